# SPDX-License-Identifier: Apache-2.0
"""Caches side by side as one picture: what each holds and reads over time, the overlap under it, and the text.

A column is a cache, four of them in a row. Its map has a token of the text at each x, and time runs down; the overlap
shares the map's x axis.

Layers and heads are put together here; single ones are shown by `inspect_page.py`.
"""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from sparse_rl.calibrate.statistics import quantiles
from sparse_rl.evaluate.inspection import Reading, Text
from sparse_rl.report.plots import COLOURS, INK, as_png, plot_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, MAP, OVERLAP, MARGIN = 4.3, 2.7, 1.2, 0.75  # inches: of a column, of its parts, left of it
GAPS = (0.12, 0.6, 0.35)  # below each part
ACROSS = 4  # columns beside each other
TOP, BOTTOM = 0.55, 0.95  # for a cache's name and numbers, for what the shades mean
COLUMNS, LINES = 72, 26  # characters a line of the text, lines at most
CAPTION = """Map: the share of layers and heads that {verb} a position. Text: for how much of the time since a token was
written they {past} it. {tint}Thin lines and ticks: the cache is cut. Every cache reads the dense model's own answer."""
TINT = 0.25  # how much of its colour shows what is held but not read
NAME, LONG = 48, 70  # characters of a cache's name: at full size, at most
LINE = 0.135  # inches
MANY = 4  # layers are counted, not named, if there are more
STRETCH = 0.602  # width of a monospace character over its height


def draw_inspection(readings: list[Reading]) -> bytes:
    """The picture as a PNG."""
    with plot_style():
        return as_png(_figure(readings))


def caption(readings: list[Reading]) -> str:
    """What the shades mean; some caches may read less than they hold."""
    if not any(reading.reads for reading in readings):
        return CAPTION.format(verb="hold", past="held", tint="")
    return CAPTION.format(verb="read", past="read", tint="Pale orange: held, but not read; white: not held. ")


def left_out(reading: Reading) -> str:
    """A word on the layers that have no part in the shares."""
    if not reading.reads:
        return ""
    if not reading.choosing:
        return "no layer chooses: all that is held is read"
    layers = reading.reads[0].at_LKT.shape[0]
    dense = [str(i) for i in range(layers) if i not in reading.choosing]
    said = f"layer {', '.join(dense)}" if len(dense) <= MANY else f"{len(dense)} of {layers} layers"
    return f"without {said}: all that is held is read there" if dense else ""


def mixed(read: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Colours: blue for what is read, pale orange for what is held beyond that, white for the rest."""
    from matplotlib.colors import to_rgb

    read, held = np.nan_to_num(read)[..., None], np.nan_to_num(held)[..., None]
    blue, orange = (1.0 - np.array(to_rgb(COLOURS[i])) for i in (0, 4))  # what they take from white
    return np.asarray(1.0 - read * blue - TINT * np.maximum(held - read, 0.0) * orange)


def _figure(readings: list[Reading]) -> Figure:
    from matplotlib.figure import Figure

    text = readings[0].text
    lines = wrapped(text)
    heights = (MAP, OVERLAP, LINE * len(lines))
    each = TOP + sum(heights) + sum(GAPS)
    total = -(-len(readings) // ACROSS) * each + BOTTOM
    wide = min(len(readings), ACROSS) * (WIDTH + MARGIN) + 0.3
    figure = Figure(figsize=(wide, total))
    for i, reading in enumerate(readings):
        row, column = divmod(i, ACROSS)
        left, top = MARGIN + column * (WIDTH + MARGIN), total - row * each - TOP
        axes = []
        for height, gap in zip(heights, GAPS, strict=True):
            top -= height
            axes.append(figure.add_axes((left / wide, top / total, WIDTH / wide, height / total)))
            top -= gap
        _map(axes[0], reading, first=column == 0)
        _overlap(axes[1], reading, first=column == 0)
        _text(axes[2], reading, lines)
    _legend(figure, caption(readings), wide, total)
    return figure


def _map(axes: Axes, reading: Reading, *, first: bool) -> None:
    text = reading.text
    size = len(text.ids)
    axes.imshow(
        mixed(reading.read(), reading.held()),
        aspect="auto",
        interpolation="nearest",
        extent=(0, size, size, text.prompt_len),
    )
    axes.axvline(text.prompt_len, color=COLOURS[1], lw=1, ls="--")
    for firing in reading.firings:
        axes.plot([0.985, 1.0], [firing.context] * 2, transform=axes.get_yaxis_transform(), color=INK, lw=0.8)
    axes.grid(visible=False)
    axes.tick_params(labelbottom=False)
    overlap = reading.overlap
    facts = f"overlap mean {overlap.mean():.3f}, P05 {quantiles(overlap, [0.05])[0]:.3f}, lowest {overlap.min():.3f}"
    name = reading.name if len(reading.name) <= LONG else f"{reading.name[: LONG - 1]}…"
    axes.set_title(name, fontsize=10 * min(1.0, NAME / len(name)), fontweight="bold", pad=17, parse_math=False)
    said = f"KV saved {reading.saved_frac:.0%}, read {reading.read_frac:.0%}, {facts}"
    axes.text(0, 1.02, said, transform=axes.transAxes, fontsize=8, va="bottom")
    axes.text(0.98, 0.97, left_out(reading), transform=axes.transAxes, fontsize=7, va="top", ha="right")
    if first:
        axes.set_ylabel("tokens seen  (time runs down)", fontsize=9)


def _overlap(axes: Axes, reading: Reading, *, first: bool) -> None:
    text, overlap = reading.text, reading.overlap
    x = np.arange(text.prompt_len, len(text.ids)) + 0.5
    for firing in reading.firings:
        axes.axvline(firing.context, color=INK, lw=0.5, alpha=0.25)
    axes.vlines(x, overlap, 1.0, color=COLOURS[0], lw=max(0.6, 250 / len(text.ids)), alpha=0.75)
    axes.axvline(text.prompt_len, color=COLOURS[1], lw=1, ls="--")
    axes.text(text.prompt_len, 0.03, " answer", color=COLOURS[1], fontsize=8)
    axes.set_xlim(0, len(text.ids))
    axes.set_ylim(0.0, 1.02)
    axes.grid(visible=False, axis="x")  # cuts are the lines there
    axes.set_xlabel("position in the text", fontsize=9)
    if first:
        axes.set_ylabel("overlap with\nthe dense model", fontsize=9)


def _text(axes: Axes, reading: Reading, lines: list[list[tuple[int, str]]]) -> None:
    from matplotlib.patches import Rectangle

    often = reading.often()
    colours = mixed(often, often)
    axes.set(xlim=(0, COLUMNS), ylim=(len(lines), 0))
    axes.axis("off")
    points = WIDTH * 72 / COLUMNS / STRETCH
    for row, line in enumerate(lines):
        x = 0
        for token, piece in line:
            known = token >= 0 and not np.isnan(often[token])
            if known:
                axes.add_patch(Rectangle((x, row), len(piece), 1, facecolor=tuple(colours[token]), lw=0))
            dark = known and often[token] > 0.6
            axes.text(
                x,
                row + 0.5,
                piece,
                family="monospace",
                fontsize=points,
                va="center_baseline",
                color="white" if dark else INK,
                parse_math=False,
            )
            x += len(piece)
            if token == reading.text.prompt_len - 1:
                axes.plot([x, x], [row, row + 1], color=COLOURS[1], lw=1.2)


def _legend(figure: Figure, said: str, wide: float, total: float) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap

    bar = figure.add_axes((MARGIN / wide, 0.45 / total, 0.8 / wide, 0.1 / total))
    shades = LinearSegmentedColormap.from_list("shares", ["white", COLOURS[0]])
    figure.colorbar(ScalarMappable(cmap=shades), cax=bar, orientation="horizontal", ticks=[0, 1])
    bar.tick_params(labelsize=7, length=2)
    lines = fill(said, int((wide - MARGIN - 1.2) / 0.068))
    figure.text((MARGIN + 1.0) / wide, 0.5 / total, lines, fontsize=8, va="center")


def wrapped(text: Text) -> list[list[tuple[int, str]]]:
    """The text in lines of at most COLUMNS characters, as (token, piece); a token may be broken. Token -1 is a note."""
    lines: list[list[tuple[int, str]]] = [[]]
    room = COLUMNS
    for token, piece in enumerate(text.pieces):
        rest = printable(piece)
        while rest:
            if room == 0:
                lines.append([])
                room = COLUMNS
            lines[-1].append((token, rest[:room]))
            rest, room = rest[room:], room - len(lines[-1][-1][1])
    if len(lines) > LINES:
        return [*lines[: LINES - 1], [(-1, f"... and {len(lines) - LINES + 1} lines more")]]
    return lines


def printable(piece: str) -> str:
    """A token's text in characters of one width that the picture's font has."""
    piece = piece.replace("\n", "↵").replace("\t", "→")
    return "".join(each if each.isprintable() and ord(each) < 0x2500 else "□" for each in piece) or "□"
