# SPDX-License-Identifier: Apache-2.0
"""From components' settings to command-line flags and YAML keys, and back.

Each component owns a frozen dataclass; its fields become `--section.field`, documented by the lines `field: text` of
its docstring. Nothing here knows what a setting means, and no component is imported before it is asked for.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from difflib import get_close_matches
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser, Namespace

from sparse_rl.specs import suggestion

if TYPE_CHECKING:
    from sparse_rl.kv import KVPolicy
    from sparse_rl.objective.correction import Correction
    from sparse_rl.tasks import TaskConfig

C = TypeVar("C")


def add_section(parser: ArgumentParser, name: str, component: type, leave_out: tuple[str, ...] = ()) -> None:
    """One flag for every field of the component's settings, but for those that somebody else decides."""
    group = parser.add_argument_group(f"{name} settings")
    hints, texts = get_type_hints(component), field_texts(component)
    for field in (field for field in fields(component) if field.name not in leave_out):
        assert field.default is not MISSING, f"{component.__name__}.{field.name} needs a default"
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        hint = flag_type(hints[field.name])
        group.add_argument(f"--{name}.{field.name}", type=hint, default=default, help=texts[field.name])


def build_section(component: type[C], name: str, section: Namespace) -> C:
    """The component's settings; it checks them itself."""
    hints, given = get_type_hints(component), _settings(section)
    for key, value in given.items():
        if value is None and type(None) not in get_args(hints[key]):
            raise ValueError(f"{name}.{key} is null; give it a value or leave it out.")
    return component(**_tuples(component, given))


def add_kv_section(parser: ArgumentParser) -> None:
    from sparse_rl.kv import POLICIES

    _add_choice(parser, "kv", "policy", "full", POLICIES)


def build_kv(section: Namespace) -> KVPolicy:
    """The policy with the settings that were given."""
    from sparse_rl.kv import build_policy

    return build_policy(**given_of(section))


def add_task_section(parser: ArgumentParser) -> None:
    from sparse_rl.tasks import TASKS

    _add_choice(parser, "task", "name", "chain", TASKS)


def build_task(section: Namespace) -> TaskConfig:
    """The task's settings; `build` makes the task."""
    from sparse_rl.tasks import TASKS

    given = given_of(section)
    name = given.pop("name", None)
    if name not in TASKS:
        raise ValueError(f"task.name is {name!r}{suggestion(str(name), TASKS)}; choose one of {', '.join(TASKS)}.")
    task: Any = TASKS[name]
    known = [field.name for field in fields(task)]
    for key in given:
        if key not in known:
            other = next((name for name, task in TASKS.items() if key in {field.name for field in fields(task)}), None)
            lacks_file = other == "rows" and "train_file" not in given
            remedy = "give task.train_file too" if lacks_file else f"give task.name {other}, or leave it out"
            takes = f"{other!r} has it: {remedy}" if other else f"it takes {', '.join(known)}"
            raise ValueError(f"task.{key} is not a setting of the task {name!r}; {takes}.")
    built: TaskConfig = task(**_tuples(task, given))
    return built


def add_correction_section(parser: ArgumentParser) -> None:
    """`--correction.preset` and every field of the correction; unset ones are the preset's."""
    from sparse_rl.objective.correction import PRESETS, Correction

    group = parser.add_argument_group("correction settings (defaults are the preset's)")
    group.add_argument("--correction.preset", type=str, default="sparse_rl", help=f"one of {', '.join(PRESETS)}")
    hints, texts = get_type_hints(Correction), field_texts(Correction)
    for field in fields(Correction):
        hint = flag_type(hints[field.name]) | None
        group.add_argument(f"--correction.{field.name}", type=hint, default=None, help=texts[field.name])


def build_correction(section: Namespace) -> Correction:
    """The preset with the fields that were given."""
    from sparse_rl.objective.correction import PRESETS

    given = given_of(section)
    preset = given.pop("preset", None)
    if preset not in PRESETS:
        hint = suggestion(str(preset), PRESETS)
        raise ValueError(f"correction.preset is {preset!r}{hint}; choose one of {', '.join(PRESETS)}.")
    return replace(PRESETS[preset], **given)


def _add_choice(parser: ArgumentParser, section: str, key: str, default: str, components: Mapping[str, type]) -> None:
    """`--section.key` names a component; every setting of every component is a flag, unset ones its own default."""
    group = parser.add_argument_group(f"{section} settings (defaults are those of the {key})")
    group.add_argument(f"--{section}.{key}", type=str, default=default, help=f"one of {', '.join(components)}")
    settings: dict[str, tuple[Any, dict[str, dict[str, list[str]]]]] = {}  # hint; meaning, default, who has it
    for name, component in components.items():
        hints, texts = get_type_hints(component), field_texts(component)
        for field in fields(component):
            meanings = settings.setdefault(field.name, (hints[field.name], {}))[1]
            meanings.setdefault(texts[field.name], {}).setdefault(str(field.default), []).append(name)
    for name, (hint, meanings) in settings.items():
        help = "; ".join(f"{text} [{_by_default(defaults)}]" for text, defaults in meanings.items())
        group.add_argument(f"--{section}.{name}", type=flag_type(hint) | None, default=None, help=help)


def _by_default(names: dict[str, list[str]]) -> str:
    """4: streaming; 0: random, knorm; only the names where the default is nothing"""
    shown = {default: "" if default in ("None", "()", "") else f"{default}: " for default in names}
    return "; ".join(shown[default] + ", ".join(of) for default, of in names.items())


def given_of(section: Namespace) -> dict[str, Any]:
    """The settings that somebody gave, or that have a default of their own."""
    return {key: value for key, value in _settings(section).items() if value is not None}


def _settings(section: Namespace) -> dict[str, Any]:
    if not isinstance(section, Namespace):
        raise ValueError(f"a section of settings is {section!r}; it must be a table of keys and values.")
    return section.as_dict()


def _tuples(component: type, given: dict[str, Any]) -> dict[str, Any]:
    """Lists, and single values where several may stand, as the tuples a frozen component has."""
    hints = get_type_hints(component)
    several = {key for key in given if one_or_several(hints[key]) is not hints[key]}
    return {
        key: (tuple(value) if isinstance(value, list) else (value,)) if key in several and value is not None else value
        for key, value in given.items()
    }


def flag_type(hint: Any) -> Any:
    """What a flag is read as: a text where there are choices, which the component itself knows."""
    return str if get_origin(hint) is Literal else one_or_several(hint)


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


def suggest(message: str, parser: ArgumentParser, more_names: tuple[str, ...] = ()) -> str:
    """An argument error in one line: the nearest known option, or what a setting should be."""
    message = " ".join(message.split())
    unknown = re.search(r"unrecognized arguments: (\S+)|[Oo]ption '(\S+)'(?: is not accepted)?$", message)
    if unknown:
        given = (unknown[1] or unknown[2]).split("=")[0]
        word = given.lstrip("-")
        if word == "...":
            return "'...' stands for settings of your own; leave it out."
        known = [option.lstrip("-") for action in parser._actions for option in action.option_strings] + [*more_names]
        close = get_close_matches(word, known, n=1, cutoff=0.6)
        close = close or [name for name in known if name.rpartition(".")[2].startswith(f"{word}_")]
        return f"unknown option {word!r}" + (f"; did you mean --{close[0]}?" if close else "; see --help.")
    if alone := re.fullmatch(r"argument (\S+): expected one argument", message):
        return f"{alone[1]} has no value; --help says which it takes."
    wrong = re.search(r'Parser key "([\w.]+)".*(?:Got value|Given value): (.+)$', message)
    asked = message.partition("Given value type")[0]
    kinds = [kind for kind in re.findall(r"<class '(\w+)'>", asked) if kind not in ("NoneType", "str")]
    if wrong and kinds:
        hint = "; infinity is written .inf" if wrong[2].strip("-'\"").lower() in ("inf", "infinity") else ""
        return f"{wrong[1]} is {_cut(wrong[2])!r}, which is not of type {' or '.join(dict.fromkeys(kinds))}{hint}."
    return message


def _cut(value: str) -> str:
    return value if len(value) <= 80 else f"{value[:77]}..."
