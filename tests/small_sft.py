# SPDX-License-Identifier: Apache-2.0
"""A supervised run of a second on the tiny model."""

from __future__ import annotations

import torch

from sparse_rl.model.dry_run import dry_run
from sparse_rl.model.load import LoadedModel
from sparse_rl.model.tiny import tiny_model, tiny_tokenizer
from sparse_rl.tasks.supervised import Example, Examples, make_example
from sparse_rl.train import OptimizerConfig, SFTConfig, SFTTrainer
from sparse_rl.train.sft import end_ids

TEXTS = {"one and one is": " two", "the sky is": " blue, mostly", "abc": "def", "sparse": " caches, dense learners"}
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, schedule="linear", warmup=2)


def fresh(family: str = "llama", dtype: torch.dtype = torch.float32, **overrides) -> LoadedModel:
    """A tiny model that nobody else trains."""
    model = tiny_model(family, dtype=dtype, **overrides)
    return LoadedModel(model=model, tokenizer=tiny_tokenizer(), shape=dry_run(model))


def rows(loaded: LoadedModel, texts: dict[str, str] = TEXTS) -> list[Example]:
    pairs = [{"prompt": prompt, "completion": completion} for prompt, completion in texts.items()]
    return [make_example(pair, f"row {i}", loaded.tokenizer, end_ids(loaded)) for i, pair in enumerate(pairs)]


def small_sft(folder, *, loaded=None, observers=(), optimizer=OPTIMIZER, **config) -> SFTTrainer:
    """Four rows to learn, two of them also held out, in bf16."""
    loaded = loaded or fresh(dtype=torch.bfloat16, num_hidden_layers=2)
    examples = rows(loaded)
    settings = {"steps": 6, "rows_per_step": 3, "eval_every": 2, "save_every": 1, "output_dir": str(folder)}
    return SFTTrainer(
        loaded,
        Examples(train=examples, eval=examples[:2]),
        config=SFTConfig(**(settings | config)),
        optimizer=optimizer,
        observers=observers,
    )
