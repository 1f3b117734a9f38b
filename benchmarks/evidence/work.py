# SPDX-License-Identifier: Apache-2.0
"""What a cell does: train a testbed's model, train an arm, evaluate under several caches, measure and calibrate before.

Every function takes the cell, the device and the folder of models, and returns what goes into the results.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from cells import HERE, Cell

from sparse_rl.bench.record import rounded
from sparse_rl.calibrate import Calibration, CalibrationConfig
from sparse_rl.calibrate import calibrate as run_calibration
from sparse_rl.calibrate.analysis import tail_row
from sparse_rl.evaluate import EvalConfig, evaluate
from sparse_rl.kv import EvictPolicy, Full, KVPolicy, build_policy
from sparse_rl.kv.schedule import Schedule
from sparse_rl.metrics import read_log
from sparse_rl.model.load import EMBEDDED, LoadedModel, load
from sparse_rl.objective.correction import PRESETS
from sparse_rl.objective.mismatch import CATASTROPHIC, diagnose, overlap_bounds, overlap_ids
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.runfolder import publish, remove, unfinished
from sparse_rl.score import score
from sparse_rl.tasks import Chain
from sparse_rl.train import OptimizerConfig, Trainer, TrainerConfig, UpdateConfig
from sparse_rl.train.control import OF_AUTO, ControlConfig
from sparse_rl.train.distill import DistillConfig
from sparse_rl.train.observer import Observer
from sparse_rl.types import Rollout, kv_saved_frac

CURVES = {  # of metrics.jsonl, by short name
    "reward": "reward",
    "rejection": "correction/rejection_rate",
    "catastrophic": "mismatch/catastrophic_rollout_frac",  # what the veto rejects, or would
    "kl": "rollout_corr/kl",
    "grad_norm": "grad_norm",
    "length": "completions/mean_length",
    "kv_saved": "kv/saved_frac",
    "overlap_p05": "mismatch/overlap_p05",
    "rollout_s": "time/rollout_s",
    "update_s": "time/update_s",
}
FOLLOWED = ("tail/", "kv/budget/", "distill/overlap_p05")  # of a run on a schedule, or whose budget moves
BEGAN = "began_with"  # file beside a trained model: the hash of the weights before
CHECKS = 3  # parts of a run, after each of which dense accuracy is looked at
MEASURED, MEASURED_N = 64, 8  # prompts and completions of a measurement before training
LEAST_TOKENS, ROUNDS = 600, 12  # of a bin of context lengths; runs of schedules on the way to one that holds a target
RESAMPLES = 50  # of a calibration's rollouts: the lower end of their interval meets the target, so none does by luck
ROWS = 1024
STARTS_N = 4  # samples a problem before training: every run is compared with it
STARTS = (0.55, 0.85)  # accuracy of a testbed's model before training


def warm(cell: Cell, device: str, models: Path) -> dict[str, Any]:
    """The testbed's model, by the repository's own script."""
    folder = models / cell.name
    part = unfinished(folder)
    remove(part)
    script = HERE.parents[1] / "scripts" / "pretrain_chain.py"
    command = [sys.executable, str(script), str(part), *cell.settings["testbed"]["warm"], "--device", device]
    made = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if made.returncode:
        raise RuntimeError(made.stdout[-1500:])
    log = [line for line in made.stdout.splitlines() if line.startswith("step ")]
    training = json.loads((part / "training.json").read_text())
    least, most = STARTS
    if not least <= training["accuracy"] <= most:
        raise RuntimeError(
            f"{cell.name} ended at accuracy {training['accuracy']}; a start lies between {least} and {most}, so that "
            "arms can gain and lose. Change --accuracy, --seconds or --noise of the testbed."
        )
    publish(part, folder)
    return {"start": began_with(folder), "training": training, "log": log[:: max(1, len(log) // 12)]}


def train(cell: Cell, device: str, models: Path) -> dict[str, Any]:
    """One run of the trainer; accuracy with both caches at its end."""
    settings, bed = cell.settings, cell.settings["testbed"]
    loaded, task = start(bed, device, models), task_of(bed)
    policy, correction = policy_of(settings["policy"], budget_of(settings, models), bed), PRESETS[settings["preset"]]
    if settings["eps"]:
        correction = replace(correction, veto=settings["eps"])
    scratch = Path(tempfile.mkdtemp(prefix="evidence-"))
    checks = Checks(engine_of(loaded, Full(), bed), task, bed)
    trainer = Trainer(
        loaded,
        task,
        kv=policy,
        sampling=Sampling(n=bed["n"], max_tokens=task.chain_len + 16),
        engine=EngineConfig(rows=bed["prompts"] * bed["n"], compile=bed["compiled"]),
        correction=correction,
        update=UpdateConfig(
            max_tokens=bed["max_tokens"], updates_per_rollout=settings["updates_per_rollout"], compile=False
        ),
        optimizer=OptimizerConfig(learning_rate=bed["lr"], schedule="linear", beta2=0.98),
        eval=EvalConfig(prompts=0),
        control=control_of(settings),
        distill=DistillConfig(**settings.get("distill", {})),
        config=TrainerConfig(
            output_dir=str(scratch / "run"),
            steps=bed["updates"],
            prompts_per_step=bed["prompts"],
            seed=settings["seed"],
            save_every=0,
            save_total_limit=1,
            log_completions=0,
            log_rejected=0,
        ),
        observers=(checks,),
    )
    not_finite = False
    try:
        try:
            trainer.train()
        except FloatingPointError:  # a result: the run has collapsed
            not_finite = True
        steps = [line for line in read_log(scratch / "run" / "metrics.jsonl") if line["step"]]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        trainer.engine.release()
    if settings["keep"]:
        save(loaded, models / cell.name, began_with(start_of(bed, models)))
    dense = accuracy(checks.engine, task, bed["problems"])
    kv = trainer.engine.kv if settings["budget"] else policy_of("rkv", bed["budgets"][1], bed)
    with trainer.distiller.on() if trainer.distiller is not None else nullcontext():  # as the rollouts were
        sparse = accuracy(engine_of(loaded, kv, bed), task, bed["problems"])
    return {
        "start": began_with(start_of(bed, models)),
        "dense": dense,
        "sparse": sparse,
        "checks": checks.found,
        "not_finite": not_finite,
        "curves": {short: [rounded(line.get(name)) for line in steps] for short, name in CURVES.items()},
        **(followed(steps, kv) if "control" in settings else {}),
    }


def followed(steps: list[dict[str, Any]], kv: KVPolicy) -> dict[str, Any]:
    """Tails and budgets by context length, step by step, under their own names; and the budgets after the last."""
    names = sorted({name for line in steps for name in line if name.startswith(FOLLOWED) and "tokens" not in name})
    assert isinstance(kv, EvictPolicy)
    return {"bins": {name: [rounded(line.get(name)) for line in steps] for name in names}, "budgets": kv.schedule.text}


def matrix(cell: Cell, device: str, models: Path) -> dict[str, Any]:
    """A trained model under several caches."""
    bed = cell.settings["testbed"]
    folder = models / cell.needs[0] if cell.needs else EMBEDDED
    loaded, task = load(str(folder), dtype=dtype_of(bed, device), device=device), task_of(bed)
    policies = {"full": policy_of("full", 0, bed)}
    for name in cell.settings["policies"]:
        policies |= {f"{name}:{budget}": policy_of(name, budget, bed) for budget in cell.settings["budgets"]}
    found = {name: accuracy(engine_of(loaded, policy, bed), task, bed["problems"]) for name, policy in policies.items()}
    return {"start": began_with(folder), "matrix": found}


@torch.no_grad()
def measure(cell: Cell, device: str, models: Path) -> dict[str, Any]:
    """The testbed's model before training: reward, mismatch in every form, and where vetoes fall."""
    settings, bed = cell.settings, cell.settings["testbed"]
    loaded, task = start(bed, device, models), task_of(bed)
    policy = policy_of(settings["policy"], settings["budget"], bed)
    count = min(MEASURED, bed["problems"])
    prompts = task.stream(0, count, 1000 + settings["seed"])
    sampling = Sampling(
        n=MEASURED_N, max_tokens=task.chain_len + 16, top_logprobs=overlap_ids(loaded.vocab_size), seed=settings["seed"]
    )
    engine = Engine(loaded, policy, EngineConfig(rows=count * MEASURED_N, compile=bed["compiled"]))
    rollouts = engine.generate(prompts, sampling)
    engine.release()
    rewards = task.rewards.grade(rollouts, loaded.tokenizer).rewards.view(count, MEASURED_N)
    return {
        "start": began_with(start_of(bed, models)),
        "reward": rounded(float(rewards.mean())),
        "reward_se": rounded(float(rewards.mean(dim=1).std()) / count**0.5),
        "kv_saved": rounded(kv_saved_frac(rollouts)),
        **mismatch(loaded, rollouts, bed["max_tokens"]),
        "prompt_len": task.prompt_len,
        "accuracy": {"dense": accuracy(engine_of(loaded, policy, bed), task, bed["problems"], STARTS_N)}
        if settings["policy"] == "full" and settings["seed"] == 0
        else None,
    }


def calibrate(cell: Cell, device: str, models: Path) -> dict[str, Any]:
    """The tail by budget and context length, a schedule for each target, and accuracy under it before training."""
    settings, bed = cell.settings, cell.settings["testbed"]
    loaded, task = start(bed, device, models), task_of(bed)
    count = min(MEASURED, bed["problems"])
    config = CalibrationConfig(
        lowest=settings["smallest"],
        highest=settings["largest"],
        num_budgets=settings["budgets"],
        page=1,
        bin=settings["bin"],
        min_tokens=LEAST_TOKENS,
        sure=True,
        bootstrap=RESAMPLES,
        verify=ROUNDS,
    )
    asked = Calibration(
        loaded=loaded,
        policy=policy_of(settings["policy"], settings["largest"], bed),
        prompts=task.stream(0, count * MEASURED_N, 1000),  # one sample each, so that rollouts differ as in training
        sampling=Sampling(n=1, max_tokens=task.chain_len + 16),
        engine=EngineConfig(rows=count * MEASURED_N, compile=bed["compiled"]),
        config=config,
    )
    schedules: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="evidence-") as scratch:
        for target in settings["targets"]:
            asked = replace(asked, config=replace(config, target=target))
            found = run_calibration(asked, scratch, resume=True)  # the runs of the grid are made once
            steps = Schedule(*(tuple(found["schedule"][key]) for key in ("starts", "budgets"))).text
            engine = engine_of(loaded, policy_of(settings["policy"], steps, bed), bed)
            schedules[f"{target:g}"] = {
                "budgets": steps,
                "tails": tails_of(found["verified"], config, "p05"),  # with the schedule itself
                "lower_ends": [rounded(low) for low in tail_row(found["verified"], config)],  # of their intervals
                "kv_read": rounded(found["verified"]["kv_read_frac"]),
                "sparse": accuracy(engine, task, bed["problems"]),
                "notes": found["notes"],
            }
    folder = models / cell.name
    part = unfinished(folder)
    remove(part)
    part.mkdir(parents=True)
    (part / "config.json").write_text(json.dumps({target: each["budgets"] for target, each in schedules.items()}))
    publish(part, folder)
    return {
        "start": began_with(start_of(bed, models)),
        "bins": found["bins"],
        "curve": {
            run["budget"]: {name: tails_of(run, config, name) for name in ("p05", "p01", "mean")}
            | {"kv_read": rounded(run["kv_read_frac"]), "rejected": rounded(run["rejected_frac"])}
            for run in found["runs"]
        },
        "schedules": schedules,
    }


def tails_of(run: dict[str, Any], config: CalibrationConfig, tail: Any) -> list[float | None]:
    """By bin of context length, as measured."""
    return [rounded(value) for value in tail_row(run, replace(config, tail=tail, sure=False))]


def mismatch(loaded: LoadedModel, rollouts: list[Rollout], max_tokens: int, temperature: float = 1.0) -> dict[str, Any]:
    """Statistics of log xi and overlap over rollouts, and the token at which a veto would end each."""
    dense = score(loaded.model, rollouts, temperature=temperature, max_tokens=max_tokens)
    lengths = torch.tensor([len(rollout.token_ids) for rollout in rollouts])
    rows = torch.arange(len(rollouts)).repeat_interleave(lengths)
    log_xi = torch.cat([d.dense_logprobs - r.sampler_logprobs for d, r in zip(dense, rollouts, strict=True)])
    pairs = [(r.top_logprobs, d.at_top_ids) for d, r in zip(dense, rollouts, strict=True)]
    overlap = torch.cat([overlap_bounds(q, p)[0] for q, p in pairs if q is not None and p is not None])
    found = diagnose(log_xi, torch.ones_like(rows, dtype=torch.bool), rows, torch.ones(len(rollouts)), {"ov": overlap})
    lowest = torch.full((len(rollouts),), 1.0).scatter_reduce(0, rows, overlap, "amin")
    veto = log_xi < torch.tensor(CATASTROPHIC).log()
    first = [int(part.nonzero()[0]) if part.any() else None for part in veto.split(lengths.tolist())]
    return {
        "length": rounded(float(lengths.double().mean())),
        "overlap_mean": rounded(found["mismatch/ov_mean"]),
        "overlap_p05": rounded(found["mismatch/ov_p05"]),
        "overlap_p01": rounded(found["mismatch/ov_p01"]),
        "overlap_min": rounded(float(lowest.mean())),
        "kl": rounded(found["rollout_corr/kl"]),
        "rejection": rounded(found["mismatch/catastrophic_rollout_frac"]),
        "first_veto": [place for place in first if place is not None],
        "lengths": [int(lengths.min()), int(lengths.max())],
        "rollouts": len(rollouts),
    }


class Checks(Observer):
    """Dense accuracy on some held-out problems, a few times in a run."""

    def __init__(self, engine: Engine, task: Chain, bed: dict[str, Any]) -> None:
        self.engine, self.task, self.bed = engine, task, bed
        self.every = max(1, -(-bed["updates"] // CHECKS))
        self.found: list[list[float | None]] = []  # step, accuracy, standard error

    def on_log(self, metrics: dict[str, Any]) -> None:
        step = metrics["step"]
        if step and step % self.every == 0 and step < self.bed["updates"]:
            self.found.append([step, *accuracy(self.engine, self.task, self.bed["problems"] // 2)])


def engine_of(loaded: LoadedModel, policy: KVPolicy, bed: dict[str, Any]) -> Engine:
    return Engine(loaded, policy, EngineConfig(rows=min(ROWS, bed["problems"]), compile=bed["compiled"]))


def accuracy(engine: Engine, task: Chain, problems: int, n: int = 1) -> list[float | None]:
    """Of held-out problems at temperature 1, and its standard error over them; none of a model that is not finite."""
    sampling = EvalConfig(n=n).sampling(task.chain_len + 16)
    try:
        found = evaluate(engine, task.held_out(problems), sampling, task.rewards)
    except FloatingPointError:
        return [None, None]
    engine.release()
    return [rounded(found["reward"]), rounded(found["reward_se"])]


def start(bed: dict[str, Any], device: str, models: Path) -> LoadedModel:
    return load(str(start_of(bed, models)), dtype=dtype_of(bed, device), device=device)


def start_of(bed: dict[str, Any], models: Path) -> Path:
    return EMBEDDED if bed["model"] == "embedded" else models / bed["model"]


def began_with(folder: Path) -> str:
    """The hash of the weights that a model's training began with: its own, unless a cell trained it."""
    note = folder / BEGAN
    return note.read_text() if note.exists() else sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def dtype_of(bed: dict[str, Any], device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else getattr(torch, bed["dtype"])


def task_of(bed: dict[str, Any]) -> Chain:
    return Chain(letters=bed["letters"], steps=bed["steps"], filler=bed["filler"])


def budget_of(settings: dict[str, Any], models: Path) -> int | str:
    """A number, or the steps that the named calibration has found for the target."""
    budget = settings["budget"]
    if isinstance(budget, int):
        return budget
    steps: dict[str, str] = json.loads((models / budget / "config.json").read_text())
    return steps[f"{settings['target']:g}"]


def control_of(settings: dict[str, Any]) -> ControlConfig:
    """Of a budget that does not move, what is measured of it."""
    control = settings.get("control", {})
    return ControlConfig(**{k: v for k, v in control.items() if control["auto"] or k not in OF_AUTO})


def policy_of(name: str, budget: int | str, bed: dict[str, Any]) -> KVPolicy:
    return Full() if name == "full" else build_policy(name, budget=budget, interval=bed["interval"])


def save(loaded: LoadedModel, folder: Path, began: str) -> None:
    part = unfinished(folder)
    remove(part)
    loaded.tokenizer.save_pretrained(part)
    loaded.model.save_pretrained(part)
    (part / BEGAN).write_text(began)
    publish(part, folder)
