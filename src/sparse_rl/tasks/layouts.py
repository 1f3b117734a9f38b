# SPDX-License-Identifier: Apache-2.0
"""Which of a row's columns is the prompt, and which the answer.

    trl       {"prompt": string or messages, ...}, or {"messages": [..., the answer to imitate]}; nothing is renamed
    verl      {"prompt": messages, "reward_model": {"ground_truth": ...}, "data_source": ..., "extra_info": ...}
    slime     {"prompt" or "text": string or messages, "label": ..., "metadata": ...}
    problem   {"problem" or "question": string, "answer": ...}: text that a template makes a prompt of

The answer becomes the column `answer`; all other columns go to the reward functions under their own names.

Rows are read in `files.py`; a prompt becomes tokens in `prompts.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sparse_rl.specs import suggestion
from sparse_rl.tasks.files import Row

MISSING = object()


@dataclass(frozen=True, slots=True)
class Layout:
    """The keys of a prompt, of which a row has one, and of its answer; a dot leads into a table."""

    name: str
    prompts: tuple[str, ...]
    answer: str | None = None
    templated: bool = False  # a string is a problem, not yet a prompt

    def fits(self, columns: dict[str, Any]) -> bool:
        has_prompt = any(find(columns, key) is not MISSING for key in self.prompts)
        return has_prompt and (self.answer is None or find(columns, self.answer) is not MISSING)

    def split(self, row: Row) -> tuple[str | list[Any], dict[str, Any]]:
        """The prompt as the row has it, and the columns."""
        present = [key for key in self.prompts if find(row.columns, key) is not MISSING]
        key = (present or self.prompts)[0]
        prompt = find(row.columns, key)
        kinds = "string" if self.templated else "string or a list of messages"
        if not isinstance(prompt, str if self.templated else str | list):
            wanted = " or ".join(f'"{name}"' for name in present[:1] or self.prompts)
            raise ValueError(f"{row.where} has no {wanted} that is a {kinds}; mend or remove it{self._said()}.")
        if key == "messages" and isinstance(prompt, str):
            raise ValueError(f'{row.where} has "messages" that are a text, not a list; CSV has no lists, JSONL does.')
        if self.templated and not prompt.strip():
            raise ValueError(f'{row.where} has an empty "{key}"; mend or remove it.')
        columns = {name: value for name, value in row.columns.items() if name != key}
        if self.answer is not None:
            answer = find(row.columns, self.answer)
            if answer is MISSING or answer is None:
                raise ValueError(f'{row.where} has no "{self.answer}"; mend or remove it{self._said()}.')
            columns["answer"] = answer
        if key == "messages" and isinstance(prompt, list) and is_answer(prompt):
            prompt, columns["completion"] = prompt[:-1], prompt[-1].get("content")
        return prompt, columns

    def _said(self) -> str:
        return f" (the layout is {self.name})"


# In the order in which they are looked for.
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("verl", ("prompt",), "reward_model.ground_truth"),
        Layout("slime", ("prompt", "text"), "label"),
        Layout("trl", ("prompt", "messages")),
        Layout("problem", ("problem", "question"), "answer", templated=True),
    )
}
KEYS = [*dict.fromkeys(key for layout in LAYOUTS.values() for key in layout.prompts), "label", "answer"]


def choose_layout(name: str, prompt_key: str | None, answer_key: str | None, first: Row) -> Layout:
    """The layout of that name, or for "auto" the one that the first row has; keys that are given replace its own."""
    name = "trl" if name == "auto" and prompt_key else name
    layout = _recognise(first) if name == "auto" else LAYOUTS[name]
    layout = replace(layout, prompts=(prompt_key,)) if prompt_key else layout
    return replace(layout, answer=answer_key) if answer_key else layout


def find(columns: dict[str, Any], key: str) -> Any:
    """The value under a key, or under a path of keys with dots; MISSING if there is none."""
    if key in columns:
        return columns[key]
    first, dot, rest = key.partition(".")
    inner = columns.get(first)
    return find(inner, rest) if dot and isinstance(inner, dict) else MISSING


def _recognise(row: Row) -> Layout:
    for layout in LAYOUTS.values():
        if layout.fits(row.columns) and not (layout.name == "slime" and "answer" in row.columns):
            return layout
    for name, value in row.columns.items():
        if isinstance(value, list) and value and isinstance(value[0], dict) and {"from", "value"} <= value[0].keys():
            raise ValueError(
                f'{row.where} has "{name}" of "from" and "value"; write them as "messages" of "role" (system, user or '
                'assistant) and "content".'
            )
    hints = (suggestion(name, KEYS) for name in row.columns if name not in KEYS)
    separated = row.where.endswith((".csv", ".tsv"))
    header = " (its first line is read as their names)" if separated else ""
    raise ValueError(
        f"{row.where} has the columns {', '.join(row.columns) or 'none at all'}{header}, which fit no layout"
        f"{next(filter(None, hints), '')}; name them with --task.prompt_key and --task.answer_key."
    )


def is_answer(messages: list[Any]) -> bool:
    return bool(messages) and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant"
