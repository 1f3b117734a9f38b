# SPDX-License-Identifier: Apache-2.0
"""The raw results of benchmarks/evidence read back, and what they come to over seeds.

A record is one cell: {"cell": "short-naive-45-s0", "part": "a", "settings": {...}, "results": {...}, ...}. Of two with
one name the later counts. Nothing is made up: what was not measured is an estimate of no values.

The runs are made by benchmarks/evidence, outside of the package; verdicts are in `evidence_claims.py`.
"""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from sparse_rl.evaluate.statistics import Estimate, estimate
from sparse_rl.metrics import ALARM_WINDOW, MANY_ANOMALOUS

Record = dict[str, Any]
KEYS = {"cell", "part", "commit", "hardware", "seconds", "settings", "results"}  # of every record
ARMS = ("dense", "naive", "reject_only", "reweight_only", "sparse_rl", "bounded", "sparse_rl_release", "tis", "icepop")
STATISTICS = {  # measured before training: what a low or a high value of it warns of
    "overlap_mean": ("overlap, mean", -1),
    "overlap_p05": ("overlap, P05", -1),
    "overlap_p01": ("overlap, P01", -1),
    "overlap_min": ("overlap, lowest of a rollout (mean)", -1),
    "kl": ("mismatch KL", 1),
    "rejection": ("rollouts with a token xi < 1e-4", 1),
}
SEEDS = 3
CLEAR = 2.8  # standard errors of a difference: Student's t of two times three seeds, 95 %
LEAST = 0.01  # a difference of accuracy that counts
DROP, SURE = 0.02, 2.0  # accuracy, and standard errors over problems, that a run must lose to have collapsed
THRESHOLD = 0.86  # of P05, from which on Sparrow finds training stable
LEARNS = 0.10  # accuracy that the dense arm must gain
DRAWS = 1000  # of the bootstrap


@dataclass(frozen=True, slots=True)
class Evidence:
    """All records, by what they are."""

    records: tuple[Record, ...]

    @property
    def testbeds(self) -> list[str]:
        """Those on which something was trained."""
        return list(dict.fromkeys(r["settings"]["testbed"]["name"] for r in self.records if "checks" in r["results"]))

    def bed(self, testbed: str) -> Record:
        """The testbed's settings."""
        found: Record = next(
            r["settings"]["testbed"] for r in self.records if r["settings"].get("testbed", {}).get("name") == testbed
        )
        return found

    def arms(self, testbed: str) -> tuple[str, ...]:
        """Those planned there."""
        return ARMS if "sweep" in self.bed(testbed) else ("dense", "naive", "sparse_rl")

    def part(self, name: str) -> list[Record]:
        return [record for record in self.records if record["part"] == name]

    def trained(self, testbed: str | None = None) -> list[Record]:
        """Every training run of the embedded task."""
        runs = [r for r in self.records if "checks" in r["results"]]
        return [r for r in runs if testbed is None or r["settings"]["testbed"]["name"] == testbed]

    def runs(
        self,
        testbed: str,
        arm: str,
        budget: int,
        *,
        policy: str | None = None,
        eps: float | None = None,
        updates: int = 1,
        target: float | None = None,
    ) -> list[Record]:
        """The seeds of one setting; with a target, of what holds it, whatever the budget."""
        wanted = {"arm": arm, "target": target}
        if target is None:
            wanted |= {
                "budget": 0 if arm == "dense" else budget,
                "policy": policy or ("full" if arm == "dense" else "rkv"),
                "eps": eps,
                "updates_per_rollout": updates,
            }
        runs = self.trained(testbed)
        return [r for r in runs if all(r["settings"].get(key) == value for key, value in wanted.items())]

    def before(self, testbed: str, policy: str, budget: int) -> list[Record]:
        """Measurements of the model before training."""
        found = [r for r in self.records if "first_veto" in r["results"] and "policy" in r["settings"]]
        wanted = (testbed, policy, budget)
        return [r for r in found if (_bed(r), r["settings"]["policy"], r["settings"]["budget"]) == wanted]

    def calibration(self, testbed: str) -> Record | None:
        """Part g: the tail by budget, and the schedules that hold one."""
        return next((r for r in self.part("g") if _bed(r) == testbed and "schedules" in r["results"]), None)

    def start(self, testbed: str) -> Estimate:
        """Accuracy before training, dense cache; its error is over problems."""
        for record in self.before(testbed, "full", 0):
            if record["results"]["accuracy"]:
                return over_seeds([record["results"]["accuracy"]["dense"]])
        return self.under(testbed, "start", 0, "full")

    def end(self, testbed: str, arm: str, budget: int, cache: str = "dense", **which: Any) -> Estimate:
        """Accuracy after training, over seeds."""
        return over_seeds([r["results"][cache] for r in self.runs(testbed, arm, budget, **which)])

    def gain(self, testbed: str) -> Estimate:
        """What the dense arm learns."""
        start, end = self.start(testbed), self.end(testbed, "dense", 0)
        return Estimate(end.mean - start.mean, math.hypot(end.se, start.se), min(end.count, SEEDS * start.count))

    def curve(self, testbed: str, arm: str, budget: int, name: str, at: slice, **which: Any) -> Estimate:
        """A curve's mean over some of the steps, over seeds."""
        runs = self.runs(testbed, arm, budget, **which)
        return estimate(_mean(r["results"]["curves"][name][at]) for r in runs)

    def under(self, testbed: str, arm: str, trained_at: int, cache: str) -> Estimate:
        """Part c: accuracy under a cache, over seeds."""
        found = [r for r in self.records if "matrix" in r["results"] and _bed(r) == testbed]
        found = [r for r in found if (r["settings"]["arm"], r["settings"]["trained_at"]) == (arm, trained_at)]
        return over_seeds([r["results"]["matrix"][cache] for r in found if cache in r["results"]["matrix"]])


def read_evidence(folder: Path) -> Evidence:
    """Every .jsonl file of the folder."""
    if not folder.is_dir():
        raise ValueError(f"--evidence {str(folder)!r} is no folder; give the one with the .jsonl files of results.")
    found: dict[str, Record] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                record = _in_shape(json.loads(line, parse_constant=_refuse))
                found[record["cell"]] = record
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}, is not the record of a cell; remove it.") from error
    _check_starts(found.values())
    return Evidence(tuple(found.values()))


def over_seeds(found: Sequence[Sequence[float | None]]) -> Estimate:
    """Of accuracies with their errors over problems: the error over seeds, but no less than what problems explain.

    Three seeds may agree by chance; one has its error over problems alone.
    """
    known = [(mean, se or 0.0) for mean, se in found if mean is not None]
    over = estimate(mean for mean, _ in known)
    if not known:
        return over
    problems = math.sqrt(math.fsum(se * se for _, se in known)) / len(known)
    return Estimate(over.mean, problems if math.isnan(over.se) else max(over.se, problems), over.count)


def collapsed(run: Record, start: Estimate) -> bool:
    """Whether a run lost accuracy, more than chance over problems explains, or ended since updates were not finite."""
    end, se = run["results"]["dense"]
    if end is None or run["results"].get("not_finite"):
        return True
    return bool(start.mean - end > max(DROP, SURE * math.hypot(se or 0.0, start.se)))


def alarmed(run: Record) -> bool:
    """Whether training's alarm of anomalies was on at some step, or would have been."""
    curve = [share or 0.0 for share in run["results"]["curves"]["catastrophic"]]
    windows = (curve[max(0, end - ALARM_WINDOW) : end] for end in range(1, len(curve) + 1))
    return any(math.fsum(window) / ALARM_WINDOW > MANY_ANOMALOUS for window in windows)


def compare(first: Estimate, second: Estimate) -> Literal["more", "no more", "unclear"]:
    """Whether the first is clearly above the second, or surely by less than DROP."""
    difference, error = first.mean - second.mean, math.hypot(first.se, second.se)
    if difference > CLEAR * error and difference >= LEAST:
        return "more"
    return "no more" if difference + CLEAR * error < DROP else "unclear"


def ratio(first: Estimate, second: Estimate) -> Estimate:
    """The first over the second, errors to first order."""
    if not second.mean > 0:
        return estimate([])
    mean = first.mean / second.mean
    relative = math.hypot(first.se / first.mean, second.se / second.mean) if first.mean else 0.0
    return Estimate(mean, mean * relative, min(first.count, second.count))


def held(evidence: Evidence, testbed: str) -> list[tuple[str, int, float | None]]:
    """Part g's runs as arm, budget, target: constant budgets (part a's too), schedules, and what finds its own."""
    runs = evidence.trained(testbed)
    constant = {r["settings"]["budget"] for r in runs if r["settings"]["arm"] == "tis"}
    found: list[tuple[str, int, float | None]] = [("tis", budget, None) for budget in sorted(constant)]
    for arm in ("schedule", "auto", "auto_distill"):
        found += [(arm, 0, t) for t in sorted({r["settings"]["target"] for r in runs if r["settings"]["arm"] == arm})]
    return found


def kv_read(evidence: Evidence, testbed: str, arm: str, budget: int, target: float | None) -> Estimate:
    """Of a dense cache's entries, the share read: R-KV reads all that it holds."""
    saved = evidence.curve(testbed, arm, budget, "kv_saved", slice(None), target=target)
    return Estimate(1 - saved.mean, saved.se, saved.count)


@dataclass(frozen=True, slots=True)
class Case:
    """A training run with what was known before it."""

    setting: tuple[str, str, int]  # testbed, policy, budget
    known: dict[str, float | None]  # by statistic, mean over seeds
    change: float  # of dense accuracy
    failed: bool


def cases(evidence: Evidence, arms: Sequence[str]) -> list[Case]:
    """Every run of these arms with one update a rollout and the preset's own threshold, where the dense arm learns.

    Of chains alone: with a large vocabulary overlap is a lower bound, which lies on another scale.
    """
    found = []
    beds = [bed for bed in evidence.testbeds if bed != "trial" and evidence.gain(bed).mean >= LEARNS]
    for run in evidence.trained():
        own = run["settings"]
        if own["arm"] not in arms or own["updates_per_rollout"] != 1 or own["eps"] or "sweep" not in own["testbed"]:
            continue
        setting = (_bed(run), own["policy"], own["budget"])
        measured, start = evidence.before(*setting), evidence.start(setting[0])
        if measured and setting[0] in beds:
            known = {name: _mean([record["results"][name] for record in measured]) for name in STATISTICS}
            end = run["results"]["dense"][0]
            change = math.nan if end is None else end - start.mean
            found.append(Case(setting, known, change, collapsed(run, start)))
    return found


def auc(found: Sequence[Case], name: str) -> float:
    """The chance that the statistic warns more of a failed run than of a good one of the same testbed; ties: half."""
    beds: dict[str, tuple[list[float], list[float]]] = {}  # values of good runs and of failed ones
    for value, case in _warning(found, name):
        beds.setdefault(case.setting[0], ([], []))[case.failed].append(value)
    wins, pairs = 0.0, 0
    for good, bads in beds.values():
        good.sort()
        wins += sum((bisect_left(good, bad) + bisect_right(good, bad)) / 2 for bad in bads)
        pairs += len(good) * len(bads)
    return wins / pairs if pairs else math.nan


def by_bed(found: Sequence[Case], name: str) -> dict[str, float]:
    """The AUC of each testbed alone."""
    beds = dict.fromkeys(case.setting[0] for case in found)
    return {bed: auc([case for case in found if case.setting[0] == bed], name) for bed in beds}


def threshold(found: Sequence[Case], name: str) -> tuple[float, float]:
    """The cut with the best mean of the two rates of being right, half-way between neighbours; and that mean."""
    warnings = _warning(found, name)
    best = (math.nan, 0.0)
    for low, high in pairwise(sorted({value for value, _ in warnings})):
        cut = (low + high) / 2
        rates = []
        for outcome in (True, False):
            own = [(value > cut) == outcome for value, case in warnings if case.failed == outcome]
            rates.append(sum(own) / len(own) if own else math.nan)
        if sum(rates) / 2 > best[1]:
            best = (STATISTICS[name][1] * cut, sum(rates) / 2)
    return best


def _warning(found: Sequence[Case], name: str) -> list[tuple[float, Case]]:
    """The statistic of each case that has it, so turned that a high value warns."""
    given = [(case.known[name], case) for case in found]
    return [(STATISTICS[name][1] * value, case) for value, case in given if value is not None]


def interval(found: Sequence[Case], value: Callable[[Sequence[Case]], float]) -> tuple[float, float]:
    """95 % of the value over samples of whole settings, drawn with replacement; always the same draws."""
    settings = sorted({case.setting for case in found})
    by_setting = {setting: [case for case in found if case.setting == setting] for setting in settings}
    draw = random.Random(0)
    values = []
    for _ in range(DRAWS):
        chosen = [case for _ in settings for case in by_setting[settings[int(draw.random() * len(settings))]]]
        drawn = value(chosen)
        if not math.isnan(drawn):
            values.append(drawn)
    values.sort()
    if len(values) < DRAWS // 2:
        return math.nan, math.nan
    return values[int(0.025 * len(values))], values[int(0.975 * len(values))]


@dataclass(frozen=True, slots=True)
class Survival:
    """Rollouts without a veto so far, by token, and the law of a constant hazard from the first eviction on.

    The hazard is fitted up to half-way from there to the end; the law foretells the rest.
    """

    places: tuple[int, ...]  # tokens at which vetoes fall, in order
    total: int  # rollouts
    length: float  # their mean
    begin: float  # token of the first eviction

    @property
    def middle(self) -> float:
        return (self.begin + self.length) / 2

    @property
    def hazard(self) -> float:
        """Vetoes a token, of rollouts without one."""
        vetoes = bisect_left(self.places, self.middle) - bisect_left(self.places, self.begin)
        tokens = [min(place, self.middle) - self.begin for place in self.places if place >= self.begin]
        exposed = math.fsum(tokens) + (self.total - len(self.places)) * (self.middle - self.begin)
        return vetoes / exposed if exposed > 0 else math.nan

    def left(self, token: float) -> float:
        """The share of rollouts without a veto before the token."""
        return 1 - bisect_left(self.places, token) / self.total

    def law(self, token: float) -> float:
        """What the hazard foretells for a token behind the middle."""
        return self.left(self.middle) * math.exp(-self.hazard * (token - self.middle))


def survival(evidence: Evidence, testbed: str, budget: int) -> Survival | None:
    """Of R-KV before training; None if nothing was measured or the cache is never full."""
    given = evidence.before(testbed, "rkv", budget)
    length = _mean(record["results"]["length"] for record in given)
    if length is None:
        return None
    begin = max(0, budget + evidence.bed(testbed)["interval"] - given[0]["results"]["prompt_len"])
    places = sorted(place for record in given for place in record["results"]["first_veto"])
    total = sum(record["results"]["rollouts"] for record in given)
    return Survival(tuple(places), total, length, begin) if begin < length else None


def _check_starts(records: Iterable[Record]) -> None:
    """All of a testbed must have begun with the same weights."""
    starts: dict[str, dict[str, str]] = {}  # a cell by testbed and hash
    for record in records:
        if start := record["results"].get("start"):
            starts.setdefault(_bed(record), {})[start] = record["cell"]
    for bed, cells in starts.items():
        if len(cells) > 1:
            shown = ", ".join(f"{start[:12]} ({cell})" for start, cell in sorted(cells.items()))
            raise ValueError(f"testbed {bed} began with several models, {shown}; keep the lines of one.")


def _refuse(name: str) -> float:
    """What was not finite is null in the results; NaN and Infinity come from elsewhere."""
    raise ValueError(f"{name} is no number")


def _in_shape(record: Record) -> Record:
    """SmolLM2's cells as those of a testbed with one budget, which its sweep chose."""
    if not record.keys() >= KEYS:
        raise KeyError(f"no {', '.join(sorted(KEYS - record.keys()))}")
    if record["part"] != "smollm2":
        return record
    own, results = record["settings"], record["results"]
    arm, budget = own.get("arm", "start"), results["budget"]
    at = 0 if arm == "dense" else budget
    settings = {"arm": arm, "policy": "rkv" if at else "full", "budget": at, "eps": None, "updates_per_rollout": 1}
    bed = {"name": "smollm2", "budgets": [budget], "steps": own.get("steps")}
    settings |= {"trained_at": 0 if arm == "start" else at, "testbed": bed}
    matrix = results["matrix"]
    if arm == "start":
        reward, error = matrix[f"rkv:{budget}"]
        results = results | results["before"] | {"accuracy": None, "reward": reward, "reward_se": error}
    else:
        results = results | {"dense": matrix["full"], "sparse": matrix[f"rkv:{budget}"], "checks": []}
    return record | {"settings": own | settings, "results": results}


def _bed(record: Record) -> str:
    return str(record["settings"].get("testbed", {}).get("name", ""))


def _mean(values: Iterable[float | None]) -> float | None:
    given = [value for value in values if value is not None]
    return math.fsum(given) / len(given) if given else None
