# SPDX-License-Identifier: Apache-2.0
"""What the text of a row's tests says before any of them runs. No program has a say in it."""

from __future__ import annotations

import ast
import builtins
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from types import ModuleType
from typing import Any

from sparse_rl.sandbox.remote import Opaque

_PLAIN = (int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
_ALMOST = (Counter, deque, date, datetime, timedelta, Decimal, Fraction, re.Match)
# of arrays and frames, whose modules would take long to import
_ARRAYS = """T all any argmax argmin argsort astype clip cumprod cumsum dot dtype dtypes equals fillna flatten iat iloc
isin isna isnull itemsize loc max mean median min nbytes ndim nlargest nonzero notna nsmallest nunique prod ptp ravel
reshape round shape sort_index sort_values squeeze std sum to_numpy tolist transpose unique value_counts var"""
_PATHS = [name for name in dir(PurePosixPath) if "_" in name]  # a class may well have a `name` or a `parent`
_PLAIN_NAMES = frozenset(name for kind in _PLAIN + _ALMOST for name in dir(kind)).union(_ARRAYS.split(), _PATHS)
_LATER = (ast.Lambda, ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)
_ENDS = ("exit", "quit", "sys.exit", "os._exit")


def bound(node: ast.AST) -> list[str]:
    """The names that a part of test code gives to things of its own."""
    if isinstance(node, ast.alias):
        return [(node.asname or node.name).partition(".")[0]]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.arg):
        return [node.arg]
    return [node.id] if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) else []


def used_as_classes(nodes: list[ast.AST]) -> set[str]:
    """The names that tests use as classes: `isinstance(x, Node)`, `except MyError`, or one that starts with a capital
    letter, if an attribute that plain data does not have is used on it or on what it made (`stack = Stack()`,
    `stack.push(1)`). That a function's result is plain cannot be told from its name: MBPP has a function `Diff`.
    """
    found, made = set(), {}
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            made[ast.unparse(node)] = node.func.id
            if node.func.id == "isinstance" and len(node.args) == 2:
                found |= type_names(node.args[1])
        elif isinstance(node, ast.ExceptHandler) and node.type is not None:
            found |= type_names(node.type)
        elif isinstance(node, ast.Assign):
            for target, value in _assigned(node):
                if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
                    made[ast.unparse(target)] = value.func.id
    for node in nodes:
        if isinstance(node, ast.Attribute) and not (node.attr in _PLAIN_NAMES or node.attr.startswith("__")):
            name = made.get(holder := ast.unparse(node.value), holder)
            found |= {name} if name[0].isupper() and name.isidentifier() else set()
    return found


def type_names(node: ast.expr) -> set[str]:
    """Of Node, (Node, Edge) and Node | Edge; in type(f(3)), no name is a class."""
    parts = node.elts if isinstance(node, ast.Tuple) else [node.left, node.right] if isinstance(node, ast.BinOp) else []
    return {node.id} if isinstance(node, ast.Name) else set().union(*map(type_names, parts))


def _assigned(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def fault(trees: Iterable[ast.Module], space: Mapping[str, Any]) -> bool:
    """Whether no program can pass: a test ends its own process, or hands the program a function of its own.

    Only what runs for every program counts. What stands in a branch, the program could steer to.
    """
    for tree in trees:
        nodes = list(ast.walk(tree))
        taken = {name for node in nodes for name in bound(node)}
        own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for node in (node for line in tree.body for node in _always(line) if isinstance(node, ast.Call)):
            name = ast.unparse(node.func)
            if name in _ENDS:
                return True
            known = name in taken or name in space or hasattr(builtins, name)
            if isinstance(node.func, ast.Name) and (isinstance(space.get(name), Opaque) or not known):
                arguments = (*node.args, *(keyword.value for keyword in node.keywords))
                if any(_stays_here(argument, own, taken, space) for argument in arguments):
                    return True
    return False


def _always(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a statement that run whenever it does."""
    yield node
    parts: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.Assert | ast.If | ast.IfExp | ast.While):
        parts = [node.test]
    elif isinstance(node, ast.With | ast.Try):
        parts = node.body[:1]  # what raises there is caught
    elif isinstance(node, ast.BoolOp):
        parts = node.values[:1]
    elif isinstance(node, ast.Compare):
        parts = [node.left, node.comparators[0]]
    elif not isinstance(node, ast.Expr | ast.Assign | ast.expr) or isinstance(node, _LATER):
        parts = []
    for part in parts:
        yield from _always(part)


def _stays_here(node: ast.expr, own: set[str], taken: set[str], space: Mapping[str, Any]) -> bool:
    """Whether an argument is a function or the like, which cannot be passed to another process."""
    if isinstance(node, ast.List | ast.Tuple):
        return any(_stays_here(item, own, taken, space) for item in node.elts)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        holder = space.get(node.value.id, getattr(builtins, node.value.id, None))
        return isinstance(holder, ModuleType | type) and callable(getattr(holder, node.attr, None))
    if isinstance(node, ast.Name) and node.id not in own:
        value = space.get(node.id, getattr(builtins, node.id, None))
        return node.id not in taken and callable(value) and not isinstance(value, Opaque)
    return isinstance(node, ast.Lambda | ast.Name)
