# SPDX-License-Identifier: Apache-2.0
"""The training loop: prompts, sparse rollouts, rewards, advantages, updates; and everything written on the way.

A run folder holds run.json (settings and machine), metrics.jsonl, completions.jsonl, rejected.jsonl and checkpoint-N.
Every random number is a function of the seed and the step, so a resumed run is the run that was never stopped.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import torch

from sparse_rl.evaluate import EvalConfig, summary
from sparse_rl.kv import Full, KVPolicy
from sparse_rl.metrics import NoLog, RunLog, Timer
from sparse_rl.model.load import LoadedModel
from sparse_rl.objective.advantage import advantages
from sparse_rl.objective.correction import PRESETS, Correction, preset_name
from sparse_rl.objective.loss import LossConfig
from sparse_rl.objective.mismatch import overlap_ids
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.score.head import Head
from sparse_rl.tasks import Graded, Task
from sparse_rl.train import checkpoint
from sparse_rl.train.callbacks import Callbacks
from sparse_rl.train.config import TrainerConfig, check_settings
from sparse_rl.train.folder import check_folder, chosen_checkpoint, differences, lock, start_record, task_settings
from sparse_rl.train.learner import Learner, OptimizerConfig
from sparse_rl.train.master import MasterWeights
from sparse_rl.train.observer import Observer
from sparse_rl.train.processes import Processes, watched
from sparse_rl.train.record import completion_records, rejected_records, rollout_metrics, warn_once
from sparse_rl.train.shard import ShardedWeights
from sparse_rl.train.shares import generate, grade, rollout_stats
from sparse_rl.train.update import UpdateConfig, Updated, update
from sparse_rl.types import Prompt, Rollout

logger = logging.getLogger(__name__)


class Trainer:
    """Trains a model on a task; `train` runs to the last step.

    loaded = load("embedded")
    trainer = Trainer(loaded, Chain(), kv=RKV(budget=56, interval=8), correction=PRESETS["sparse_rl"])
    trainer.train()
    """

    def __init__(
        self,
        loaded: LoadedModel,
        task: Task,
        *,
        config: TrainerConfig | None = None,
        kv: KVPolicy | None = None,
        sampling: Sampling | None = None,
        engine: EngineConfig | None = None,
        correction: Correction | None = None,
        loss: LossConfig | None = None,
        update: UpdateConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        eval: EvalConfig | None = None,
        observers: tuple[Observer, ...] = (),
        processes: Processes | None = None,
    ) -> None:
        self.loaded, self.task = loaded, task
        self.config = config or TrainerConfig()
        self.processes = processes or Processes()
        self.observers = observers if self.processes.first else ()
        if self.processes.first and self.config.report_to:
            self.observers = (*observers, Callbacks(self.config.report_to))
        self.kv = kv or Full()
        self.engine_config = engine or EngineConfig()
        self.correction = correction or PRESETS["sparse_rl"]
        self.loss_config, self.update_config = loss or LossConfig(), update or UpdateConfig()
        self.optimizer_config, self.eval_config = optimizer or OptimizerConfig(), eval or EvalConfig()
        self.sampling = replace(
            sampling or Sampling(n=8), top_logprobs=overlap_ids(loaded.vocab_size), seed=self.config.seed
        )
        check_settings(self.sampling, self.update_config, self.kv, self.config)
        self._check_model()
        sharded = ShardedWeights(loaded.model, self.processes) if self.processes.grouped else None
        masters = sharded or MasterWeights(loaded.model)
        total = self.config.steps * self.update_config.num_updates
        self.learner = Learner(
            sharded.head if sharded is not None else Head(loaded.model),
            self.optimizer_config.build(masters),
            masters,
            ref_head=Head(copy.deepcopy(loaded.model).requires_grad_(False)) if self.loss_config.beta > 0 else None,
            rate=lambda update: self.optimizer_config.rate(update, total),
            processes=self.processes,
        )
        self.engine = Engine(loaded, self.kv, self.engine_config)
        self.eval_engines: dict[str, Engine] = {}  # kept for their graphs
        self._check_prompts()
        self.step, self.num_tokens = 0, 0
        self.rollout_stats = self.engine.stats
        self.best: dict[str, Any] = {"checkpoint": None, "value": None}
        self.timer = Timer()
        self.warned: set[str] = set()

    @watched
    def train(self) -> None:
        """Run to the last step, from the start or from where `resume_from_checkpoint` says."""
        self._open()
        try:
            for observer in self.observers:
                observer.on_begin(self)
            if self.step == 0:
                self._finish_step({}, began=time.perf_counter())
            while self.step < self.config.steps:
                began = time.perf_counter()
                rollouts = self._roll_out()
                with self.timer("reward"):
                    graded = self._grade(rollouts, self.sampling.n)
                advantages_R = self._advantages(rollouts, graded)
                with self.timer("update"):
                    updated = self._learn(rollouts, advantages_R)
                self.step += 1
                self._record(rollouts, graded, advantages_R, updated)
                metrics = rollout_metrics(rollouts, graded, self._groups(rollouts)) | updated.metrics
                warn_once(self.warned, self.kv, rollouts, metrics)
                self._finish_step(metrics, began)
        finally:
            self._close()
            for observer in self.observers:
                observer.on_end()

    def _roll_out(self) -> list[Rollout]:
        start = self.step * self.config.prompts_per_step
        prompts = self.task.stream(start, self.config.prompts_per_step, self.config.seed)
        with self.timer("rollout"):
            rollouts = self._generate(self.engine, prompts, self._sampling_of(self.step), "rollout")
        self.num_tokens += sum(len(rollout.prompt.ids) + len(rollout.token_ids) for rollout in rollouts)
        self.rollout_stats = rollout_stats(self.engine, self.processes)
        if not self.engine.bounded:
            self.engine.release()  # the update needs the memory
        return rollouts

    def _advantages(self, rollouts: list[Rollout], graded: Graded) -> torch.Tensor:
        """(R,); 0 for a completion that nobody graded."""
        greedy = None
        if self.config.advantage == "remax":
            prompts = [rollout.prompt for rollout in rollouts if rollout.sample == 0]
            once = replace(self._sampling_of(self.step), n=1, temperature=0.0, top_logprobs=0)
            with self.timer("baseline"):
                baseline = self._generate(self.engine, prompts, once, "baseline")
            if not self.engine.bounded:
                self.engine.release()
            greedy = self._grade(baseline, 1).rewards
        groups, known = torch.tensor(self._groups(rollouts)), ~graded.rewards.isnan()
        if greedy is not None:
            known &= ~greedy.isnan()[groups]
        result = torch.zeros(len(rollouts))
        if known.any():
            result[known] = advantages(graded.rewards[known], groups[known], self.config.advantage, greedy)
        return result

    def _learn(self, rollouts: list[Rollout], advantages_R: torch.Tensor) -> Updated:
        return update(
            self.learner,
            rollouts,
            advantages_R,
            self._groups(rollouts),
            self.correction,
            self.loss_config,
            self.update_config,
            temperature=self.sampling.temperature,
            max_length=self.sampling.max_tokens,
            generator=torch.Generator().manual_seed(self._seed_of(self.step)),
        )

    def _finish_step(self, metrics: dict[str, float], began: float) -> None:
        """Evaluate if it is time, write the step's line, save if it is time."""
        last = self.step == self.config.steps
        metrics = {"step": self.step, "num_tokens": self.num_tokens, **metrics}
        if self.step == 0 or last or (self.eval_config.every and self.step % self.eval_config.every == 0):
            metrics |= self._evaluate()
        if self.step and self.rollout_stats is not None:
            tokens = metrics["completions/mean_length"] * self.config.prompts_per_step * self.sampling.n
            metrics["rollout/tokens_per_s"] = tokens / self.timer.seconds["time/rollout_s"]
            metrics["kv/peak_bytes"] = self.rollout_stats.peak_bytes
            metrics["rollout/preemptions"] = self.rollout_stats.num_preemptions
            metrics["time/capture_s"] = self.rollout_stats.capture_s
        metrics |= self.timer.seconds | {"step_time": time.perf_counter() - began}
        self.timer = Timer()
        self.log.write("metrics.jsonl", metrics)
        for observer in self.observers:
            observer.on_log(metrics)
        due = self.config.save_every and self.step % self.config.save_every == 0
        if self.step and self.processes.by_first(lambda: self._is_best(metrics) or last or due):
            with self.timer("save"):
                self._save()

    def _is_best(self, metrics: dict[str, Any]) -> bool:
        """Whether this step was evaluated, and better than every one before; it is then remembered as the best."""
        value = metrics.get(self.config.best_metric)
        if (
            value is None
            or not math.isfinite(value)
            or (self.best["value"] is not None and value <= self.best["value"])
        ):
            return False
        self.best = {"checkpoint": f"checkpoint-{self.step}", "value": value}
        return True

    def _evaluate(self) -> dict[str, float]:
        """Held-out reward with the dense cache and, where it is another, the run's own."""
        prompts = self.task.held_out(self.eval_config.prompts)
        if not prompts:
            return {}
        sampling = self.eval_config.sampling(self.sampling.max_tokens, self.sampling.stop, self.sampling.stop_ids)
        policies: dict[str, KVPolicy] = (
            {"dense": Full()} if isinstance(self.kv, Full) else {"dense": Full(), "sparse": self.kv}
        )
        metrics: dict[str, float] = {}
        with self.timer("eval"):
            for cache, policy in policies.items():
                engine = self.eval_engines.setdefault(cache, Engine(self.loaded, policy, self.engine_config))
                rollouts = self._generate(engine, prompts, sampling, f"eval/{cache}")
                result = summary(rollouts, self._grade(rollouts, sampling.n).rewards, sampling.n)
                engine.release()
                metrics |= {f"eval/{cache}/{name}": value for name, value in result.items()}
        return metrics

    def _record(self, rollouts: list[Rollout], graded: Graded, advantages_R: torch.Tensor, updated: Updated) -> None:
        """Some completions, and the most surprising of the rejected ones."""
        tokenizer = self.loaded.tokenizer
        for record in completion_records(
            rollouts, graded, advantages_R, updated, tokenizer, self.config.log_completions
        ):
            self.log.write("completions.jsonl", {"step": self.step, **record})
        for record in rejected_records(rollouts, updated, tokenizer, self.config.log_rejected):
            self.log.write("rejected.jsonl", {"step": self.step, **record})

    def _save(self) -> None:
        run = Path(self.config.output_dir)
        folder = run / f"checkpoint-{self.step}"
        state = {
            "step": self.step,
            "num_tokens": self.num_tokens,
            "best": self.best,
            "logs": self.log.sizes(),
            "warned": sorted(self.warned),
            "settings": self.settings(),
        }
        checkpoint.save(folder, self.loaded, self.learner, state)
        self.processes.by_first(lambda: checkpoint.prune(run, self.config.save_total_limit, self.best["checkpoint"]))
        for observer in self.observers:
            observer.on_save(folder)

    def _open(self) -> None:
        """Start the run folder, or take up the run in it. Nothing is changed before all of it is known to be well."""
        self.lock: IO[str] | None = None
        self.log: RunLog = NoLog()
        try:
            chosen, state = self.processes.by_first(self._choose)
            if chosen is not None:
                self._resume(chosen, state)
            self.processes.together(lambda: self._start(state["logs"]) if self.processes.first else None)
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        self.log.close()
        if self.lock is not None:
            self.lock.close()

    def _choose(self) -> tuple[Path | None, dict[str, Any]]:
        """The checkpoint to resume from and what it says, if there is one."""
        run = Path(self.config.output_dir)
        check_folder(self.config)
        run.mkdir(parents=True, exist_ok=True)
        self.lock = lock(run)
        folder = chosen_checkpoint(self.config)
        if folder is None:
            return None, {"logs": {}}
        state = checkpoint.read_state(folder)
        if state["step"] > self.config.steps:
            raise ValueError(
                f"trainer.steps is {self.config.steps}, but {folder.name} is beyond it; raise trainer.steps, or resume "
                "from an earlier checkpoint."
            )
        RunLog.check(run, state["logs"])
        return folder, state

    def _start(self, sizes: dict[str, int]) -> None:
        """Write run.json, open the logs, and remove what a future that is now taken again has left."""
        run = Path(self.config.output_dir)
        start_record(run, self.settings(), self.loaded, self.processes.size)
        self.log = RunLog(run, sizes)
        later = [path for path in checkpoint.checkpoints(run) if checkpoint.step_of(path) > self.step]
        if later:
            logger.warning("%s removed: the run goes on from step %d.", ", ".join(p.name for p in later), self.step)
        for path in later:
            checkpoint.discard(path)
        checkpoint.prune(run, self.config.save_total_limit, self.best["checkpoint"])  # if it was stopped just before

    def _resume(self, folder: Path, state: dict[str, Any]) -> None:
        """Take up a checkpoint's state."""
        self.processes.together(lambda: checkpoint.restore(folder, self.learner, state["num_updates"]))
        changed = differences(state["settings"], json.loads(json.dumps(self.settings())))
        if changed:
            logger.warning("resuming with other settings: %s.", "; ".join(changed))
        self.step, self.num_tokens, self.best = state["step"], state["num_tokens"], state["best"]
        self.warned = set(state["warned"])

    def settings(self) -> dict[str, Any]:
        """Every setting of the run, as run.json and the checkpoints have them."""
        return {
            "model": self.loaded.model.config.name_or_path,
            "dtype": str(self.loaded.model.dtype).removeprefix("torch."),
            "device": self.loaded.model.device.type,
            "task": task_settings(self.task),
            "kv": {"policy": self.kv.name, **asdict(self.kv)},
            "sampling": asdict(self.sampling),
            "engine": asdict(self.engine_config),
            "correction": {"preset": preset_name(self.correction), **asdict(self.correction)},
            "loss": asdict(self.loss_config),
            "update": asdict(self.update_config),
            "optimizer": asdict(self.optimizer_config),
            "eval": asdict(self.eval_config),
            "trainer": asdict(self.config),
        }

    def _check_model(self) -> None:
        for name, module in self.loaded.model.named_modules():
            if isinstance(module, torch.nn.Dropout) and module.p > 0:
                raise ValueError(f"the model has dropout {module.p} in {name}; set it to 0 in its config.")

    def _check_prompts(self) -> None:
        """A prompt that leaves no room for an answer is better known now than at some step."""
        context = self.engine.context
        for prompt in [*getattr(self.task, "train", []), *getattr(self.task, "eval", [])]:
            if len(prompt.ids) >= context:
                raise ValueError(
                    f"the prompt that begins {prompt.text[:60]!r} has {len(prompt.ids)} tokens, and the model's "
                    f"context is {context}; remove it."
                )

    def _generate(self, engine: Engine, prompts: list[Prompt], sampling: Sampling, stage: str) -> list[Rollout]:
        return generate(engine, prompts, sampling, self.processes, self._progress(stage))

    def _grade(self, rollouts: list[Rollout], n: int) -> Graded:
        return grade(self.task.rewards, rollouts, n, self.loaded.tokenizer, self.processes)

    def _groups(self, rollouts: list[Rollout]) -> list[int]:
        return [i // self.sampling.n for i in range(len(rollouts))]

    def _seed_of(self, step: int) -> int:
        return self.config.seed * 1_000_003 + step + 1

    def _sampling_of(self, step: int) -> Sampling:
        return replace(self.sampling, seed=self._seed_of(step))

    def _progress(self, stage: str) -> Any:
        def show(progress: Any) -> None:
            for observer in self.observers:
                observer.on_progress(stage, progress)

        return show
