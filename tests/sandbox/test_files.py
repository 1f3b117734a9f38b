# SPDX-License-Identifier: Apache-2.0
"""Which files a program may read: the standard library and the packages that its reward allows."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import sparse_rl
from sparse_rl.grading.code import CodeReward
from sparse_rl.sandbox.confine import _READ_DIR as READ_DIR
from sparse_rl.sandbox.confine import around
from sparse_rl.sandbox.files import COMMON, common, package, places, view
from sparse_rl.sandbox.isolation import isolation
from sparse_rl.sandbox.process import Limits, Sandbox
from sparse_rl.tasks.rewards import GradingConfig, build_reward

confined = pytest.mark.skipif(isolation().method is None, reason=f"no isolation on this machine: {isolation().reason}")
SECRETS = [
    os.path.abspath(pytest.__file__),
    sparse_rl.__file__,
    *(str(path) for path in Path(site.__file__).parent.glob("*-packages/*.txt")),
]
LOOK = f"""
import os, sys
def opened(path):
    try:
        return open(path).read(1) is not None
    except OSError:
        return False
def look():
    return [path for path in {SECRETS!r} if opened(path)]
def names():
    found = []
    for place in sys.path:
        try:
            found += os.listdir(place)
        except OSError:
            pass
    return found
def imported(name):
    try:
        __import__(name)
        return True
    except ImportError:
        return False
"""


@confined
def test_a_program_reads_the_standard_library_and_what_is_allowed():
    standard = ["json", "sqlite3", "ssl", "ctypes", "zoneinfo", "unittest", "decimal"]
    cases = [(None, ["numpy"], "_pytest"), ((), standard, "numpy"), (("hypothesis",), ["hypothesis"], "numpy")]
    for packages, known, unknown in cases:
        tests = [
            "import numpy as np\nassert np.allclose(1, 1) and look() == [], look()",  # the checker has every package
            f"assert all(imported(name) for name in {known!r}) and not imported({unknown!r})",
        ]
        sandbox = Sandbox(isolation().method, Limits(packages=packages))
        verdict = CodeReward(sandbox, 1).judge(LOOK, {"tests": tests})
        assert verdict.word == "passed", (packages, verdict)


@confined
def test_a_program_does_not_see_which_packages_there_are():
    sandbox = Sandbox(isolation().method, Limits(packages=("numpy",)))
    tests = ["found = names()\nassert 'numpy' in found and 'json' in found\nassert 'pytest' not in found, found"]
    verdict = CodeReward(sandbox, 1).judge(LOOK, {"tests": tests})
    assert verdict.word == "passed" or not has_namespaces(), verdict


def has_namespaces() -> bool:
    script = "import ctypes; raise SystemExit(ctypes.CDLL(None).unshare(0x10020000) != 0)"
    return subprocess.run([sys.executable, "-S", "-c", script]).returncode == 0


@confined
def test_landlock_alone_keeps_what_packages_hold(tmp_path):
    """Without a root of its own: names may be listed, files are not read, and what is allowed still works."""
    script = f"""
import json, os, sys
sys.path.append({str(Path(sparse_rl.__file__).parents[1])!r})
from sparse_rl.sandbox import confine
from sparse_rl.sandbox.confine import Confinement, View
def refused(libc, wanted):
    raise OSError("no namespaces here")
confine._own_root = refused
wanted = json.loads(sys.argv.pop())
confine.confine(Confinement(**wanted | {{"view": View(*wanted["view"])}}))
sys.path = [place for place in sys.path if "src" not in place] + {list(places())!r}
{LOOK}
import numpy
print([*look(), numpy.arange(2).tolist(), imported("sqlite3")])
"""
    wanted = {"folder": str(tmp_path), "view": view(("numpy",)), "parent": 0, "landlock": True}
    wanted |= {"cpu_s": 20, "memory_bytes": 1 << 30, "file_bytes": 1 << 20}
    command = [sys.executable, "-S", "-s", "-P", "-c", script, json.dumps(wanted)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    if isolation().method == "landlock":
        assert ran.stdout == "[[0, 1], True]\n", ran


def test_views():
    """Landlock's rules hold everything of the standard library, and nothing of other packages."""
    seen, every = view(("numpy",)), view(None)
    assert set(places()) <= set(every.shown) and every.hidden == ()
    rules = [rule for folder in seen.shown if os.path.exists(folder) for rule in around(folder, seen.hidden)]
    whole = [path for path, rights in rules if rights != READ_DIR] + list(seen.added)

    def readable(path: str) -> bool:
        return any(path == folder or path.startswith(folder + "/") for folder in whole)

    library = Path(sysconfig.get_path("stdlib"))
    assert all(readable(str(path)) for path in library.iterdir() if path.name != "site-packages")
    assert readable(package("numpy")[0]) and not any(readable(secret) for secret in SECRETS)
    assert not any(readable(path) for path in seen.hidden)


def test_what_lies_around_a_folder(tmp_path):
    for name in ("a/b/hidden", "a/c", "d"):
        (tmp_path / name).mkdir(parents=True)
    hidden = [str(tmp_path / "a/b/hidden")]
    found = {path.removeprefix(str(tmp_path)): rights == READ_DIR for path, rights in around(str(tmp_path), hidden)}
    assert found == {"": True, "/a": True, "/a/b": True, "/a/c": False, "/d": False}


def test_packages_come_with_what_they_need():
    assert any(path.endswith("/dateutil") for path in package("pandas"))
    assert set(package("numpy")) < set(package("pandas"))
    assert package("nothing-of-that-name") == ()
    assert set(common()) <= set(COMMON) and "numpy" in common()


def test_packages_are_a_setting():
    grading = GradingConfig(workers=1, unsafe_code=True)
    made = build_reward("code:packages=numpy+pandas", grading)
    assert isinstance(made, CodeReward) and made.sandbox.limits.packages == ("numpy", "pandas")
    assert build_reward('code:{"packages": ""}', grading).sandbox.limits.packages == ()
    assert build_reward("code", grading).sandbox.limits.packages is None
    with pytest.raises(ValueError, match="'numpi', which is not installed; install it or leave it out"):
        build_reward("code:packages=numpi", grading)
