# SPDX-License-Identifier: Apache-2.0
"""The user's own rows and rewards: prompts from files and datasets, shuffled anew each epoch.

`files` says where rows may lie, `layouts` which of their columns is the prompt, `rewards` which functions have a name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import transformers

from sparse_rl.specs import suggestion
from sparse_rl.tasks.base import ANY_NAME, GIVEN, Reward, Rewards, keywords_of
from sparse_rl.tasks.files import Table, read_table
from sparse_rl.tasks.layouts import LAYOUTS, Layout, choose_layout
from sparse_rl.tasks.prompts import Style, default_template, find_template, make_prompt, short_enough
from sparse_rl.tasks.rewards import REWARDS, build_reward
from sparse_rl.types import Prompt

if TYPE_CHECKING:
    from sparse_rl.tasks.rewards import GradingConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")
OF_TRL = ("trainer_state", "log_extra", "log_metric")  # what TRL's trainer gives a reward function, and no other


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsConfig:
    """Your own prompts and rewards.

    train_file: JSONL, JSON, CSV, TSV, parquet, folder of save_to_disk, hub:NAME, hub:NAME:SPLIT, hub:NAME:CONFIG:SPLIT
    eval_file: the same, for evaluation; without it, nothing is evaluated
    rewards: names with their settings ("math", "overlong:limit=512,buffer=64"), "module:function" or "file.py:function"
    reward_weights: one a function; 1 each, if none are given
    layout: of the rows, trl, verl, slime or problem; auto tells by their columns
    prompt_key: column of the prompt, where the layout has another; a dot leads into a table
    answer_key: column that rewards know as `answer`, where the layout has another; a dot leads into a table
    template: a template's name, or a text with {problem} in it, for prompts that are strings
    system: system message of every chat
    chat_template_kwargs: what the model's chat template should know, as {"enable_thinking": false}
    max_prompt_tokens: rows with longer prompts are left out, a tenth at most; the model's context is always a limit
    """

    name: ClassVar[str] = "rows"

    train_file: str = ""
    eval_file: str | None = None
    rewards: tuple[str, ...] = ()
    reward_weights: tuple[float, ...] = ()
    layout: str = "auto"
    prompt_key: str | None = None
    answer_key: str | None = None
    template: str | None = None
    system: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.train_file:
            raise ValueError("task.train_file is missing; name a file or a dataset with a prompt in every row.")
        if not self.rewards:
            raise ValueError(
                'task.rewards is missing; give names, or functions as "module:function" or "file.py:function".'
            )
        if self.layout not in ("auto", *LAYOUTS):
            raise ValueError(f"task.layout is {self.layout!r}; choose one of auto, {', '.join(LAYOUTS)}.")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError(f"task.max_prompt_tokens is {self.max_prompt_tokens}; it must be at least 1.")

    def build(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        *,
        context: int | None = None,
        grading: GradingConfig | None = None,
    ) -> Rows:
        """Read the files. Prompts must leave room for at least one token in the `context`."""
        rewards = Rewards(tuple(build_reward(spec, grading) for spec in self.rewards), self.reward_weights)
        table = read_table(self.train_file)
        layout = self._layout_of(table)
        train = self._prompts(table, layout, rewards, tokenizer, context)
        if self.template is None and tokenizer.chat_template and not all(prompt.messages for prompt in train):
            logger.info(
                "prompts that are strings go to the model as they are, though it has a chat template; "
                "--task.template chat makes each a user's turn."
            )
        own = [spec for spec in self.rewards if spec.partition(":")[0] not in REWARDS]
        if own and any(prompt.messages for prompt in train):
            logger.info(
                'prompts are chats: %s gets each completion as a list, [{"role": "assistant", "content": ...}].', own[0]
            )
        held_out, layouts = [], {layout.name}
        if self.eval_file:
            other = read_table(self.eval_file)
            other_layout = self._layout_of(other)
            held_out = self._prompts(other, other_layout, rewards, tokenizer, context)
            layouts.add(other_layout.name)
        else:
            logger.info("nothing is held out for evaluation; --task.eval_file names a file of prompts for it.")
        settings = {"name": self.name, **asdict(self), "train_sha256": table.sha256[:16]}
        settings |= {"layout": layout.name} if len(layouts) == 1 else {}  # else each file's own again, if it is resumed
        settings |= {"grading": asdict(grading)} if grading is not None else {}
        return Rows(train, rewards, tokenizer, held_out, settings=settings)

    def _layout_of(self, table: Table) -> Layout:
        return choose_layout(self.layout, self.prompt_key, self.answer_key, table.rows[0])

    def _prompts(
        self,
        table: Table,
        layout: Layout,
        rewards: Rewards,
        tokenizer: transformers.PreTrainedTokenizerBase,
        context: int | None,
    ) -> list[Prompt]:
        template = find_template(self.template, tokenizer) if self.template is not None else None
        if template is not None and template.lines:
            logger.warning("the model has no chat template: task.template %s is plain text here.", self.template)
        if template is None and layout.templated:
            template = default_template(tokenizer)
        style = Style(template=template, system=self.system)
        prompts = {}
        for row in table.rows:
            prompt, columns = layout.split(row)
            written = {**columns, "prompt": style.write(prompt, row.where)}
            text = prompt if isinstance(prompt, str) else None
            prompts[row.where] = make_prompt(written, row.where, tokenizer, self.chat_template_kwargs, text)
        check_columns(prompts, rewards)
        longest = max(len(prompt.ids) for prompt in prompts.values())
        logger.info("%s: %d rows, layout %s, longest prompt %d tokens.", table.name, len(prompts), layout.name, longest)
        limits = [self.max_prompt_tokens, context - 1 if context is not None else None]
        limit = min((limit for limit in limits if limit is not None), default=None)
        if limit is None:
            return list(prompts.values())
        own = limit == self.max_prompt_tokens
        remedy = "raise task.max_prompt_tokens" if own else "give a model with a longer context"
        return short_enough(prompts, lambda prompt: len(prompt.ids), limit, remedy)


class Rows:
    """A task from rows in memory: dicts with a "prompt" and any other columns, or prompts that are ready."""

    def __init__(
        self,
        rows: Sequence[dict[str, Any] | Prompt],
        rewards: Rewards,
        tokenizer: transformers.PreTrainedTokenizerBase,
        eval_rows: Sequence[dict[str, Any] | Prompt] = (),
        settings: dict[str, Any] | None = None,
    ) -> None:
        if not rows:
            raise ValueError("there are no rows to train on.")
        if not isinstance(rewards, Rewards):
            raise ValueError(f"rewards is {rewards!r}; give Rewards((function,)).")
        self.rewards = rewards
        self.settings = settings or {"name": "rows", "rewards": list(rewards.names)}  # what a run's record says of it
        self.train = [_as_prompt(row, f"row {i}", tokenizer) for i, row in enumerate(rows)]
        self.eval = [_as_prompt(row, f"evaluation row {i}", tokenizer) for i, row in enumerate(eval_rows)]

    def stream(self, start: int, count: int, seed: int) -> list[Prompt]:
        return take(self.train, start, count, seed)

    def held_out(self, count: int) -> list[Prompt]:
        return self.eval[:count]


def check_columns(prompts: dict[str, Prompt], rewards: Rewards) -> None:
    """Every function finds the columns it asks for, in at least one row, and in all rows what it can grade."""
    known = dict.fromkeys(column for prompt in prompts.values() for column in prompt.columns)
    for name, function in zip(rewards.names, rewards.functions, strict=True):
        for wanted in _wanted(function):
            if wanted in OF_TRL and wanted not in known:
                raise ValueError(
                    f"reward {name!r} asks for {wanted!r}, which only TRL's trainer has; give it a default in the "
                    f"function ({wanted}=None) that lets it work without."
                )
            if wanted not in known:
                of_answer = "say which of them it is with --task.answer_key"
                of_other = "rename one of them, in the rows or in the function"
                renamed = of_answer if wanted == "answer" else of_other
                remedy = f"{renamed}, or add it to the rows" if known else "add it to the rows"
                raise ValueError(
                    f"reward {name!r} asks for the column {wanted!r}, which no row has{suggestion(wanted, known)}: the "
                    f"columns are {', '.join(known) or 'none but the prompt'}; {remedy}."
                )
        for wanted in _wanted(function):  # a row may leave out what others have
            lacking = next((where for where, prompt in prompts.items() if prompt.columns.get(wanted) is None), None)
            if lacking is not None:
                logger.warning("%s has no %r: reward %r gets None for it.", lacking, wanted, name)
    rewards.check_keywords(known)
    for where, prompt in prompts.items():
        if (wrong := rewards.check(prompt.columns)) is not None:
            raise ValueError(f"{where} {wrong}; mend or remove it.")


def _wanted(function: Reward) -> list[str]:
    """The columns a reward function cannot do without."""
    needed = [p.name for p in keywords_of(function) if p.kind is not ANY_NAME and p.default is p.empty]
    return [name for name in needed if name not in GIVEN]


def _as_prompt(row: dict[str, Any] | Prompt, where: str, tokenizer: transformers.PreTrainedTokenizerBase) -> Prompt:
    return row if isinstance(row, Prompt) else make_prompt(row, where, tokenizer)


def take(items: Sequence[T], start: int, count: int, seed: int) -> list[T]:
    """Items number `start` to `start + count` of the endless stream in which every epoch has an order of its own."""
    size = len(items)
    last = (start + count - 1) // size
    orders = {epoch: _shuffled(size, seed, epoch) for epoch in range(start // size, last + 1)}
    return [items[orders[i // size][i % size]] for i in range(start, start + count)]


@lru_cache(maxsize=2)
def _shuffled(size: int, seed: int, epoch: int) -> list[int]:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed + 1_000_003 * (epoch + 1))).tolist()
