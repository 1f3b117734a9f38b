# SPDX-License-Identifier: Apache-2.0
"""The tables of README and docs that show what benchmarks/results holds; scripts/docs_tables.py puts them there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from sparse_rl.kv.schedule import Schedule
from sparse_rl.objective.correction import PRESETS
from sparse_rl.report.evidence import collapsed, read_evidence
from sparse_rl.report.evidence_claims import number
from sparse_rl.report.markdown import table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
EVIDENCE = RESULTS.parent / "evidence" / "results"
SHAPES = {
    "qwen2.5-1.5b": "Qwen2.5-1.5B",
    "qwen2.5-7b": "Qwen2.5-7B",
    "qwen3-1.7b": "Qwen3-1.7B",
    "qwen3-4b": "Qwen3-4B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "gpt-oss-20b": "gpt-oss-20B",
}
CACHES = {"full": "dense", "rkv": "R-KV", "snapkv": "SnapKV", "quest": "Quest", "pages_mean": "`pages_mean`"}
CLASSES = {  # of the kernels of a step
    "attention": "attention",
    "linear": "matrix products",
    "pointwise": "pointwise kernels",
    "sampling": "sampling",
    "compaction": "compression",
    "other": "host and gaps",
}


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def commit(*records: dict[str, Any]) -> str:
    """A line that says by which code they were made."""
    made = ", ".join(dict.fromkeys(record["commit"] for record in records))
    return f"\n\nCommit {made}."


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count < 20e9 else f"{count / 1e9:.0f} GB"


def error(value: float, standard: float) -> str:
    return f"{value:.3f} ± {standard:.3f}"


def rollout(**settings: Any) -> dict[str, Any]:
    """The one of the H200's rollouts with these settings."""
    found = [r for r in read("rollout_h200") if all(r["settings"][name] == value for name, value in settings.items())]
    assert len(found) == 1, (settings, len(found))
    return found[0]


def cache_of(kv: dict[str, Any]) -> str:
    name = CACHES.get(kv["policy"], kv["policy"])
    return f"{name} {kv['budget']} + {kv['interval']}" if "interval" in kv else name


ARMS = {  # of the evidence: a preset, or `dense`
    "dense": "dense cache (nothing saved)",
    "naive": "sparse, no correction (naive)",
    "reject_only": "sparse, rejection only",
    "reweight_only": "sparse, reweighting only",
    "sparse_rl": "sparse, `sparse_rl` (rejection and reweighting)",
    "strict": "sparse, `strict` (the same, a stricter veto)",
    "bounded": "sparse, `bounded`",
    "sparse_rl_release": "sparse, `sparse_rl_release`",
    "tis": "sparse, `tis`",
    "icepop": "sparse, `icepop`",
}


def arms(bed: str, *chosen: str) -> str:
    """Accuracy with the dense cache after training, by arm and by how much of the cache was saved."""
    evidence = read_evidence(EVIDENCE)
    budgets, start = evidence.bed(bed)["budgets"], evidence.start(bed)
    saved = [evidence.curve(bed, "sparse_rl", budget, "kv_saved", slice(None)).mean for budget in budgets]

    def end(arm: str, budget: int) -> str:
        arm, eps = ("sparse_rl", PRESETS["strict"].veto) if arm == "strict" else (arm, None)
        runs = evidence.runs(bed, arm, budget, eps=eps)
        lost = sum(collapsed(run, start) for run in runs)
        told = f" ({lost} of {len(runs)} collapse)" if lost else ""
        return number(evidence.end(bed, arm, budget, eps=eps)) + told if runs else "not tried"

    rows = [["before training", *[number(start)] * len(budgets)]]
    for arm in chosen or ARMS:
        cells = [end(arm, 0)] * len(budgets) if arm == "dense" else [end(arm, budget) for budget in budgets]
        rows.append([ARMS[arm], *cells])
    head = ["rollouts", *(f"{percent(share)} of KV saved" for share in saved)]
    return table(head, rows) + commit(*evidence.trained(bed))


def measured() -> str:
    """The README's few: what a sparse cache gains, and the learner beside TRL's."""
    work = {"shape": "qwen2.5-1.5b", "rows": 256, "work": "standard"}
    sparse = rollout(**work, output=4096, kv=rollout(**work, output=32768)["settings"]["kv"])
    dense = next(r for r in read("rollout_h200") if r["settings"]["kv"]["policy"] == "full")
    long = rollout(**work, output=32768)["results"]
    updates = dict(zip(("lognormal lengths of at most 4,096", "2,048 tokens each"), read("learner_h200"), strict=False))
    (a, b), kv = (sparse["results"], dense["results"]), "kv"
    rows = [
        (
            "rollouts, Qwen2.5-1.5B, 256 rows of 4,096 tokens, R-KV 512 + 128",
            f"{a['tokens_per_s']:,.0f} tok/s, {gigabytes(a[kv]['peak_bytes'])} of KV",
            f"dense cache: {b['tokens_per_s']:,.0f} tok/s, {gigabytes(b[kv]['peak_bytes'])}",
        ),
        (
            "the same, 32,768 tokens (steps at full caches)",
            f"{long['tokens_per_s']:,.0f} tok/s, {gigabytes(long[kv]['peak_bytes'])}",
            f"dense cache: {gigabytes(long[kv]['dense_bytes'])}, does not fit",
        ),
    ]
    for lengths, learner in updates.items():
        found = learner["results"]
        ours, trl = (f"{each['tokens_per_s']:,.0f} tok/s" for each in (found, found["against"]["trl"]))
        rows.append((f"updates of Qwen2.5-1.5B, {lengths}", ours, f"TRL 1.16: {trl}"))
    return table(("what", "here", "instead"), rows) + commit(sparse, dense, *updates.values())


def rollouts() -> str:
    rows = []
    for record in read("rollout_h200"):
        settings, found = record["settings"], record["results"]
        if settings["kv"]["policy"] == "pages_mean":
            continue
        lengths = f"{settings['output']:,}" if settings["work"] == "standard" else f"{settings['work']}, median 2,048"
        evicts = "interval" in settings["kv"]
        kept = gigabytes(found["kv"]["peak_bytes"])
        rows.append(
            (
                SHAPES[settings["shape"]],
                f"{settings['rows']:,}",
                lengths + (" (cut)" if found["cut"] else ""),
                cache_of(settings["kv"]),
                f"{found['tokens_per_s']:,.0f}",
                f"{found['step_ms']:.2f}",
                percent(found["roofline"]["share"]),
                f"{kept}, dense {gigabytes(found['kv']['dense_bytes'])}" if evicts else kept,
            )
        )
    heading = ("shape", "rows", "output", "cache", "tok/s", "ms a step", "share of the roofline", "KV at the peak")
    return table(heading, rows) + commit(*read("rollout_h200"))


def mixtures() -> str:
    rows = []
    for record in read("mixtures_h200"):
        settings, found = record["settings"], record["results"]
        rival = found["against"].get("generate")
        theirs = f"{rival['tokens_per_s']:,.0f} ({rival['ratio']:.1f}x)" if rival else ""
        cache, peak = cache_of(settings["kv"]), gigabytes(found["kv"]["peak_bytes"])
        rows.append((SHAPES[settings["shape"]], cache, f"{found['tokens_per_s']:,.0f}", theirs, peak))
    return table(("shape", "cache", "tok/s", "`generate`", "KV at the peak"), rows) + commit(*read("mixtures_h200"))


def rollout_split() -> str:
    found = read("rollout_h200")[0]["results"]
    parts = ", ".join(f"{percent(found['split_ms'][key] / found['step_ms'])} {name}" for key, name in CLASSES.items())
    return f"A sparse step of the first line is {parts}; its steps alone give {256e3 / found['step_ms']:,.0f} tok/s."


def policies_speed() -> str:
    found = {record["label"]: record["results"] for record in read("policies_speed")}
    budgets, rows = (256, 512, 1024), []
    for name in dict.fromkeys(label.partition(" ")[0] for label in found):
        if name == "full":
            continue
        speeds = [found[f"{name} {budget}"]["tokens_per_s"] for budget in budgets]
        rivals = [found[f"streaming {budget}"]["tokens_per_s"] for budget in budgets]
        worst = min(speed / rival for speed, rival in zip(speeds, rivals, strict=True))
        share = "" if name in ("pages_mean", "quest") else f"{worst:.2f}"
        peak = gigabytes(found[f"{name} 512"]["kv_peak_bytes"])
        rows.append((f"`{name}`", *(f"{speed:,.0f}" for speed in speeds), share, peak))
    dense = found["full"]
    rows.append(("dense", f"{dense['tokens_per_s']:,.0f}", "", "", "", gigabytes(dense["kv_peak_bytes"])))
    return table(
        ("policy", "tok/s at 256", "512", "1,024", "of `streaming`, at worst", "KV at the peak, 512"), rows
    ) + commit(*read("policies_speed"))


def selecting() -> str:
    found = rollout(shape="qwen3-1.7b")["results"]
    dense, chosen = found["against"]["full"], found["split_ms"]["selection"] / found["step_ms"]
    rows = [
        (
            "`pages_mean`, `sparrow/qwen3-1.7b-0.86`",
            f"{found['tokens_per_s']:,.0f} ({dense['ratio']:.1f}x)",
            f"{found['step_ms']:.2f}",
            percent(chosen, 1),
        ),
        ("dense", f"{dense['tokens_per_s']:,.0f}", f"{dense['step_ms']:.2f}", ""),
    ]
    name = "Qwen3-1.7B's shape, 24 rows, 32,000 tokens of context"
    return table((name, "tok/s", "ms a step", "of that choosing pages"), rows) + commit(rollout(shape="qwen3-1.7b"))


def policies_quality() -> str:
    found = {record["label"]: record["results"] for record in read("policies_quality")}
    budgets, rows = (64, 96, 128), []

    def overlap(each: dict[str, Any]) -> str:
        return " / ".join(f"{each[f'overlap_{name}']:.2f}" for name in ("mean", "p05", "p01"))

    for name in dict.fromkeys(label.partition(" ")[0] for label in found):
        if name != "full":
            cells = [found[f"{name} {budget}"] for budget in budgets]
            rows.append((f"`{name}`", *map(overlap, cells), *(f"{cell['lookup']:.2f}" for cell in cells)))
    rows.append(("dense", overlap(found["full"]), "", "", f"{found['full']['lookup']:.2f}", "", ""))
    return table(("policy", "overlap at 64", "96", "128", "look-up at 64", "96", "128"), rows) + commit(
        *read("policies_quality")
    )


def learner() -> str:
    rows = []
    for record in read("learner_h200"):
        settings, found = record["settings"], record["results"]
        spread = settings["spread"] == "lognormal"
        rival = found["against"].get("trl")
        rows.append(
            (
                f"lognormal, at most {settings['output']:,}" if spread else f"{settings['output']:,} each",
                f"{found['tokens_per_s']:,.0f}",
                percent(found["mfu"]),
                gigabytes(found["peak_bytes"]),
                f"{rival['tokens_per_s']:,.0f} tok/s: ours {rival['ratio']:.2f}x" if rival else "",
            )
        )
    return table(("lengths", "tok/s", "MFU", "peak memory", "TRL 1.16's GRPO step in the same run"), rows) + commit(
        *read("learner_h200")
    )


def full_step(kind: str) -> str:
    """`whole`: all weights; `lora`: adapters."""
    chosen = [r for r in read("full_step_h200") if not r["settings"]["dense"]]
    (record,) = [r for r in chosen if bool(r["settings"].get("lora")) == (kind == "lora")]
    found, rows = record["results"], []
    decoded = f"{found['rollout_s'] - found['capture_s']:.0f} s and {found['capture_s']:.0f} s of capturing"
    for stage, took in (("rollout", decoded), ("update", f"{found['update_s']:.0f} s")):
        bytes_planned, bytes_held = (found[f"{name}_bytes"][stage] / 1e9 for name in ("planned", "measured"))
        speed = f"{found[f'{stage}_tokens_per_s']:,.0f} tok/s"
        what = "rollout, R-KV 512 + 128" if stage == "rollout" else stage
        rows.append((what, f"{bytes_planned:.1f} GB", f"{bytes_held:.1f} GB, {took}: {speed}"))
    return table(("", "planned", "measured"), rows) + commit(record)


def cost() -> str:
    rows = []
    for record in read("cost_h200"):
        for step in record["results"]["steps"]:
            rows.append(
                (
                    SHAPES[record["settings"]["shape"]],
                    f"{step['context']:,}",
                    f"{step['dense_ms']:.2f} ms, {step['predicted_dense_ms']:.2f}",
                    f"{step['sparse_ms']:.2f} ms, {step['predicted_sparse_ms']:.2f}",
                    f"{step['ratio']:.2f}x",
                    f"{step['predicted_ratio']:.2f}x ({100 * step['error']:+.0f} %)",
                )
            )
    heading = ("shape", "context", "dense step, predicted", "sparse step, predicted", "speed-up", "predicted")
    return table(heading, rows) + commit(*read("cost_h200"))


def smollm2() -> str:
    rows, records = [], []
    for name, task in (("lookup", "look-up among ten pairs"), ("words", "word problems from a warm start")):
        record = read(f"smollm2_{name}")
        runs, settings = record["runs"], record["settings"]
        saved = mean(x for run in runs for x in run["curves"]["kv_saved"] if x)
        first = f"{task}, {settings['budget']} + {settings['interval']}, {percent(saved)}"
        if "before" in record:
            rows.append((first, "before", *ends(record["before"], {}), ""))
            first = ""
        for run in runs:
            arm = run["arm"] if run["arm"] != "sparse_rl" else "`sparse_rl`"
            caught = [x for x in run["curves"]["catastrophic"][-10:] if x is not None]
            rows.append((first, arm, *ends(run["final"], run.get("gain", {})), percent(mean(caught or [0.0]))))
            first = ""
        records.append(record)
    caches = (f"{cache} cache" for cache in ("dense", "sparse"))
    columns = (name for cache in caches for name in (cache, "gain", "cut off"))
    return table(("task, budget, KV saved", "arm", *columns, "xi < 1e-4"), rows) + commit(*records)


def ends(found: dict[str, Any], gain: dict[str, list[float]]) -> Iterable[str]:
    """A model's reward with either cache, what it gained prompt by prompt, and how many answers ran into the limit."""
    for cache in ("dense", "sparse"):
        yield error(found[cache]["reward"], found[cache]["reward_se"])
        yield f"{gain[cache][0]:+.3f} ± {gain[cache][1]:.3f}" if gain else ""
        yield percent(found[cache]["clipped_ratio"])


def calibrated() -> str:
    """The schedules of SmolLM2, and the tails they come to."""
    rows, records = [], []
    for name, label in (("snapkv", "SnapKV: entries"), ("pages_mean", "`pages_mean`: entries read")):
        record = read(f"calibrate_smollm2/{name}")
        schedule = Schedule(*(tuple(record["schedule"][key]) for key in ("starts", "budgets")))
        if not rows:
            heading = ("contexts", *(f"{low}-{high}" for low, high in record["bins"]))
            rows.append(("asked for", *(f"{asked:.3f}" for asked in record["targets"])))
        rows.append((label, *(str(schedule.at(low)) for low, _ in record["bins"])))
        rows.append(("P05 as run", *(f"{run['top20']['all']['p05']:.3f}" for run in record["verified"]["bins"])))
        records.append(record)
    return table(heading, rows) + commit(*records)


def luck() -> str:
    """The embedded model at the longest contexts, around the budget where its tail falls."""
    record = read("calibrate_embedded")
    rows = []
    for run in record["runs"]:
        if 32 <= run["budget"] <= 56:
            tail = run["bins"][-1]["top20"]["all"]
            low, high = tail["p05_interval"]
            interval = f"{tail['p05']:.2f} ({low:.2f} to {high:.2f})"
            rows.append((str(run["budget"]), interval, percent(run["rejected_frac"])))
    low, high = record["bins"][-1]
    return table(("entries", f"P05 at contexts of {low} to {high}", "rollouts with xi < 1e-4"), rows) + commit(record)


def inference(*chosen: str) -> str:
    """SmolLM2 on every benchmark: a line a model and cache; with the warm start alone, where caches are chosen."""
    record = read("eval_smollm2")
    names = ("GSM8K", "SVAMP", "MultiArith", "SingleOp", "look-up of 15", "look-up of 60")
    rows = []
    for model, called in zip(record["models"], ("instruct", "warm start"), strict=True):
        if chosen and called == "instruct":
            continue
        for cache in chosen or dict.fromkeys(cell["cache"] for cell in record["cells"]):
            cells = [cell for cell in record["cells"] if (cell["model"], cell["cache"]) == (model, cache)]
            assert len(cells) == len(names)
            scores = (cell["metrics"]["pass@1"] for cell in cells)
            rows.append(
                (
                    *([] if chosen else [called]),
                    spec_name(cache),
                    *(f"{100 * score['mean']:.1f} ± {100 * score['se']:.1f}" for score in scores),
                    percent(mean(cell["kv_saved_frac"] for cell in cells)),
                    percent(mean(cell["kv_read_frac"] for cell in cells)),
                    f"{sum(cell['tokens'] for cell in cells) / sum(cell['samples'] for cell in cells):.0f}",
                )
            )
            called = ""
    heading = (*([] if chosen else ["model"]), "cache", *names, "KV saved", "KV read", "tokens per answer")
    return table(heading, rows, align="l" * (1 if chosen else 2) + "r" * 9) + commit(record)


def spec_name(spec: str) -> str:
    """`rkv:budget=48,interval=16` as people write it."""
    policy, _, rest = spec.partition(":")
    settings = dict(part.rpartition("=")[::2] for part in rest.split(",")) if rest else {}
    budget = settings.get("budget") or settings.get("")
    name = CACHES.get(policy, policy)
    return " ".join(
        [name, *([budget] if budget else []), *(["+", settings["interval"]] if "interval" in settings else [])]
    )


def rollouts_cpu() -> str:
    rows = []
    for work, name in (("standard", "256 tokens each"), ("lognormal", "lognormal, median 128, at most 256")):
        cells = []
        for record in read("rollout_cpu"):
            if record["settings"]["work"] == work:
                found, evicts = record["results"], record["settings"]["kv"]["policy"] != "full"
                least, *_, most = sorted(record["ratios"])
                cell = f"{found['tokens_per_s']:,.0f} tok/s ({found['against']['generate']['ratio']:.2f}x"
                cell += f", {least:.2f} to {most:.2f})"
                cells.append(cell + (f", {percent(found['kv']['saved_frac'])} of KV saved" if evicts else ""))
        rows.append((name, *cells))
    return table(("responses", "engine, dense", "engine, R-KV 64 + 32"), rows) + commit(*read("rollout_cpu"))


TABLES: dict[str, Callable[..., str]] = {
    function.__name__: function
    for function in (
        arms, measured, rollouts, rollout_split, mixtures, policies_speed, selecting, policies_quality, learner,
        full_step, cost, smollm2, calibrated, luck, inference, rollouts_cpu,
    )
}  # fmt: skip
