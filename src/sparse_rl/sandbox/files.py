# SPDX-License-Identifier: Apache-2.0
"""Which files a child may read: the standard library, the system's shared libraries, and some installed packages.

A program sees the packages that its reward allows, and the checker, which runs a dataset's test code, all of them.
Folders of packages lie inside folders that a child needs (`lib/python3.11/site-packages`), so they are taken out again:
in a root of the child's own they are empty, and Landlock's rules go around them. Where Landlock is alone, a program can
still list the names in folders that hold such a folder, but not read the files.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from functools import cache
from glob import glob

from sparse_rl.sandbox.confine import View

COMMON = (
    "numpy",
    "pandas",
    "scipy",
    "sympy",
    "networkx",
    "sortedcontainers",
)  # allowed where nobody says, if installed
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo")
_ENDS = ("site-packages", "dist-packages")


@cache
def places() -> tuple[str, ...]:
    """The folders in which installed packages lie."""
    return tuple(place for place in sys.path if place.rstrip("/").endswith(_ENDS) and os.path.isdir(place))


@cache
def view(allowed: tuple[str, ...] | None) -> View:
    """What a child sees that may import these packages; None is every one."""
    prefixes = {os.path.join(prefix, "lib") for prefix in (sys.base_prefix, sys.base_exec_prefix)}
    shown = tuple(dict.fromkeys((os.path.dirname(os.__file__), *sorted(prefixes), *_SYSTEM)))
    if allowed is None:
        return View(shown=(*shown, *places()), hidden=(), added=(), listed=())
    hidden = [
        path for folder in shown for end in _ENDS for depth in ("", "*/") for path in glob(f"{folder}/{depth}{end}")
    ]
    added = dict.fromkeys(path for name in allowed for path in package(name))
    return View(shown=shown, hidden=tuple(dict.fromkeys(hidden)), added=tuple(added), listed=places())


def common() -> tuple[str, ...]:
    return tuple(name for name in COMMON if package(name))


@cache
def package(name: str) -> tuple[str, ...]:
    """Where the files of an installed package and of those it needs lie; none for one that is not installed."""
    found: dict[str, None] = {}
    waiting, seen = [name], set()
    while waiting:
        one = waiting.pop()
        try:
            distribution = importlib.metadata.distribution(one)
        except importlib.metadata.PackageNotFoundError:
            continue
        if distribution.metadata["Name"] in seen:
            continue
        seen.add(distribution.metadata["Name"])
        tops = {str(file.parts[0]) for file in distribution.files or ()} - {"..", "__pycache__"}
        found |= dict.fromkeys(str(distribution.locate_file(top)) for top in sorted(tops))
        if not tops and (spec := importlib.util.find_spec(one)) is not None:  # some systems list no files
            found |= dict.fromkeys(spec.submodule_search_locations or [spec.origin or ""])
        for needed in distribution.requires or ():
            if "extra ==" not in needed:
                waiting += re.findall(r"^[\w.-]+", needed)
    return tuple(path for path in found if os.path.exists(path))
