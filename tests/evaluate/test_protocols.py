# SPDX-License-Identifier: Apache-2.0
"""The protocols are the papers', number by number; what a user changes is seen as a departure."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from sparse_rl.evaluate.protocols import PROTOCOLS, Settings, metrics_of
from sparse_rl.evaluate.statistics import by_problem
from sparse_rl.tasks.benchmarks import BENCHMARKS
from sparse_rl.tasks.templates import TEMPLATES

STOPS = ("</s>", "<|im_end|>", "<|endoftext|>")
SPARSE_RL = {"temperature": 0.8, "top_p": 0.95, "seed": 0, "stop": STOPS, "template": "sparse-rl-eval"}
SPARROW = {"temperature": 1.0, "top_p": 0.7, "seed": 0, "stop": ()}


def test_names():
    assert list(PROTOCOLS) == ["default", "sparse-rl", "sparrow"]
    assert all(protocol.name == name for name, protocol in PROTOCOLS.items())


@pytest.mark.parametrize("name", ["gsm8k", "math500", "gaokao2023en", "minerva_math", "olympiadbench"])
def test_sparse_rl_draws_one_sample(name):
    assert asdict(PROTOCOLS["sparse-rl"].settings(name)) == SPARSE_RL | {
        "n": 1,
        "max_tokens": 8192,
        "metrics": ("pass@1",),
    }


@pytest.mark.parametrize("name", ["aime24", "amc23"])
def test_sparse_rl_draws_32_samples_of_contests(name):
    assert asdict(PROTOCOLS["sparse-rl"].settings(name)) == SPARSE_RL | {
        "n": 32,
        "max_tokens": 16384,
        "metrics": ("avg@32",),
    }


def test_the_headline_is_of_seven():
    protocol = PROTOCOLS["sparse-rl"]
    assert set(protocol.headline) == set(protocol.benchmarks) and len(protocol.headline) == 7
    assert not any(protocol.departures(name, protocol.settings(name)) for name in protocol.headline)
    assert TEMPLATES["sparse-rl-eval"].prompt("1 + 1?") == (
        "1 + 1? Please reason step by step, and put your final answer within \\boxed{}.\n\n"
    )


@pytest.mark.parametrize("name", ["aime24", "aime25", "aime26"])
def test_sparrow_draws_16_samples(name):
    protocol = PROTOCOLS["sparrow"]
    assert asdict(protocol.settings(name)) == SPARROW | {
        "template": "sparrow",
        "n": 16,
        "max_tokens": 37 * 1024,
        "metrics": ("mean@16", "pass@16"),
    }
    assert protocol.departures(name, protocol.settings(name)) == []


def test_sparrow_on_amc_and_code():
    protocol = PROTOCOLS["sparrow"]
    amc = protocol.settings("amc23")
    assert (amc.n, amc.metrics, amc.template, amc.top_p) == (4, ("mean@4",), "sparrow", 0.7)
    assert "83 problems" in protocol.departures("amc23", amc)[0]
    for name in ("livecodebench_v1", "humaneval_plus", "mbpp_plus"):
        code = protocol.settings(name)
        assert asdict(code) == SPARROW | {
            "template": "code",
            "n": 1,
            "max_tokens": 24 * 1024,
            "metrics": ("pass@1",),
        }


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=lambda protocol: protocol.name)
def test_whatever_is_covered_can_be_run(protocol):
    covered = [name for name, benchmark in BENCHMARKS.items() if benchmark.kind in protocol.kinds]
    assert set(covered) >= set(protocol.benchmarks or BENCHMARKS)
    for name in covered:
        settings = protocol.settings(name)
        assert "PROBLEM" in str(TEMPLATES[settings.template].prompt("PROBLEM"))
        for metric in settings.metrics:
            assert by_problem(metric, [[1.0] * settings.n]) == [1.0]
    for name in BENCHMARKS.keys() - set(covered):
        with pytest.raises(ValueError, match=f"says nothing of {name} .* Take protocol default"):
            protocol.settings(name)


def test_default_is_greedy_in_a_chat_that_says_how_to_answer():
    protocol = PROTOCOLS["default"]
    for name in BENCHMARKS:
        settings = protocol.settings(name)
        assert (settings.n, settings.temperature, settings.metrics) == (1, 0.0, ("pass@1",))
        assert TEMPLATES[settings.template].chat and not protocol.departures(name, settings)
    asked = {name: TEMPLATES[protocol.settings(name).template].text for name in BENCHMARKS}
    assert "\\boxed{}" in asked["math500"] and "```python" in asked["mbpp"] and "<answer>" in asked["countdown"]
    assert protocol.settings("lookup:pairs=60") == protocol.settings("lookup")


def test_changes_are_departures():
    protocol = PROTOCOLS["sparse-rl"]
    meant = protocol.settings("aime24")
    assert meant.changed(n=None, temperature=None) == meant == meant.changed(n=32)
    less = meant.changed(n=8, max_tokens=1024)
    assert less.metrics == ("avg@8", "pass@8") and less.temperature == 0.8
    assert protocol.departures("aime24", less) == ["n is 8 instead of 32", "max_tokens is 1024 instead of 16384"]
    greedy = meant.changed(n=1, temperature=0.0)
    assert greedy.metrics == ("pass@1",) and len(protocol.departures("aime24", greedy)) == 2
    assert protocol.departures("aime25", meant) == ["aime25 is not among the benchmarks of sparse-rl"]
    assert meant.changed(metrics=("pass@32",)).metrics == ("pass@32",)
    assert metrics_of(1) == ("pass@1",) and metrics_of(3) == ("avg@3", "pass@3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 0}, "n is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"n": 4}, "samples at temperature 0 are all the same"),
        ({"metrics": ("pass@2",)}, "pass@2 needs more than the 1 samples"),
        ({"metrics": ("best",)}, "metric 'best' is unknown"),
    ],
)
def test_settings_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        Settings(template="chat", max_tokens=8).changed(**change)


def test_unknown_benchmarks():
    with pytest.raises(ValueError, match="did you mean 'math500'"):
        PROTOCOLS["sparrow"].settings("math-500")
