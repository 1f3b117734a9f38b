# SPDX-License-Identifier: Apache-2.0
"""A tokenizer with a chat template."""

from __future__ import annotations

import pytest

from sparse_rl.model.tiny import tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if quiet %}<quiet>{% endif %}"
)


@pytest.fixture
def chatty():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer
