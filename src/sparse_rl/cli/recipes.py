# SPDX-License-Identifier: Apache-2.0
"""`--config`: settings from a YAML file or from a recipe that comes with the package, known by name."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import yaml

SECTIONS = {"train": "task", "sft": "data"}  # of each command, the settings that only it has


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


def read_config(name: str, command: str) -> dict[str, Any]:
    """The settings of a file, or of a recipe."""
    path, recipe = Path(name), _recipe(name)
    if not path.exists() and not recipe.is_file():
        listed = ", ".join(recipes(command))
        raise ValueError(f"--config {name!r} is neither a file nor a recipe; the recipes are {listed}.")
    try:
        settings = yaml.safe_load((path if path.exists() else recipe).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} is not YAML: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{name} is not a table of settings; write lines of the form `key: value`.")
    for other, section in SECTIONS.items():
        if other != command and section in settings:
            raise ValueError(f"{name} has {section} settings, which belong to `sparse-rl {other}`; give it there.")
    return settings


def recipes(command: str) -> list[str]:
    """The names of the command's recipes."""
    files = [entry for entry in _recipe("").iterdir() if entry.name.endswith(".yaml")]
    return sorted(file.name for file in files if SECTIONS[command] in yaml.safe_load(file.read_text()))


def to_yaml(settings: dict[str, Any]) -> str:
    """Settings in the form of a config file."""
    return str(yaml.dump(settings, Dumper=_Lists, sort_keys=False))


def _recipe(name: str) -> Any:
    return resources.files("sparse_rl") / "recipes" / name


class _Lists(yaml.SafeDumper):  # type: ignore[misc]
    """Writes tuples as lists."""


_Lists.add_representer(tuple, lambda dumper, value: dumper.represent_list(value))
