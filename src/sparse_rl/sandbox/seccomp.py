# SPDX-License-Identifier: Apache-2.0
"""The system calls a program may make: a seccomp filter that allows what is listed and refuses the rest.

The filter is classic BPF over `struct seccomp_data` {int nr; u32 arch; u64 ip; u64 args[6]}. It is built by hand for
x86_64 and aarch64; a call of another architecture (or of x32) ends the process.

Which files may be opened is not its business, but Landlock's (`confine.py`).
"""

from __future__ import annotations

import errno
import struct

# name:number on x86_64:number on aarch64
_TABLE = """
read:0:63 write:1:64 close:3:57 fstat:5:80 newfstatat:262:79 stat:4:- lstat:6:- statx:332:291 lseek:8:62
mmap:9:222 mprotect:10:226 munmap:11:215 mremap:25:216 madvise:28:233 msync:26:227 brk:12:214 pread64:17:67
pwrite64:18:68 readv:19:65 writev:20:66 access:21:- faccessat:269:48 faccessat2:439:439 readlink:89:-
readlinkat:267:78 getdents64:217:61 getcwd:79:17 statfs:137:43 fstatfs:138:44 creat:85:-
ftruncate:77:46 fsync:74:82 fdatasync:75:83 sendto:44:206 recvfrom:45:207 shutdown:48:210 getsockopt:55:209
fadvise64:221:223 sendfile:40:71 copy_file_range:326:285 pipe:22:- pipe2:293:59 dup:32:23
dup2:33:- dup3:292:24 select:23:- pselect6:270:72 poll:7:- ppoll:271:73 rt_sigaction:13:134
rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigtimedwait:128:137
rt_sigsuspend:130:133 sigaltstack:131:132 alarm:37:- pause:34:- getitimer:36:102 setitimer:38:103
futex:202:98 set_robust_list:273:99 rseq:334:293 set_tid_address:218:96
arch_prctl:158:- restart_syscall:219:128 sched_yield:24:124 sched_getaffinity:204:123
getcpu:309:168 nanosleep:35:101 clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114
gettimeofday:96:169 time:201:- times:100:153 getrusage:98:165 sysinfo:99:179 uname:63:160 getrandom:318:278
getrlimit:97:163 getpid:39:172 gettid:186:178 getppid:110:173 getuid:102:174 geteuid:107:175 getgid:104:176
getegid:108:177 getgroups:115:158 exit:60:93 exit_group:231:94
"""
# Calls that are allowed with some arguments only, each with its rule in `_guarded`.
_GUARDED = """
open:2:- openat:257:56 clone:56:220 clone3:435:435 kill:62:129 tgkill:234:131 prlimit64:302:261
prctl:157:167 fcntl:72:25 ioctl:16:29 unlink:87:- unlinkat:263:35 socketpair:53:199
"""
_ARCHES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the table, AUDIT_ARCH_*
SECCOMP_NR = {"x86_64": 317, "aarch64": 277}

_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_X32_BIT = 0x40000000
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_CLONE_THREAD, _CLONE_NEW_ANYTHING = 0x10000, 0x7E020000
_O_TRUNC, _O_ACCMODE, _O_TMPFILE = 0o1000, 0o3, 0o20000000
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE = 1, 1, 0xF
_FIONBIO = 0x5421  # whether a socket waits
_FCNTL = (0, 1, 2, 3, 4, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC: none names a process
_PRCTL = (15, 16)  # PR_SET_NAME, PR_GET_NAME

Instruction = tuple[int, int, int, int]  # code, steps when true, steps when false, operand


def _refuse(error: int) -> Instruction:
    return (_RETURN, 0, 0, 0x00050000 | error)


def _argument(index: int) -> Instruction:
    """Load the low half of an argument: pids, flags and commands are 32 bits wide for the kernel too."""
    return (_LOAD, 0, 0, 16 + 8 * index)


_YES: Instruction = (_RETURN, 0, 0, _ALLOW)
_NO: Instruction = _refuse(errno.EPERM)


def _one_of(argument: int, values: tuple[int, ...]) -> list[Instruction]:
    tests: list[Instruction] = [
        (_JUMP_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)
    ]  # to the last line
    return [_argument(argument), *tests, _NO, _YES]


def _guarded(name: str, pid: int) -> list[Instruction]:
    """What is asked of the arguments of one call; every list ends in a return."""
    if name in ("open", "openat"):
        # Old kernels let Landlock's readers truncate: O_TRUNC has to come with a way of writing, which Landlock checks.
        # And a file without a name would not be counted in the private folder.
        flags = _argument(1 if name == "open" else 2)
        nameless: Instruction = (_JUMP_ANY_BIT, 2, 0, _O_TMPFILE)
        return [flags, nameless, (_AND, 0, 0, _O_TRUNC | _O_ACCMODE), (_JUMP_EQUAL, 0, 1, _O_TRUNC), _NO, _YES]
    if name in ("unlink", "unlinkat"):
        # Says that it is done, and leaves the file, which goes with the folder: what is deleted while it is open or
        # mapped takes room that nobody can count. Nothing is renamed either, since that deletes what it replaces.
        return [_refuse(0)]
    if name == "socketpair":  # asyncio's. A stream can be sent nowhere but to its other end.
        local: list[Instruction] = [_argument(0), (_JUMP_EQUAL, 0, 3, _AF_UNIX)]
        return [*local, _argument(1), (_AND, 0, 0, _SOCK_TYPE), (_JUMP_EQUAL, 1, 0, _SOCK_STREAM), _NO, _YES]
    if name == "clone":
        threads_only: list[Instruction] = [
            (_JUMP_ANY_BIT, 2, 0, _CLONE_NEW_ANYTHING),
            (_JUMP_ANY_BIT, 0, 1, _CLONE_THREAD),
            _YES,
            _NO,
        ]
        return [_argument(0), *threads_only]
    if name == "clone3":  # its flags are in memory, where no filter can look; libraries fall back to clone
        return [_refuse(errno.ENOSYS)]
    if name == "ioctl":  # for the rest, what an ordinary file answers
        return [_argument(1), (_JUMP_EQUAL, 0, 1, _FIONBIO), _YES, _refuse(errno.ENOTTY)]
    if name == "prlimit64":
        return _one_of(0, (0, pid))
    if name in ("kill", "tgkill"):
        return _one_of(0, (pid,))
    return _one_of(*{"fcntl": (1, _FCNTL), "prctl": (0, _PRCTL)}[name])


def _numbers(table: str, column: int) -> list[tuple[str, int]]:
    entries = [entry.split(":") for entry in table.split()]
    return [(name, int(numbers[column])) for name, *numbers in entries if numbers[column] != "-"]


def build_filter(machine: str, pid: int) -> list[Instruction]:
    """The filter for a process with this pid; ValueError for an architecture that has no table."""
    if machine not in _ARCHES:
        raise ValueError(f"there is no system call filter for {machine!r}, only for {' and '.join(_ARCHES)}.")
    column, arch = _ARCHES[machine]
    program: list[Instruction] = [
        (_LOAD, 0, 0, 4),
        (_JUMP_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
    ]
    if machine == "x86_64":
        program += [(_JUMP_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL)]
    for _, number in _numbers(_TABLE, column):
        program += [(_JUMP_EQUAL, 0, 1, number), _YES]
    for name, number in _numbers(_GUARDED, column):
        rule = _guarded(name, pid)
        program += [(_JUMP_EQUAL, 0, len(rule), number), *rule]
    return [*program, _NO]


def packed(program: list[Instruction]) -> bytes:
    """The filter as the kernel reads it: struct sock_filter {u16 code; u8 jt; u8 jf; u32 k} each."""
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
