# SPDX-License-Identifier: Apache-2.0
"""A tiny random model of every decoder-only type that transformers knows, its config made by rule.

The rule reads the fields of a type's own default config. Sizes and counts become small, by the field's name; switches,
kinds of layers and everything else stay as the family has them. SETTINGS lists what the rule cannot know.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from sparse_rl.model.tiny import tiny_tokenizer

NUM_LAYERS = 2
KINDS = ["sliding_attention", "full_attention"]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
RECORDS = (
    "transformers_version",
    "architectures",
    "id2label",
    "label2id",
    "dtype",
    "attention_layers",
)
DERIVED = ("head_dim", "num_key_value_heads", "num_experts_per_tok")  # from the others, where they are none
GAIN = 1.3  # of a projection: wide enough that attention looks at something
WINDOW = 36  # entries a sliding layer sees: fewer than a text has, more than a sparse cache keeps

# The first pattern that fits a whole name of a field decides. Fields whose default is no positive integer stay.
RULES: tuple[tuple[str, int], ...] = (
    (r"vocab_size\w*|n_token|ngram_vocab_size_base|encoder_hash_byte_group_vocab|unpadded_vocab_size", 259),
    (r"hidden_size(_global)?|n_embd|d_model|dim_model|embedding_dim|dim_model_base|word_embed_proj_dim|lru_width", 64),
    (r"embedding_size|attention_hidden_size|mamba_d_ssm|router_hidden_size", 64),
    (r"hidden_size_per_layer_input|\w*lora_rank|laurel_rank|gated_norm_rank|adapter_rank|hc_lowrank|dt_rank", 16),
    (r"time_step_rank|mamba_dt_rank|moe_latent_size|ple_embed_dim", 16),
    (r"\w*intermediate_size\w*|n_inner|ffn_dim|dim_ff|dff|d_inner|\w*ffn_hidden_size|decoder_ffn_dim", 96),
    (r"num_blocks|num_layers_per_stack|attn_layer_period|layer_group_size|num_mem_blocks", 2),
    (r"\w*num_key_value_heads|num_kv_heads|num_query_groups|indexer_kv_heads", 2),
    (r"num_attention_heads|swa_num_attention_heads|n_heads?|num_heads|\w*attention_heads|index\w*_n_heads", 4),
    (r"linear_num_\w*heads|mamba_num_heads|mamba_n_heads|n_mamba_heads|linear_num_heads", 4),
    (r"qk_head_dim", 32),  # two of 16
    (r"head_dim|\w+_head_dim|kv_channels|dim_head|d_head|linear_head_dim|linear_(key|value)_head_dim", 16),
    (r"mamba_d_head|mamba_headdim|d_rel", 16),
    (r"rotary_dim", 8),
    (r"max_position_embeddings|n_positions|n_ctx|model_max_length|context_length|rel_extent", 512),
    (r"position_bias_max_distance", 512),
    (r"sliding_window|\w*window_size|sliding_window_size|local_attention|attention_chunk_size", WINDOW),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts", 2),
    (r"num_expert_group|n_group|topk_group|mamba_n_groups|n_groups|mamba_ngroups|o_groups", 1),
    (r"n(um)?_shared_experts|moe_num_shared_experts|first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"moe_layer_end_index|max_window_layers", 1),
    (r"index_topk|keep_window_size|indexer_budget", 16),
    (r"mamba_d_state|ssm_state_size|state_size", 16),
    (r"mamba_chunk_size|chunk_size|block_size|index_block_size", 16),
    (r"num_nextn_predict_layers|num_mtp_layers", 0),
)
# What the rule cannot know, with the reason.
MAMBA = {"mamba_n_heads": 8}  # times their width: twice the model's
TWICE = {"attention_hidden_size": 128, "attention_head_dim": 32}  # the model's width
WIDER_GLOBAL = {"per_layer_config": {"01": {"head_dim": 32}}}  # names layers by their number
SETTINGS: dict[str, dict[str, Any]] = {
    "bamba": MAMBA | {"attn_layer_indices": [1]},  # by default no layer attends
    "cohere_compass_text": {  # its default has none
        "rope_parameters": dict.fromkeys(KINDS, ROPE | {"mrope_section": [3, 3, 2]})
    },
    "dbrx": {
        "num_key_value_heads": 2,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},  # its default has no rotation
        "ffn_config": {"ffn_hidden_size": 96, "hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},  # its default has no experts
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 2},  # two layers of each kind
    "gemma4_text": WIDER_GLOBAL,
    "gemma4_unified_text": WIDER_GLOBAL,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},  # counts its layers
    "granite": {"attention_multiplier": 0.3},  # near 1 / sqrt(head_dim), as in checkpoints; 1 by default
    "granitemoehybrid": MAMBA | {"layer_types": ["linear_attention", "full_attention"]},  # by default no layer attends
    "jamba": {"attn_layer_offset": 1},  # below the period
    "lfm2": {"layer_types": ["conv", "full_attention"]},  # by default no layer convolves
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},  # its default has no kinds
    "mamba2": {"num_heads": 8},  # times their width: twice the model's
    "moshi": {"sliding_window": 512},  # its cache has a window, its forward pass none: as published, none either
    "qwen4_exp_text": {  # its default has none of these
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "zamba": TWICE,
    "zamba2": TWICE | {"n_mamba_heads": 8},  # times their width: twice the model's
    "zaya": {"num_experts_per_tok": 1},  # it knows no other
}
# Families in a second setting, where that is another mechanism.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama (tied head)": ("llama", {"tie_word_embeddings": True}),
    "llama (biases, dropout)": ("llama", {"attention_bias": True, "mlp_bias": True, "attention_dropout": 0.1}),
    "llama (one KV head)": ("llama", {"num_key_value_heads": 1}),
    "llama (llama3 rotation)": (
        "llama",
        {
            "rope_parameters": ROPE
            | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            | {"original_max_position_embeddings": 64}
        },
    ),
    "llama (linear rotation)": ("llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}}),
    "qwen2 (windows)": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": KINDS}),
    "qwen3 (yarn rotation)": (
        "qwen3",
        {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    ),
    "phi3 (longrope)": (  # beyond the original length from the first answer on
        "phi3",
        {
            "rope_parameters": ROPE
            | {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0 + 0.5 * i for i in range(8)]}
            | {"original_max_position_embeddings": 8},
            "original_max_position_embeddings": 8,
        },
    ),
    "gpt2 (scale by layer)": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "opt (350m)": ("opt", {"word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "phi (norms of queries)": ("phi", {"qk_layernorm": True}),
    "granitemoehybrid (attention alone)": ("granitemoehybrid", {"layer_types": ["full_attention"] * 2}),
    "gemma3_text (both directions)": ("gemma3_text", {"use_bidirectional_attention": True}),
    "gemma4_text (one width)": ("gemma4_text", {"per_layer_config": {}}),
    "gemma4_text (shared KV)": (
        "gemma4_text",
        {"per_layer_config": {}, "num_hidden_layers": 4, "num_kv_shared_layers": 2},
    ),
    "gemma4_unified_text (one width)": ("gemma4_unified_text", {"per_layer_config": {}}),
    "mpt (no ALiBi)": ("mpt", {"attn_config": {"alibi": False}}),
    "falcon (ALiBi)": ("falcon", {"alibi": True}),
}


# One cell for each mechanism.
MECHANISMS: dict[str, str] = {
    "llama": "grouped query heads, rotated positions",
    "llama (biases, dropout)": "biases; a dropout that load switches off",
    "qwen2 (windows)": "windows in some layers, biases of queries, keys and values",
    "qwen3": "normed queries and keys",
    "qwen3 (yarn rotation)": "a rotation with a factor on its scale",
    "mistral": "a window in every layer",
    "ministral3": "queries scaled by their position",
    "gemma2": "soft-capped attention",
    "gemma3_text": "windows, a rotation by kind of layer, norms of 1 + weight",
    "gemma3n_text": "layers that share keys and values",
    "gemma4_text": "layers of different widths",
    "olmo2": "norms behind each block",
    "cohere2": "attention beside the MLP, no positions in full layers",
    "smollm3": "no positions in some layers",
    "glm4": "half of each head rotated, in pairs",
    "phi3": "joined projections",
    "phi3 (longrope)": "a rotation with two factors, in one of which a run is",
    "granite": "multipliers, a scale of its own",
    "granitemoeshared": "shared experts beside routed ones",
    "mixtral": "routed experts",
    "gpt_oss": "attention sinks",
    "deepseek_v3": "latent attention: values narrower than keys",
    "dbrx": "clipped queries, keys and values",
    "gpt2": "learned positions, convolutions as projections",
    "jetmoe": "experts that attend",
    "gemma4_unified_text (one width)": "images seen in both directions, text causally",
    "falcon": "attention looked up among its own classes",
    "bloom": "ALiBi",
    "stablelm": "attention of its own, not through transformers' interface",
    "bamba": "state-space layers",
}


def types() -> list[str]:
    """Every type that the causal mapping knows."""
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING]


def left_out(model_type: str) -> str | None:
    """Why a type is no decoder-only language model of its own, or None if it is."""
    kind = CONFIG_MAPPING[model_type]
    if kind.is_encoder_decoder:
        return "decoders of an encoder-decoder"
    if model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return "encoders"
    if {"text_config", "decoder"} & {*kind.sub_configs}:
        return "wrappers of several models"
    return None if kind.model_type == model_type else "second names"


def cells() -> list[str]:
    """A name for each decoder-only type, and for each variant of one."""
    decoders = [name for name in types() if left_out(name) is None]
    return [*decoders, *(name for name, (of, _) in VARIANTS.items() if of in decoders)]


def outside() -> dict[str, str]:
    """The other types, each with what it is."""
    return {name: f"left out: {why}" for name in types() if (why := left_out(name))}


def tiny_config(cell: str) -> transformers.PreTrainedConfig:
    """The config of a cell, small."""
    model_type, settings = VARIANTS.get(cell, (cell, {}))
    given = transformers.AutoConfig.for_model(model_type).to_dict()
    tokenizer = tiny_tokenizer()
    tokens = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    special = SETTINGS.get(model_type, {}) | settings
    small = _small(given, special.get("num_hidden_layers", NUM_LAYERS))
    if "kv_lora_rank" in small:  # one latent vector for all heads: as many of keys as of queries
        small["num_key_value_heads"] = small["num_attention_heads"]
    small |= tokens | {"tie_word_embeddings": False} | special
    return transformers.AutoConfig.for_model(small.pop("model_type"), **small)


def _small(given: dict[str, Any], depth: int) -> dict[str, Any]:
    layers = next((given[name] for name in DEPTHS if isinstance(given.get(name), int)), None)
    return {name: _smaller(name, value, layers, depth) for name, value in given.items() if name not in RECORDS}


def _smaller(name: str, value: Any, layers: int | None, depth: int) -> Any:
    if isinstance(value, dict):
        return value if name in ("rope_parameters", "rope_scaling") else _small(value, depth)
    if isinstance(value, list) and layers and len(value) == layers:  # an item a layer: one of each kind, in turn
        kinds = list(dict.fromkeys(value))
        return [_smaller(name, kinds[i % len(kinds)], None, depth) for i in range(depth)]
    if name.endswith("token_id"):
        return 0 if isinstance(value, int) else value
    if name in DEPTHS:
        return depth
    if name in DERIVED and value is None:
        value = 1
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return value
    return next((size for pattern, size in RULES if re.fullmatch(pattern, name)), value)


def tiny_model(config: transformers.PreTrainedConfig, seed: int = 0) -> transformers.PreTrainedModel:
    """With the family's own attention, and weights of which none can be left out unseen."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        for tensor in (*model.parameters(), *(b for name, b in model.named_buffers() if "bias" in name)):
            if tensor.is_floating_point():
                draw(tensor.data)
    return model.eval()


def draw(tensor: torch.Tensor) -> None:
    """Matrices keep the size of what they multiply; what began at one value (norms, biases, sinks) is spread."""
    if tensor.ndim > 1 and tensor.std() > 0:
        tensor.normal_(std=GAIN * tensor.shape[-1] ** -0.5)
    else:
        tensor.add_(0.3 * torch.randn_like(tensor))
