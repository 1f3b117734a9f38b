# SPDX-License-Identifier: Apache-2.0
"""Every decoder-only type of the installed transformers works, or is refused for the recorded reason.

verdicts.json is written by scripts/support_matrix.py, which also says what has changed.
"""

from __future__ import annotations

import families
import pytest
from family_checks import recorded, verdict

HOW = "if that is meant, run scripts/support_matrix.py, then scripts/docs_tables.py"
CASES = [
    pytest.param(cell, marks=[] if cell in families.MECHANISMS else [pytest.mark.slow]) for cell in families.cells()
]


@pytest.mark.parametrize("cell", CASES)
def test_a_family_keeps_its_verdict(cell, tmp_path):
    model = families.tiny_model(families.tiny_config(cell))
    assert verdict(model, tmp_path) == recorded().get(cell), HOW


def test_every_type_has_a_verdict():
    assert {*recorded()} == {*families.cells(), *families.outside()}, HOW
    assert families.outside().items() <= recorded().items(), HOW
    assert {*families.MECHANISMS} <= {*families.cells()}


def test_no_family_is_refused_with_another_programs_error():
    """Such a reason names no remedy, and may hide a fault of ours."""
    foreign = [cell for cell, text in recorded().items() if "Error:" in text]
    assert not foreign, foreign


def test_what_is_left_out_is_no_decoder():
    assert {"llama", "gemma3_text", "gpt_oss", "mamba"} <= {*families.cells()}
    assert families.left_out("bert") == "encoders" and families.left_out("bart").startswith("decoders")
    assert families.left_out("gemma3").startswith("wrappers") and families.left_out("gpt-sw3") == "second names"
