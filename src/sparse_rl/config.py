# SPDX-License-Identifier: Apache-2.0
"""From components' settings to command-line flags and YAML keys, and back.

Each component owns a frozen dataclass; its fields become `--section.field`, documented by the lines `field: text` of
its docstring. Nothing here knows what a setting means.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from difflib import get_close_matches
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser, Namespace

from sparse_rl.kv import POLICIES, KVPolicy, build_policy

C = TypeVar("C")


def add_section(parser: ArgumentParser, name: str, component: type) -> None:
    """One flag for every field of the component's settings."""
    group = parser.add_argument_group(f"{name} settings")
    hints, texts = get_type_hints(component), field_texts(component)
    for field in fields(component):
        assert field.default is not MISSING, f"{component.__name__}.{field.name} needs a default"
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        group.add_argument(
            f"--{name}.{field.name}", type=one_or_several(hints[field.name]), default=default, help=texts[field.name]
        )


def build_section(component: type[C], name: str, section: Namespace) -> C:
    """The component's settings; it checks them itself."""
    hints, given = get_type_hints(component), _settings(section)
    for key, value in given.items():
        if value is None and type(None) not in get_args(hints[key]):
            raise ValueError(f"{name}.{key} is null; give it a value or leave it out.")
        if value is not None and one_or_several(hints[key]) is not hints[key]:
            given[key] = tuple(value) if isinstance(value, list) else (value,)
    return component(**given)


def add_kv_section(parser: ArgumentParser) -> None:
    """`--kv.policy` and every setting of every policy; unset ones take the policy's own default."""
    group = parser.add_argument_group("kv settings (defaults are the policy's own)")
    group.add_argument("--kv.policy", type=str, default="full", help=f"one of {', '.join(POLICIES)}")
    settings: dict[str, tuple[Any, str, list[str]]] = {}
    for policy in POLICIES.values():
        hints, texts = get_type_hints(policy), field_texts(policy)
        for field in fields(policy):
            known = settings.setdefault(field.name, (hints[field.name], texts[field.name], []))
            known[2].append(f"{policy.name} {field.default}")
    for name, (hint, text, defaults) in settings.items():
        hint = str if get_origin(hint) is Literal else hint  # the policy itself says what the choices are
        group.add_argument(f"--kv.{name}", type=hint | None, default=None, help=f"{text} [{', '.join(defaults)}]")


def build_kv(section: Namespace) -> KVPolicy:
    """The policy with the settings that were given."""
    return build_policy(**{key: given for key, given in _settings(section).items() if given is not None})


def _settings(section: Namespace) -> dict[str, Any]:
    if not isinstance(section, Namespace):
        raise ValueError(f"a section of settings is {section!r}; it must be a table of keys and values.")
    return section.as_dict()


def one_or_several(hint: Any) -> Any:
    """X | list[X] for tuple[X, ...], so that one value needs no brackets; other hints as they are."""
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if not any(get_origin(option) is tuple for option in options):
        return hint
    item: Any = next(get_args(option)[0] for option in options if get_origin(option) is tuple)
    several = item | list.__class_getitem__(item)
    return several | None if type(None) in options else several


def field_texts(component: type) -> dict[str, str]:
    """What the docstrings of a component and its bases say of each field, lines of the form `field: text`."""
    texts: dict[str, str] = {}
    for base in reversed(component.__mro__):
        texts |= dict(re.findall(r"^(\w+): (.+)$", inspect.cleandoc(base.__doc__ or ""), flags=re.MULTILINE))
    return texts


def suggest(message: str, parser: ArgumentParser) -> str:
    """An argument error in one line: the nearest known option, or what a setting should be."""
    message = " ".join(message.split())
    unknown = re.search(r"unrecognized arguments: (\S+)|[Oo]ption '(\S+)'(?: is not accepted)?$", message)
    if unknown:
        word = (unknown[1] or unknown[2]).split("=")[0].lstrip("-")
        known = [option.lstrip("-") for action in parser._actions for option in action.option_strings]
        close = get_close_matches(word, known, n=1, cutoff=0.5)
        return f"unknown option {word!r}" + (f"; did you mean --{close[0]}?" if close else "; see --help.")
    wrong = re.search(r'Parser key "([\w.]+)".*(?:Got value|Given value): (\S+)', message)
    kinds = [kind for kind in re.findall(r"<class '(\w+)'>", message) if kind not in ("NoneType", "str")]
    if wrong and kinds:
        return f"{wrong[1]} is {wrong[2]!r}, which is not of type {' or '.join(dict.fromkeys(kinds))}."
    return message
