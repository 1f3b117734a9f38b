# SPDX-License-Identifier: Apache-2.0
"""Whether a run fits a device's memory, and what to change if it does not; nothing is loaded or allocated."""

from sparse_rl.plan.advice import Remedy, remedies, rows_that_fit, sparse_policy, together
from sparse_rl.plan.device import choose_device
from sparse_rl.plan.memory import Plan, make_plan
from sparse_rl.plan.records import Device, Footprint, RunSize
from sparse_rl.plan.show import as_json, lines, summary
from sparse_rl.plan.size import ModelSize, empty_model, model_config, model_size

__all__ = [
    "Device",
    "Footprint",
    "ModelSize",
    "Plan",
    "Remedy",
    "RunSize",
    "as_json",
    "choose_device",
    "empty_model",
    "lines",
    "make_plan",
    "model_config",
    "model_size",
    "remedies",
    "rows_that_fit",
    "sparse_policy",
    "summary",
    "together",
]
