# SPDX-License-Identifier: Apache-2.0
"""What caches hold of a text: by hand, and against the engine's own record of the same text."""

from __future__ import annotations

import base64
import json
import re

import numpy as np
import pytest
import torch

from sparse_rl.cli import main
from sparse_rl.evaluate.inspection import Firing, Reading, Text, answer, read
from sparse_rl.kv import RKV, Full, SnapKV
from sparse_rl.objective.mismatch import overlap_bounds
from sparse_rl.report.inspect_page import inspection_page
from sparse_rl.report.inspect_plot import COLUMNS, LINES, wrapped
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.score import score
from sparse_rl.types import Prompt


@pytest.fixture
def by_hand():
    """Three tokens of prompt and three of answer; one layer, two heads; a cut after four tokens."""
    text = Text(ids=(1, 2, 3, 4, 5, 6), pieces=("a", "</script>", "\n", "<b>", "é", "#"), prompt_len=3)
    kept = np.array([[[1, 0, 0, 1, 0, 0], [1, 1, 0, 0, 0, 0]]], dtype=bool)
    firing = Firing(context=4, kept_LKN=kept)
    return Reading(name="rkv:2", text=text, firings=(firing,), entries=(4, 3), overlap=np.array([1.0, 0.9, 0.2]))


def test_what_is_held_by_hand(by_hand):
    n = np.nan
    expected = [[1, 1, 1, n, n, n], [1, 0.5, 0, 0.5, n, n], [1, 0.5, 0, 0.5, 1, n]]  # after 3, 4 and 5 tokens
    np.testing.assert_array_equal(by_hand.held(), expected)
    np.testing.assert_allclose(by_hand.stayed(), [1, 2 / 3, 1 / 3, 0.5, 1, n])
    assert by_hand.saved_frac == pytest.approx(1 - 7 / 9)


@pytest.mark.parametrize("policy", [RKV(budget=20, interval=6), SnapKV(budget=16, interval=9)], ids=lambda p: p.name)
def test_a_cache_reads_as_the_engine_samples(policy, tiny, prompts):
    loaded = tiny(dtype=torch.float64)
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
        positions = torch.from_numpy(firing.kept_LKN).nonzero()[:, 2].view(kept.shape)
        assert torch.equal(positions, kept.long())


def test_the_answer_is_the_dense_models(tiny, prompts):
    loaded, (prompt,) = tiny(), prompts(9)
    text = answer(loaded, Prompt(ids=tuple(prompt)), max_tokens=12, temperature=0.0, seed=0)
    (rollout,) = Engine(loaded, Full()).generate([prompt], Sampling(max_tokens=12, temperature=0.0))
    assert text.ids == (*prompt, *rollout.token_ids.tolist()) and len(text.pieces) == len(text.ids)
    assert text.contexts == range(9, len(text.ids))


def test_the_page_has_every_bit_and_escapes_the_text(by_hand):
    page = inspection_page([by_hand, by_hand], "tiny")
    (data,) = re.findall(r'id="data">(.*?)</script>', page)
    data = json.loads(data)
    assert data["pieces"] == list(by_hand.text.pieces) and (data["layers"], data["heads"]) == (1, 2)
    bits = np.frombuffer(base64.b64decode(data["caches"][1]["cuts"][0]["kept"]), dtype=np.uint8)
    np.testing.assert_array_equal(np.unpackbits(bits.reshape(1, 2, 1), axis=-1)[..., :6], by_hand.firings[0].kept_LKN)
    assert "&lt;/script&gt;</span>" in page and page.count("<b></b>") == 2
    assert page.count('class="low"') == 2 and 'title="position 5, never written, overlap 0.200"' in page
    assert "http" not in page


def test_long_texts_are_cut_short_in_the_picture():
    pieces = ("x" * 30, "\n", "漢") * 200
    lines = wrapped(Text(ids=tuple(range(600)), pieces=pieces, prompt_len=1))
    assert len(lines) == LINES and "lines more" in lines[-1][0][1]
    assert all(sum(len(piece) for _, piece in line) == COLUMNS for line in lines[:-1])
    assert {char for line in lines[:-1] for _, piece in line for char in piece} == set("x↵□")


def test_the_command_writes_a_page_and_a_picture(tmp_path, capsys):
    caches = ["streaming:budget=16,interval=4", "snapkv:budget=16,interval=4"]
    command = ["inspect", "--model", "tiny", "--prompt", "Once upon a time there was", "--max-tokens", "12"]
    main([*command, "--kv", *caches, "--output", str(tmp_path / "out")])
    assert (tmp_path / "out" / "inspect.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out" / "inspect.html").read_text()
    printed = capsys.readouterr().out
    assert all(f"<h3>{cache}</h3>" in page and f"{cache}: KV saved" in printed for cache in caches)
    with pytest.raises(SystemExit):
        main([*command, "--kv", "rvk:64"])
    assert "did you mean 'rkv'" in capsys.readouterr().err


def test_a_policy_that_chooses_what_it_reads_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["inspect", "--model", "tiny", "--kv", "pages_mean:64"])
    assert "chooses what it reads at every step" in capsys.readouterr().err
