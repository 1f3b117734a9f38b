# SPDX-License-Identifier: Apache-2.0
"""What a fresh Python process takes away from itself, for good, before it reads a line of a program.

In order: limits, namespaces with an empty network and a root of its own (where the machine allows them), every
capability, the right to gain any, Landlock (which files), a death with its parent, seccomp (which system calls).
Landlock and seccomp each hold alone, but neither hides that a file exists, how long it is and when it changed: that is
the root's doing. Nothing here is compiled, and nothing but the standard library is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import stat
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sparse_rl.sandbox.seccomp import SECCOMP_NR, build_filter, packed

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock's calls have one number on every architecture
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWIPC, _CLONE_NEWNET = 0x00020000, 0x10000000, 0x08000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_CAPSET_NR = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION = 0x20080522

# Landlock's rights over files
_WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE, _MAKE_REG, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8, 1 << 14
_READ = _READ_FILE | _READ_DIR
_PRIVATE = _READ | _WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE  # no folders, links, pipes or devices
_DEVICES = {"/dev/null": _READ_FILE | _WRITE_FILE, "/dev/urandom": _READ_FILE}
_FILE_RIGHTS = _READ_FILE | _WRITE_FILE | _TRUNCATE  # those that mean something for a file


class View(NamedTuple):
    """The files that a child may read (`files.py`)."""

    shown: tuple[str, ...]  # files and folders
    hidden: tuple[str, ...]  # but for these folders in them
    added: tuple[str, ...]  # and these, wherever they lie
    listed: tuple[str, ...]  # the folders that those lie in, which are listed to find them


class Confinement(NamedTuple):
    """What one child may have. (A dataclass would cost every child 15 ms of imports.)"""

    folder: str  # its own, the only place it writes to
    view: View
    cpu_s: int
    memory_bytes: int
    file_bytes: int  # of one file
    parent: int  # its parent's pid; 0 where that cannot be seen
    landlock: bool  # whether Landlock must hold (without it something else has to hide the files)
    strict: bool = True  # whether a missing protection is an error


def confine(wanted: Confinement) -> None:
    """Take everything away but what is wanted. OSError or ValueError where a protection cannot be had."""
    _limit(wanted)
    if not sys.platform.startswith("linux"):
        if wanted.strict:
            raise OSError(f"{sys.platform} offers no more than limits.")
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # when memory runs out, this process goes first
    if wanted.landlock:  # bubblewrap has done all this already
        with contextlib.suppress(OSError):  # where namespaces are refused, the rest holds alone
            _own_root(libc, wanted)
        for namespace in (_CLONE_NEWNET, _CLONE_NEWIPC):
            libc.unshare(namespace)
    protections = [_drop_capabilities, _no_new_privileges]
    if wanted.landlock:
        protections.append(_landlock)
    protections += [_die_with_parent, _filter_calls]
    for protect in protections:
        try:
            protect(libc, wanted)
        except (OSError, ValueError):
            if wanted.strict:
                raise


def _limit(wanted: Confinement) -> None:
    limits = {"CORE": 0, "CPU": wanted.cpu_s, "FSIZE": wanted.file_bytes, "NOFILE": 64, "STACK": 64 << 20}
    limits |= {"MEMLOCK": 0, "MSGQUEUE": 0, "AS": wanted.memory_bytes}
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is None:  # not on this system
            continue
        ceiling = resource.getrlimit(kind)[1]
        value = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
        resource.setrlimit(kind, (value, value))


def _call(libc: ctypes.CDLL, *arguments: int | bytes | None) -> int:
    """A system call by its number. Integers go as 64 bits: a C int would leave half of a register to chance."""
    result: int = libc.syscall(*(ctypes.c_long(part) if isinstance(part, int) else part for part in arguments))
    return result


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _own_root(libc: ctypes.CDLL, wanted: Confinement) -> None:
    """A root folder that shows nothing but what may be read, and the private folder."""
    user, group = os.getuid(), os.getgid()
    _checked(libc.unshare(_CLONE_NEWUSER), "a user namespace")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _checked(libc.unshare(_CLONE_NEWNS), "a mount namespace")
    root = "/proc"  # a folder that is everywhere, and that a program has no use for
    _mount(libc, None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount(libc, "none", root, "tmpfs", 0)
    for path in wanted.view.shown:
        _show(libc, root, path)
    for path in wanted.view.hidden:
        _mount(libc, "none", root + path, "tmpfs", 0)
    for path in (*wanted.view.added, wanted.folder, *_DEVICES):
        _show(libc, root, path)
    os.chroot(root)  # nothing of the old one is open, and without capabilities there is no way back
    os.chdir(wanted.folder)


def _show(libc: ctypes.CDLL, root: str, path: str) -> None:
    place = root + path
    if os.path.isdir(path):
        os.makedirs(place, exist_ok=True)
    elif not os.path.exists(path):
        return
    elif not os.path.exists(place):
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.close(os.open(place, os.O_CREAT))
    _mount(libc, path, place, None, _MS_BIND | _MS_REC)


def _mount(libc: ctypes.CDLL, source: str | None, target: str, kind: str | None, flags: int) -> None:
    parts = (part and part.encode() for part in (source, target, kind))
    _checked(libc.mount(*parts, ctypes.c_ulong(flags), None), f"mount {target}")


def _drop_capabilities(libc: ctypes.CDLL, wanted: Confinement) -> None:
    header, none = struct.pack("=II", _CAPABILITY_VERSION, 0), bytes(24)
    number = _CAPSET_NR.get(os.uname().machine)
    if number is None:
        raise ValueError(f"capabilities cannot be dropped on {os.uname().machine!r}.")
    _checked(_call(libc, number, header, none), "capset")


def _no_new_privileges(libc: ctypes.CDLL, wanted: Confinement) -> None:
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def _die_with_parent(libc: ctypes.CDLL, wanted: Confinement) -> None:
    """Last but for the filter: the kernel forgets it when a process's credentials change."""
    _checked(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "pdeathsig")
    if wanted.parent and os.getppid() != wanted.parent:
        raise OSError(f"the parent {wanted.parent} died first.")


def landlock_version(libc: ctypes.CDLL) -> int:
    """The kernel's Landlock ABI, 0 where there is none."""
    return max(0, _call(libc, _CREATE_RULESET, None, 0, 1))


def _landlock(libc: ctypes.CDLL, wanted: Confinement) -> None:
    version = landlock_version(libc)
    if not version:
        raise OSError("the kernel has no Landlock.")
    handled = (1 << 13) - 1  # version 1; then the right to move between folders, to truncate, to use devices
    for since, right in ((2, 1 << 13), (3, _TRUNCATE), (5, 1 << 15)):
        handled |= right if version >= since else 0
    network = 0b11 if version >= 4 else 0  # bind and connect over TCP
    scoped = 0b11 if version >= 6 else 0  # abstract sockets and signals
    attributes = struct.pack("=QQQ", handled, network, scoped)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _checked(_call(libc, _CREATE_RULESET, attributes, len(attributes), 0), "landlock")
    try:
        for folder in wanted.view.shown:
            for path, rights in around(folder, wanted.view.hidden):
                _permit(libc, ruleset, path, rights)
        for path in wanted.view.added:
            _permit(libc, ruleset, path, _READ)
        for path in wanted.view.listed:
            _permit(libc, ruleset, path, _READ_DIR)
        _permit(libc, ruleset, wanted.folder, _PRIVATE & handled)
        for path, rights in _DEVICES.items():
            _permit(libc, ruleset, path, rights)
        _checked(_call(libc, _RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def around(folder: str, hidden: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The parts of a folder that hold nothing hidden, to be read, and the folders that do, to be listed."""
    if not any(path.startswith(folder + "/") for path in hidden):
        yield folder, _READ
        return
    yield folder, _READ_DIR
    for name in os.listdir(folder):
        if (path := os.path.join(folder, name)) not in hidden:
            yield from around(path, hidden)


def _permit(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what does not exist needs no right
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= _FILE_RIGHTS
        rule = struct.pack("=Qi", rights, place)
        _checked(_call(libc, _ADD_RULE, ruleset, 1, rule, 0), f"landlock rule for {path}")
    finally:
        os.close(place)


def _filter_calls(libc: ctypes.CDLL, wanted: Confinement) -> None:
    machine = os.uname().machine
    code = ctypes.create_string_buffer(packed(program := build_filter(machine, os.getpid())))
    header = struct.pack("@HP", len(program), ctypes.addressof(code))
    _checked(_call(libc, SECCOMP_NR[machine], 1, 0, header), "seccomp")
