# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures. `--device cuda` runs the engine's tests on a GPU.

Tests draw their inputs from Python's and torch's generators, or from numpy's with `seed`. What they draw follows from
the files of the last commit: other numbers for every commit, the same numbers wherever that commit is tested.
`--seed` gives others.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import yaml

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before transformers imports Triton: its kernels then run on numpy
torch.set_num_threads(1)  # the models are tiny: threads only wait for each other, and badly so beside other processes

if TYPE_CHECKING:  # imported where it is used: the process that hands tests out to others never does
    from transformers import PreTrainedModel

    from sparse_rl.model.load import LoadedModel

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell has it for what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # until the tests are imported: there is no garbage before


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="torch device the engine's tests run on")
    parser.addoption("--seed", default=None, help="any text: what the tests draw from; the last commit unless given")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Processes of pytest-xdist get the first one's options, and so its seed."""
    if config.option.seed is None:
        config.option.seed = last_commit()
    if config.getoption("--hypothesis-seed", None) is None:
        config.option.hypothesis_seed = str(random.Random(config.option.seed).randrange(1 << 63))


def last_commit() -> str:
    """Its files' hash, which a clone shares; without git, anything new."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD^{tree}"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return str(random.SystemRandom().randrange(1 << 63))


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked `some(n)` n cases are run, others with every commit, and the rest is slow; on a GPU, all."""
    drawn: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("some") and config.option.device == "cpu":
            drawn.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in drawn.items():
        random.Random(f"{config.option.seed} {name}").shuffle(cases)
        for case in cases[cases[0].get_closest_marker("some").args[0] :]:
            case.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """What was imported stays: nobody looks through half a million objects again, and no forked child copies them."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Another in every test, whatever ran before it; printed where the test fails."""
    given = request.config.getoption("--seed")
    seed = random.Random(f"{given} {request.node.nodeid}").randrange(1 << 63)
    print(f"drawn from {seed} (--seed {given})")
    random.seed(seed)
    seed_torch = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed_torch(seed)  # torch.manual_seed writes a whole traceback down for a GPU that is not there
    return seed


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--device")


@pytest.fixture(autouse=True)
def graphs_of_uncompiled_layers(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes seconds a model: on a GPU only tests marked `compiled` do it."""
    if device != "cpu" and "compiled" not in request.keywords:
        monkeypatch.setattr("sparse_rl.rollout.decoder.Decoder._compiled", lambda self: nullcontext())


@pytest.fixture(autouse=True)
def signals_are_left_as_they_were() -> Iterator[None]:
    """Or a test after this one, in the same process, fails for no reason of its own."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.fixture(scope="session")
def tiny(device: str) -> Callable[..., LoadedModel]:
    """tiny("qwen3", dtype=torch.float64, ...): the same model each time it is asked for.

    Two layers: one of each kind.
    """
    from sparse_rl.model.dry_run import dry_run
    from sparse_rl.model.load import LoadedModel
    from sparse_rl.model.tiny import tiny_model, tiny_tokenizer

    @lru_cache(maxsize=32)
    def build(family: str = "llama", layers: int = 2, **settings: object) -> LoadedModel:
        model = tiny_model(family, device=device, **depth(family, layers), **settings)
        return LoadedModel(model=model, tokenizer=tiny_tokenizer(), shape=dry_run(model))

    return build


@pytest.fixture(scope="session")
def reference(device: str) -> Callable[..., PreTrainedModel]:
    """A second copy of a tiny model, with transformers' own attention."""
    from sparse_rl.model.tiny import tiny_model

    @lru_cache(maxsize=32)
    def build(family: str = "llama", layers: int = 2, **settings: object) -> PreTrainedModel:
        attention = "eager" if family in ("gemma2", "gpt_oss") else "sdpa"  # which knows neither soft-caps nor sinks
        return tiny_model(family, device=device, attn_implementation=attention, **depth(family, layers), **settings)

    return build


def depth(family: str, layers: int) -> dict[str, object]:
    """Settings of a tiny model with the first of the family's layers, or with windows in as large a part of them."""
    from sparse_rl.model.tiny import FAMILIES

    own = FAMILIES[family]
    settings: dict[str, object] = {"num_hidden_layers": layers}
    if "layer_types" in own:
        settings["layer_types"] = own["layer_types"][:layers]
    if "max_window_layers" in own:
        settings["max_window_layers"] = own["max_window_layers"] * layers // 4
    return settings


@pytest.fixture
def prompts() -> Callable[..., list[list[int]]]:
    """prompts(5, 70, seed=1): random prompts of these lengths."""

    def build(*lengths: int, seed: int = 0, vocabulary: int = 256) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in lengths]

    return build


@pytest.fixture
def config(tmp_path: Path) -> Callable[[object], str]:
    """config(settings) or config(text): a YAML file, new each time."""

    def write(settings: object) -> str:
        path = tmp_path / f"config{len(list(tmp_path.glob('config*')))}.yaml"
        path.write_text(settings if isinstance(settings, str) else yaml.safe_dump(settings))
        return str(path)

    return write
