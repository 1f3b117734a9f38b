# SPDX-License-Identifier: Apache-2.0
"""The training loop: prompts, sparse rollouts, rewards, advantages, updates; and everything written on the way.

A run folder holds run.json (settings and machine), metrics.jsonl, completions.jsonl, rejected.jsonl and checkpoint-N,
and bad_batches if an update was not finite.
Every random number is a function of the seed and the step, so a resumed run is the run that was never stopped.

An update is in `update.py`; where the run stands, and when it is saved, in `run.py`.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch

from sparse_rl.evaluate import EvalConfig, digest_of, summary
from sparse_rl.kv import EvictPolicy, Full, KVPolicy, policy_record
from sparse_rl.model import rope
from sparse_rl.model.load import LoadedModel
from sparse_rl.model.lora import LoraConfig, add_adapters
from sparse_rl.objective.advantage import advantages
from sparse_rl.objective.correction import PRESETS, Correction, preset_name
from sparse_rl.objective.loss import LossConfig
from sparse_rl.objective.mismatch import overlap_ids
from sparse_rl.objective.tail import BinTail
from sparse_rl.rollout import Engine, EngineConfig, Progress, Sampling
from sparse_rl.rollout.memory import GuardedEngine
from sparse_rl.score.base_head import BaseHead
from sparse_rl.score.head import Head
from sparse_rl.specs import refuse_unused
from sparse_rl.tasks import Graded, Task
from sparse_rl.train.alarms import Alarms
from sparse_rl.train.callbacks import Callbacks
from sparse_rl.train.config import TrainerConfig, check_model, check_requests, check_settings, longest_prompt
from sparse_rl.train.control import ControlConfig, Controller, control_grid, measure, tail_metrics
from sparse_rl.train.distill import DistillConfig, Distiller
from sparse_rl.train.folder import task_settings
from sparse_rl.train.guards import POOL, Guards
from sparse_rl.train.learner import Learner, OptimizerConfig
from sparse_rl.train.observer import Observer, tell
from sparse_rl.train.peaks import MemoryPeaks
from sparse_rl.train.processes import Processes
from sparse_rl.train.record import (
    completion_records,
    engine_metrics,
    rejected_records,
    rollout_metrics,
    told_if_slow,
    warn,
)
from sparse_rl.train.run import Run
from sparse_rl.train.shard import ShardedWeights, check_sharded
from sparse_rl.train.shares import grade, rollout_stats
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
        lora: LoraConfig | None = None,
        control: ControlConfig | None = None,
        distill: DistillConfig | None = None,
        observers: tuple[Observer, ...] = (),
        processes: Processes | None = None,
    ) -> None:
        for name, given, instead in (("kv", kv, "RKV(budget=512)"), ("correction", correction, "PRESETS['tis']")):
            if isinstance(given, str):
                raise ValueError(f"{name} is {given!r}; give an object, such as {instead}.")
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
        self.lora_config, self.control_config = lora or LoraConfig(), control or ControlConfig()
        self.distill_config = distill or DistillConfig()
        sampling = sampling or Sampling(n=8)
        refuse_unused(sampling, "sampling", "training sets it; its seed is trainer.seed", "seed", "top_logprobs")
        self.sampling = replace(sampling, top_logprobs=overlap_ids(loaded.vocab_size), seed=self.config.seed)
        check_settings(self.sampling, self.update_config, self.kv, self.config, self.distill_config)
        check_model(loaded.model)
        self.distiller: Distiller | None = None
        if self.distill_config.r:
            self.distiller = Distiller(loaded, self.distill_config, self.config.seed, self.processes)
        if self.lora_config.r:
            add_adapters(loaded.model, self.lora_config, self.config.seed)
        if self.processes.grouped:
            check_sharded(self.optimizer_config)
        sharded = ShardedWeights(loaded.model, self.processes) if self.processes.grouped else None
        masters = sharded or self.optimizer_config.masters(loaded.model, loaded.device)
        total = self.config.steps * self.update_config.num_updates
        self.learner = Learner(
            sharded.head if sharded is not None else Head(loaded.model),
            self.optimizer_config.build(masters),
            masters,
            ref_head=self._reference() if self.loss_config.beta > 0 else None,
            rate=lambda update: self.optimizer_config.rate(update, total),
            processes=self.processes,
        )
        self.guards = Guards(first=self.processes.first)
        # An Engine, called again with fewer rows where memory runs out: its `generate` is in rollout/memory.py.
        self.engine = GuardedEngine(loaded, self.kv, self.engine_config, self.guards, "rollout")
        self.guards.give_pool = self.engine.release
        self.alarms = Alarms()
        self.controller = self._controller() if self.control_config.auto else None
        if self.controller is not None:
            self.engine.use(self.controller.policy)
        self.eval_engines = self._eval_engines()
        self.evaluated = ""  # what held-out rewards are of
        check_requests(self.engine, task, self.config, self.sampling)
        if self.sampling.max_tokens > loaded.context:
            asked, context = self.sampling.max_tokens, loaded.context
            logger.warning("sampling.max_tokens is %d, but the model's context ends at %d tokens.", asked, context)
        self.run = Run(self, section="task", best_metric=self.config.best_metric, distiller=self.distiller)
        self.peaks = MemoryPeaks(loaded.model.device)

    @property
    def step(self) -> int:
        return self.run.step

    def train(self) -> None:
        """Run to the last step, from the start or from where `resume_from_checkpoint` says.

        SIGTERM and Ctrl-C save the run and raise `Stopped`, a SystemExit.
        """
        with self.processes.watched(self.config.output_dir), self.run.opened():
            if self.run.pending is not None:  # a step that was learnt but not finished when the run stopped
                self._finish_step(self.run.pending, time.perf_counter())
            while self.step < self.config.steps:
                self._take_step()

    def _take_step(self) -> None:
        """Roll out, grade, learn, and write down what came of it."""
        self.guards.check_together()
        run, began = self.run, time.perf_counter()
        rollouts = self._roll_out()
        stats, rows = rollout_stats(self.engine, self.processes), self.engine.config.rows
        speed = engine_metrics(rollouts, stats, rows, run.timer.seconds["time/rollout_s"])
        with run.timer("reward"):
            graded = self._grade(rollouts, self.sampling.n)
        advantages_R = self._advantages(rollouts, graded)
        with run.timer("update"), self.peaks("update"):
            updated = self._learn(rollouts, advantages_R)
        distilled = self._distill(rollouts, advantages_R, updated)
        run.step += 1
        self._record(rollouts, graded, advantages_R, updated)
        self.guards.note(updated.bad, self.update_config.num_updates, graded.rewards, self.step, run.folder)
        metrics = rollout_metrics(rollouts, graded, self._groups(rollouts)) | speed | updated.metrics | distilled
        # with a controller, it lowers budgets itself
        evicts = self.kv if isinstance(self.kv, EvictPolicy) and self.controller is None else None
        naive = not isinstance(self.kv, Full) and self.correction == PRESETS["none"]
        warn(rollouts, graded, evicts, naive, run.warned)
        metrics |= self.alarms.look_at_rewards(bool(advantages_R.any()), metrics["reward"])
        metrics |= self._control(rollouts, updated, metrics)
        run.remember(metrics)
        self.processes.together(self.guards.check_finite)
        self.guards.check_together()
        self._finish_step(metrics, began)

    def _roll_out(self) -> list[Rollout]:
        start = self.step * self.config.prompts_per_step
        prompts = self.task.stream(start, self.config.prompts_per_step, self.config.seed)
        with self.run.timer("rollout"), self.peaks("rollout"):
            rollouts = self._generate(self.engine, prompts, replace(self.sampling, seed=self._seed), "rollout")
        self.run.num_tokens += sum(len(rollout.prompt.ids) + len(rollout.token_ids) for rollout in rollouts)
        return rollouts

    def _advantages(self, rollouts: list[Rollout], graded: Graded) -> torch.Tensor:
        """(R,); 0 for a completion that nobody graded."""
        greedy = None
        if self.config.advantage == "remax":
            prompts = [rollout.prompt for rollout in rollouts if rollout.sample == 0]
            once = replace(self.sampling, seed=self._seed, n=1, temperature=0.0, top_logprobs=0)
            with self.run.timer("baseline"):
                baseline = self._generate(self.engine, prompts, once, "baseline")
            greedy = self._grade(baseline, 1).rewards
        groups, known = torch.tensor(self._groups(rollouts)), ~graded.rewards.isnan()
        if greedy is not None:
            known &= ~greedy.isnan()[groups]
        result = torch.zeros(len(rollouts))
        if known.any():
            result[known] = advantages(graded.rewards[known], groups[known], self.config.advantage, greedy)
        return result

    def _learn(self, rollouts: list[Rollout], advantages_R: torch.Tensor) -> Updated:
        self._begin("learning")
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
            generator=torch.Generator().manual_seed(self._seed),
            guards=self.guards,
        )

    def _distill(self, rollouts: list[Rollout], advantages_R: torch.Tensor, updated: Updated) -> dict[str, float]:
        """Let the sampler's adapter learn, if it has one."""
        if self.distiller is None:
            return {}
        with self.run.timer("distill"):
            return self.distiller.learn(
                rollouts,
                advantages_R,
                updated,
                self.engine.kv,
                self.engine.page_size,
                self.loss_config,
                self.update_config,
                temperature=self.sampling.temperature,
                max_length=self.sampling.max_tokens,
                step=self.step,
                guards=self.guards,
            )

    def _control(self, rollouts: list[Rollout], updated: Updated, metrics: dict[str, float]) -> dict[str, float]:
        """Measure the tail by context length, raise alarms, and move the budget if that is asked for."""
        config = self.control_config
        measured: list[BinTail] | None = None
        if config.every and self.step % config.every == 0:
            measured = self.processes.by_first(lambda: measure(rollouts, updated, config))
        found = tail_metrics(measured or [], self.engine.kv)
        if not isinstance(self.kv, Full):
            found |= self.alarms.look(self.step, metrics, measured, config.target, config.quantile)
        if self.controller is not None:
            found["kv/budget_moves"] = self.controller.observe(measured or [])
            self.engine.use(self.controller.policy)
        return found

    def _finish_step(self, metrics: dict[str, float], began: float) -> None:
        """Evaluate if it is time, write the step's line, save if it is time."""
        found = self._evaluate() if self.run.evaluates(self.eval_config.every) else {}
        reward, error = (found.get(f"eval/dense/{name}", math.nan) for name in ("reward", "reward_se"))
        if math.isfinite(reward) and math.isfinite(error):  # of two prompts or more
            if self.alarms.held_out not in ("", self.evaluated) and self.config.best_metric.startswith("eval/"):
                self.run.best = {"checkpoint": None, "value": None}
                logger.warning("the best checkpoint so far is of another evaluation; it is sought anew.")
            found |= self.alarms.look_at_evaluation(reward, error, self.evaluated)
        metrics = metrics | found
        self.run.finish_step(metrics | (self.peaks.bytes if self.step else {}), began)

    @property
    def _eval_sampling(self) -> Sampling:
        return self.eval_config.sampling(self.sampling.max_tokens, self.sampling.stop, self.sampling.stop_ids)

    def _eval_engines(self) -> dict[str, GuardedEngine]:
        """One a cache, kept for their graphs."""
        found, held_out = {}, self.task.held_out(self.eval_config.prompts)
        for cache, kv in {"dense": Full(), "sparse": self.engine.kv}.items():
            if cache == "dense" or not isinstance(self.kv, Full):
                found[cache] = GuardedEngine(self.loaded, kv, self.engine_config, self.guards, f"eval/{cache}")
                found[cache].check(held_out, self._eval_sampling)
        return found

    def _evaluate(self) -> dict[str, float]:
        """Held-out reward with the dense cache and, where it is another, the run's own."""
        prompts = self.task.held_out(self.eval_config.prompts)
        if not prompts:
            return {}
        sampling = self._eval_sampling
        metrics: dict[str, float] = {}
        self.evaluated = digest_of(prompts, sampling, self.task.rewards, task_settings(self.task).get("rewards"))
        with self.run.timer("eval"):
            for cache, engine in self.eval_engines.items():
                if cache == "sparse":
                    engine.use(self.engine.kv)  # whose budget may have moved
                rollouts = self._generate(engine, prompts, sampling, f"eval/{cache}")
                result = summary(rollouts, self._grade(rollouts, sampling.n), sampling.n)
                metrics |= {f"eval/{cache}/{name}": value for name, value in result.items()}
        return metrics

    def _record(self, rollouts: list[Rollout], graded: Graded, advantages_R: torch.Tensor, updated: Updated) -> None:
        """Some completions, and the most surprising of the rejected ones."""
        tokenizer = self.loaded.tokenizer
        for record in completion_records(
            rollouts, graded, advantages_R, updated, tokenizer, self.config.log_completions
        ):
            self.run.log.write("completions.jsonl", {"step": self.step, **record})
        for record in rejected_records(rollouts, updated, tokenizer, self.config.log_rejected):
            self.run.log.write("rejected.jsonl", {"step": self.step, **record})

    def settings(self) -> dict[str, Any]:
        """Every setting of the run, as run.json and the checkpoints have them."""
        return {
            "model": self.loaded.model.config.name_or_path,
            **rope.settings(self.loaded.model),
            "dtype": str(self.loaded.model.dtype).removeprefix("torch."),
            "device": self.loaded.model.device.type if self.processes.grouped else self.loaded.device,
            "task": task_settings(self.task),
            "kv": policy_record(self.kv),
            "sampling": asdict(self.sampling),
            "engine": asdict(self.engine_config),
            "correction": {"preset": preset_name(self.correction), **asdict(self.correction)},
            "loss": asdict(self.loss_config),
            "update": asdict(self.update_config),
            "optimizer": asdict(self.optimizer_config),
            "lora": asdict(self.lora_config),
            "control": asdict(self.control_config),
            "distill": asdict(self.distill_config),
            "eval": asdict(self.eval_config),
            "trainer": asdict(self.config),
        }

    def state(self) -> dict[str, Any]:
        """What else it goes on from, as JSON has it: the budget's search, and the alarms'."""
        control = self.controller.state() if self.controller is not None else {}
        return {"alarms": self.alarms.state(), "control": control}

    def restore(self, state: dict[str, Any]) -> None:
        self.alarms.restore(state["alarms"])
        if self.controller is not None:
            self.controller.restore(state["control"])
            self.engine.use(self.controller.policy)

    def _controller(self) -> Controller:
        prompt, page_size = longest_prompt(self.task, self.config), self.engine.page_size
        longest = min(self.loaded.context, prompt + self.sampling.max_tokens)
        grid = control_grid(self.control_config, self.kv, prompt=prompt, longest=longest, page_size=page_size)
        return Controller(self.control_config, self.kv, grid, longest)

    def _reference(self) -> Head:
        """The model as it is now: the module without its adapters, or a copy."""
        if self.lora_config.r:
            return BaseHead(self.loaded.model)
        return Head(copy.deepcopy(self.loaded.model).requires_grad_(False))

    def _generate(self, engine: Engine, prompts: list[Prompt], sampling: Sampling, stage: str) -> list[Rollout]:
        """The rollouts of all prompts; those to learn from have the sampler's adapter, if there is one."""
        distiller = self.distiller if engine is self.engine else None
        with distiller.sampling(self.learner.masters) if distiller is not None else nullcontext():
            mine = self.processes.share(len(prompts))  # each samples its share, with the random numbers of the whole
            more: dict[str, Any] = {"on_step": self._progress(stage), "record_kept": distiller is not None}
            own = self.processes.together(lambda: engine.generate(prompts[mine], sampling, first=mine.start, **more))
        rollouts = [rollout for part in self.processes.gather(own) for rollout in part]
        if engine is not self.engine or not engine.bounded or POOL in self.guards.halved:
            engine.release()  # the update needs the memory
        return rollouts

    def _grade(self, rollouts: list[Rollout], n: int) -> Graded:
        self._begin("grading")
        with told_if_slow(self.task.rewards.names, self.run.warned), self.guards.grading():
            return grade(self.task.rewards, rollouts, n, self.loaded.tokenizer, self.processes)

    def _groups(self, rollouts: list[Rollout]) -> list[int]:
        return [i // self.sampling.n for i in range(len(rollouts))]

    @property
    def _seed(self) -> int:
        """Of the step's random numbers."""
        return self.config.seed * 1_000_003 + self.step + 1

    def _begin(self, stage: str) -> None:
        tell(self.observers, "on_stage", stage)

    def _progress(self, stage: str) -> Callable[[Progress], None]:
        def show(progress: Progress) -> None:
            self.guards.check()
            tell(self.observers, "on_progress", stage, progress)

        return show
