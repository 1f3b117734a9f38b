# SPDX-License-Identifier: Apache-2.0
"""Published model shapes by name, with random weights: what costs time and memory is there, the words are not.

The numbers are those of the checkpoints' own config.json; where positions end before 40,960, they are carried that far,
so that long outputs can be measured.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from sparse_rl.model import tiny
from sparse_rl.model.attention import registered
from sparse_rl.model.dry_run import dry_run
from sparse_rl.model.load import LoadedModel, check_device
from sparse_rl.specs import suggestion

POSITIONS = 40960


def _shape(
    model_type: str,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: tuple[int, int, int],  # of queries, of keys and values, their width
    vocabulary: int,
    *,
    tied: bool = True,
    theta: float,
    eps: float,
    positions: int = POSITIONS,
    rope: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta, **(rope or {})},
        "rms_norm_eps": eps,
        "max_position_embeddings": positions,
    }


LLAMA3 = {  # how Llama 3 stretches its rotation
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

YARN = {  # and how gpt-oss does
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        **tiny.SHAPE,
        **tiny.FAMILIES["llama"],
        "vocab_size": len(tiny.tiny_tokenizer()),
        "max_position_embeddings": POSITIONS,
    },
    "smollm2-135m": _shape("llama", 30, 576, 1536, (9, 3, 64), 49152, theta=1e5, eps=1e-5),
    "llama-3.2-1b": _shape(
        "llama", 16, 2048, 8192, (32, 8, 64), 128256, theta=5e5, eps=1e-5, positions=131072, rope=LLAMA3
    ),
    "qwen2.5-1.5b": _shape("qwen2", 28, 1536, 8960, (12, 2, 128), 151936, theta=1e6, eps=1e-6, positions=131072),
    "qwen2.5-7b": _shape(
        "qwen2", 28, 3584, 18944, (28, 4, 128), 152064, tied=False, theta=1e6, eps=1e-6, positions=131072
    ),
    "qwen3-1.7b": _shape("qwen3", 28, 2048, 6144, (16, 8, 128), 151936, theta=1e6, eps=1e-6),
    "qwen3-4b": _shape("qwen3", 36, 2560, 9728, (32, 8, 128), 151936, theta=1e6, eps=1e-6),
    "qwen3-8b": _shape("qwen3", 36, 4096, 12288, (32, 8, 128), 151936, tied=False, theta=1e6, eps=1e-6),
    "qwen3-14b": _shape("qwen3", 40, 5120, 17408, (40, 8, 128), 151936, tied=False, theta=1e6, eps=1e-6),
    "qwen3-30b-a3b": {
        **_shape("qwen3_moe", 48, 2048, 6144, (32, 4, 128), 151936, tied=False, theta=1e6, eps=1e-6),
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "gpt-oss-20b": {
        **_shape(
            "gpt_oss",
            24,
            2880,
            2880,
            (64, 8, 64),
            201088,
            tied=False,
            theta=1.5e5,
            eps=1e-5,
            positions=131072,
            rope=YARN,
        ),
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    },
}


def shape_config(name: str) -> transformers.PretrainedConfig:
    """The configuration of a shape; no token ends a text."""
    if name not in SHAPES:
        hint = suggestion(name.lower(), SHAPES)
        raise ValueError(f"shape {name!r} is unknown{hint}; choose one of {', '.join(SHAPES)}.")
    settings = dict(SHAPES[name])
    return transformers.AutoConfig.for_model(
        settings.pop("model_type"), bos_token_id=None, eos_token_id=None, pad_token_id=None, **settings
    )


def random_module(
    name: str, device: str | torch.device, dtype: torch.dtype, seed: int, *, attn_implementation: str | None = None
) -> transformers.PreTrainedModel:
    """The module of a shape, its weights drawn where they stay. Same device and seed, same weights."""
    config = shape_config(name)
    check_device(device)
    place = torch.device(device)
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []), place:
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attn_implementation or registered()
        )
    placed: transformers.PreTrainedModel = model.to(place).eval()
    return placed


def random_model(name: str, device: str | torch.device, dtype: torch.dtype, seed: int = 0) -> LoadedModel:
    """A shape ready for the engine; its tokenizer only stands in for one."""
    model = random_module(name, device, dtype, seed)
    return LoadedModel(model=model, tokenizer=tiny.tiny_tokenizer(), shape=dry_run(model))
