# SPDX-License-Identifier: Apache-2.0
"""The report: a page that stands alone, says the right numbers, and survives whatever a run left behind."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from made_up_runs import Page, config, report, training, write_run

from sparse_rl.metrics import METRICS
from sparse_rl.report.page import write_report
from sparse_rl.report.plots import PLOTS, _figure, points
from sparse_rl.report.runs import load_runs, summary

HOSTILE = "</td><script>alert('1')</script>&\"<b x=\ud800\x00"


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("three")
    sparse = [training(step) for step in range(31)]
    dense = write_run(root / "dense", [training(step, sparse=False) for step in range(31)], config("full", None))
    rejected = [
        {"step": 3, "prompt": f"p{i}", "token": token, "token_id": 1, "index": 7, "sampler_logprob": -0.25,
         "dense_logprob": -12.5, "log_xi": log_xi, "before": "w" * 900 + " 3+4=", "after": " so" + "w" * 900}
        for i, (token, log_xi) in enumerate([("MILD", -9.5), ("WORST", -30.0), ("\n", -20.0), ("NEXT", -12.25)])
    ]  # fmt: skip
    completions = [
        {
            "step": step,
            "prompt": "a=3",
            "completion": f"sample {step} " + "w" * 9000,
            "reward": 1.0,
            "advantage": None,
            "accepted": step > 1,
        }
        for step in range(1, 31)
    ]
    one = write_run(root / "a" / "sparse", sparse, rejected=rejected, completions=completions)
    two = write_run(root / "b" / "sparse", sparse[:18], config("snapkv", 32, seed=1))
    with open(two / "metrics.jsonl", "a") as file:
        file.write('{"step": 18, "reward": 0.')
    return report(dense, one, two, png=root / "out" / "png")


def test_page_needs_nothing_but_itself(three):
    page = Page(three)
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(page.tags)
    addresses = re.findall(r"\w+://[^\s\"'<>)]*", three)
    assert set(addresses) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "@import" not in three and not re.search(r"url\((?!#)", three)
    assert all(value.startswith("#") for name, value in page.attributes if name in ("href", "xlink:href", "src"))
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert page.tags.count("svg") == len(PLOTS)


def test_summary_by_hand(three):
    head, dense, one, two = Page(three).tables[0]
    assert [cell.replace("\u00a0", " ") for cell in dense] == [
        "● dense", "full", "none", "30", "0.400 ± 0.020 → 0.700 ± 0.020", "–",
        "0.637",  # mean of 21 .. 30 is 25.5, of which a fortieth
        "0.0 %", "0.0 %", "115.5", "15,500",
    ]  # fmt: skip
    assert [cell.replace("\u00a0", " ") for cell in one] == [
        "● a/sparse", "rkv, budget 64", "sparse_rl", "30", "0.400 ± 0.020 → 0.700 ± 0.020", "0.300 ± 0.030 → 0.600",
        "0.637",
        "5.0 %",  # 0.1 at every other step
        "40.5 %",  # 25 + the mean of 1 .. 30
        "115.5", "15,500",
    ]  # fmt: skip
    assert [cell.replace("\u00a0", " ") for cell in two] == [
        "● b/sparse", "snapkv, budget 32", "sparse_rl", "17 of 30",  # the line of step 18 is only half there
        "0.400 ± 0.020 → 0.500 ± 0.020", "0.300 ± 0.030 → 0.400",
        "0.312",  # mean of 8 .. 17 is 12.5
        "5.3 %",  # 0.1 at 9 of 17 steps
        "34.0 %", "109.0", "9,000",
    ]  # fmt: skip
    assert len(head) == len(dense)


def test_settings_that_differ(three):
    assert Page(three).tables[1] == [
        ["setting", "dense", "a/sparse", "b/sparse"],
        ["correction.preset", "none", "sparse_rl", "sparse_rl"],
        ["kv.policy", "full", "rkv", "snapkv"],
        ["kv.budget", "null", "64", "32"],
        ["trainer.seed", "0", "0", "1"],
    ]
    assert ["versions.torch", "2", "2", "2"] in Page(three).tables[2]


def test_shown_metrics_are_defined(three):
    rows = dict(Page(three).tables[3])
    assert rows["correction/rejection_rate"] == METRICS["correction/rejection_rate"]
    assert rows["eval/sparse/reward"] == METRICS["eval/{CACHE}/reward"]
    assert "mismatch/xi_p01" in rows and "mismatch/xi_p50" not in rows  # several runs: one line each
    assert "mismatch/overlap_p01" not in rows  # all null
    assert "–" not in rows.values()


def test_telling_rejections_and_samples(three):
    assert re.findall("<mark>(.*?)</mark>", three) == ["WORST", "&#x27;\\n&#x27;"]  # six for three runs: two of each
    assert "3+4=<mark>WORST</mark> so" in three
    assert "sampler logprob -0.25, dense logprob -12.5, log xi -30" in three
    assert re.findall(r"sample (\d+)", three) == ["1", "30"]
    assert "step 1, reward 1, advantage –, accepted no</p>" in three
    assert max(map(len, re.findall("w+", three))) < 1000


def test_pictures(tmp_path):
    folder = write_run(tmp_path / r"run_$\frac$", [{"step": 0}, {"step": 1, "reward": 0.5, "grad_norm": float("nan")}])
    other = write_run(tmp_path / "_hidden", [{"step": 1, "reward": 0.25}])
    report(folder, other, png=tmp_path / "png")
    assert [path.name for path in (tmp_path / "png").iterdir()] == ["reward.png"]
    assert (tmp_path / "png" / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_one_run_draws_every_quantile(tmp_path):
    page = Page(report(write_run(tmp_path / "run", [training(step) for step in range(3)])))
    shown = [name for name, _ in page.tables[2][1:]]
    assert [name for name in shown if "xi" in name] == [f"mismatch/xi_{stat}" for stat in ("p01", "p05", "p50", "p99")]
    assert page.tables[1][0] == ["setting", "run"]


def test_axes_do_not_magnify_noise(tmp_path):
    noise = [
        training(s) | {"completions/mean_length": 179 + s / 100, "tail/overlap_lowest": 0.98 + s / 1e3}
        for s in range(1, 4)
    ]
    steady = load_runs([write_run(tmp_path / "steady", noise)])
    falling = [training(s) | {"tail/overlap_lowest": 1.0 - s / 10} for s in range(1, 4)]
    fallen = load_runs([write_run(tmp_path / "fallen", falling)])
    plots = {plot.name: plot for plot in PLOTS}
    assert _figure(plots["length"], steady).axes[0].get_ylim()[1] == pytest.approx(1.05 * 179.03)
    assert _figure(plots["tail"], steady).axes[0].get_ylim() == pytest.approx((0.955, 1.005))
    low, high = _figure(plots["tail"], fallen).axes[0].get_ylim()
    assert 0.6 < low < 0.7 and 0.9 < high <= 1.005, "what is no noise is drawn as before"


@pytest.mark.parametrize(
    ("low", "high", "some"),
    [(0.3, 1.2, {"0.3", "0.5", "1"}), (0.02, 1.4, {"0.02", "0.1", "0.5", "1"}), (0.002, 0.005, {"0.002", "0.005"})],
)
def test_a_log_axis_of_few_decades_has_plain_numbers(tmp_path, low, high, some):
    lines = [training(1) | {f"mismatch/xi_{stat}": xi for stat, xi in (("p01", low), ("p05", low), ("p50", high))}]
    lines[0]["mismatch/xi_p99"] = high
    figure = _figure(next(plot for plot in PLOTS if plot.name == "xi"), load_runs([write_run(tmp_path / "run", lines)]))
    figure.draw_without_rendering()
    axis = figure.axes[0].yaxis
    assert some <= {tick.get_text() for tick in axis.get_ticklabels()}
    assert not any(tick.get_text() for tick in axis.get_ticklabels(minor=True))


def test_a_line_at_zero_stands_off_the_axis(tmp_path):
    """A twentieth of the axis at most, and room even where all is 0."""
    runs = load_runs([write_run(tmp_path / "run", [training(step, sparse=False) for step in range(1, 4)])])
    for plot in PLOTS:
        if plot.scale in ("zero", "share"):
            low, high = _figure(plot, runs).axes[0].get_ylim()
            assert -high / 20 < low < 0 < high


def test_a_few_slow_steps_do_not_sway_the_speed(tmp_path):
    lines = [training(step) | {"rollout/tokens_per_s": 10.0 if step < 3 else 5000.0} for step in range(1, 8)]
    folder = write_run(tmp_path / "run", lines)
    assert summary(load_runs([folder])[0])["tokens/s"] == "5,000"
    assert "tokens/s is their median" in report(folder)


def test_same_input_same_page(tmp_path):
    folder = write_run(tmp_path / "run", [{"step": step, "reward": 0.5, "eval/dense/reward": 0.5} for step in range(2)])
    assert report(folder) == report(folder)


def test_hostile_text_stays_text(tmp_path):
    record = dict.fromkeys(("prompt", "token", "before", "after", "completion", "finish_reason", "step"), HOSTILE)
    settings = {HOSTILE: HOSTILE, "kv": {"policy": HOSTILE, "budget": HOSTILE}, "correction": {"preset": HOSTILE}}
    metrics = [{"step": 1, "reward": 1, HOSTILE: HOSTILE, "grad_norm": HOSTILE, "correction/rejection_rate": 1}]
    folder = write_run(tmp_path / "<script>&'\"", metrics, settings, rejected=[record], completions=[record, {}])
    text = report(folder)
    page = Page(text)
    assert "script" not in page.tags and "b" not in page.tags
    assert text.count("&lt;/td&gt;&lt;script&gt;") >= 10


@pytest.mark.parametrize(
    ("anomalous", "saved", "policy", "said"),
    [
        (
            0.2,
            0.5,
            "rkv",
            "20 % of the completions have a token that the dense model would all but never have written; raise "
            "kv.budget or choose another kv.policy (sparse-rl inspect compares them).",
        ),
        (0.15, 0.5, "rkv", None),
        (0.0, 0.0, "rkv", "no KV was saved, as the budget is above the lengths seen; lower kv.budget."),
        (0.0, 0.0, "full", None),
    ],
)
def test_advice(tmp_path, anomalous, saved, policy, said):
    line = {"step": 1, "mismatch/catastrophic_rollout_frac": anomalous, "kv/saved_frac": saved}
    text = report(write_run(tmp_path / "run", [line], config(policy)))
    assert re.findall('<p class="note">(.*?)</p>', text) == ([f"run: {said}"] if said else [])


@pytest.mark.parametrize(("read", "advised"), [(0.4, False), (1.0, True)])
def test_a_policy_that_chooses_pages_saves_by_reading_less(tmp_path, read, advised):
    line = {"step": 1, "kv/saved_frac": 0.0, "kv/read_frac": read}
    assert ("no KV was saved" in report(write_run(tmp_path / "run", [line], config("quest")))) == advised


def test_steps_without_any_reward_are_told(tmp_path):
    lines = [{"step": i + 1, "completions/ungraded_frac": share} for i, share in enumerate((1.0, 0.5, 1.0))]
    (note,) = re.findall('<p class="note">(.*?)</p>', report(write_run(tmp_path / "run", lines)))
    assert note.startswith("run: no completion had a reward at 2 of 3 steps, so nothing was learnt there")


def test_a_budget_that_follows_the_tail_is_called_auto(tmp_path):
    text = report(write_run(tmp_path / "run", [training(1)], config() | {"control": {"auto": True}}))
    assert "rkv, budget\u00a0auto" in text and "budget\u00a064" not in text


def test_alarms_are_told_with_what_to_change(tmp_path):
    flags = [0, 1, 1, 0]
    lines = [{"step": i + 1, "alarm/tail": on, "alarm/kl": 0, "kv/saved_frac": 0.5} for i, on in enumerate(flags)]
    (note,) = re.findall('<p class="note">(.*?)</p>', report(write_run(tmp_path / "run", lines)))
    assert note.startswith("run: alarm/tail was on at 2 of 4 steps; raise kv.budget")


@pytest.mark.parametrize("metrics", [[], [{"step": 0, "eval/dense/reward": 0.5}], [{"step": 0, "reward": None}, {}]])
def test_runs_that_only_just_began(tmp_path, metrics):
    page = Page(report(write_run(tmp_path / "run", metrics)))
    evaluated = "0.500" if metrics and "eval/dense/reward" in metrics[0] else "–"
    assert page.tables[0][1][3:] == ["0\u00a0of\u00a030", evaluated, *"––––––"]
    assert page.tags.count("svg") == (evaluated == "0.500")


def test_long_runs_are_drawn_in_blocks(tmp_path):
    folder = write_run(tmp_path / "run", [{"step": step, "reward": step % 2} for step in range(1, 301)])
    steps, values, errors = points(load_runs([folder])[0], "reward")
    assert (steps[0], steps[-1], len(steps), errors) == (2.0, 299.0, 100, None)  # 1, 2, 3 to 298, 299, 300
    assert values[:2] == pytest.approx([2 / 3, 1 / 3])
    assert "means over blocks of steps" in report(folder)


def test_names_are_unique_and_folders_read_once(tmp_path):
    folders = [write_run(tmp_path / name, []) for name in ("x/1/run", "y/1/run", "other")]
    assert [run.name for run in load_runs([*folders, folders[0]])] == ["x/1/run", "y/1/run", "other"]
    assert [run.name for run in load_runs([folders[1], folders[2]])] == ["run", "other"]


def test_what_cannot_be_read_is_named(tmp_path):
    def refused(folder: Path) -> str:
        with pytest.raises(ValueError, match=re.escape(str(folder))) as error:
            report(folder)
        assert not (tmp_path / "out").exists()
        return str(error.value)

    assert "is no run folder, it has no run.json" in refused(tmp_path / "nowhere")
    folder = write_run(tmp_path / "run", [])
    assert "is no run folder" in refused(folder / "run.json")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": \n')
    assert "metrics.jsonl holds something other than JSON;" in refused(folder)
    (folder / "metrics.jsonl").write_text("[1]\n")
    assert "metrics.jsonl holds something other than JSON objects;" in refused(folder)
    (folder / "metrics.jsonl").unlink()
    assert "is no run folder, it has no metrics.jsonl" in refused(folder)
    (folder / "run.json").write_bytes(b"\xff{")
    assert "run.json holds something other than JSON;" in refused(folder)
    (folder / "run.json").unlink()
    (folder / "run.json").mkdir()
    assert "run.json cannot be read (Is a directory);" in refused(folder)
    with pytest.raises(ValueError, match="at least one run folder"):
        load_runs([])


def test_an_output_that_is_a_folder(tmp_path):
    folder = write_run(tmp_path / "run", [])
    with pytest.raises(OSError, match=r"could not be written .*; give another place for it"):
        write_report([folder], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_without_matplotlib(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", [training(1)])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=re.escape("pip install 'sparse-rl[report]'")):
        report(folder)
