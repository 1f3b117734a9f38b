# SPDX-License-Identifier: Apache-2.0
"""Random models of every supported family, with a byte tokenizer, in Hugging Face layout.

They need no download and run anywhere, so tests, benchmarks and `--model tiny` use them. Weights are drawn wider
than for training: attention then has something to look at, and dropping a cache entry changes the output.

Models of published sizes are in `shapes.py`.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sparse_rl.model import rope
from sparse_rl.model.attention import registered

WINDOW = 24  # entries a sliding layer sees; small, so that short tests leave the window

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral", "sliding_window": WINDOW},
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 64,  # not the head dim: a scale of its own
        "tie_word_embeddings": False,  # its scaled embedding would only ever repeat the last token
    },
    "olmo2": {"model_type": "olmo2"},
    "gemma2": {  # attention's logits have a soft-cap
        "model_type": "gemma2",
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": None,
        "query_pre_attn_scalar": 64,
        "tie_word_embeddings": False,
    },
    "gpt_oss": {  # every head has a sink
        "model_type": "gpt_oss",
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v3": {  # latent attention: keys of 16 + 16, values of 24
        "model_type": "deepseek_v3",
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "head_dim": 16,
        "v_head_dim": 24,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 2,
    },
    "phi3": {
        "model_type": "phi3",
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "factor": 128.0,
            "short_factor": [1.0 + 0.1 * i for i in range(12)],
            "long_factor": [2.0 + 0.5 * i for i in range(12)],
        },
    },
}

SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "initializer_range": 0.12,
}


def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a byte, its id the byte's value, then the special tokens."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    # ByteLevel writes a printable byte as itself and the others, in order, as the characters from 256 on.
    others = iter(sorted(char for char in alphabet if ord(char) > 255))
    vocab = {chr(byte) if chr(byte) in alphabet else next(others): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", model_max_length=8192
    )


def tiny_config(family: str, **overrides: Any) -> transformers.PreTrainedConfig:
    """Of a family's tiny model."""
    if family not in FAMILIES:
        raise ValueError(f"no tiny model of family {family!r}; choose one of {', '.join(FAMILIES)}.")
    tokenizer = tiny_tokenizer()
    tokens = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    settings = {"vocab_size": len(tokenizer), **tokens, **SHAPE, **deepcopy(FAMILIES[family]), **overrides}
    return transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)


def tiny_model(
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attn_implementation: str | None = None,
    **overrides: Any,
) -> transformers.PreTrainedModel:
    """A random model of a family (about 0.8M parameters); overrides are config fields. Same seed, same weights."""
    config = tiny_config(family, **overrides)
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}  # grouped products know no fp64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attn_implementation or registered(), **experts
        )
    placed: transformers.PreTrainedModel = model.to(device=device, dtype=dtype).eval()
    rope.fix(placed)
    return placed
