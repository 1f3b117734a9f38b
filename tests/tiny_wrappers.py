# SPDX-License-Identifier: Apache-2.0
"""Multimodal wrappers around tiny text models, as transformers itself builds and saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from sparse_rl.model.tiny import tiny_tokenizer

TEXT: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.12,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 258,
}
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
PICTURE = {"image_size": 28, "patch_size": 14}
QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 64, "num_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0,
    "llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip

WRAPPERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # type, text, vision, the rest
    "gemma3": (
        "gemma3",
        {"model_type": "gemma3_text", "sliding_window": 24},
        {"model_type": "siglip_vision_model", **TOWER, **PICTURE},
        {"mm_tokens_per_image": 4},
    ),
    "mistral3": (
        "mistral3",
        {"model_type": "mistral"},
        {"model_type": "pixtral", **TOWER, **PICTURE, "head_dim": 16},
        {},
    ),
    "ministral3": (
        "mistral3",
        {"model_type": "ministral3", "rope_parameters": YARN},
        {"model_type": "pixtral", **TOWER, **PICTURE, "head_dim": 16},
        {"tie_word_embeddings": False},
    ),
    "qwen2_vl": (
        "qwen2_vl",
        {"rope_parameters": MROPE},
        {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        {},
    ),
    "qwen2_5_vl": ("qwen2_5_vl", {"rope_parameters": MROPE}, QWEN, {"tie_word_embeddings": True}),
    "qwen3_vl": (
        "qwen3_vl",
        {"rope_parameters": {**MROPE, "mrope_interleaved": True}},
        {**QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        {},
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {"rope_parameters": {**MROPE, "mrope_interleaved": True}, "num_experts": 4, **EXPERTS},
        {**QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        {},
    ),
    "glm4v_moe": (
        "glm4v_moe",
        {
            "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0},
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            **EXPERTS,
        },
        {**QWEN, "image_size": 28},
        {},
    ),
    "glm4v": ("glm4v", {"rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}}, {**QWEN, "image_size": 28}, {}),
}


def save_wrapper(name: str, folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """Write the wrapper with a tokenizer and a processor's settings."""
    kind, text, vision, rest = WRAPPERS[name]
    config = transformers.AutoConfig.for_model(kind, text_config={**TEXT, **text, **more}, vision_config=vision, **rest)
    wrapper = transformers.AutoModelForImageTextToText.from_config(config, dtype=dtype).eval()
    wrapper.generation_config.eos_token_id = [258, 10]
    wrapper.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"size": 28}')
    return wrapper


def text_weights(wrapper: Any) -> dict[str, torch.Tensor]:
    """Of the text module and the head, by the names that the text model alone gives them."""
    text, head = wrapper.get_decoder().state_dict(), wrapper.get_output_embeddings().state_dict()
    return {f"model.{name}": t for name, t in text.items()} | {f"lm_head.{name}": t for name, t in head.items()}


def other_weights(wrapper: Any) -> dict[str, torch.Tensor]:
    """Of all that text passes by."""
    state = wrapper.state_dict().items()
    return {name: t for name, t in state if "language_model" not in name and not name.startswith("lm_head")}
