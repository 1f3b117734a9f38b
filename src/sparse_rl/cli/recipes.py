# SPDX-License-Identifier: Apache-2.0
"""`--config`: settings from a YAML file or from a recipe that comes with the package, known by name.

A file with the key `base` says only what differs from that file, beside it or in the working folder, or recipe:
`base: qwen3-1.7b.yaml`.

Whether keys and values are right is seen in `parsing.py`, with the flags'; a run's own record is read in `resume.py`.
"""

from __future__ import annotations

import textwrap
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sparse_rl.specs import suggestion

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

DEFAULT = "default.yaml"  # where neither a config nor a model is named
OWNERS = {"data": "sft", "task": "train", "trainer": "train"}  # of sections that not every command has
OWN = {"train": {"task", "trainer"}, "sft": {"data", "trainer"}, "calibrate": {"task"}}  # those of each command


def add_config(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        action="config",
        help="YAML file with any of these settings, or a recipe's name; `base: FILE` in it is what it differs from",
    )


def given_configs(arguments: list[str], command: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The settings of the files behind --config, and all other arguments."""
    names, others = split_configs(arguments)
    return [each for name in names for each in read_configs(name, command)], others


def split_configs(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The names behind --config, and all other arguments."""
    names, others = [], []
    given = iter(arguments)
    for argument in given:
        option, equals, value = argument.partition("=")
        if option != "--config":
            others.append(argument)
            continue
        name = value if equals else next(given, None)
        if name is None:
            raise ValueError("--config needs the name of a file or a recipe.")
        names.append(name)
    return names, others


def with_configs(configs: list[dict[str, Any]], others: list[str]) -> list[str]:
    """Arguments with the files' settings before the flags, so that flags win."""
    return [*(text for config in configs for text in ("--config", yaml.safe_dump(config))), *others]


def read_configs(name: str, command: str, above: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The settings of a file or of a recipe, behind those of its base; `above` are the files that led here."""
    path, recipe = Path(name), _recipe(name)
    asked = f"base {name!r} of {above[-1]}" if above else f"--config {name!r}"
    if not path.exists() and not recipe.is_file():
        known = recipes(command)
        if not known:
            raise ValueError(f"{asked} is not a file; check the path.")
        raise ValueError(
            f"{asked} is neither a file nor a recipe{suggestion(name, known)}; the recipes are {', '.join(known)}."
        )
    if _place(name) in map(_place, above):
        raise ValueError(f"{asked} goes round in a circle; end it with a file that has no base.")
    try:
        settings = yaml.safe_load((path if path.exists() else recipe).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} is not YAML: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{name} is not a table of settings; write lines of the form `key: value`.")
    base, whose = settings.pop("base", None), f"{name}, a base of {above[0]}," if above else name
    if "config" in settings or {"command", "settings"} <= settings.keys():
        raise ValueError(
            f"{whose} is not a file of settings: it has the key {'config' if 'config' in settings else 'command'!r}. A "
            "run's own record is resumed; `--dry-run` prints settings as such a file, and `base: FILE` names another."
        )
    for section, owner in OWNERS.items():
        if section in settings and section not in OWN.get(command, ()):
            raise ValueError(f"{whose} has {section} settings, which belong to `sparse-rl {owner}`; give it there.")
    if base is not None and (beside := path.parent / str(base)).is_file() and _place(str(beside)) != _place(name):
        base = beside
    return [*(read_configs(str(base), command, (*above, name)) if base is not None else ()), settings]


def recipes(command: str) -> list[str]:
    """The names of the command's recipes."""
    files = {e.name: yaml.safe_load(e.read_text()) for e in _recipe("").iterdir() if e.name.endswith(".yaml")}
    sections = {name: OWNERS.keys() & files[settings.get("base", name)].keys() for name, settings in files.items()}
    return sorted(name for name in files if sections[name] <= OWN.get(command, set()))


def default_settings() -> str:
    """What default.yaml sets, in lines of a help text."""
    settings = yaml.safe_load(_recipe(DEFAULT).read_text())
    tables = {section: value if isinstance(value, dict) else {"": value} for section, value in settings.items()}
    told = [f"{section}.{key}".rstrip(".") + f" {table[key]}" for section, table in tables.items() for key in table]
    return textwrap.fill(", ".join(told), 118, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def to_yaml(settings: dict[str, Any]) -> str:
    """Settings in the form of a config file."""
    return str(yaml.dump(settings, Dumper=_Lists, sort_keys=False))


def _place(name: str) -> str:
    """One for every file, however it is named."""
    return str(Path(name).resolve() if Path(name).exists() else _recipe(name))


def _recipe(name: str) -> Any:
    return resources.files("sparse_rl") / "recipes" / name


class _Lists(yaml.SafeDumper):  # type: ignore[misc]
    """Writes tuples as lists."""


_Lists.add_representer(tuple, lambda dumper, value: dumper.represent_list(value))
