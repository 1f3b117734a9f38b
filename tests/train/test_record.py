# SPDX-License-Identifier: Apache-2.0
"""What a step's log says of its rollouts, by hand."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from sparse_rl.kv import RKV
from sparse_rl.model.load import load
from sparse_rl.tasks import Graded
from sparse_rl.train import record
from sparse_rl.train.record import rejected_records, repetition, rollout_metrics, warn
from sparse_rl.train.update import Updated
from sparse_rl.types import KVStats, Prompt


def test_rollout_metrics_by_hand():
    """Two groups of two: lengths 3, 5 and 2, 4; the second group's rewards are equal."""

    def rollout(length, reason, peak, held):
        return SimpleNamespace(
            token_ids=torch.arange(length),
            finish_reason=reason,
            prompt=SimpleNamespace(ids=(1, 2)),
            kv=KVStats(held=held, full=10, hybrid=10.0, peak=peak, peak_bytes=0, num_compressions=0),
        )

    rollouts = [
        rollout(3, "stop", 4, (2, 3)), rollout(5, "length", 4, (1, 1)), rollout(2, "stop", 3, (4,)),
        rollout(4, "stop", 4, (5, 4)),
    ]  # fmt: skip
    graded = Graded(rewards=torch.tensor([0.0, 1.0, 2.0, 2.0]).double(), by_function={})
    got = rollout_metrics(rollouts, graded, [0, 0, 1, 1])
    assert got["completions/mean_length"] == 3.5 and got["completions/mean_terminated_length"] == 3.0
    assert (got["completions/min_length"], got["completions/max_length"]) == (2.0, 5.0)
    assert got["completions/clipped_ratio"] == 0.25 and got["frac_reward_zero_std"] == 0.5
    assert got["kv/saved_frac"] == 1 - 20 / 40
    assert got["kv/peak_frac"] == pytest.approx(15 / (4 + 6 + 3 + 5))


def test_grading_that_takes_long_is_told_once(monkeypatch, caplog):
    monkeypatch.setattr(record, "SLOW_S", 0.01)
    warned: set[str] = set()
    for _ in range(2):
        with record.told_if_slow(("near", "judge"), warned):
            time.sleep(0.2)
    assert [line for line in caplog.messages if "has taken" in line] == [
        "grading (near, judge) has taken 0.01 s so far; a reward function of your own has no time limit, and may hang. "
        "Ctrl-C stops the run there."
    ]
    monkeypatch.setattr(record, "SLOW_S", 60.0)
    with record.told_if_slow(("near",), set()):
        pass
    assert len(caplog.messages) == 1


def test_repetition_by_hand():
    assert repetition(torch.arange(50)) == 0.0
    assert repetition(torch.tensor([1, 2] * 10)) == pytest.approx(1 - 2 / 13)
    ids = torch.randint(0, 3, (3000,))  # few ids, so that many runs are near each other and some are equal
    runs = {tuple(ids[i : i + 8].tolist()) for i in range(2993)}
    assert repetition(ids) == 1 - len(runs) / 2993 and repetition(ids.int()) == repetition(ids)
    assert repetition(torch.tensor([1, 2, 3])) == 0.0


@pytest.mark.parametrize(("place", "held"), [(2, 6), (0, 3)])
def test_a_rejected_record_by_hand(place, held):
    """Whatever is said of the last token, which the sampler did not choose."""
    sampler = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    dense = sampler.clone()
    dense[place], dense[3] = -20.0, -90.0
    rollout = SimpleNamespace(
        prompt=SimpleNamespace(ids=(10, 11, 12), text="abc"),
        token_ids=torch.tensor([13, 14, 15, 16]),
        sampler_logprobs=sampler,
        completion_mask=torch.tensor([True, True, True, False]),
        kv=SimpleNamespace(held=(5, 6, 7)),
    )
    updated = Updated(
        metrics={}, dense_logprobs=(dense,), overlap=(), row_weights=torch.ones(1), accepted=torch.tensor([False])
    )
    (record,) = rejected_records([rollout], updated, load("embedded").tokenizer, 5)
    assert record["entries_held"] == held and record["index"] == place
    assert record["before"] + record["token"] + record["after"] == "abcdefg"
    assert record["token"] == "defg"[place] and record["entries_dense"] == 3 + place


@pytest.mark.parametrize(
    ("interval", "protect", "said"),
    [
        (8, False, "holds 20 entries, and is cut when it holds 48 (40 + kv.interval 8); a smaller kv.budget would"),
        (10, False, "is cut when it holds 50 (40 + kv.interval 10); a smaller kv.interval (and kv.budget) would"),
        (8, True, "is cut when it holds 63 (55 + kv.interval 8); a smaller kv.budget would"),
    ],
    ids=["budget", "interval", "with its prompt"],
)
def test_what_keeps_a_cache_from_being_cut(interval, protect, said, caplog):
    """Of a prompt of 15 tokens and one of 2, answers of 6 and 9: the longest sequence is not the longest answer."""
    kv = SimpleNamespace(num_compressions=0)
    lengths = ((15, 6), (2, 9))
    rollouts = [SimpleNamespace(prompt=Prompt(ids=(0,) * p), token_ids=torch.arange(n), kv=kv) for p, n in lengths]
    graded = Graded(rewards=torch.zeros(2).double(), by_function={})
    policy, warned = RKV(budget=40, interval=interval, protect_prompt=protect), set()
    for _ in range(2):
        warn(rollouts, graded, policy, False, warned)
    assert len(caplog.records) == 1 and said in caplog.text and warned == {"budget"}
    warn(rollouts, graded, None, False, set())
    assert len(caplog.records) == 1
