# SPDX-License-Identifier: Apache-2.0
"""What to do about the gap between the sampler and the dense model: weights, dropped tokens, rejected rollouts.

    xi_t = pi_old(o_t) / pi_sparse(o_t)        both at the weights of the rollout; log_xi comes in, nothing else

Token weights ignore how likely the prefix was, and rejection cuts the support: none of this is unbiased. Log-ratios are
clamped to +-20 before `exp`, so a weight is finite; the veto reads the raw one. docs/corrections.md: the bias of each.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import torch

from sparse_rl.specs import check_choices

MAX_LOG_RATIO = 20.0
CHANCE = 0.1  # of a rollout that is no worse than `hazard` to be rejected, at most, whatever its length


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How log_xi becomes weights; each field is a choice of its own, presets name combinations.

    weight: multiply a token's loss by the ratio
    level: whose ratio is weighed and bounded: the token's, the sequence's product, or its geometric mean
    lower: ratios below this are out of bounds; 0 is off
    upper: ratios above this are out of bounds; .inf is off
    action: out of bounds: "truncate" the weight to the bound, or "mask" the token (or the sequence, by level)
    veto: tokens with xi below this are anomalous; 0 never are
    drops: what an anomalous token takes along: the "rollout", the "rest" of it from there on, or the "token" alone
    hazard: usual rate of anomalous tokens: only a rollout with clearly more is rejected; 0 rejects at the first
    normalize: divide weights by their mean over all tokens of the optimiser batch
    denominator: "fixed" counts dropped tokens too, "surviving" only kept ones, of a rollout or the batch by aggregation
    """

    weight: bool = True
    level: Literal["token", "sequence", "geometric"] = "token"
    lower: float | None = None
    upper: float | None = None
    action: Literal["truncate", "mask"] = "truncate"
    veto: float | None = None
    drops: Literal["rollout", "rest", "token"] = "rollout"
    hazard: float | None = None
    normalize: bool = False
    denominator: Literal["fixed", "surviving"] = "fixed"

    def __post_init__(self) -> None:
        check_choices(self, "correction")
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ValueError(f"correction.lower is {self.lower}, above correction.upper {self.upper}; swap them.")
        bounded = (self.lower or 0.0) > 0.0 or (self.upper is not None and self.upper < float("inf"))
        defaults = {each.name: each.default for each in fields(self)}
        drops = bool(self.veto) or (bounded and self.action == "mask")
        for field, unread, remedy in (
            ("level", self.level != "token" and not (self.weight or bounded), "set weight, lower or upper"),
            ("action", self.action == "mask" and not bounded, "set lower or upper"),
            ("normalize", self.normalize and not self.weight, "set weight"),
            ("denominator", self.denominator == "surviving" and not drops, "set veto, or bounds that mask"),
        ):
            if unread:
                value, off = (str(each).lower() for each in (getattr(self, field), defaults[field]))
                raise ValueError(f"correction.{field} is {value}, which changes nothing; {remedy}, or make it {off}.")
        if bounded and self.action == "truncate" and not self.weight:
            raise ValueError(
                "correction.lower and correction.upper truncate weights, but correction.weight is false; "
                "set correction.weight, or correction.action to mask."
            )
        for field in ("lower", "upper", "veto", "hazard"):
            if not (getattr(self, field) or 0.0) >= 0:
                raise ValueError(f"correction.{field} is {getattr(self, field)}; it must be 0 or more.")
        for field in ("veto", "hazard"):
            if (getattr(self, field) or 0.0) >= 1:
                raise ValueError(f"correction.{field} is {getattr(self, field)}; it must be below 1, 1e-4 say.")
        if (self.drops != "rollout" or self.hazard) and not self.veto:
            name = "hazard" if self.hazard else "drops"
            raise ValueError(
                f"correction.{name} is {getattr(self, name)}, but nothing is anomalous; set correction.veto, 1e-4 say."
            )
        if self.hazard and self.drops != "rollout":
            raise ValueError(
                f"correction.hazard decides which rollouts are rejected, but correction.drops is {self.drops!r}; "
                "leave one of them out."
            )

    @property
    def needs_batch(self) -> bool:
        """Whether a microbatch's loss depends on the rest of the batch, so that scores must come first."""
        return self.normalize or self.denominator == "surviving"


PRESETS: dict[str, Correction] = {
    "none": Correction(weight=False),
    "sparse_rl": Correction(veto=1e-4),
    "strict": Correction(veto=1e-2),
    "bounded": Correction(lower=0.5, upper=1.5, action="mask", veto=1e-4),
    "sparse_rl_release": Correction(
        lower=0.5, upper=1.5, action="mask", veto=1e-4, normalize=True, denominator="surviving"
    ),
    "prefix": Correction(veto=1e-4, drops="rest"),
    "mask": Correction(veto=1e-4, drops="token"),
    "hazard": Correction(veto=1e-4, hazard=1e-4),
    "reject_only": Correction(weight=False, veto=1e-4),
    "reweight_only": Correction(),
    "tis": Correction(upper=2.0),
    "icepop": Correction(lower=0.5, upper=5.0, action="mask"),
    "geometric": Correction(weight=False, level="geometric", lower=0.999, upper=1.001, action="mask"),
}


def preset_name(correction: Correction) -> str:
    """The preset it equals, or "custom"."""
    return next((name for name, preset in PRESETS.items() if preset == correction), "custom")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """T packed completion tokens of R rollouts."""

    weight: torch.Tensor  # (T,) fp32, multiplies the token's loss; 0 where it was dropped
    kept: torch.Tensor  # (T,) bool
    accepted: torch.Tensor  # (R,) bool: not rejected as a whole


def correct(
    log_xi: torch.Tensor,  # (T,) dense_logprobs - sampler_logprobs
    mask: torch.Tensor,  # (T,) bool, tokens the sampler chose
    rows: torch.Tensor,  # (T,) which rollout a token belongs to
    num_rows: int,
    correction: Correction,
) -> Corrected:
    """Weights, kept tokens and accepted rollouts."""
    log_xi = torch.where(mask, log_xi.detach().float(), 0.0)
    count_R = sum_rows(mask.float(), rows, num_rows)
    log_ratio = log_xi
    if correction.level != "token":
        total_R = sum_rows(log_xi, rows, num_rows)
        log_ratio = (total_R if correction.level == "sequence" else total_R / count_R.clamp(min=1))[rows]
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    accepted = torch.ones(num_rows, dtype=torch.bool, device=log_xi.device)
    kept = mask
    if correction.veto is not None:
        # A plain comparison, so that a nan is anomalous.
        anomalous = mask & ~(log_xi >= torch.tensor(correction.veto).log())
        if correction.drops == "rollout":
            accepted = ~_rejected(sum_rows(anomalous.float(), rows, num_rows), count_R, correction.hazard)
        else:
            kept = mask & ~(_from_first(anomalous, rows, num_rows) if correction.drops == "rest" else anomalous)
    weight = ratio if correction.weight else torch.ones_like(ratio)
    if correction.upper is not None and correction.weight:
        weight = weight.clamp(max=correction.upper)
    if correction.action == "mask":
        inside = torch.ones_like(mask)
        if correction.lower is not None:
            inside &= ratio >= correction.lower
        if correction.upper is not None:
            inside &= ratio <= correction.upper
        if correction.level == "token":
            kept = kept & inside
        else:
            accepted &= sum_rows((mask & ~inside).float(), rows, num_rows) == 0
    elif correction.lower is not None and correction.weight:
        weight = weight.clamp(min=correction.lower)
    if correction.normalize:
        weight = weight / (torch.where(mask, weight, 0.0).sum() / mask.sum().clamp(min=1)).clamp(min=1e-8)
    kept = kept & accepted[rows]
    return Corrected(weight=torch.where(kept, weight, 0.0), kept=kept, accepted=accepted)


def _rejected(anomalous_R: torch.Tensor, count_R: torch.Tensor, hazard: float | None) -> torch.Tensor:
    """Rollouts with an anomalous token or, given a hazard, more of them than chance gives a rollout of that length."""
    if not hazard:
        return anomalous_R > 0
    # The chance that a Poisson count of mean hazard * length is as large.
    chance_R: torch.Tensor = torch.special.gammainc(anomalous_R.clamp(min=1).double(), hazard * count_R.double())
    return (anomalous_R > 0) & (chance_R <= CHANCE)


def _from_first(anomalous: torch.Tensor, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Each rollout's first anomalous token and all after it, (T,) bool; a rollout's tokens stand in order."""
    place = torch.arange(len(rows), device=rows.device)
    first_R = torch.full((num_rows,), len(rows), device=rows.device)
    first_R = first_R.scatter_reduce(0, rows, torch.where(anomalous, place, len(rows)), "amin")
    return place >= first_R[rows]


def sum_rows(values_T: torch.Tensor, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Sum of each rollout's tokens, (R,)."""
    return torch.zeros(num_rows, dtype=values_T.dtype, device=values_T.device).index_add(0, rows, values_T)
