# SPDX-License-Identifier: Apache-2.0
"""Blocks on disk: whole, or not there."""

from __future__ import annotations

import json
import random
import shutil

import pytest

from sparse_rl.evaluate.plan import Cell
from sparse_rl.evaluate.record import cell_folders
from sparse_rl.evaluate.store import Store
from sparse_rl.runfolder import write_whole

TIMES = {"generate_s": 1.5, "capture_s": 0.25}


def filled(folder):
    """Three blocks of random samples; what the two files held after each."""
    store, states = Store(folder), [(b"", b"")]
    for start, stop in ((0, 2), (2, 5), (5, 6)):
        samples = [
            {"tokens": random.randrange(9), "completion": "é\n" * random.randrange(4)} for _ in range(stop - start)
        ]
        store.append(start, stop, samples, **TIMES)
        states.append((store.samples.read_bytes(), store.index.read_bytes()))
    return store, states


def test_what_was_appended_is_read_back(tmp_path):
    store, states = filled(tmp_path)
    again = Store(tmp_path)
    assert again.blocks == store.blocks and again.done == 6 and again.read() == store.read()
    assert len(again.read()) == 6 and sum(block.tokens for block in again.blocks) == sum(
        s["tokens"] for s in again.read()
    )
    assert (again.samples.read_bytes(), again.index.read_bytes()) == states[-1]


@pytest.mark.parametrize("name", ["samples.jsonl", "blocks.jsonl"])
def test_a_file_cut_at_any_byte_of_its_last_block_loses_that_block_alone(tmp_path, name):
    store, states = filled(tmp_path / "whole")
    before, after = (len(state[name == "blocks.jsonl"]) for state in states[-2:])
    for size in range(before, after):
        shutil.copytree(tmp_path / "whole", tmp_path / "cut", dirs_exist_ok=True)
        with open(tmp_path / "cut" / name, "ab") as file:
            file.truncate(size)
        cut = Store(tmp_path / "cut")
        assert cut.done == 5 and cut.blocks == store.blocks[:2], size
        assert (cut.samples.read_bytes(), cut.index.read_bytes()) == states[-2]


def test_damage_anywhere_is_found(tmp_path):
    _, states = filled(tmp_path / "whole")
    for which, name in enumerate(("samples.jsonl", "blocks.jsonl")):
        content = states[-1][which]
        for place in random.sample(range(len(content)), min(40, len(content))):
            shutil.copytree(tmp_path / "whole", tmp_path / "bad", dirs_exist_ok=True)
            flipped = bytearray(content)
            flipped[place] ^= 1
            (tmp_path / "bad" / name).write_bytes(flipped)
            bad = Store(tmp_path / "bad")
            good = sum(len(state[which]) <= place for state in states[1:])
            assert (bad.samples.read_bytes(), bad.index.read_bytes()) == states[good], f"{name}, byte {place}"
            assert len(bad.blocks) == good


def test_a_block_that_is_lost_can_be_appended_again(tmp_path):
    _, states = filled(tmp_path)
    (tmp_path / "samples.jsonl").write_bytes(states[-1][0] + b'{"half": ')
    assert Store(tmp_path).done == 6
    (tmp_path / "blocks.jsonl").unlink()
    store = Store(tmp_path)
    assert store.done == 0 and store.read() == []
    store.append(0, 1, [{"tokens": 3}], **TIMES)
    assert json.loads((tmp_path / "samples.jsonl").read_text()) == {"tokens": 3}


def test_a_block_counts_only_where_it_follows_the_one_before(tmp_path):
    """Two writers leave blocks that are sound each by itself: what follows the first writer's is cut off."""
    _, states = filled(tmp_path / "whole")
    for place, done in ((0, 0), (1, 2), (2, 5)):  # the block that is missing
        shutil.copytree(tmp_path / "whole", tmp_path / "gap", dirs_exist_ok=True)
        for which, name in enumerate(("samples.jsonl", "blocks.jsonl")):
            content = states[-1][which]
            (tmp_path / "gap" / name).write_bytes(states[place][which] + content[len(states[place + 1][which]) :])
        gap = Store(tmp_path / "gap")
        assert gap.done == done and (gap.samples.read_bytes(), gap.index.read_bytes()) == states[place]
    for which, name in enumerate(("samples.jsonl", "blocks.jsonl")):
        (tmp_path / "whole" / name).write_bytes(states[-1][which] * 2)
    twice = Store(tmp_path / "whole")
    assert twice.done == 6 and (twice.samples.read_bytes(), twice.index.read_bytes()) == states[-1]


def test_every_cell_has_a_folder_of_its_own():
    names = ["a/b", "a-b", "A-b", "a b", "..", ".", "/", "x" * 300, "é:1", "é=1"]
    cells = [Cell(name, "lookup:pairs=2", "full") for name in names] + [
        Cell("a", "b", "rkv:1"),
        Cell("a", "b", "rkv-1"),
    ]
    folders = cell_folders(cells)
    assert len({folder.lower() for folder in folders.values()}) == len(cells)
    assert all(len(folder.split("/")) == 3 and ".." not in folder.split("/") for folder in folders.values())


@pytest.mark.parametrize("name", ["samples.jsonl", "blocks.jsonl"])
@pytest.mark.parametrize("harm", ["deleted", "cut", "longer", "folder"])
def test_what_is_deleted_or_changed_under_an_evaluation_is_noticed_and_made_anew(tmp_path, name, harm):
    folder = tmp_path / "cell"
    store = Store(folder)
    store.append(0, 2, [{"tokens": 3}] * 2, **TIMES)
    path = folder / name
    if harm == "folder":
        shutil.rmtree(folder)
    elif harm == "deleted":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-3] if harm == "cut" else path.read_bytes() + b"x")
    if name == "samples.jsonl" or harm == "folder":
        with pytest.raises(ValueError, match="was deleted or changed under the evaluation"):
            store.read()
    with pytest.raises(
        ValueError, match=r"was deleted or changed under the evaluation: .* start it again with --resume"
    ):
        store.append(2, 3, [{"tokens": 3}], **TIMES)
    again = Store(folder)
    assert again.done == (2 if harm == "longer" or again.blocks else 0)
    again.append(again.done, again.done + 1, [{"tokens": 3}], **TIMES)
    assert len(Store(folder).read()) == (3 if again.done == 3 else 1)


def test_a_folder_that_is_gone_asks_for_no_room(tmp_path):
    with pytest.raises(OSError, match=r"\(No such file or directory\); .*gone was deleted; start again"):
        write_whole(tmp_path / "gone" / "record.json", "{}")
