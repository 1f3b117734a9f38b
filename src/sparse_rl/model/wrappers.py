# SPDX-License-Identifier: Apache-2.0
"""Text models inside multimodal wrappers (Gemma 3, Mistral 3, Qwen-VL, GLM-4V): taken out at load, put back on export.

transformers loads the wrapper, so its own rules say which tensor of the files is which weight. The text module that it
builds becomes a causal language model together with the wrapper's head. The config of that model says in `wrapped_in`
which wrapper it is from, and export writes the trained weights under the names that the wrapper's files have.
"""

from __future__ import annotations

import importlib
import json
import logging
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from safetensors.torch import load_file

from sparse_rl.model import dequantise
from sparse_rl.model.attention import UnsupportedModelError, registered
from sparse_rl.specs import first_line

logger = logging.getLogger(__name__)

FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")  # of a wrapper on the hub
BESIDE = ("*processor*.json", "*.jinja", "chat_template.json")  # those that export copies
PROBE = 6  # tokens


def is_wrapper(config: Any) -> bool:
    return hasattr(config, "text_config") and type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def causal_lm(config: Any) -> Any:
    """What makes a causal language model of a config: the library's, or for a bare text module one of ours."""
    kind: Any = type(config)
    known = kind in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or kind not in transformers.MODEL_MAPPING
    inner: Any = None if known else transformers.MODEL_MAPPING[kind]
    if inner is None or not inner.__name__.endswith("TextModel"):
        return transformers.AutoModelForCausalLM
    return _with_head(inner, kind)


@lru_cache
def _with_head(inner: Any, kind: type) -> type[transformers.PreTrainedModel]:
    """A class that puts a head on a text module."""

    class TextForCausalLM(inner.__base__, transformers.GenerationMixin):  # type: ignore[misc]
        __module__ = inner.__module__  # whose source the library reads to learn what can be set
        config_class = kind
        base_model_prefix = "model"

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = inner(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(
            self,
            input_ids: torch.Tensor | None = None,
            attention_mask: Any = None,
            position_ids: torch.Tensor | None = None,
            logits_to_keep: int | torch.Tensor = 0,
            **kwargs: Any,
        ) -> Any:
            outputs = self.model(input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            return transformers.modeling_outputs.CausalLMOutputWithPast(
                logits=self.lm_head(outputs.last_hidden_state[:, kept]), past_key_values=outputs.past_key_values
            )

    TextForCausalLM._tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    TextForCausalLM.from_config = TextForCausalLM._from_config
    TextForCausalLM.__name__ = TextForCausalLM.__qualname__ = inner.__name__.removesuffix("Model") + "ForCausalLM"
    return TextForCausalLM


def load_text(name: str, **settings: Any) -> tuple[transformers.PreTrainedModel, list[str], list[str]]:
    """The text model of a wrapper's folder or hub name, and the names of its missing and of its unused weights."""
    loaded: Any = transformers.AutoModelForImageTextToText.from_pretrained(name, output_loading_info=True, **settings)
    wrapper, report = loaded
    model = text_of(wrapper)
    path, head = (path_of(wrapper, part) for part in (wrapper.get_decoder(), wrapper.get_output_embeddings()))
    model.config.wrapped_in = {"name": lasting_name(name), "text": path}
    model.config.name_or_path = name
    model.generation_config = wrapper.generation_config
    names = [f"{name}." for name, _ in wrapper.named_modules() if name and name != head]
    others = tuple(name for name in names if not name.startswith(f"{path}.") and not f"{path}.".startswith(name))
    unused = [key for key in report["unexpected_keys"] if not key.startswith(others)]
    if not report["missing_keys"]:
        _check_logits(wrapper.eval(), model)
    return model, sorted(report["missing_keys"]), sorted(unused)


def text_of(wrapper: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """A causal language model of a wrapper's own text module and head."""
    text: Any = wrapper.get_decoder()
    head: Any = wrapper.get_output_embeddings()
    config = text.config
    config.tie_word_embeddings = head.weight is text.get_input_embeddings().weight  # the wrapper's config decides
    with torch.device("meta"):
        model: Any = causal_lm(config).from_config(config)
    model.config = config  # the text module's own, not a copy
    setattr(model, model.base_model_prefix, text)
    model.set_output_embeddings(head)
    if {*map(id, model.parameters())} != {*map(id, text.parameters()), *map(id, head.parameters())}:
        raise UnsupportedModelError(f"{type(model).__name__} has weights that {type(wrapper).__name__} has not.")
    assert isinstance(model, transformers.PreTrainedModel)
    return model


def path_of(model: Any, part: Any) -> str:
    return next(str(name) for name, module in model.named_modules() if module is part)


@torch.no_grad()
def _check_logits(wrapper: Any, model: Any) -> None:
    """Text alone must get the wrapper's logits: its positions, scales and caps are then those of the text model."""
    ids = torch.arange(PROBE)[None] % model.config.vocab_size
    wrapper.set_attn_implementation("eager")
    model.set_attn_implementation("eager")
    outer, inner = (module.eval()(input_ids=ids, use_cache=False).logits for module in (wrapper, model))
    model.set_attn_implementation(registered())
    if (outer - inner).abs().mean() > 1e-3 * outer.std():
        raise UnsupportedModelError(f"{type(wrapper).__name__} gives text other logits than {type(model).__name__}.")


def prefixes(model: transformers.PreTrainedModel) -> tuple[str, str]:
    """How the names of the text module's parts begin in the model, and in its wrapper if it has one."""
    inside = f"{model.base_model_prefix}."
    wrapped_in = getattr(model.config, "wrapped_in", None)
    return inside, f"{wrapped_in['text']}." if wrapped_in else inside


def lasting_name(name: str | None) -> str | None:
    """A model's name that means the same from every working folder."""
    return str(Path(name).resolve()) if name and Path(name).is_dir() else name


def save(model: transformers.PreTrainedModel, folder: Path) -> None:
    """In Hugging Face layout; the text model of a wrapper as that wrapper again, if it can still be found."""
    wrapped_in = getattr(model.config, "wrapped_in", None)
    if wrapped_in is None:
        model.save_pretrained(folder)
        return
    try:
        source = _source(wrapped_in["name"])
    except Exception as error:  # whatever the hub or the file system says
        logger.warning(
            "%s, which has the tensors that were not trained, is gone (%s); the text model is exported alone. Bring it "
            "back to export the whole.",
            wrapped_in["name"],
            first_line(error),
        )
        del model.config.wrapped_in
        model.save_pretrained(folder)
        return
    _save_wrapper(model, source, folder)
    for pattern in BESIDE:
        for file in source.glob(pattern):
            if not (folder / file.name).exists():
                shutil.copy(file, folder)


def _source(name: str) -> Path:
    folder = Path(name)
    if not folder.is_absolute():
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=[*FILES]))
    if not (folder / "config.json").is_file():
        raise FileNotFoundError("there is no config.json")
    return folder


def _save_wrapper(model: transformers.PreTrainedModel, source: Path, folder: Path) -> None:
    """The wrapper of `source` with the model's weights; every other tensor as the files of `source` have it."""
    to_files = importlib.import_module("transformers.core_model_loading").revert_weight_conversion
    config: Any = transformers.AutoConfig.from_pretrained(source)
    quantised = dequantise.ask_for_plain_weights(config, str(source))
    with dequantise.cut_blocks(config):
        wrapper: Any = transformers.AutoModelForImageTextToText.from_pretrained(source, config=config, dtype="auto")
    if quantised:
        dequantise.finish(wrapper, None)
    pairs = (
        (wrapper.get_decoder(), model.base_model),
        (wrapper.get_output_embeddings(), model.get_output_embeddings()),
    )
    trained = {
        f"{path_of(wrapper, outer)}.{name}": tensor
        for outer, inner in pairs
        for name, tensor in inner.state_dict().items()
    }
    own = wrapper.state_dict()
    strange = [name for name, tensor in trained.items() if name not in own or own[name].shape != tensor.shape]
    if strange:
        raise ValueError(f"{source} is not the model that was trained: {strange[0]} does not fit; put that one there.")
    others = {name: tensor for name, tensor in own.items() if name not in trained}
    state = to_files(wrapper, trained)
    state |= (None if quantised else _stored(source, state)) or to_files(wrapper, others)
    wrapper.to(model.dtype)  # what its config will say
    wrapper.save_pretrained(folder, state_dict=state, save_original_format=False)


def _stored(source: Path, trained: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in a folder's safetensors files that were not trained."""
    index = source / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"].values() if index.is_file() else ["model.safetensors"]
    stored: dict[str, torch.Tensor] = {}
    for file in sorted({source / name for name in names}):
        if file.is_file():
            stored |= {name: tensor for name, tensor in load_file(file).items() if name not in trained}
    return stored
