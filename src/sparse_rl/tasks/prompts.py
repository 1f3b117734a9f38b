# SPDX-License-Identifier: Apache-2.0
"""From a row to the tokens a rollout starts from.

What files a row may come from is in `files.py`, how it is graded in `rewards.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import transformers

from sparse_rl.tasks.base import GIVEN
from sparse_rl.tasks.templates import TEMPLATES, Template
from sparse_rl.types import Prompt

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_LEFT_OUT = 0.1  # share of the rows that may be too long


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How prompts are written: a template for those that are strings, and a system message."""

    template: Template | None = None
    system: str | None = None

    def write(self, prompt: str | list[Any], where: str) -> str | list[Any]:
        """The prompt with template and system message."""
        if isinstance(prompt, str) and self.template is not None:
            if self.system and not self.template.chat:
                raise ValueError(
                    f"{where}: the template is plain text, which has no place for a system message; leave it out, or "
                    "write it into a template of your own."
                )
            return self.template.prompt(prompt, self.system)
        if self.template is not None:
            raise ValueError(f"{where} is a list of messages, and a template takes a string; leave out the template.")
        if self.system is None:
            return prompt
        if isinstance(prompt, str):
            raise ValueError(f"{where} is plain text, and a system message needs a chat; give a template as well.")
        has_one = bool(prompt) and isinstance(prompt[0], dict) and prompt[0].get("role") == "system"
        return [{"role": "system", "content": self.system}, *(prompt[1:] if has_one else prompt)]


def named_template(name: str) -> Template:
    """A template by its name, or a text with {problem} in it, as a user's turn."""
    if name not in TEMPLATES and "{problem}" not in name:
        known = ", ".join(TEMPLATES)
        raise ValueError(f"template {name!r} is none of {known}; choose one, or write a text with {{problem}} in it.")
    return TEMPLATES.get(name) or Template(name)


def find_template(name: str, tokenizer: transformers.PreTrainedTokenizerBase) -> Template:
    """The template as a model gets it, in training and in evaluation.

    Without a chat template, the turns of a named one are lines of plain text, and a user's own text is what it says.
    """
    template = named_template(name)
    if tokenizer.chat_template or not template.chat:
        return template
    return replace(template, lines=True) if name in TEMPLATES else replace(template, chat=False)


def default_template(tokenizer: transformers.PreTrainedTokenizerBase) -> Template:
    """A user's turn where the tokenizer has a chat template, else the text and a new line."""
    return find_template("chat", tokenizer)


def as_turn(text: str, tokenizer: transformers.PreTrainedTokenizerBase) -> str | list[dict[str, str]]:
    """A problem as the default template has it."""
    return default_template(tokenizer).prompt(text)


def make_prompt(
    row: Any,
    where: str,
    tokenizer: transformers.PreTrainedTokenizerBase,
    chat_template_kwargs: dict[str, Any] | None = None,
    own: str | None = None,
) -> Prompt:
    """A row with a "prompt", a string or a list of messages, as a prompt; `where` names it in errors.

    own: what stands in the file, where a template of --task.template made the prompt of it
    """
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str | list):
        raise ValueError(f'{where} has no "prompt" that is a string or a list of messages; mend or remove it.')
    columns = {key: value for key, value in row.items() if key != "prompt"}
    for name in GIVEN:
        if name in columns:
            raise ValueError(f"{where} has a column {name!r}, a name that reward functions know otherwise; rename it.")
    messages = prompt if isinstance(prompt, list) else []
    chat = isinstance(prompt, list)
    if prompt == []:
        raise ValueError(f"{where} is a chat without messages; mend or remove it.")
    for number, message in enumerate(messages, start=1):
        if (missing := _missing(message)) is not None:
            raise ValueError(f'{where}: message {number} has no "{missing}"; a message needs a "role" and a "content".')
    if chat and tokenizer.chat_template is None:
        raise ValueError(
            f"{where} is a list of messages, but the model has no chat template; give a model with one, such as "
            "smollm2, or prompts that are strings."
        )
    options = {"add_generation_prompt": True, **(chat_template_kwargs or {}), "tokenize": False}
    try:
        text = str(tokenizer.apply_chat_template(messages, **options) if chat else prompt)
        ids = tuple(tokenizer(text, add_special_tokens=not chat).input_ids)
    except Exception as error:  # a template's own complaint, or text that is not Unicode
        what = "the model's chat template refuses" if chat else "the tokenizer cannot read"
        raise ValueError(f"{where}: {what} it ({type(error).__name__}: {error}); mend it.") from error
    if not ids:
        raise ValueError(f"{where}: the prompt is empty; mend or remove it.")
    check_known(text, ids, where, tokenizer, None if chat else own)
    return Prompt(ids=ids, text=text, messages=tuple(messages), columns=columns)


def _missing(message: Any) -> str | None:
    """What a chat's message lacks: a role, or a content; calls of tools may do without the latter."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return "role"
    return "content" if message.get("content") is None and not message.get("tool_calls") else None


def check_known(
    text: str,
    ids: tuple[int, ...] | list[int],
    where: str,
    tokenizer: transformers.PreTrainedTokenizerBase,
    own: str | None = None,
) -> None:
    """Refuse text that the tokenizer has no tokens for: the model would read something else.

    own: what stands in the file, where a template added the rest
    """
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown not in ids or str(tokenizer.unk_token) in text:
        return
    strange = "".join(c for c in dict.fromkeys(text) if unknown in tokenizer(c, add_special_tokens=False).input_ids)
    if not strange:  # the token may also stand for something else, such as the beginning
        return
    vocab = tokenizer.get_vocab()
    known = f", which knows only {''.join(sorted(vocab, key=vocab.__getitem__))!r}" if len(vocab) < 100 else ""
    from_row = "".join(c for c in strange if own is None or c in own)
    if not from_row:
        raise ValueError(
            f"{where}: the template adds {strange!r}, unknown to the model's tokenizer{known}; give --task.template "
            "'{problem}', which adds nothing, or a model that can read it, such as smollm2 or one of the hub."
        )
    raise ValueError(
        f"{where} has {from_row!r}, unknown to the model's tokenizer{known}; give a model that can read it, such as "
        "smollm2 or one of the hub, or rewrite it."
    )


def too_long(items: dict[str, T], length: Callable[[T], int], limit: int, remedy: str) -> list[str]:
    """The places of the items with more than `limit` tokens, which are to be left out; raises if it is many."""
    found = [where for where, item in items.items() if length(item) > limit]
    if len(found) > MAX_LEFT_OUT * len(items):
        raise ValueError(f"{_said(found, items, limit)}; {remedy}, or shorten or remove them.")
    return found


def short_enough(items: dict[str, T], length: Callable[[T], int], limit: int, remedy: str) -> list[T]:
    """The items that are not `too_long`; says how many are left out."""
    left_out = too_long(items, length, limit, remedy)
    if left_out:
        logger.warning("%s; they are left out.", _said(left_out, items, limit))
    gone = set(left_out)
    return [item for where, item in items.items() if where not in gone]


def _said(found: list[str], items: dict[str, T], limit: int) -> str:
    return f"{len(found)} of {len(items)} rows have more than {limit} tokens, the first in {found[0]}"
