# SPDX-License-Identifier: Apache-2.0
"""A reward model: a sequence classifier with one label, whose logit is the reward of prompt and completion.

Chats go through the reward model's own chat template; of plain text, prompt and completion are put together. A text
that is longer than the model reads is not cut but counted as failed. On a GPU its weights are there only while it
grades, so that rollouts and updates have the memory; the way there and back takes about a second for ten gigabytes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import transformers

from sparse_rl.grading import Failed

BATCH = 16  # texts a forward
ENDLESS = 1 << 30


class RewardModel:
    """Grades with the model in a folder or of a hub name; its rewards go by the last part of that name."""

    def __init__(self, path: str, device: str | None = None) -> None:
        self.__name__ = Path(path).name
        self.path, self.device = path, device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
            model, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
                path, dtype="auto", output_loading_info=True
            )
            torch.empty(0, device=self.device)
        except (OSError, ValueError, RuntimeError, AssertionError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise ValueError(f"reward model {path!r} cannot be loaded on {self.device!r} ({reason}).") from error
        if model.config.num_labels != 1:
            raise ValueError(
                f"reward model {path!r} has {model.config.num_labels} labels; a reward is one number, so give a "
                "sequence classifier with one label."
            )
        if loading["missing_keys"]:
            missing = sorted(loading["missing_keys"])[0]
            raise ValueError(f"reward model {path!r} has no weights for {missing}; give a trained classifier.")
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.tokenizer.padding_side = "right"
        model.config.pad_token_id = self.tokenizer.pad_token_id  # how it finds the last token
        self.model = model.eval().requires_grad_(False)

    @property
    def context(self) -> int:
        """Most tokens it reads."""
        positions = getattr(self.model.config, "max_position_embeddings", None) or ENDLESS
        return int(min(positions, self.tokenizer.model_max_length))

    @torch.no_grad()
    def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | Failed | None]:
        texts = [self._ids(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        rewards: list[float | Failed | None] = [None] * len(texts)
        for i, ids in enumerate(texts):
            if not 0 < len(ids) <= self.context:
                rewards[i] = Failed(f"{len(ids)} tokens, and the reward model reads 1 to {self.context}")
        order = sorted((i for i in range(len(texts)) if rewards[i] is None), key=lambda i: len(texts[i]))
        try:
            self.model.to(self.device)
            for start in range(0, len(order), BATCH):
                chosen = order[start : start + BATCH]
                for i, reward in zip(chosen, self._logits([texts[i] for i in chosen]), strict=True):
                    rewards[i] = reward if math.isfinite(reward) else Failed(f"the reward model says {reward}")
        finally:  # after an error too: whoever mends it needs the memory
            if torch.device(self.device).type == "cuda":
                self.model.to("cpu")
                torch.cuda.empty_cache()
        return rewards

    def _logits(self, texts: list[list[int]]) -> list[float]:
        batch = self.tokenizer.pad({"input_ids": texts}, return_tensors="pt").to(self.device)
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        values: list[float] = logits[:, 0].float().tolist()
        return values

    def _ids(self, prompt: Any, completion: Any) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt + completion).input_ids)
        if self.tokenizer.chat_template is None:
            raise ValueError(f"reward model {self.path!r} has no chat template, but the prompts are chats")
        text = self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)
