# SPDX-License-Identifier: Apache-2.0
"""How a problem becomes a prompt, by name.

A template with turns goes through the model's chat template; where the model has none, the turns are lines of plain
text. One without turns is the text itself.

Tokens are made in `prompts.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Template:
    """`text` with {problem} in it; `system` for a chat's first message; `chat` false for plain text.

    `lines`: the turns are written as plain text, each on a line, for a model without a chat template.
    """

    text: str = "{problem}"
    system: str | None = None
    chat: bool = True
    lines: bool = False

    def prompt(self, problem: str, system: str | None = None) -> str | list[dict[str, str]]:
        """The prompt as a dataset row has it: a string, or a list of messages. `system` replaces the template's own."""
        text = self.text.replace("{problem}", problem)
        if not self.chat:
            return text
        system = self.system if system is None else system
        turns = [{"role": "system", "content": system}] if system else []
        turns.append({"role": "user", "content": text})
        return "".join(f"{turn['content']}\n" for turn in turns) if self.lines else turns


STEP_BY_STEP = "Please reason step by step, and put your final answer within \\boxed{}."

TEMPLATES = {
    "chat": Template(),
    "plain": Template("{problem}\n", chat=False),
    "boxed_chat": Template("{problem}\n" + STEP_BY_STEP),
    "code": Template(
        "Solve this problem in Python. Code that it begins with is to be completed: repeat it in your answer. Answer "
        "with one ```python block that holds the whole program.\n\n{problem}"
    ),
    "countdown": Template(
        "{problem}\nUse all of the numbers. Think step by step, then give the expression alone in <answer> tags, "
        "for example <answer>(1 + 2) / 3</answer>."
    ),
    # The papers' own. Sparse-RL trains with a chat whose braces are doubled, and evaluates without a chat.
    "sparse-rl": Template(
        "{problem}\n" + STEP_BY_STEP.replace("{}", "{{}}"),
        system="You are a helpful assistant.",
    ),
    "sparse-rl-eval": Template("{problem} " + STEP_BY_STEP + "\n\n", chat=False),
    "sparrow": Template(
        "Please solve the following math problem: {problem}. The assistant first thinks about the reasoning process "
        "step by step and then provides the user with the answer. Return the final answer in \\boxed{} tags, for "
        "example \\boxed{1}. Let's solve this step by step. "
    ),
}
