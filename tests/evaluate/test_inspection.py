# SPDX-License-Identifier: Apache-2.0
"""What caches hold and read of a text: by hand, against the engine's record of it, and chosen anew."""

from __future__ import annotations

import base64
import json
import re
import sys
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from sparse_rl.cli import main
from sparse_rl.evaluate.inspection import Marks, Reading, Text, answer, read
from sparse_rl.kv import RKV, Full, PagesMean, Quest, SnapKV, Streaming
from sparse_rl.kv.sparse_cache import SparseCache
from sparse_rl.objective.mismatch import overlap_bounds
from sparse_rl.report.inspect_page import inspection_page, summary_lines
from sparse_rl.report.inspect_plot import COLUMNS, LINES, _figure, caption, left_out, mixed, wrapped
from sparse_rl.report.plots import plot_style
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.score import score
from sparse_rl.types import Prompt


@pytest.fixture
def by_hand():
    """Three tokens of prompt and three of answer; one layer, two heads; a cut after four tokens."""
    text = Text(ids=(1, 2, 3, 4, 5, 6), pieces=("a", "</script>", "\n", "<b>", "é", "#"), prompt_len=3)
    kept = np.array([[[1, 0, 0, 1, 0, 0], [1, 1, 0, 0, 0, 0]]], dtype=bool)
    firing = Marks(context=4, at_LKT=kept)
    return Reading(name="rkv:2", text=text, firings=(firing,), entries=(4, 3), overlap=np.array([1.0, 0.9, 0.2]))


def test_what_is_held_by_hand(by_hand):
    n = np.nan
    expected = [[1, 1, 1, n, n, n], [1, 0.5, 0, 0.5, n, n], [1, 0.5, 0, 0.5, 1, n]]  # after 3, 4 and 5 tokens
    np.testing.assert_array_equal(by_hand.held(), expected)
    np.testing.assert_allclose(by_hand.stayed(), [1, 2 / 3, 1 / 3, 0.5, 1, n])
    assert by_hand.saved_frac == pytest.approx(1 - 7 / 9)


@pytest.fixture
def chosen_by_hand(by_hand):
    """The same with a second layer; it chooses, and its heads read two positions in both decode steps."""
    reads = []
    for context, places in ((4, ([0, 3], [1, 3])), (5, ([0, 4], [0, 4]))):
        at_LKT = np.zeros((2, 2, 6), dtype=bool)
        at_LKT[0, :, :context] = True
        at_LKT[1, [[0], [1]], places] = True
        reads.append(Marks(context=context, at_LKT=at_LKT))
    firing = replace(by_hand.firings[0], at_LKT=by_hand.firings[0].at_LKT.repeat(2, axis=0))
    return replace(by_hand, firings=(firing,), reads=tuple(reads), choosing=(1,))


def test_what_is_read_by_hand(by_hand, chosen_by_hand):
    n = np.nan
    expected = [[1, 1, 1, n, n, n], [0.5, 0.5, 0, 1, n, n], [1, 0, 0, 0, 1, n]]
    np.testing.assert_array_equal(chosen_by_hand.read(), expected)
    np.testing.assert_array_equal(chosen_by_hand.held(), by_hand.held())
    np.testing.assert_array_equal(chosen_by_hand.often(), [0.75, 0.25, 0, 0.5, 1, n])
    assert chosen_by_hand.read_frac == pytest.approx((3 + 3.5) / 9)  # a layer of 4, then 5, and one of 2 and 2
    np.testing.assert_array_equal(by_hand.read(), by_hand.held())
    assert by_hand.read_frac == pytest.approx(7 / 9)
    assert left_out(chosen_by_hand).startswith("without layer 0:") and left_out(by_hand) == ""
    assert "that hold a position" in caption([by_hand]) and "that read a position" in caption([by_hand, chosen_by_hand])
    blue, orange, white = mixed(np.array([1.0, 0, n]), np.array([1.0, 1, n]))
    np.testing.assert_allclose(blue, np.array([0, 0x72, 0xB2]) / 255)
    assert orange[0] > orange[1] > orange[2] and (white == 1).all()


CHOOSERS = (
    PagesMean(budget=64, dense_layers=1),
    Quest(budget=80, first=2, last=1, dense_layers=0),
    RKV(budget=90, interval=13, select="quest", select_budget=64),
    Streaming(budget=100, interval=9, select="pages_mean", select_budget=80),
)


@pytest.mark.parametrize("policy", CHOOSERS, ids=lambda policy: f"{policy.name}-{policy.selection.name}")
@pytest.mark.some(2)
def test_what_is_read_is_the_choice(policy, tiny, prompts, monkeypatch):
    loaded, size = tiny(layers=4, dtype=torch.float64), 150
    (prompt,) = prompts(110, seed=5)
    sampling = Sampling(max_tokens=size - 110, temperature=0.0, stop_ids=())
    (rollout,) = Engine(loaded, policy, EngineConfig(rows=1)).generate([prompt], sampling)
    ids = (*prompt, *rollout.token_ids.tolist())
    queries, keys = {}, {}

    def attend(cache, layer_idx, call):
        q_BHTD, k_BKTD = call.q_BHTD, call.k_BKTD
        start = cache.contexts[0] if cache.contexts else 0
        for t in range(k_BKTD.shape[2]):
            keys[layer_idx, start + t] = k_BKTD[0, :, t]
            queries[layer_idx, start + t] = q_BHTD[0, :, t]
        return own(cache, layer_idx, call)

    own = SparseCache.attend
    monkeypatch.setattr(SparseCache, "attend", attend)
    (reading,) = read(loaded, Text(ids=ids, pieces=ids, prompt_len=110), {"chosen": policy})
    assert reading.read_frac == pytest.approx(rollout.kv.read_frac) and reading.entries == rollout.kv.held
    assert [each.context for each in reading.reads] == list(range(111, size))
    selection, shape = policy.selection, loaded.shape
    assert reading.choosing == tuple(range(selection.dense_layers, shape.num_layers))
    skipped = 0
    for step in reading.reads:
        cut = next((each for each in reversed(reading.firings) if each.context < step.context), None)
        for layer in range(shape.num_layers):
            for head in range(shape.num_kv_heads):
                held = list(range(step.context))
                if cut is not None:
                    held = [*np.flatnonzero(cut.at_LKT[layer, head]), *range(cut.context, step.context)]
                pages = [held[i : i + 16] for i in range(0, len(held), 16)]
                if layer in reading.choosing:
                    group = queries[layer, step.context - 1].unflatten(0, (shape.num_kv_heads, -1))[head]
                    pages = choice(selection, group, [[keys[layer, i][head] for i in page] for page in pages], pages)
                expected = sorted(position for page in pages for position in page)
                assert np.flatnonzero(step.at_LKT[layer, head]).tolist() == expected
                skipped += len(held) - len(expected)
    assert skipped > 0


def choice(selection, queries, keys, pages):
    """The first pages, the last, and the best of the others, one after the other."""
    taken = {*range(selection.first), *range(len(pages) - selection.last, len(pages))}
    scores = []
    for each in keys:
        k = torch.stack(each)
        found = [q @ k.mean(0) if selection.name == "pages_mean" else bound(q, k) for q in queries]
        scores.append(float(sum(found)))
    for i in sorted(range(len(pages)), key=lambda i: -scores[i]):
        if len(taken) < min(len(pages), selection.budget // 16):
            taken.add(i)
    return [pages[i] for i in taken]


def bound(q, k):
    return torch.maximum(q * k.amin(0), q * k.amax(0)).sum()


@pytest.mark.parametrize("policy", [RKV(budget=20, interval=6), SnapKV(budget=16, interval=9)], ids=lambda p: p.name)
def test_a_cache_reads_as_the_engine_samples(policy, tiny, prompts):
    loaded = tiny(layers=4, dtype=torch.float64)
    (prompt,) = prompts(30, seed=2)
    sampling = Sampling(max_tokens=40, temperature=0.0, stop_ids=(), top_logprobs=loaded.vocab_size)
    (rollout,) = Engine(loaded, policy, EngineConfig(rows=1)).generate([prompt], sampling, record_kept=True)
    ids = (*prompt, *rollout.token_ids.tolist())
    text = Text(ids=ids, pieces=tuple(map(str, ids)), prompt_len=30)
    dense, sparse = read(loaded, text, {"full": Full(), "sparse": policy})
    (scores,) = score(loaded.model, [rollout])
    expected, _ = overlap_bounds(rollout.top_logprobs, scores.at_top_ids)
    np.testing.assert_allclose(sparse.overlap, expected.numpy(), atol=1e-5)
    np.testing.assert_allclose(dense.overlap, 1.0, atol=1e-9)
    assert sparse.overlap.min() < 0.9 and sparse.entries == rollout.kv.held
    assert sparse.saved_frac == pytest.approx(rollout.kv.saved_frac) and dense.saved_frac == 0 == len(dense.firings)
    assert len(sparse.firings) == len(rollout.kept_positions) > 3
    for firing, kept in zip(sparse.firings, rollout.kept_positions, strict=True):
        positions = torch.from_numpy(firing.at_LKT).nonzero()[:, 2].view(kept.shape)
        assert torch.equal(positions, kept.long())


def test_the_answer_is_the_dense_models(tiny, prompts):
    loaded, (prompt,) = tiny(), prompts(9)
    text = answer(loaded, Prompt(ids=tuple(prompt)), Sampling(max_tokens=12, temperature=0.0))
    (rollout,) = Engine(loaded, Full()).generate([prompt], Sampling(max_tokens=12, temperature=0.0))
    assert text.ids == (*prompt, *rollout.token_ids.tolist()) and len(text.pieces) == len(text.ids)
    assert text.contexts == range(9, len(text.ids))


def test_the_page_has_every_bit_and_escapes_the_text(by_hand):
    page = inspection_page([by_hand, replace(by_hand, reads=by_hand.firings * 2, choosing=(0,))], "tiny")
    (data,) = re.findall(r'id="data">(.*?)</script>', page)
    data = json.loads(data)
    assert data["pieces"] == list(by_hand.text.pieces) and (data["layers"], data["heads"]) == (1, 2)
    for cache, counts in zip(data["caches"], ((1, 0), (1, 2)), strict=True):
        for what, count in zip(("cuts", "reads"), counts, strict=True):
            assert cache[what]["at"] == [4] * count
            bits = np.frombuffer(zlib.decompress(base64.b64decode(cache[what]["bits"])), dtype=np.uint8)
            found = np.unpackbits(bits.reshape(count, 1, 2, 1), axis=-1)[..., :6]
            assert all((at_LKT == by_hand.firings[0].at_LKT).all() for at_LKT in found)
    assert "&lt;/script&gt;</span>" in page and page.count("<b></b>") == 2
    assert "the orange bar in it is no character but where the prompt ends" in page
    assert page.count('class="low"') == 2 and 'title="position 5, never written, overlap 0.200"' in page
    assert "http" not in page
    options = {
        what: re.findall(r'value="(-?\d+)"', page.split(f'id="{what}"')[1].split("</select>")[0])
        for what in ("layer", "head")
    }
    assert options == {"layer": ["-1", "0"], "head": ["-1", "0", "1"]}
    assert '"M4 0V100"' in page and '"M3.5 0V0.0M4.5 0V10.0M5.5 0V80.0"' in page  # the cut, the drops of the overlap


def test_what_is_said_of_a_cache_by_hand(by_hand):
    assert summary_lines([by_hand]) == [
        "rkv:2: KV saved 22%, read 78%, 1 cuts, overlap mean 0.700, P05 0.200, lowest 0.200 at 5 '#'"
    ]


def test_the_picture_shows_what_is_held_and_the_overlap(by_hand):
    with plot_style():
        shown, overlap, *_ = _figure([by_hand]).axes
    np.testing.assert_array_equal(shown.images[0].get_array(), mixed(by_hand.held(), by_hand.held()))
    assert shown.images[0].get_extent() == [0, 6, 6, 3]
    drops = [segment.tolist() for segment in overlap.collections[0].get_segments()]
    assert drops == [[[3.5, 1.0], [3.5, 1.0]], [[4.5, 0.9], [4.5, 1.0]], [[5.5, 0.2], [5.5, 1.0]]]


def test_long_texts_are_cut_short_in_the_picture():
    pieces = ("x" * 30, "\n", "漢") * 200
    lines = wrapped(Text(ids=tuple(range(600)), pieces=pieces, prompt_len=1))
    assert len(lines) == LINES and "lines more" in lines[-1][0][1]
    assert all(sum(len(piece) for _, piece in line) == COLUMNS for line in lines[:-1])
    assert {char for line in lines[:-1] for _, piece in line for char in piece} == set("x↵□")


def test_the_command_writes_a_page_and_a_picture(tmp_path, capsys):
    caches = ["streaming:budget=16,interval=4", "quest:48", "rkv:budget=60,interval=4,select=quest,select_budget=48"]
    command = ["inspect", "--model", "tiny", "--prompt", "Once upon a time " * 4, "--max-tokens", "12"]
    main([*command, "--kv", *caches, "--output", str(tmp_path / "out")])
    assert (tmp_path / "out" / "inspect.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out" / "inspect.html").read_text()
    printed = capsys.readouterr().out
    assert all(f"<h3>{cache}</h3>" in page and f"{cache}: KV saved" in printed for cache in caches)
    assert printed.rstrip().endswith("inspect.html and " + str(tmp_path / "out" / "inspect.png"))
    assert "never cut" not in printed
    main([*command, "--kv", "rkv", "--output", str(tmp_path / "out")])
    assert "rkv was never cut: it is due at 640 entries (interval 128), and the text has" in capsys.readouterr().out
    main(["inspect", "--prompt", "b=e5;a=c8;|b", "--max-tokens", "2", "--output", str(tmp_path / "own")])  # no newline
    with pytest.raises(SystemExit):
        main([*command, "--kv", "rvk:64"])
    assert "did you mean 'rkv'" in capsys.readouterr().err


def test_without_matplotlib_there_is_still_the_page(tmp_path, capsys, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    short = ["--model", "tiny", "--prompt", "Once upon a time", "--max-tokens", "2", "--kv", "streaming:8"]
    main(["inspect", *short, "--output", str(tmp_path / "out")])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["inspect.html"]
    printed = capsys.readouterr().out
    assert "streaming:8: KV saved" in printed and printed.rstrip().endswith(f"wrote {tmp_path}/out/inspect.html")
    assert "there is no inspect.png: " in caplog.text and "pip install 'sparse-rl[report]'" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kv", "rkv:40", "rkv:40"], "--kv has 'rkv:40' twice; give it once."),
        (["--kv", "rkv:40", "full", "rkv:budget=40"], "'rkv:40' and 'rkv:budget=40', which are the same cache"),
        (["--kv", "quest:64", "pages_mean:32"], "cache 'pages_mean:32': budget is 32, but the pages always read"),
        (["--kv", "rkv:budget=64,select=quest,select_budget=192"], "no more than 192 entries are ever held"),
        (["--prompt", "@BINARY"], "line 1 of BINARY is not text in UTF-8"),
        (["--model", "nowhere", "--output", "BINARY/out"], "made: BINARY is a file"),  # before a model is sought
        (["--max-tokens", "0"], "--max-tokens is 0; it must be at least 1"),
        (["--temperature", "-1"], "--temperature is -1"),
        (["--seed", str(1 << 63)], "--seed is 9223372036854775808"),
        (["--prompt", ""], "--prompt: the prompt is empty"),
    ],
)
def test_what_cannot_be_inspected_is_named(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe\x93")
    with pytest.raises(SystemExit):
        main(["inspect", "--model", "tiny", *arguments])
    assert said in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["BINARY"]
