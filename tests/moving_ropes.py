# SPDX-License-Identifier: Apache-2.0
"""Tiny models whose rotation follows the longest sequence, as transformers makes them."""

from __future__ import annotations

import copy

import torch
import transformers

from sparse_rl.model.tiny import tiny_config

ORIGINAL, POSITIONS = 48, 128
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "long_factor": [2.0 + 0.5 * i for i in range(16)],
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
MOVING = {
    "phi3": ("phi3", {"original_max_position_embeddings": ORIGINAL}),
    "longrope": ("llama", {"rope_parameters": LONGROPE}),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": POSITIONS // 2}),
    "by layer": ("gemma3", {"rope_parameters": {"sliding_attention": PLAIN, "full_attention": LONGROPE}}),
}


def settings(case):
    family, changed = MOVING[case]
    changed = {"max_position_embeddings": POSITIONS, **copy.deepcopy(changed)}
    layers = {"layer_types": ["sliding_attention", "full_attention"]} if family == "gemma3" else {}
    return family, {"num_hidden_layers": 2, **layers, **changed}


def plain(case):
    """As transformers makes it, with the weights of `tiny_model`."""
    family, changed = settings(case)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(tiny_config(family, **changed)).eval()
