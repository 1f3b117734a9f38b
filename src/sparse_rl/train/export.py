# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as a plain Hugging Face model: adapters merged, fp32 weights rounded once, what resumes left behind."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from sparse_rl.model import lora, rope, wrappers
from sparse_rl.model.load import load, recorded
from sparse_rl.runfolder import publish, remove, unfinished
from sparse_rl.specs import first_line
from sparse_rl.train import checkpoint


def export(folder: Path, output: Path, dtype: torch.dtype | None = None) -> None:
    """Write the model of a checkpoint, or of a folder with an adapter, to a new folder; all of it or nothing.

    Without a dtype: that of the run, or of the base model. A wider one is filled from the run's fp32 weights.
    """
    if output.exists():
        raise ValueError(f"{output} exists and is not overwritten; choose another name or remove it.")
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give a checkpoint of a run, like runs/first/checkpoint-10.")
    model, tokenizer = _model(folder, dtype)
    temporary = unfinished(output.with_name(f".{output.name}"))  # a name that nobody gives
    remove(temporary)  # what a kill has left
    try:
        tokenizer.save_pretrained(temporary)
        wrappers.save(model, temporary)
        rope.save(recorded(str(folder)), temporary)
        publish(temporary, output)
    except checkpoint.FULL_DISK as error:
        reason = first_line(error)
        raise OSError(
            f"{output} could not be written ({reason}); make room on the disk, or choose another place."
        ) from error
    finally:
        remove(temporary)


def _model(
    folder: Path, dtype: torch.dtype | None
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    adapted, of_a_run = (folder / lora.ADAPTER).is_file(), (folder / checkpoint.STATE).is_file()
    if adapted and not of_a_run:
        loaded = load(str(folder), dtype=dtype)
        return loaded.model, loaded.tokenizer
    settings = checkpoint.read_state(folder)["settings"]
    trained = getattr(torch, settings["dtype"])
    masters, dtype = checkpoint.read_masters(folder), dtype or trained
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if adapted:
        model = load(lora.base_name(folder), dtype=trained).model
        lora.merge(model, folder, dtype=dtype, masters=masters)
        return model, tokenizer
    model = wrappers.causal_lm(transformers.AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(masters.get(name, parameter))
    return model, tokenizer
