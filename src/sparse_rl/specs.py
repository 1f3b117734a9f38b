# SPDX-License-Identifier: Apache-2.0
"""Names with settings, as people type them: one grammar for caches, rewards and benchmarks.

rkv                             a name
rkv:budget=128,interval=32      with settings, each of the type that its field or parameter has
rkv:128                         the first one without its key, where the caller says which that is
format:{"pattern": "a{1,2}"}    as JSON, where a value has a comma in it

`check_choices` and `refuse_unused` are for settings that come in other ways; `renamed`, `suggestion` and `first_line`
are words for any error.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

LONGEST = 200  # characters of a value in an error
VALUES = re.compile(r"""(?<!\w)'[^']{200,}'(?!\w)|(?<!\w)"[^"]{200,}"(?!\w)|\[[^\]]{200,}\]|\{[^}]{200,}\}|\S{201,}""")
SECTION = re.compile(r"^[a-z]+\.(?=\w+ is )")  # "kv.budget is 1" says where the setting stands in a config


def build(what: str, spec: str, makers: Mapping[str, Callable[..., T]], *leading: Any, first: str | None = None) -> T:
    """What the maker of that name gives for `leading` and the spec's settings; errors name `what` and the spec."""
    try:
        name, settings = parse(spec, first)
        if name not in makers:
            raise ValueError(f"{name!r} is unknown{suggestion(name, makers)}; choose one of {', '.join(makers)}.")
        return makers[name](*leading, **typed(name, settings, makers[name], len(leading)))
    except ValueError as error:
        raise ValueError(f"{what} {spec!r}: {SECTION.sub('', str(error))}") from error


def parse(spec: str, first: str | None = None) -> tuple[str, dict[str, Any]]:
    """The name and its settings: texts, or what JSON has. `first` is the key of a first value that has none."""
    name, colon, text = spec.partition(":")
    if colon and not text.strip():
        raise ValueError(f"nothing follows the colon; write {name!r} alone, or settings.")
    if text.lstrip().startswith("{"):
        try:
            return name, json.loads(text, object_pairs_hook=unique)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"its settings are not JSON ({error}).") from error
    settings: dict[str, Any] = {}
    for i, part in enumerate(text.split(",") if colon else ()):
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals and i == 0 and first is not None:
            key, value = first, key
        elif not (key and value):
            raise ValueError(
                f"{part!r} is not of the form key=value; where a value has a comma in it, write the settings as JSON, "
                f'{name}:{{"key": "value"}}.'
            )
        if key in settings:
            raise ValueError(f"{key} is given twice; give it once.")
        settings[key] = value
    return name, settings


def typed(name: str, settings: dict[str, Any], maker: Callable[..., Any], skip: int = 0) -> dict[str, Any]:
    """The settings as the maker's parameters (after the first `skip`) want them; all that it needs are there."""
    parameters = list(inspect.signature(maker).parameters.values())[skip:]
    known = [parameter.name for parameter in parameters]
    for key in settings:
        if key not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"{key!r} is not a setting of {name!r}{suggestion(key, known)}; {takes}.")
    for parameter in parameters:
        if parameter.default is inspect.Parameter.empty and parameter.name not in settings:
            raise ValueError(f"{parameter.name!r} is missing; write {name}:{parameter.name}=...")
    hints = get_type_hints(maker)
    return {key: _read(key, value, hints[key]) for key, value in settings.items()}


def _read(key: str, value: Any, hint: Any) -> Any:
    """A setting as its hint has it: bool, int, float, str or Literal, any of them or None; or int, else str."""
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if value is None and NoneType in options:
        return None
    kinds = [kind for kind in options if kind is not NoneType]
    if kinds == [int, str]:
        with suppress(ValueError):
            return _read(key, value, int)
        if not isinstance(value, str):
            raise ValueError(f"{key} is {value!r}; it takes a whole number or a text.")
        return value
    (kind,) = kinds
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    if kind is str or choices:
        if isinstance(value, str) and (not choices or value in choices):
            return value
        takes = f"choose one of {', '.join(choices)}" if choices else "it takes a text"
        raise ValueError(f"{key} is {value!r}; {takes}.")
    takes, read = READERS[kind]
    try:
        return read(value if isinstance(value, str) else json.dumps(value))
    except (ValueError, KeyError) as error:
        raise ValueError(f"{key} is {value!r}; it takes {takes}.") from error


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


READERS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    bool: ("true or false", lambda text: {"true": True, "false": False}[text.lower()]),
    int: ("a whole number", int),
    float: ("a number", _finite),
}


def check_choices(settings: Any, section: str) -> None:
    """Raise unless every setting with a list of choices is one of them."""
    for name, hint in get_type_hints(type(settings)).items():
        if get_origin(hint) is Literal and getattr(settings, name) not in get_args(hint):
            choices = ", ".join(get_args(hint))
            raise ValueError(f"{section}.{name} is {getattr(settings, name)!r}; choose one of {choices}.")


def refuse_unused(settings: Any, section: str, why: str, *names: str) -> None:
    """Raise if one of these settings, which nothing reads, is not the default; all of them, if none are named."""
    for field in fields(settings):
        if (not names or field.name in names) and getattr(settings, field.name) != field.default:
            raise ValueError(f"{section}.{field.name} is given, but {why}.")


@contextmanager
def renamed(section: str, name: str) -> Iterator[None]:
    """Errors inside call a section's settings what their reader does: `sampling.top_p` is `eval.top_p`, or `--top-p`.

    name: stands for `section` and its dot; behind "--" the setting is spelt as a flag
    """
    try:
        yield
    except ValueError as error:
        spelt = (lambda found: "--" + found[1].replace("_", "-")) if name == "--" else rf"{name}\1"
        raise ValueError(re.sub(rf"(?<![^\s(]){section}\.(\w+)", spelt, str(error))) from error


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys differ, as json's object_pairs_hook."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands there twice")
    return found


def suggestion(word: str, known: Iterable[str]) -> str:
    """(did you mean 'rkv'?), if something known is like the word."""
    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def cut(text: str) -> str:
    """A text of others, its middle left out if it is long."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 53]}...{text[-50:]}"


def shortened(message: str) -> str:
    """A message with its long values cut: what is quoted, in brackets, or without a space."""
    return VALUES.sub(lambda found: cut(found[0]), message)


def first_line(error: BaseException) -> str:
    """What an error says in one line; its kind, if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
