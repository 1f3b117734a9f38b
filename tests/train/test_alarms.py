# SPDX-License-Identifier: Apache-2.0
"""Alarms: each begins with its sign, is said once, ends after ten quiet steps, and comes through a checkpoint."""

from __future__ import annotations

import json
import math
import random

import pytest

from sparse_rl.objective.tail import BinTail
from sparse_rl.train.alarms import Alarms

NAMES = ("anomalies", "rejection", "tail", "length", "kl")
FINE = {"mismatch/catastrophic_rollout_frac": 0.1, "completions/mean_length": 1000.0, "rollout_corr/k3_kl": 0.01}


def tail(far, start=2000, tokens=(125.0,) * 8):
    """A bin of rollouts in which this share of the tokens, or of each one's, is far under the target."""
    shares = far if isinstance(far, list) else [far] * len(tokens)
    bad = tuple(share * many for share, many in zip(shares, tokens, strict=True))
    return BinTail(start=start, quantile=None, tokens=tokens, under=bad, far=bad, hazard=(0.0,) * len(tokens))


def flags(alarms, metrics, steps, first=1, measured=()):
    """Which alarms are on after each step; metrics and what is measured may be functions of the step."""
    found = []
    for step in range(first, first + steps):
        line = metrics(step) if callable(metrics) else metrics
        tails = measured(step) if callable(measured) else measured
        got = alarms.look(step, line, None if tails is None else list(tails), 0.86, 0.05)
        assert set(got) == {f"alarm/{name}" for name in NAMES}
        found.append({name.removeprefix("alarm/") for name, on in got.items() if on})
    return found


def test_a_steady_run_has_none(caplog):
    def noisy(step):
        return {name: value * random.uniform(0.95, 1.05) for name, value in FINE.items()}

    assert flags(Alarms(), noisy, 400, measured=[tail(0.05), tail(0.0, 0)]) == [set()] * 400
    assert not caplog.records


def test_a_model_that_is_worse_than_at_first(caplog):
    """By 0.02 and two standard errors of the difference, 0.05 here; over with the first evaluation without it."""
    alarms = Alarms()
    assert [alarms.look_at_evaluation(r, 0.015)["alarm/collapse"] for r in (0.8, 0.9, 0.76, 0.757)] == [0, 0, 0, 1]
    resumed = Alarms()
    resumed.restore(json.loads(json.dumps(alarms.state())))
    assert [resumed.look_at_evaluation(r, 0.015)["alarm/collapse"] for r in (0.5, 0.78, 0.7)] == [1, 0, 1]
    said = [record.getMessage().partition(";")[0] for record in caplog.records]
    fell = "the held-out reward with the dense cache has fallen from 0.800 to"
    assert said == [f"{fell} 0.757", f"{fell} 0.700"]
    other = [resumed.look_at_evaluation(r, 0.015, "another")["alarm/collapse"] for r in (0.5, 0.49, 0.3)]
    assert other == [0, 0, 1], "what is evaluated in another way is not compared"
    sure = Alarms()
    assert [sure.look_at_evaluation(r, 0.0)["alarm/collapse"] for r in (0.8, 0.785, 0.775)] == [0, 0, 1]


def test_rewards_that_are_all_equal(caplog):
    """Three steps in a row; over after ten steps with a difference; the state of a checkpoint counts on."""
    alarms, rewards = Alarms(), [False, False, True, False, False]
    assert [alarms.look_at_rewards(differ, 0.0)["alarm/reward"] for differ in rewards] == [0] * 5
    resumed = Alarms()
    resumed.restore(json.loads(json.dumps(alarms.state())))
    assert [resumed.look_at_rewards(False, 0.25) for _ in range(4)] == [{"alarm/reward": 1}] * 4
    assert [resumed.look_at_rewards(True, 0.5)["alarm/reward"] for _ in range(11)] == [1] * 9 + [0] * 2
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(
        "for 3 steps all completions of a prompt had the same reward, whatever the prompt (0.25 now)"
    )
    assert "completions.jsonl" in said
    ungraded = Alarms()
    assert [ungraded.look_at_rewards(False, math.nan)["alarm/reward"] for _ in range(3)] == [0, 0, 1]
    assert "whatever the prompt (none now)" in caplog.text


def test_anomalies_are_said_once_an_onset(caplog):
    """Ten steps are ten parts, whether they were taken or not: 8 x 20 % is above 15 %, and so is 2 x 100 %."""
    alarms, high = Alarms(), FINE | {"mismatch/catastrophic_rollout_frac": 0.2}
    assert flags(alarms, high, 12) == [set()] * 7 + [{"anomalies"}] * 5
    # of ten steps, four and fewer are high from the sixth on: 4 x 0.2 + 6 x 0.1 = 1.4
    assert flags(alarms, FINE, 17) == [{"anomalies"}] * 14 + [set()] * 3
    assert flags(alarms, high, 8) == [set()] * 5 + [{"anomalies"}] * 3
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith(
        "20% of the completions (above 15%) have a token that the dense model would all but never have written; raise"
    )
    assert flags(Alarms(), FINE | {"mismatch/catastrophic_rollout_frac": 1.0}, 2) == [set(), {"anomalies"}]


def test_rejecting_more_than_half_for_three_steps_is_a_sign(caplog):
    alarms, rates = Alarms(), [0.6, 0.7, 0.4, 0.6, 0.55, 0.51, 0.9, *[0.5] * 11]
    found = flags(alarms, lambda step: FINE | {"correction/rejection_rate": rates[step - 1]}, len(rates))
    assert [on == {"rejection"} for on in found] == [*[False] * 5, *[True] * 11, *[False] * 2]
    assert "for 3 steps more than half of the completions were rejected (51% now); what is rejected" in caplog.text
    assert len(caplog.records) == 1


def test_a_few_anomalous_rollouts_of_one_step_are_no_sign():
    """Of 8 that are scored 2, every third step; a step in which nothing was scored says nothing."""
    unknown = {name: value for name, value in FINE.items() if name != "mismatch/catastrophic_rollout_frac"}

    def some(step):
        return unknown if step % 7 == 0 else unknown | {"mismatch/catastrophic_rollout_frac": 0.25 * (step % 3 == 0)}

    assert flags(Alarms(), some, 60) == [set()] * 60


def test_a_sign_that_comes_and_goes_is_said_once(caplog):
    flags(Alarms(), lambda step: FINE | {"mismatch/catastrophic_rollout_frac": 0.4 * (step % 10 < 4)}, 50)
    assert len(caplog.records) == 1


def test_the_tail_is_that_of_the_worst_bin(caplog):
    """1,000 tokens of eight rollouts: 50 are allowed, to 6.9 if they were independent."""
    alarms = Alarms()
    assert flags(alarms, FINE, 1, measured=[tail(0.01, 0), tail(0.0637), tail(0.02, 4000)]) == [set()]
    assert flags(alarms, FINE, 1, measured=[tail(0.01, 0), tail(0.2), tail(0.1, 4000)]) == [{"tail"}]
    assert "from 2000 tokens of context on, 20% of the tokens have an overlap with the dense model under 0.80" in (
        caplog.text
    )
    assert "all but 5% should have 0.86" in caplog.text and "control.largest" in caplog.text
    Alarms().look(1, FINE, [tail(0.015)], 0.86, 0.005)
    assert "1.5% of the tokens have" in caplog.text and "all but 0.5% should have 0.86" in caplog.text


def test_a_tail_is_judged_by_rollouts_and_over_as_many_steps_as_it_takes():
    """One rollout of eight that is all bad is chance; 40 tokens a step are 300 after eight steps."""
    assert flags(Alarms(), FINE, 30, measured=[tail([1.0] + [0.0] * 7)]) == [set()] * 30
    few = tail(0.5, tokens=(10.0,) * 4)
    assert flags(Alarms(), FINE, 20, measured=[few]) == [set()] * 7 + [{"tail"}] * 13
    alarms = Alarms()
    flags(alarms, FINE, 8, measured=[few])
    # judged well after eight steps more; over after ten more
    assert flags(alarms, FINE, 20, measured=[tail(0.0, tokens=few.tokens)]) == [{"tail"}] * 16 + [set()] * 4
    flags(alarms, FINE, 8, measured=[few])
    assert flags(alarms, FINE, 12) == [{"tail"}] * 9 + [set()] * 3, "it lasts no longer than there are such contexts"


def test_steps_that_measure_nothing_change_nothing(caplog):
    """A tail that is measured every 20 steps, and always bad, is warned of once."""
    found = flags(Alarms(), FINE, 100, measured=lambda step: None if step % 20 else [tail(0.5)])
    assert found == [set()] * 19 + [{"tail"}] * 81 and len(caplog.records) == 1


def test_a_healthy_tail_is_let_alone():
    """A 5th percentile of 0.88, 1.5 % under 0.80, unevenly: 20 bins of 40 tokens in four rollouts, for 300 steps."""

    def measured(step):
        return [tail([random.betavariate(0.15, 9.85) for _ in range(4)], 100 * i, (10.0,) * 4) for i in range(20)]

    found = flags(Alarms(), FINE, 300, measured=measured)
    assert sum("tail" in on for on in found) <= 30, "one false alarm may happen, and lasts a while"


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


def test_a_step_whose_kl_is_not_finite_says_nothing_of_how_it_rises():
    def broken(step):
        return FINE | {"rollout_corr/k3_kl": math.nan if step == 180 else 0.01}

    assert flags(Alarms(), broken, 300) == [set()] * 300


@pytest.mark.parametrize("cut", [5, 25, 41])
def test_alarms_come_through_a_checkpoint(cut, caplog):
    def shrinking(step):
        return FINE | {
            "completions/mean_length": 1000.0 - 10.0 * step,
            "mismatch/catastrophic_rollout_frac": 0.4 * (step < 20),
        }

    measured = [tail(0.5, tokens=(10.0,) * 4), tail(0.0, 4000, (7.0,))]
    whole = flags(Alarms(), shrinking, 60, measured=measured)
    assert {name for on in whole for name in on} == {"anomalies", "tail", "length"}
    first, second = Alarms(), Alarms()
    before = flags(first, shrinking, cut, measured=measured)
    second.restore(json.loads(json.dumps(first.state())))
    caplog.clear()
    assert before + flags(second, shrinking, 60 - cut, first=cut + 1, measured=measured) == whole
    assert len([r for r in caplog.records if "rejected" in r.getMessage()]) == 0
