# SPDX-License-Identifier: Apache-2.0
"""A command and what it said, its settings, and the flags of a run of seconds."""

from __future__ import annotations

import contextlib
import io
import json

import pytest
import yaml

from sparse_rl.cli import main

RUN = {"steps": 2, "prompts_per_step": 2}
SHORT = {"n": 4, "max_tokens": 24}
SPARSE = {"policy": "rkv", "budget": 12, "interval": 4, "window": 4}


def run(*arguments: str) -> tuple[int, str, str]:
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(arguments))
        except SystemExit as exit:
            code = exit.code
    return code, out.getvalue(), err.getvalue()


def train(*arguments: str) -> tuple[int, str, str]:
    return run("train", *arguments)


def flat(settings: dict) -> dict:
    """{"trainer": {"steps": 20}} as {"trainer.steps": 20}."""
    result = {}
    for section, value in settings.items():
        nested = isinstance(value, dict)
        result |= {f"{section}.{key}": item for key, item in value.items()} if nested else {section: value}
    return result


def flags(**sections) -> list[str]:
    return [word for key, value in flat(sections).items() for word in (f"--{key}", str(value))]


CHAIN = flags(task={"letters": 2, "steps": 2, "filler": 0}, trainer=RUN, sampling=SHORT, eval={"prompts": 4}, kv=SPARSE)


def resolved(*arguments: str, command: str = "train") -> dict:
    """Every setting the command would run with, or refuse for what they ask of data and models."""
    code, out, err = run(command, *arguments, "--dry-run")
    assert (code, err) == (0, "") or (code == 2 and out and len(err.splitlines()) == 1), err
    return flat(yaml.safe_load(out))


def changes(before: dict, after: dict) -> dict:
    return {key: after[key] for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


def assert_one_sentence(result: tuple[int, str, str], *parts: str) -> None:
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("sparse-rl: error: ") and len(err.splitlines()) == 1, err
    for part in parts:
        assert part in err


def strict_json(path):
    """What a file says in the JSON that every reader knows."""
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in {path} is not JSON"))


def contents(folder) -> dict:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
