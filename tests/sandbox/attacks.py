# SPDX-License-Identifier: Apache-2.0
"""Programs that try to get out. Each function `attack` returns "done" if and only if what it tried succeeded.

In braces are things of the test that runs them: {secret}, a file that holds the word; {folder}, where that file lies;
{port}, a listener; {parent}, the pid of the process that grades; {home}, the user's home. The environment of the test
has a variable SPARSE_RL_TEST_SECRET.
"""

from __future__ import annotations

_RAW = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def attack():
    given = [ctypes.c_long(part) if isinstance(part, int) else part for part in ({call},)]
    return "done" if libc.syscall(*given) >= 0 else "refused"
"""


def _raw(call: str) -> str:
    return _RAW.replace("{call}", call)


def _tried(body: str) -> str:
    lines = "\n".join("        " + line for line in body.strip().splitlines())
    head = "import ctypes, mmap, os, resource, signal, socket, subprocess, sys, threading, time\n"
    errors = "(OSError, ValueError, RuntimeError, MemoryError)"
    return f"{head}def attack():\n    try:\n{lines}\n    except {errors}:\n        return 'refused'\n"


# Each shows the same success outside the sandbox: the positive control.
FREE: dict[str, str] = {
    "read a file of the run": _tried("return open('{secret}').read()"),
    "read the home": _tried("os.listdir('{home}')\nreturn 'done'"),
    "read /etc/passwd": _tried("return 'done' if open('/etc/passwd').read() else ''"),
    "read its environment": _tried("return 'done' if open('/proc/self/environ').read() else ''"),
    "read a variable": _tried("return os.environ.get('SPARSE_RL_TEST_SECRET')"),
    "read a variable by libc": _tried(
        "read = ctypes.CDLL(None).getenv\nread.restype = ctypes.c_char_p\n"
        "return (read(b'SPARSE_RL_TEST_SECRET') or b'').decode()"
    ),
    "read its parent's environment": _tried("return 'done' if open('/proc/{parent}/environ').read() else ''"),
    "read its parent's command": _tried("return 'done' if open('/proc/{parent}/cmdline').read() else ''"),
    "list processes": _tried("return 'done' if os.listdir('/proc') else ''"),
    "list the root": _tried("os.listdir('/')\nreturn 'done'"),
    "list /tmp": _tried("os.listdir('/tmp')\nreturn 'done'"),
    "read through ..": _tried("return open(os.path.relpath('{secret}')).read()"),
    "change folder": _tried("os.chdir('{folder}')\nreturn open('secret').read()"),
    "openat a folder": _tried(
        "at = os.open('{folder}', os.O_PATH)\nreturn os.read(os.open('secret', 0, dir_fd=at), 9).decode()"
    ),
    "follow a symbolic link": _tried("os.symlink('{secret}', 'link')\nreturn open('link').read()"),
    "follow a hard link": _tried("os.link('{secret}', 'hard')\nreturn open('hard').read()"),
    "copy in the kernel": _tried(
        "os.sendfile(os.open('copy', 66), os.open('{secret}', 0), 0, 9)\nreturn open('copy').read()"
    ),
    "move the secret here": _tried("os.rename('{secret}', 'mine')\nos.rename('mine', '{secret}')\nreturn 'done'"),
    "write outside": _tried("open('{folder}/written', 'w').write('x')\nreturn 'done'"),
    "append to the secret": _tried("open('{secret}', 'a').close()\nreturn 'done'"),
    "truncate while reading": _tried("os.open('{folder}/other', os.O_RDONLY | os.O_TRUNC)\nreturn 'done'"),
    "truncate by name": _tried("os.truncate('{folder}/other', 0)\nreturn 'done'"),
    "write a library": _tried(
        "path = os.path.dirname(os.__file__) + '/sparse_rl_left'\nopen(path, 'w')\nos.unlink(path)\nreturn 'done'"
    ),
    "delete outside": _tried("os.unlink('{folder}/other')\nreturn '' if 'other' in os.listdir('{folder}') else 'done'"),
    "make a folder outside": _tried("os.mkdir('{folder}/made')\nreturn 'done'"),
    "change a mode": _tried("os.chmod('{secret}', 0o777)\nreturn 'done'"),
    "change a time": _tried("os.utime('{secret}')\nreturn 'done'"),
    "make a pipe with a name": _tried("os.mkfifo('pipe')\nreturn 'done'"),
    "connect to a listener": _tried("socket.create_connection(('127.0.0.1', {port}), 2).close()\nreturn 'done'"),
    "send a datagram": _tried(
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))\nreturn 'done'"
    ),
    "listen": _tried("socket.create_server(('127.0.0.1', 0)).close()\nreturn 'done'"),
    "open a local socket": _tried("socket.socket(socket.AF_UNIX).bind('socket')\nreturn 'done'"),
    "open an abstract socket": _tried("socket.socket(socket.AF_UNIX).bind('\\0sparse-rl-test')\nreturn 'done'"),
    "open a pair of sockets that send anywhere": _tried("socket.socketpair(type=socket.SOCK_DGRAM)\nreturn 'done'"),
    "open a file without a name": _tried("os.open('.', os.O_TMPFILE | os.O_RDWR)\nreturn 'done'"),
    "rename a file": _tried("open('a', 'w').close()\nos.rename('a', 'b')\nreturn 'done'"),
    "delete a file": _tried("open('c', 'w').close()\nos.unlink('c')\nreturn '' if os.path.exists('c') else 'done'"),
    "fork": _tried("pid = os.fork()\nif pid == 0:\n    os._exit(0)\nos.waitpid(pid, 0)\nreturn 'done'"),
    "spawn": _tried("return subprocess.run(['/bin/echo', 'done'], capture_output=True, text=True).stdout.strip()"),
    "spawn by posix_spawn": _tried("os.waitpid(os.posix_spawn('/bin/true', ['true'], {{}}), 0)\nreturn 'done'"),
    "shell": _tried("return 'done' if os.system('true') == 0 else 'refused'"),
    "signal its parent": _tried("os.kill({parent}, 0)\nreturn 'done'"),
    "signal its group's others": _tried("os.killpg(os.getpgid({parent}), 0)\nreturn 'done'"),
    "signal a thread of its parent": _raw("234, {parent}, {parent}, 0"),
    "queue a signal": _raw(
        "129, os.getpid(), 0, ctypes.create_string_buffer(b'\\0' * 8 + b'\\xff\\xff\\xff\\xff' + b'\\0' * 116)"
    ),
    "own a signal of its parent": _tried(
        "import fcntl\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, {parent})\nreturn 'done'"
    ),
    "read its parent's limits": _tried("resource.prlimit({parent}, resource.RLIMIT_NOFILE)\nreturn 'done'"),
    "change its own priority": _tried("os.setpriority(os.PRIO_PROCESS, 0, 1)\nreturn 'done'"),
    "start a session": _tried("os.umask(0)\nos.setpgid(0, 0)\nreturn 'done'"),
    "clone3 a process": _raw("435, ctypes.create_string_buffer(b'\\0' * 32 + b'\\x11' + b'\\0' * 55), 88"),
    "memfd_create": _raw("319, b'x', 0"),
    "io_uring_setup": _raw("425, 1, ctypes.create_string_buffer(120)"),
    "pidfd_open": _raw("434, {parent}, 0"),
    "setns by a new user namespace": _raw("272, 0x10000000"),
    "process_vm_readv of itself": _raw("310, os.getpid(), None, 0, None, 0, 0"),
    "inotify": _raw("294, 0"),
    "eventfd": _raw("290, 0, 0"),
    "userfaultfd-like watch (epoll)": _raw("291, 0"),
    "System V memory": _raw("29, 0, 4096, 0o1600"),
    "dumpable again": _raw("157, 4, 1, 0, 0, 0"),
    "no more death with its parent": _raw("157, 1, 0, 0, 0, 0"),
    "file handle": _raw(
        "303, -100, b'/', ctypes.create_string_buffer(b'\\x80' + b'\\0' * 200), ctypes.create_string_buffer(8), 0"
    ),
    "change its root": _raw("80, b'/'"),
}

# What only a root of one's own hides: names, lengths, and which processes there are.
SEEN: dict[str, str] = {
    "see a file of the run": _tried("return 'done' if os.stat('{secret}').st_size == 4 else ''"),
    "see that a file exists": _tried("return 'done' if os.path.exists('{secret}') else ''"),
    "see a folder of the run": _tried("return 'done' if os.path.isdir('{folder}') else ''"),
    "see /etc": _tried("return 'done' if os.access('/etc/passwd', os.F_OK) else ''"),
    "see its parent": _tried("return 'done' if os.path.exists('/proc/{parent}') else ''"),
}

# Those that some machines refuse to everyone: to users who are not root, or by settings of the kernel.
NOT_EVERYWHERE = {"write a library", "io_uring_setup", "setns by a new user namespace"}

# Raw calls that would do harm, or that fail without a sandbox too, with the error that says the call was refused.
REFUSED = {
    "execve": "59, b'/bin/true', None, None",
    "execveat": "322, -100, b'/bin/true', None, None, 0",
    "fork": "57",
    "vfork": "58",
    "ptrace": "101, 16, {parent}, 0, 0",
    "process_vm_writev": "311, {parent}, None, 0, None, 0, 0",
    "mount": "165, None, None, None, 0, None",
    "umount": "166, b'/nowhere', 0",
    "setns": "308, -1, 0",
    "unshare": "272, 0",
    "pivot_root": "155, None, None",
    "chroot": "161, None",
    "bpf": "321, 0, None, 0",
    "perf_event_open": "298, None, 0, 0, 0, 0",
    "userfaultfd": "323, 0",
    "keyctl": "250, 0, 0",
    "open_by_handle_at": "304, -1, None, 0",
    "openat2": "437, -100, b'/etc/passwd', None, 0",
    "kexec_load": "246, 0, 0, None, 0",
    "landlock_create_ruleset": "444, None, 0, 1",
    "seccomp": "317, 0, 0, None",
    "tkill": "200, {parent}, 0",
    "kill everything": "62, -1, 0",
    "setuid": "105, 0",
    "sethostname": "170, b'x', 1",
    "socket": "41, 2, 1, 0",
    "raw socket": "41, 2, 3, 1",
    "netlink socket": "41, 16, 3, 0",
    "mknod": "133, b'node', 0o20666, 259",
    "sched_setaffinity": "203, 0, 0, None",
    "setpriority of the parent": "141, 0, {parent}, 19",
    "prlimit of the parent": "302, {parent}, 7, None, None",
    "clone a process": "56, 17, None, None, None, 0",
}

# Programs that must end by themselves or be ended: time, memory, output, processes, files, threads.
BOMBS: dict[str, str] = {
    "fork bomb": _tried(
        r"""
while True:
    os.fork()
"""
    ),
    "endless output": r"""
import os
def attack():
    while True:
        os.write(1, b'x' * 65536)
""",
    "endless errors": r"""
import os
def attack():
    while True:
        os.write(2, b'x' * 65536)
""",
    "endless answers": r"""
import os
def attack():
    while True:
        for fd in range(64):
            try:
                os.write(fd, b'x' * 65536)
            except OSError:
                pass
""",
    "sleep": r"""
import time
def attack():
    time.sleep(1e6)
    return 'done'
""",
    "busy loop": r"""
def attack():
    while True:
        pass
""",
    "deaf to signals": r"""
import signal
for number in (signal.SIGTERM, signal.SIGXCPU, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
def attack():
    while True:
        pass
""",
    "memory in a list": r"""
def attack():
    kept = []
    try:
        while True:
            kept.append(bytearray(1 << 24))
    except MemoryError:
        return 'refused' if len(kept) < 70 else 'done'
""",
    "memory by mmap": _tried(
        r"""
kept = [mmap.mmap(-1, 1 << 30) for _ in range(4)]
return 'done'
"""
    ),
    "more memory by limits": _tried(
        r"""
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
return 'done'
"""
    ),
    "many threads": _tried(
        r"""
threading.stack_size(65536)
for _ in range(2000):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
time.sleep(0.3)
return 'done'
"""
    ),
    "a large file": _tried(
        r"""
file = open('large', 'wb')
for _ in range(200):
    file.write(b'x' * (1 << 20))
file.flush()
return 'done'
"""
    ),
    "many files": _tried(
        r"""
for i in range(3000):
    open(f'file{{i}}', 'w').write('x')
time.sleep(0.3)
return 'done'
"""
    ),
    "much in many files": _tried(
        r"""
for i in range(40):
    open(f'file{{i}}', 'wb').write(b'x' * (8 << 20))
time.sleep(0.3)
return 'done'
"""
    ),
    "much in deleted files": _tried(
        r"""
kept = []
for i in range(50):
    kept.append(open(f'file{{i}}', 'wb'))
    os.unlink(f'file{{i}}')
    kept[-1].write(b'x' * (8 << 20))
    kept[-1].flush()
time.sleep(0.3)
return 'done'
"""
    ),
    "much in deleted files that are mapped": _tried(
        r"""
kept = []
for i in range(50):
    with open(f'file{{i}}', 'w+b') as file:
        file.write(b'x' * (8 << 20))
        file.flush()
        kept.append(mmap.mmap(file.fileno(), 4096))
    os.unlink(f'file{{i}}')
time.sleep(0.3)
return 'done'
"""
    ),
    "deep value": r"""
def attack():
    value = []
    for _ in range(100000):
        value = [value]
    return value
""",
    "deep answer": r"""
import os, struct
body = b'[' * 1000000
for fd in range(3, 64):
    try:
        os.write(fd, struct.pack('=I', len(body)) + body)
    except OSError:
        pass
def attack():
    return 'done?'
""",
    "large integer": r"""
def attack():
    return 1 << (1 << 28)
""",
    "crash": r"""
import ctypes
def attack():
    ctypes.string_at(0)
""",
}
