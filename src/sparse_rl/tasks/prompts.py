# SPDX-License-Identifier: Apache-2.0
"""From a row to the tokens a rollout starts from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from sparse_rl.tasks.base import GIVEN
from sparse_rl.tasks.templates import TEMPLATES, Template
from sparse_rl.types import Prompt

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_LEFT_OUT = 0.1  # share of the rows that may be too long


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How prompts are written: a template for those that are strings, a system message, the chat template's options."""

    template: Template | None = None
    system: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def write(self, prompt: str | list[Any], where: str) -> str | list[Any]:
        """The prompt with template and system message."""
        if isinstance(prompt, str) and self.template is not None:
            prompt = self.template.prompt(prompt, self.system)
            if self.system and isinstance(prompt, str):
                raise ValueError(f"{where}: the template is plain text, which has no place for a system message.")
            return prompt
        if self.template is not None:
            raise ValueError(f"{where} is a list of messages, and a template takes a string; leave out the template.")
        if self.system is None:
            return prompt
        if isinstance(prompt, str):
            raise ValueError(f"{where} is plain text, and a system message needs a chat; give a template as well.")
        has_one = bool(prompt) and isinstance(prompt[0], dict) and prompt[0].get("role") == "system"
        return [{"role": "system", "content": self.system}, *(prompt[1:] if has_one else prompt)]


def find_template(name: str, tokenizer: PreTrainedTokenizerBase) -> Template:
    """A template by its name, or a text with {problem} in it: a user's turn where the tokenizer has a chat template."""
    if name in TEMPLATES:
        template = TEMPLATES[name]
        if template.chat and not tokenizer.chat_template:
            plain = ", ".join(key for key, value in TEMPLATES.items() if not value.chat)
            raise ValueError(
                f"the template {name!r} makes a chat, but the model has no chat template; choose {plain}, or write a "
                "text with {problem} in it."
            )
        return template
    if "{problem}" not in name:
        known = ", ".join(TEMPLATES)
        raise ValueError(f"template {name!r} is none of {known}; choose one, or write a text with {{problem}} in it.")
    return Template(name, chat=bool(tokenizer.chat_template))


def default_template(tokenizer: PreTrainedTokenizerBase) -> Template:
    """A user's turn where the tokenizer has a chat template, else the text and a new line."""
    return TEMPLATES["chat" if tokenizer.chat_template else "plain"]


def as_turn(text: str, tokenizer: PreTrainedTokenizerBase) -> str | list[dict[str, str]]:
    """A problem as the default template has it."""
    return default_template(tokenizer).prompt(text)


def make_prompt(
    row: Any, where: str, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict[str, Any] | None = None
) -> Prompt:
    """A row with a "prompt", a string or a list of messages, as a prompt; `where` names it in errors."""
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str | list):
        raise ValueError(f'{where} has no "prompt" that is a string or a list of messages; mend or remove it.')
    columns = {key: value for key, value in row.items() if key != "prompt"}
    for name in GIVEN:
        if name in columns:
            raise ValueError(f"{where} has a column {name!r}, a name that reward functions know otherwise; rename it.")
    messages = prompt if isinstance(prompt, list) else []
    chat = isinstance(prompt, list)
    if chat and tokenizer.chat_template is None:
        raise ValueError(f"{where} is a list of messages, but the model has no chat template; give it as a string.")
    if prompt == []:
        raise ValueError(f"{where} is a chat without messages; mend or remove it.")
    options = {"add_generation_prompt": True, **(chat_template_kwargs or {}), "tokenize": False}
    try:
        text = str(tokenizer.apply_chat_template(messages, **options) if chat else prompt)
        ids = tuple(tokenizer(text, add_special_tokens=not chat).input_ids)
    except Exception as error:  # a template's own complaint, or text that is not Unicode
        what = "the model's chat template refuses" if chat else "the tokenizer cannot read"
        raise ValueError(f"{where}: {what} it ({type(error).__name__}: {error}); mend it.") from error
    if not ids:
        raise ValueError(f"{where} is empty; mend or remove it.")
    check_known(text, ids, where, tokenizer)
    return Prompt(ids=ids, text=text, messages=tuple(messages), columns=columns)


def check_known(text: str, ids: tuple[int, ...] | list[int], where: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse text that the tokenizer has no tokens for: the model would read something else."""
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown not in ids or str(tokenizer.unk_token) in text:
        return
    strange = "".join(c for c in dict.fromkeys(text) if unknown in tokenizer(c, add_special_tokens=False).input_ids)
    if not strange:  # the token may also stand for something else, such as the beginning
        return
    vocab = tokenizer.get_vocab()
    known = f", which knows only {''.join(sorted(vocab, key=vocab.__getitem__))!r}" if len(vocab) < 100 else ""
    raise ValueError(f"{where} has {strange!r}, unknown to the model's tokenizer{known}; rewrite it.")


def short_enough(items: dict[str, T], length: Callable[[T], int], limit: int, remedy: str) -> list[T]:
    """The items, by their place, of at most `limit` tokens; says how many are left out, and raises if it is many."""
    too_long = [where for where, item in items.items() if length(item) > limit]
    if too_long:
        found = f"{len(too_long)} of {len(items)} rows have more than {limit} tokens, the first in {too_long[0]}"
        if len(too_long) > MAX_LEFT_OUT * len(items):
            raise ValueError(f"{found}; {remedy}, or shorten or remove them.")
        logger.warning("%s; they are left out.", found)
    return [item for item in items.values() if length(item) <= limit]
