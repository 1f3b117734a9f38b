# SPDX-License-Identifier: Apache-2.0
"""What caches held and read of one text, as a page that needs nothing but itself: any layer and head can be looked at.

What each cut kept and each step read travels in the page as bits, one a layer, head and position; a few lines of script
draw the maps.

How caches read the text is in evaluate/inspection.py; the picture is drawn in `inspect_plot.py`.
"""

from __future__ import annotations

import base64
import json
import logging
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from sparse_rl.calibrate.statistics import quantiles
from sparse_rl.evaluate.inspection import Marks, Reading
from sparse_rl.report.inspect_plot import TINT, draw_inspection, left_out
from sparse_rl.report.page import Html, document, markup, table, write
from sparse_rl.report.plots import NoMatplotlib

logger = logging.getLogger(__name__)

ABOUT = """What a sparse KV cache holds and reads as a text grows, and how far the next token it would write is from the
dense model's. All caches read the same text, the dense model's own answer, so they can be compared token by token;
while sampling, a cache goes on from its own tokens."""
HEAD = ("cache", "KV saved", "KV read", "entries at most", "cuts", "overlap, mean", "P05", "lowest", "where")
HELP = """Map: a position of the text at each x, time runs down; the darker, the more of the chosen layers and heads
read it; a cache that does not choose pages reads what it holds. Pale orange is held, but not read. The dashed line is
where the answer begins. Below it, the overlap sum min(p_dense, p_sparse) at every token, from 0 to 1; thin lines are
cuts. Below that, the text: the darker, the more of the time since it was written a token was read, over all layers and
heads; the orange bar in it is no character but where the prompt ends, and what is underlined in orange has an overlap
below 0.5. Layers that read everything are left out where others
choose, unless they are picked."""
LOW = 0.5

CSS = """<style>
.pick { position: sticky; top: 0; background: Canvas; padding: .4rem 0; z-index: 2; }
.caches { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1.5rem; }
.caches h3 { margin: .2rem 0; overflow-wrap: anywhere; font-size: 1rem; }
.map, .overlap { position: relative; border: 1px solid #8884; }
.map canvas { display: block; width: 100%; height: 17rem; image-rendering: pixelated; cursor: crosshair; }
.map > span { position: absolute; top: .3rem; right: .5rem; font-size: .75rem; opacity: .75; pointer-events: none; }
.border { position: absolute; top: 0; bottom: 0; border-left: 1px dashed #d55e00; pointer-events: none; }
.border span { position: absolute; left: .3rem; bottom: 0; color: #d55e00; font-size: .75rem; }
.overlap svg { display: block; width: 100%; height: 6rem; } .overlap { border-top: 0; }
.overlap .axis { position: absolute; left: .3rem; font-size: .7rem; opacity: .75; }
.at { min-height: 1.5em; font-size: .85rem; opacity: .85; white-space: pre-wrap; overflow-wrap: anywhere; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; margin: .3rem 0; }
.text { max-height: 24rem; overflow-y: auto; } .text b { border-left: 2px solid #d55e00; }
.text .low { text-decoration: underline 2px #d55e00; }
.heads { display: grid; gap: 2px; font-size: .7rem; overflow-x: auto; }
.heads canvas { width: 100%; min-width: 2.5rem; height: 3rem; border: 1px solid #8884; cursor: pointer; }
</style>"""

SCRIPT = """<script type="module">
const data = JSON.parse(document.getElementById("data").textContent);
const size = data.pieces.length, first = data.promptLen, steps = size - first;
const bytes = Math.ceil(size / 8), heads = data.layers * data.heads;
async function inflated(text) {
  const packed = new Blob([Uint8Array.from(atob(text), c => c.charCodeAt(0))]).stream();
  return new Uint8Array(await new Response(packed.pipeThrough(new DecompressionStream("deflate"))).arrayBuffer());
}
for (const cache of data.caches)
  for (const marks of [cache.cuts, cache.reads]) marks.bits = await inflated(marks.bits);

function chosen(cache, layer, head) {
  const all = [];
  for (let l = 0; l < data.layers; l++) for (let h = 0; h < data.heads; h++)
    if ((layer < 0 ? !cache.choosing.length || cache.choosing.includes(l) : layer === l) && (head < 0 || head === h))
      all.push(l * data.heads + h);
  return all;
}
function shares(marks, i, which) {
  const share = new Float32Array(size).fill(1), until = marks.at[i];
  for (let x = 0; x < until; x++) {
    let count = 0;
    for (const one of which) count += (marks.bits[(i * heads + one) * bytes + (x >> 3)] >> (7 - (x & 7))) & 1;
    share[x] = count / which.length;
  }
  return share;
}
function rows(marks, which) {
  const all = [];
  for (let y = 0, next = 0, share = new Float32Array(size).fill(1); y < steps; y++) {
    while (next < marks.at.length && marks.at[next] <= first + y) share = shares(marks, next++, which);
    all.push(share);
  }
  return all;
}
function draw(canvas, cache, layer, head) {
  canvas.width = size; canvas.height = steps;
  const which = chosen(cache, layer, head), held = rows(cache.cuts, which);
  const read = cache.reads.at.length ? rows(cache.reads, which) : held;
  const context = canvas.getContext("2d"), image = context.createImageData(size, steps);
  for (let y = 0; y < steps; y++) for (let x = 0; x < first + y; x++) {
    const blue = read[y][x], orange = data.tint * Math.max(0, held[y][x] - blue), sum = blue + orange;
    const mix = (a, b) => (blue * a + orange * b) / sum;
    if (sum) image.data.set([mix(0, 230), mix(114, 159), mix(178, 0), 255 * sum], 4 * (y * size + x));
  }
  context.putImageData(image, 0, 0);
  Object.assign(canvas, {held, read});
}
const layerPick = document.getElementById("layer"), headPick = document.getElementById("head");
const maps = [...document.querySelectorAll(".map canvas")];
function redraw() { maps.forEach((map, i) => draw(map, data.caches[i], +layerPick.value, +headPick.value)); }
layerPick.onchange = headPick.onchange = redraw;
maps.forEach((map, i) => map.onmousemove = event => {
  const box = map.getBoundingClientRect();
  const x = Math.min(size - 1, Math.floor((event.clientX - box.left) / box.width * size));
  const y = Math.min(steps - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * steps)));
  const percent = share => `${Math.round(100 * share[y][x])} %`;
  const say = x < first + y ? `read by ${percent(map.read)}, held by ${percent(map.held)}` : "not written yet";
  map.closest("section").querySelector(".at").textContent =
    `after ${first + y} tokens, position ${x} ${JSON.stringify(data.pieces[x])}: ${say}`;
});
document.querySelectorAll("details.every").forEach((details, i) => details.ontoggle = () => {
  const grid = details.querySelector(".heads");
  if (grid.children.length) return;
  for (let l = 0; l < data.layers; l++) for (let h = 0; h < data.heads; h++) {
    const cell = document.createElement("div"), canvas = document.createElement("canvas");
    canvas.title = cell.textContent = `layer ${l}, head ${h}`;
    cell.prepend(canvas); grid.append(cell);
    draw(canvas, data.caches[i], l, h);
    canvas.onclick = () => { layerPick.value = l; headPick.value = h; redraw(); maps[i].scrollIntoView(); };
  }
});
redraw();
</script>"""


def write_inspection(readings: list[Reading], folder: Path, model: str) -> list[Path]:
    """Write inspect.html into the folder, and inspect.png where matplotlib is installed; what was written."""
    written = [folder / "inspect.html"]
    write(written[0], inspection_page(readings, model))
    try:
        write(folder / "inspect.png", draw_inspection(readings))
        written.append(folder / "inspect.png")
    except NoMatplotlib as error:
        logger.warning("there is no inspect.png: %s", error)
    return written


def inspection_page(readings: list[Reading], model: str) -> str:
    text = readings[0].text
    layers, heads = _shape(readings)
    picks = "".join(
        f'<label>{what} <select id="{what}"><option value="-1">all</option>'
        + "".join(f'<option value="{i}">{i}</option>' for i in range(count))
        + "</select></label> "
        for what, count in (("layer", layers), ("head", heads))
    )
    data = {
        "pieces": text.pieces,
        "promptLen": text.prompt_len,
        "layers": layers,
        "heads": heads,
        "tint": TINT,
        "caches": [
            {"cuts": packed(reading.firings), "reads": packed(reading.reads), "choosing": reading.choosing}
            for reading in readings
        ],
    }
    body = "\n".join(
        (
            CSS,
            table(HEAD, (_facts(reading) for reading in readings), "summary"),
            f"<p><small>{markup(HELP)}</small></p>",
            f'<div class="pick">{picks}</div>',
            f'<div class="caches">{"".join(_cache(reading, heads) for reading in readings)}</div>',
            # A text may have "</script>" in it.
            f'<script type="application/json" id="data">{json.dumps(data).replace("<", chr(92) + "u003c")}</script>',
            SCRIPT,
        )
    )
    return document(f"What caches hold and read: {model}", ABOUT, body)


def summary_lines(readings: list[Reading]) -> list[str]:
    """For the terminal: a line a cache."""
    return [
        f"{reading.name}: KV saved {facts[1]}, read {facts[2]}, {facts[4]} cuts, overlap mean {facts[5]}, "
        f"P05 {facts[6]}, lowest {facts[7]} at {facts[8]}"
        for reading in readings
        for facts in [_facts(reading)]
    ]


def packed(marks: tuple[Marks, ...]) -> dict[str, Any]:
    """Bits in the order of context, layer, head, position, each head from a new byte on, deflated, as base64."""
    bits = b"".join(np.packbits(each.at_LKT, axis=-1).tobytes() for each in marks)
    return {"at": [each.context for each in marks], "bits": base64.b64encode(zlib.compress(bits)).decode()}


def _shape(readings: list[Reading]) -> tuple[int, int]:
    """Layers and heads; of a text that was always read whole there is but the whole."""
    found = next((each.at_LKT.shape for reading in readings for each in reading.firings + reading.reads), (1, 1, 0))
    return found[0], found[1]


def _facts(reading: Reading) -> tuple[str, ...]:
    overlap, text = reading.overlap, reading.text
    where = text.prompt_len + int(overlap.argmin())
    return (
        reading.name,
        f"{reading.saved_frac:.0%}",
        f"{reading.read_frac:.0%}",
        str(max(reading.entries, default=0)),
        str(len(reading.firings)),
        f"{overlap.mean():.3f}",
        f"{quantiles(overlap, [0.05])[0]:.3f}",
        f"{overlap.min():.3f}",
        f"{where} {text.pieces[where]!r}",
    )


def _cache(reading: Reading, heads: int) -> Html:
    text = reading.text
    border = f'<div class="border" style="left:{100 * text.prompt_len / len(text.ids):.2f}%">'
    return Html(
        f"<section><h3>{markup(reading.name)}</h3>\n"
        f'<div class="map"><canvas></canvas><span>{left_out(reading)}</span>{border}</div></div>\n'
        f'<div class="overlap">{_overlap(reading)}{border}<span>answer</span></div>'
        f'<span class="axis" style="top:0">1</span><span class="axis" style="bottom:0">0 overlap</span></div>\n'
        f'<div class="at"></div>\n<div class="text">{_text(reading)}</div>\n'
        f'<details class="every"><summary>Every layer (down) and head (across)</summary>'
        f'<div class="heads" style="grid-template-columns:repeat({heads},1fr)"></div></details></section>\n'
    )


def _overlap(reading: Reading) -> Html:
    text = reading.text
    size = len(text.ids)
    cuts = "".join(f"M{firing.context} 0V100" for firing in reading.firings)
    first = text.prompt_len
    drops = "".join(f"M{first + i + 0.5} 0V{100 * (1 - each):.1f}" for i, each in enumerate(reading.overlap))
    style = 'vector-effect="non-scaling-stroke" fill="none"'
    return Html(
        f'<svg viewBox="0 0 {size} 100" preserveAspectRatio="none" role="img" aria-label="overlap">'
        f'<path d="{cuts}" stroke="currentColor" opacity=".2" {style}/>'
        f'<path d="{drops}" stroke="#0072b2" stroke-width="2" {style}/></svg>'
    )


def _text(reading: Reading) -> Html:
    """Every token, shaded by how often it was read."""
    text, often, stayed, found = reading.text, reading.often(), reading.stayed(), []
    for i, piece in enumerate(text.pieces):
        if i == text.prompt_len:
            found.append("<b></b>")
        shade = 0.0 if np.isnan(often[i]) else often[i]
        said = f"position {i}, " + ("never written" if np.isnan(stayed[i]) else f"stayed {stayed[i]:.0%} of the time")
        if reading.reads and not np.isnan(often[i]):
            said += f", read in {shade:.0%} of the steps"
        low = ""
        if i >= text.prompt_len:
            overlap = reading.overlap[i - text.prompt_len]
            said += f", overlap {overlap:.3f}"
            low = ' class="low"' if overlap < LOW else ""
        found.append(
            f'<span{low} style="background:rgba(0,114,178,{0.75 * shade:.2f})" title="{said}">{markup(piece)}</span>'
        )
    return Html("".join(found))
