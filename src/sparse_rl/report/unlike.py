# SPDX-License-Identifier: Apache-2.0
"""Whether runs were asked the same: settings that decide who is asked what, and how answers are graded.

How a run samples, caches, corrects and learns is what runs are compared for; it is not looked at here.
"""

from __future__ import annotations

from sparse_rl.report.runs import LoggedRun, differing

SAME_QUESTIONS = ("eval.every", "eval.seed")
LIMIT = "sampling.max_tokens"


def incomparable(runs: list[LoggedRun]) -> str | None:
    """A sentence on rewards, or losses, that say nothing beside each other; None if there are none."""
    supervised = runs[0].supervised
    section, measured = ("data", "losses") if supervised else ("task", "rewards")
    evaluated = [run for run in runs if run.series("eval/loss" if supervised else "eval/dense/reward")]
    of_evaluation = (f"{section}.eval_file", "eval.")
    in_training = [name for name in _asked(runs, section) if not name.startswith(of_evaluation)]
    held_out = [name for name in _asked(evaluated, section) if name != f"{section}.train_file"]
    if not in_training and not held_out:
        return None
    kind = "held-out " if not in_training else "training " if evaluated[1:] and not held_out else ""
    apart = _listed(list(dict.fromkeys([*in_training, *held_out])))
    return f"These runs differ in {apart}: their {kind}{measured} cannot be compared."


def cut_apart(runs: list[LoggedRun]) -> str | None:
    """A sentence on completions that end at different lengths."""
    if LIMIT not in differing(runs):
        return None
    return f"These runs differ in {LIMIT}: what one cuts off, another may finish."


def _asked(runs: list[LoggedRun], section: str) -> list[str]:
    """Settings of the model, the section and the evaluation that are not the same and matter."""
    file, digest = f"{section}.train_file", f"{section}.train_sha256"
    rows = digest if all(digest in run.settings for run in runs) else file  # a copy elsewhere has the same rows
    name = f"{section}.name"
    apart = differing(runs)
    found = []
    for setting in apart:
        if setting == rows:
            found.append(file)
        elif setting in (file, digest, *SAME_QUESTIONS) or setting.startswith(f"{section}.grading."):
            continue  # grading: how graders are run, not what they say
        elif setting.startswith("eval.") and not all(setting in run.settings for run in runs):
            continue  # an older run did not say
        elif setting == "model" or setting.startswith("eval."):
            found.append(setting)
        elif setting.startswith(f"{section}.") and (name not in apart or setting == name):
            found.append(setting)  # another task has all other settings too
    return found


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
