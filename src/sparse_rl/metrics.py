# SPDX-License-Identifier: Apache-2.0
"""Every metric with its definition, and the timer.

Names are TRL's where the meaning is TRL's and verl's `rollout_corr/*` where it is verl's. A stage returns its numbers
as a dict; `RunLog` of train/log.py is the one place that writes them.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# {NAME} stands for a reward function's name, {CACHE} for "dense" or "sparse", {BIN} for the context length, prompt
# included, from which on a token is counted, up to the next bin (control.bin).
METRICS: dict[str, str] = {
    "step": "rollout batches learnt from so far; updates, if supervised",
    "num_tokens": "prompt and completion tokens so far",
    "learning_rate": "mean over the step's updates",
    "loss": "of the step, mean over its updates; if supervised, negative log-likelihood, mean over completion tokens",
    "grad_norm": "before clipping, mean over the step's updates",
    "kl": "k3 to the reference model, mean over the tokens it is computed on (only with loss.beta)",
    "clip_ratio/region_mean": "share of the tokens in the loss whose gradient the clip decides",
    "reward": "weighted sum of the reward functions, mean over completions",
    "reward_std": "its standard deviation over completions",
    "rewards/{NAME}/mean": "of one reward function",
    "rewards/{NAME}/std": "its standard deviation over completions",
    "rewards/{NAME}/failed": "completions it could not grade (it hung or crashed); they are left out",
    "frac_reward_zero_std": "share of groups whose completions all have the same reward",
    "completions/mean_length": "tokens",
    "completions/min_length": "tokens",
    "completions/max_length": "tokens",
    "completions/clipped_ratio": "share that ran into the length limit",
    "completions/mean_terminated_length": "tokens of those that ended by themselves",
    "completions/repetition": "share of a completion's 8-grams that occurred earlier in it, mean over completions",
    "completions/ungraded_frac": "share that every reward function declined to grade; they have no advantage",
    "rollout_corr/kl": "mean over tokens of log pi_sampler - log pi_dense (k1)",
    "rollout_corr/k3_kl": "mean over tokens of xi - log xi - 1 (k3)",
    "mismatch/ess_frac": "effective sample size of the raw weights xi, as a fraction of the tokens",
    "mismatch/catastrophic_frac": "share of tokens with xi < 1e-4",
    "mismatch/catastrophic_rollout_frac": "share of completions with a token of xi < 1e-4: what a veto at 1e-4 rejects",
    "mismatch/lowest_log_xi_mean": "mean over completions of their smallest log xi",
    "mismatch/xi_p01": "1st percentile of xi over tokens",
    "mismatch/xi_p05": "5th percentile of xi over tokens",
    "mismatch/xi_p50": "median of xi over tokens",
    "mismatch/xi_p99": "99th percentile of xi over tokens",
    "mismatch/overlap_mean": "sum over the vocabulary of min(sampler, dense), mean over tokens; exact for vocabularies "
    "of up to 4096 tokens, else a lower bound from the sampler's 20 most likely",
    "mismatch/overlap_p05": "its 5th percentile over tokens",
    "mismatch/overlap_p01": "its 1st percentile over tokens",
    "mismatch/overlap_upper_mean": "upper bound of the same, mean over tokens",
    "mismatch/overlap_upper_p05": "its 5th percentile over tokens",
    "mismatch/overlap_upper_p01": "its 1st percentile over tokens",
    "mismatch/overlap_top20_mean": "the same over what both sides have in their top 20: the scale of Sparrow's 0.86",
    "mismatch/overlap_top20_p05": "its 5th percentile over tokens",
    "mismatch/overlap_top20_p01": "its 1st percentile over tokens",
    "tail/{BIN}/overlap": "5th percentile (control.quantile) of overlap_top20 over the tokens of that context length, "
    "of 20 tokens or more",
    "tail/{BIN}/hazard": "share of them with xi < 1e-4",
    "tail/{BIN}/tokens": "how many there are; where some stand for others, how many they are worth",
    "tail/overlap_lowest": "the lowest tail/{BIN}/overlap of the step",
    "mismatch/coverage": "share of completions that were scored; the others are stood for by a sample",
    "mismatch/sampling_se": "standard error, at most, that the sample adds to a share of completions",
    "correction/rejection_rate": "share of completions rejected as a whole",
    "correction/dropped_frac": "share of tokens that the correction drops, those of rejected completions included",
    "correction/skipped_updates": "updates that changed nothing: no advantage, all rejected, not finite",
    "update/nonfinite": "updates that changed nothing because their loss or gradient was not finite",
    "update/max_tokens": "of a learner forward: update.max_tokens, or trainer.max_tokens if supervised, halved "
    "wherever memory ran out",
    "distill/loss": "of the sampler's adapter (only with distill.r)",
    "distill/kl": "its KL between dense model and sparse sampler, mean over tokens",
    "distill/grad_norm": "of the adapter, before clipping",
    "distill/overlap_mean": "of some rollouts: what the sparse sampler shares with the dense model after the step's "
    "updates, as mismatch/overlap_mean (every distill.every steps)",
    "distill/overlap_mean_without": "the same without the adapter; what an evicting policy kept stays as it was",
    "distill/overlap_p05": "5th percentile of the first over tokens",
    "distill/overlap_p05_without": "5th percentile of the second over tokens",
    "train/working_frac": "share of completions with something to learn from: an advantage, or a KL term",
    "alarm/reward": "1 while no completion is better or worse than the others of its prompt for three steps in a row, "
    "and for ten steps after",
    "alarm/anomalies": "1 while more than 15 % of the completions of ten steps have a token of xi < 1e-4, and for ten "
    "steps after",
    "alarm/rejection": "1 while more than half of the completions were rejected for three steps in a row, and for ten "
    "steps after",
    "alarm/tail": "1 while a bin's tail of overlap is more than 0.06 under control.target, over 300 tokens or more and "
    "beyond chance, and for ten steps after",
    "alarm/length": "1 while completions are a quarter shorter than they were (means of ten steps), and for ten after",
    "alarm/kl": "1 while the mismatch KL still rises after 200 steps, and for ten steps after",
    "alarm/collapse": "at evaluations: 1 while the held-out reward with the dense cache is more than 0.02 and two "
    "standard errors below that of the first",
    "epoch": "passes over the rows so far (only if supervised)",
    "train/tokens_per_s": "prompt and completion tokens over the time of the update (only if supervised)",
    "kv/saved_frac": "1 - entries held / entries a dense cache would hold, summed over decode steps",
    "kv/budget/{BIN}": "kv.budget for contexts of that length in the step's rollouts",
    "kv/budget_moves": "of the bins seen, those whose budget changes after this step (control.auto)",
    "kv/read_frac": "entries that attention read / those a dense cache would read, summed over decode steps, mean over "
    "layers; below the share held where a policy chooses pages",
    "kv/peak_frac": "mean peak of entries held, over what a dense cache would peak at",
    "kv/peak_bytes": "most bytes of KV pages in use at once, with the query rings, page tables and state of the rows; "
    "the largest of several processes",
    "memory/rollout_peak_bytes": "most bytes torch had allocated on the GPU at once during the rollout",
    "memory/update_peak_bytes": "most bytes torch had allocated on the GPU at once during the updates",
    "rollout/tokens_per_s": "sampled tokens over the time of the rollout",
    "rollout/rows": "engine.rows, halved wherever memory ran out",
    "rollout/preemptions": "sequences put back for lack of pages",
    "eval/{CACHE}/reward": "on held-out prompts, mean over prompts",
    "eval/{CACHE}/reward_se": "its standard error over prompts",
    "eval/{CACHE}/failed": "completions that a grader could not grade; they are left out",
    "eval/{CACHE}/mean_length": "tokens",
    "eval/{CACHE}/clipped_ratio": "share that ran into the length limit",
    "eval/{CACHE}/kv_saved_frac": "as kv/saved_frac",
    "eval/loss": "negative log-likelihood of held-out completions, mean over their tokens (only if supervised)",
    "eval/perplexity": "its exponential",
    "time/rollout_s": "sampling",
    "time/capture_s": "compiling and capturing decode steps, part of time/rollout_s",
    "time/baseline_s": "greedy completions for remax",
    "time/reward_s": "grading",
    "time/update_s": "scoring and learning",
    "time/distill_s": "learning of the sampler's adapter",
    "time/eval_s": "evaluation",
    "time/save_s": "the checkpoint before this step",
    "step_time": "seconds of the whole step",
}

MANY_ANOMALOUS = 0.15  # completions with a token of xi < 1e-4: from here on the cache is too sparse
ALARM_WINDOW = 10  # steps a mean length or share is taken over
REMEDIES = {  # what an alarm asks for
    "alarm/reward": "read completions.jsonl. If right answers earn nothing, mend the reward; if all are right, take "
    "harder prompts; if none is, take easier ones, a warm start (sparse-rl sft) or a reward that tells near from far.",
    "alarm/anomalies": "raise kv.budget, or choose another kv.policy (sparse-rl inspect compares them). Where they are "
    "rejected, rejected.jsonl shows the tokens.",
    "alarm/rejection": "what is rejected was sampled for nothing: raise kv.budget. A strict veto may reject as much "
    "and still learn; rejected.jsonl shows at which tokens it does.",
    "alarm/tail": "raise kv.budget for such contexts: a schedule, or kv.budget auto, which goes up to control.largest. "
    "Where the dense cache itself has less, as with small models (sparse-rl calibrate tells), lower control.target.",
    "alarm/length": "if the reward does not ask for short answers, the cache is too sparse for long ones: raise "
    "kv.budget for long contexts (a schedule, or kv.budget auto), or choose a correction that keeps long rollouts, "
    "prefix say.",
    "alarm/kl": "raise kv.budget (or set it to auto), or lower optimizer.learning_rate.",
    "alarm/collapse": "the model that is kept gets worse, whatever the sampler earns: go back to the best checkpoint, "
    "then lower optimizer.learning_rate, or where the cache is sparse raise kv.budget or choose a stricter correction "
    "(strict, say).",
}


def definition(name: str) -> str | None:
    """What a metric means, or None for a name nobody defined."""
    for pattern, text in METRICS.items():
        expression = re.escape(pattern).replace(r"\{NAME\}", r"[^/]+").replace(r"\{CACHE\}", "(dense|sparse)")
        expression = expression.replace(r"\{BIN\}", r"\d+")
        if re.fullmatch(expression, name):
            return text
    return None


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file; one still being written is left out."""
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1]]


class Timer:
    """Seconds by stage: `with timer("rollout"): ...` gives time/rollout_s."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            name = f"time/{stage}_s"
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


def finite(value: Any, instead: Callable[[float], Any] = lambda _: None) -> Any:
    """The value with null, or what `instead` makes of it, for every number that JSON has no name for, at any depth."""
    if isinstance(value, dict):
        return {key: finite(item, instead) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item, instead) for item in value]
    return instead(value) if isinstance(value, float) and not math.isfinite(value) else value
