# SPDX-License-Identifier: Apache-2.0
"""What a call of the engine asks for: prompts as tokens, checked against the model, and a sequence for each sample.

Whether they fit the pool is the engine's question.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from sparse_rl.kernels.sampling import request_key
from sparse_rl.model.load import LoadedModel
from sparse_rl.rollout.sampler import Sampling
from sparse_rl.rollout.sequence import Sequence
from sparse_rl.types import Prompt

MAX_REQUESTS = 1 << 22  # of a call


def read_prompts(loaded: LoadedModel, prompts: SequenceOf[Prompt | str | SequenceOf[int]]) -> list[Prompt]:
    """Text and token ids as prompts."""
    if isinstance(prompts, str):
        raise ValueError("prompts is one string; give a list of prompts.")
    return [_prompt(loaded, prompt, i) for i, prompt in enumerate(prompts)]


def _prompt(loaded: LoadedModel, prompt: Prompt | str | SequenceOf[int], index: int) -> Prompt:
    if isinstance(prompt, str):
        prompt = Prompt(ids=tuple(loaded.tokenizer(prompt).input_ids), text=prompt)
    elif not isinstance(prompt, Prompt):
        prompt = Prompt(ids=tuple(int(token) for token in prompt))
    if not prompt.ids:
        raise ValueError(f"prompt {index} is empty; give it at least one token.")
    if prompt.max_tokens is not None and prompt.max_tokens < 1:
        raise ValueError(f"prompt {index} has max_tokens {prompt.max_tokens}; it must be at least 1.")
    return prompt


def check_request(loaded: LoadedModel, prompts: list[Prompt], sampling: Sampling, first: int) -> None:
    """Raise if the model cannot answer these prompts under these settings."""
    if not isinstance(sampling, Sampling):
        raise ValueError(
            f"sampling is a {type(sampling).__name__}, but all prompts of a call share one Sampling; make a call for "
            "each."
        )
    vocabulary = loaded.vocab_size
    if (first + len(prompts)) * sampling.n > MAX_REQUESTS:
        raise ValueError(
            f"{first + len(prompts)} prompts with sampling.n {sampling.n} are over {MAX_REQUESTS} samples; ask for "
            "fewer."
        )
    for i, prompt in enumerate(prompts):
        if len(prompt.ids) >= loaded.context:
            raise ValueError(
                f"prompt {i} has {len(prompt.ids)} tokens and the model's context is {loaded.context}, "
                "which leaves no room for an answer; shorten it."
            )
        if not 0 <= min(prompt.ids) <= max(prompt.ids) < vocabulary:
            raise ValueError(
                f"prompt {i} has token ids from {min(prompt.ids)} to {max(prompt.ids)}, but the model has "
                f"{vocabulary} tokens; use the model's own tokenizer."
            )
    for token in sampling.stop_ids or ():
        if not 0 <= token < vocabulary:
            raise ValueError(f"sampling.stop_ids has {token}, but the model has {vocabulary} tokens; leave it out.")
    if sampling.top_logprobs > vocabulary:
        raise ValueError(
            f"sampling.top_logprobs is {sampling.top_logprobs}, but the model has {vocabulary} tokens; ask for fewer."
        )


def sequences_of(loaded: LoadedModel, prompts: list[Prompt], sampling: Sampling, first: int) -> list[Sequence]:
    """`sampling.n` sequences a prompt, no longer than the model's context; `first` is the first prompt's place."""
    return [
        Sequence(
            request=(first + i) * sampling.n + sample,
            prompt_idx=i,
            prompt_len=len(prompt.ids),
            max_tokens=min(
                sampling.max_tokens, prompt.max_tokens or sampling.max_tokens, loaded.context - len(prompt.ids)
            ),
            key=request_key(sampling.seed, (first + i) * sampling.n + sample),
        )
        for i, prompt in enumerate(prompts)
        for sample in range(sampling.n)
    ]
