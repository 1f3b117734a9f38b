# SPDX-License-Identifier: Apache-2.0
"""Alarms: each begins with its sign, is said once, ends after ten quiet steps, and comes through a checkpoint."""

from __future__ import annotations

import json
import random

import pytest

from sparse_rl.objective.tail import BinTail
from sparse_rl.train.alarms import Alarms

NAMES = ("rejection", "tail", "length", "kl")
FINE = {"correction/rejection_rate": 0.1, "completions/mean_length": 1000.0, "rollout_corr/k3_kl": 0.01}


def tail(quantile, start=2000):
    return BinTail(start=start, tokens=1000.0, quantile=quantile, under=0.1, hazard=0.0)


def flags(alarms, metrics, steps, first=1, measured=()):
    """Which alarms are on after each step; metrics may be a function of the step."""
    found = []
    for step in range(first, first + steps):
        line = metrics(step) if callable(metrics) else metrics
        got = alarms.look(step, line, list(measured), 0.86)
        assert set(got) == {f"alarm/{name}" for name in NAMES}
        found.append({name.removeprefix("alarm/") for name, on in got.items() if on})
    return found


def test_a_steady_run_has_none(caplog):
    def noisy(step):
        return {name: value * random.uniform(0.95, 1.05) for name, value in FINE.items()}

    assert flags(Alarms(), noisy, 400, measured=[tail(0.81), tail(0.95, 0)]) == [set()] * 400
    assert not caplog.records


def test_rejection_is_said_once_an_onset(caplog):
    alarms, high = Alarms(), FINE | {"correction/rejection_rate": 0.2}
    assert flags(alarms, high, 3) == [{"rejection"}] * 3
    assert flags(alarms, FINE, 12) == [{"rejection"}] * 9 + [set()] * 3
    assert flags(alarms, high, 2) == [{"rejection"}] * 2
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith("20% of the completions were rejected (above 15%); raise kv.budget")


def test_a_sign_that_comes_and_goes_is_said_once(caplog):
    flags(Alarms(), lambda step: FINE | {"correction/rejection_rate": 0.2 * (step % 5 == 0)}, 50)
    assert len(caplog.records) == 1


def test_the_tail_is_that_of_the_worst_bin(caplog):
    alarms = Alarms()
    assert flags(alarms, FINE, 1, measured=[tail(0.95, 0), tail(0.801), tail(0.9, 4000)]) == [set()]
    assert flags(alarms, FINE, 1, measured=[tail(0.95, 0), tail(0.799), tail(0.9, 4000)]) == [{"tail"}]
    assert "from 2000 tokens of context on, the tail of overlap with the dense model is 0.80" in caplog.text
    assert "control.largest" in caplog.text


def test_lengths_that_shrink(caplog):
    """Means of ten steps: from 1000 down by 20 a step, the mean is under 750 when the middle of the ten is."""
    found = flags(Alarms(), lambda step: FINE | {"completions/mean_length": 1000.0 - 20.0 * max(0, step - 20)}, 60)
    # the mean of steps n-9..n is 1000 - 20 (n - 24.5); under 750 from n = 38 on
    assert [step + 1 for step, on in enumerate(found) if "length" in on] == list(range(38, 61))
    assert "completions have shrunk from 1000 to 730 tokens; if the reward does not ask" in caplog.text


def test_a_kl_that_does_not_settle(caplog):
    def growing(step):
        return FINE | {"rollout_corr/k3_kl": 0.01 * 1.01**step}

    found = flags(Alarms(), growing, 260)  # 1.01^50 = 1.64
    assert [step + 1 for step, on in enumerate(found) if "kl" in on] == list(range(200, 261))
    assert len(caplog.records) == 1 and "still rises after 200 steps" in caplog.text
    settled = flags(Alarms(), lambda step: FINE | {"rollout_corr/k3_kl": 0.05 - 0.04 * 0.98**step}, 300)
    assert settled == [set()] * 300
    tiny = flags(Alarms(), lambda step: FINE | {"rollout_corr/k3_kl": 1e-6 * 1.02**step}, 250)
    assert tiny == [set()] * 250


@pytest.mark.parametrize("cut", [5, 25, 41])
def test_alarms_come_through_a_checkpoint(cut, caplog):
    def shrinking(step):
        return FINE | {"completions/mean_length": 1000.0 - 10.0 * step, "correction/rejection_rate": 0.3 * (step < 20)}

    whole = flags(Alarms(), shrinking, 60)
    first, second = Alarms(), Alarms()
    before = flags(first, shrinking, cut)
    second.restore(json.loads(json.dumps(first.state())))
    caplog.clear()
    assert before + flags(second, shrinking, 60 - cut, first=cut + 1) == whole
    assert len([r for r in caplog.records if "rejected" in r.getMessage()]) == 0
