# SPDX-License-Identifier: Apache-2.0
"""Attacks on the sandbox: each gets 1 if and only if it succeeds. All get 0, and the pool lives."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox.attacks import BOMBS, FREE, NOT_EVERYWHERE, REFUSED, SEEN
from sandbox.forgeries import EXCUSES, FORGERIES

from sparse_rl.grading.code import CodeReward
from sparse_rl.sandbox.isolation import isolation
from sparse_rl.sandbox.process import Limits, Sandbox

pytestmark = pytest.mark.skipif(
    isolation().method is None, reason=f"no isolation on this machine: {isolation().reason}"
)
X86 = platform.machine() == "x86_64"  # the raw calls are written with its numbers
FILLING = ("much in many files", "much in deleted files", "much in deleted files that are mapped")
RIGHT = "def attack():\n    return 'do' + 'ne'"


@pytest.fixture(scope="module")
def reward() -> CodeReward:
    return CodeReward.build(Limits(timeout_s=4.0, memory_mb=512), workers=2)


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("programs")))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A folder of the run with a secret, a secret variable, and a listener."""
    monkeypatch.setenv("SPARSE_RL_TEST_SECRET", "done")
    (tmp_path / "secret").write_text("done")
    (tmp_path / "other").write_text("other")
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield {
            "secret": str(tmp_path / "secret"),
            "folder": str(tmp_path),
            "port": str(server.getsockname()[1]),
            "parent": str(os.getpid()),
            "home": os.path.expanduser("~"),
        }
    assert (tmp_path / "secret").read_text() == "done"


def filled(program: str, place: dict[str, str]) -> str:
    for name, value in place.items():
        program = program.replace(f"{{{name}}}", value)
    return program.replace("{{", "{").replace("}}", "}")


def graded(reward: CodeReward, programs: list[str], **columns: object) -> list[object]:
    rows = {"tests": ["assert attack() == 'done'"]} | columns
    fenced = [f"```python\n{program}\n```" for program in programs]
    return reward([""] * len(fenced), fenced, **{name: [value] * len(fenced) for name, value in rows.items()})


def left_behind() -> set[str]:
    """Private folders and children of this process."""
    return {*os.listdir(tempfile.gettempdir()), *children()}


def children() -> list[str]:
    return [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


def test_what_is_open_outside_is_closed_inside(reward, place, tmp_path_factory):
    """Every attack gets 0, and outside the sandbox the same program succeeds, so that the 0 is the sandbox's doing."""
    attacks = FREE | (SEEN if has_namespaces() else {})
    programs = {name: filled(attack, place) for name, attack in attacks.items() if X86 or "libc" not in attack}
    before = left_behind()
    verdict = reward.judge(
        all_of(programs),
        {
            "tests": [
                f"found = attack()\nassert len(found) == {len(programs)}, found\n"
                "assert 'done' not in found.values(), [name for name in found if found[name] == 'done']"
            ]
        },
    )
    assert verdict.word == "passed", verdict
    assert sorted(os.listdir(place["folder"])) == ["other", "secret"]
    assert (Path(place["folder"]) / "other").read_text() == "other"
    assert left_behind() <= before
    succeeded = free(list(programs.values()), place, tmp_path_factory.mktemp("free"))
    powerless = {name for name, success in zip(programs, succeeded, strict=True) if not success}
    assert powerless <= NOT_EVERYWHERE, powerless


def all_of(programs: dict[str, str]) -> str:
    """One program that makes every attack, each in a namespace of its own, and returns what each returned."""
    return (
        f"programs = {programs!r}\n"
        "def attack():\n    found = {}\n    for name, program in programs.items():\n        space = {}\n"
        "        exec(program, space)\n        found[name] = space['attack']()\n    return found\n"
    )


def has_namespaces() -> bool:
    """Whether the machine lets this user have a root of his own."""
    script = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nuser = os.getuid()\nassert libc.unshare(0x10000000) == 0\n"
        "open('/proc/self/uid_map', 'w').write(f'{user} {user} 1')\nassert libc.unshare(0x20000) == 0\n"
        "assert libc.mount(b'none', b'/proc', b'tmpfs', 0, None) == 0"
    )
    return subprocess.run([sys.executable, "-S", "-c", script], capture_output=True).returncode == 0


RUNNER = """
import json, os, sys
for i, program in enumerate(json.load(open("programs"))):
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.mkdir(str(i))
        os.chdir(str(i))
        open(sys.argv[1] + "/other", "w").write("other")
        space = {}
        exec(program, space)
        os.write(into, str(space["attack"]()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    print(os.read(out, 99).decode().startswith("done"))
"""


def free(programs: list[str], place: dict[str, str], own: Path) -> list[bool]:
    """Which attacks succeed without a sandbox."""
    (own / "programs").write_text(json.dumps(programs))
    command = [sys.executable, "-S", "-c", RUNNER, place["folder"]]
    ran = subprocess.run(command, cwd=own, capture_output=True, text=True, timeout=60)
    return [line == "True" for line in ran.stdout.split()]


@pytest.mark.skipif(not X86, reason="system call numbers of x86_64")
def test_system_calls_are_refused(reward, place):
    """Not only do they fail: they fail because the filter refuses them."""
    listed = ", ".join(f"({name!r}, lambda: libc.syscall({call}))" for name, call in REFUSED.items())
    program = filled(
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nlibc.syscall.restype = ctypes.c_long\n"
        f"calls = [{listed}]\n"
        "def attack():\n    found = {}\n    for name, call in calls:\n        result = call()\n"
        "        found[name] = 0 if result >= 0 else ctypes.get_errno()\n    return found",
        place,
    )
    tests = [f"found = attack()\nassert len(found) == {len(REFUSED)} and set(found.values()) == {{1}}, found"]
    verdict = reward.judge(program, {"tests": tests})
    assert verdict.word == "passed", verdict


@pytest.mark.skipif(not X86, reason="machine code of x86_64")
@pytest.mark.parametrize("code", ["b814000000cd80c3", "b8270000400f05c3"], ids=["int 0x80", "x32"])
def test_another_architecture_ends_the_process(reward, code):
    """getpid through the 32-bit gate and through x32."""
    program = (
        "import ctypes, mmap\nroom = mmap.mmap(-1, 4096, prot=7)\n"
        f"room.write(bytes.fromhex('{code}'))\n"
        "run = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(room)))\n"
        "def attack():\n    run()\n    return 'done'"
    )
    assert graded(reward, [program, program.replace("    run()\n", "")]) == [0.0, 1.0]


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.some(3)
def test_bombs_end(reward, place, name):
    reason = {"many threads": "threads", "many files": "files", **dict.fromkeys(FILLING, "filled its folder")}.get(name)
    limits = Limits(timeout_s=4.0 if reason else 1.0, memory_mb=512)
    before = left_behind()
    start = time.monotonic()
    verdict = CodeReward(Sandbox(reward.sandbox.method, limits), 2).judge(
        filled(BOMBS[name], place), {"tests": ["assert attack() == 'done'"]}
    )
    assert verdict.word == "failed" and (reason or "") in verdict.detail, verdict
    assert time.monotonic() - start < 6
    assert left_behind() <= before


def test_a_running_program_holds_no_rights(reward):
    """As the kernel sees it from outside: no capability of any kind, none to gain, the filter in place."""
    known = set(children())
    running = threading.Thread(target=reward.sandbox.run, args=("import time\ntime.sleep(1)", ""))
    running.start()
    status: dict[str, str] = {}
    while running.is_alive() and status.get("Seccomp") != "2":
        for pid in set(children()) - known:
            with contextlib.suppress(OSError):
                status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert {status[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Amb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    running.join()


def test_verdicts_cannot_be_forged(reward):
    """In each of the ways in which programs are tested; the right program passes in each."""
    ways = [
        {"tests": ["assert attack() == 'done'"]},
        {"tests": [{"input": [], "output": "done"}], "entry_point": "attack"},
        {"tests": None, "test": "def check(candidate):\n    assert candidate() == 'done'\n", "entry_point": "attack"},
    ]
    for way in ways:
        names = list(FORGERIES) if way is ways[0] else random.sample(list(FORGERIES), 6)
        scores = graded(reward, [*(FORGERIES[name] for name in names), RIGHT], **way)
        assert dict(zip(names, scores, strict=False)) == dict.fromkeys(names, 0.0), way
        assert scores[-1] == 1.0


def test_no_program_gets_itself_left_out(reward):
    """Whatever it returns is right or wrong. What the tests do with a result changes nothing."""
    row = {"tests": ["assert attack() == 'done'"]}
    ways = [
        row,
        {"tests": [{"input": [], "output": "done"}], "entry_point": "attack"},
        {"tests": None, "test": "def check(candidate):\n    assert candidate() == 'done'\n", "entry_point": "attack"},
        {"tests": ["assert attack()[:2] == 'do'"]},
        {"tests": ["found = attack()\nassert same(found) == 'done'"]},
        {"tests": ["found = [attack()]\nfor _ in range(9):\n    found = same(found)\nassert found == ['done']"]},
        {"tests": ["found = attack()\nassert found.replace('a', 'b') == 'done' and found[::-1] == 'enod'"]},
        {"tests": ["xs = attack()\nassert max(xs, key=lambda x: x) == 'o' and xs.count('d') == 1"]},
        {"tests": ["import sys\nif attack() != 'done':\n    sys.exit(1)"]},
        {"tests": ["assert attack().join(map(str, [1, 2])) == '1done2'"]},
    ]
    same = "def same(value):\n    return value\n"
    for way in ways:
        names = list(EXCUSES) if way is row else random.sample(list(EXCUSES), 2)
        scores = graded(reward, [*(same + EXCUSES[name] for name in names), same + RIGHT], **way)
        assert dict(zip(names, scores, strict=False)) == dict.fromkeys(names, 0.0), way
        assert scores[-1] == 1.0, way
    own = "class Own:\n    sort = index = lambda self, *given, **named: 0\ndef attack():\n    return Own()"
    for test in ("xs = attack()\nxs.sort(key=len)\nassert xs == ['done']", "assert attack().index(print) == 1"):
        assert graded(reward, [own], tests=[test]) == [0.0]


HELPERS = """
import sys
yes = lambda *given, **named: True
isclose = allclose = array_equal = approx = Counter = Fraction = isnan = assert_allclose = yes
class np:
    allclose = isclose = array_equal = array = staticmethod(yes)
    class testing:
        assert_allclose = assert_equal = staticmethod(yes)
numpy = pytest = math = sys.modules['math'] = sys.modules['numpy'] = np
class Liar:
    __eq__ = __lt__ = __le__ = __ge__ = __gt__ = __contains__ = yes
    __sub__ = __rsub__ = __abs__ = __float__ = __array__ = lambda self, *given, **named: RESULT
"""


def test_what_compares_is_the_checkers(reward):
    """Helpers that the tests do not import, and the program has under the same names; the right program passes."""
    tests = [
        "np.allclose(f(1), 42)",
        "numpy.isclose(f(1), 42)",
        "math.isclose(f(1), 42)",
        "isclose(f(1), 42) and allclose(f(1), 42)",
        "array_equal([f(1)], [42])",
        "assert_allclose(f(1), 42) is None",
        "np.testing.assert_equal(f(1), 42) is None",
        "(np.array([1, 42]) == np.array([1, f(1)])).all()",
        "Counter([f(1)]) == Counter([42])",
        "Fraction(f(1)) == Fraction(42)",
        "not isnan(f(1)) and f(1) == approx(42)",
        "approx(42) == f(1)",
    ]
    counted = "passed = []\n" + "\n".join(
        f"try:\n    passed += [{test!r}] if {test} else []\nexcept Exception as error:\n    pass" for test in tests
    )
    wrong = ["41", "Liar()", "float('nan')"]
    for result in wrong:
        program = f"{HELPERS.replace('RESULT', '0.0')}def f(x):\n    return {result}"
        verdict = reward.judge(program, {"tests": [counted, "assert passed == [], passed"]})
        assert verdict.word == "passed", (result, verdict)
    verdict = reward.judge(
        "def f(x):\n    return 42", {"tests": [counted, f"assert len(passed) == {len(tests)}, passed"]}
    )
    assert verdict.word == "passed", verdict


@pytest.mark.parametrize("name", ["memory by mmap", "a large file", "many files"])
def test_bombs_go_off_outside(place, tmp_path_factory, name):
    assert free([filled(BOMBS[name], place)], place, tmp_path_factory.mktemp("free")) == [True]


def test_forgeries_fool_a_checker_in_the_same_process(tmp_path):
    """What the two processes are for: here the tests stand under the program, and status 0 is a pass."""
    fooled = set()
    for name in (
        "early exit",
        "hard exit",
        "exit when called",
        "SystemExit when called",
        "lying equality",
        "lying object",
    ):
        (tmp_path / "program.py").write_text(FORGERIES[name] + "\nassert attack() == 'done'")
        fooled |= {name} if subprocess.run([sys.executable, "-S", tmp_path / "program.py"]).returncode == 0 else set()
    assert len(fooled) == 6, fooled


def test_scripts_are_confined_too(reward, place):
    row = {"tests": [{"input": "x\n", "output": "done"}]}
    programs = {name: filled(program, place) for name, program in FREE.items() if X86 or "libc" not in program}
    every = all_of(programs) + "\nprint(*[name for name, result in attack().items() if result == 'done'] or ['none'])"
    ran = reward.sandbox.run(every, "")
    assert (ran.output, ran.stopped) == (b"none\n", ""), ran
    bombs = [filled(BOMBS[name], place) + "\nprint(attack())" for name in ("endless output", "many files", "sleep")]
    quick = CodeReward(Sandbox(reward.sandbox.method, Limits(timeout_s=1.0, memory_mb=512)), 2)
    assert set(graded(quick, bombs, **row)) == {0.0}
    assert graded(reward, ["import os\nprint('done', flush=True)\nos._exit(1)", "print('done')"], **row) == [0.0, 1.0]


def test_a_parent_that_dies_takes_its_programs_along(tmp_path):
    code = (
        "import os, signal, threading, time, subprocess\n"
        "from sparse_rl.sandbox.isolation import isolation\n"
        "from sparse_rl.sandbox.process import Limits, Sandbox\n"
        "box = Sandbox(isolation().method, Limits(timeout_s=60))\n"
        "threading.Thread(target=box.run, args=('import time\\ntime.sleep(50)', ''), daemon=True).start()\n"
        "time.sleep(0.7)\n"
        "print(*[name for name in os.listdir('/proc') if name.isdigit() and parent(name) == os.getpid()], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    helper = (
        "def parent(pid):\n    try:\n        stat = open(f'/proc/{pid}/stat').read()\n"
        "        return int(stat.rsplit(')', 1)[1].split()[1])\n"
        "    except OSError:\n        return 0\n"
    )
    import sparse_rl

    source = str(Path(sparse_rl.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source, "TMPDIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", helper + code], env=environment, capture_output=True, text=True)
    pids = ran.stdout.split()
    assert len(pids) == 1, ran
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{pids[0]}") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pids[0]}")
