# SPDX-License-Identifier: Apache-2.0
"""Dense and sparse continuations side by side, with the overlap of every sparse token.

They are sampled and scored by `generate --compare`; whole texts under several caches are `inspect_page.py`'s.
"""

from __future__ import annotations

import torch
import transformers
from rich.table import Table
from rich.text import Text

from sparse_rl.calibrate.statistics import quantiles
from sparse_rl.types import Rollout

SPAN = 8  # tokens a line
TITLE = 72  # characters of the prompt above them
CLOSE, APART = 0.9, 0.5  # overlap from which a token is drawn green, below which red


def side_by_side(
    tokenizer: transformers.PreTrainedTokenizerBase,
    dense: Rollout,
    sparse: Rollout,
    overlap_T: torch.Tensor,
    *,
    exact: bool,
) -> Table:
    """A table of spans of tokens; `summary` goes below it."""
    table = Table(title=Text(_shorten(sparse.prompt.text)), title_justify="left", expand=False)
    table.add_column("token", justify="right", style="dim")
    table.add_column("dense")
    table.add_column("sparse")
    table.add_column("overlap, %" if exact else "overlap (lower bound), %")
    for start in range(0, max(len(dense.token_ids), len(sparse.token_ids)), SPAN):
        span = slice(start, start + SPAN)
        table.add_row(
            str(start),
            Text(visible(str(tokenizer.decode(dense.token_ids[span])))),
            Text.assemble(
                *[
                    (visible(str(tokenizer.decode(token))), _colour(value))
                    for token, value in zip(sparse.token_ids[span], overlap_T[span].tolist(), strict=True)
                ]
            ),
            Text.assemble(*[(f"{100 * value:3.0f} ", _colour(value)) for value in overlap_T[span].tolist()]),
        )
    return table


def summary(dense: Rollout, sparse: Rollout, overlap_T: torch.Tensor, upper_T: torch.Tensor) -> str:
    """One line of statistics; `upper_T` is what the overlap is at most, where it is not known exactly."""
    bounds = "" if torch.equal(overlap_T, upper_T) else f" or more (mean at most {upper_T.mean():.3f})"
    common = min(len(dense.token_ids), len(sparse.token_ids))
    differs = (dense.token_ids[:common] != sparse.token_ids[:common]).nonzero()
    diverged = f"first different token {int(differs[0])}" if len(differs) else f"first {common} tokens equal"
    if not sparse.kv.num_compressions and sparse.kv.read_frac == 1:
        bounds += "; nothing was cut or left unread, so the caches are equal"
    (p05,) = quantiles(overlap_T.numpy(), [0.05])
    return (
        f"overlap mean {overlap_T.mean():.3f}, P05 {p05:.3f}, min {overlap_T.min():.3f}{bounds}; "
        f"{diverged}; KV saved {100 * sparse.kv.saved_frac:.0f} %, read {100 * sparse.kv.read_frac:.0f} %, "
        f"peak {sparse.kv.peak} entries against {dense.kv.peak}, {sparse.kv.num_compressions} cuts"
    )


def visible(text: str) -> str:
    """Text on one line, with what a terminal cannot show replaced."""
    return "".join(char if char.isprintable() else {"\n": "⏎", "\t": "⇥"}.get(char, "·") for char in text)


def _colour(overlap: float) -> str:
    return "green" if overlap >= CLOSE else "red" if overlap < APART else "yellow"


def _shorten(text: str) -> str:
    text = visible(text)
    return text if len(text) <= TITLE else text[: TITLE - 1] + "…"
