# SPDX-License-Identifier: Apache-2.0
"""What a folder of results records: its command, and which settings are others now."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shlex
import sys

import pytest
import yaml

from sparse_rl.runfolder import (
    as_settings,
    check_folder,
    command,
    damage,
    differences,
    digests,
    discard,
    lock,
    publish,
    unfinished,
    write_json,
    write_whole,
)


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        ("/usr/bin/sparse-rl", "sparse-rl"),
        ("/lib/sparse_rl/__main__.py", "sparse-rl"),
        ("my_sparse_project/mine.py", "my_sparse_project/mine.py"),
        ("not-sparse-rl", "not-sparse-rl"),
        ("other/__main__.py", "other/__main__.py"),
        ("", "''"),
    ],
)
def test_the_command_is_what_a_shell_takes(monkeypatch, program, shown):
    arguments = ["eval", "--system", "Be brief; it's late", "--problems", "3"]
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    assert command().startswith(f"{shown} eval ") and shlex.split(command()) == [shlex.split(shown)[0], *arguments]
    assert shlex.split(command(["bench", "a b"])) == ["sparse-rl", "bench", "a b"]


def test_differences_but_for_what_is_ignored():
    before = {"a": 1, "b": {"a": 2, "c": 3}, "gone": None}
    after = {"a": 1, "b": {"a": 5, "c": 4}, "new": 7}
    assert differences(before, after) == ["b.a 2 is now 5", "b.c 3 is now 4", "new None is now 7"]
    assert differences(before, after, ("a", "c", "b.a")) == ["b.c 3 is now 4", "new None is now 7"]
    assert differences(before, after, ("b", "b.a", "b.c", "new")) == []


def test_a_folder_of_something_else_is_refused_and_hidden_files_are_nothing(tmp_path):
    (tmp_path / ".lock").touch()
    assert check_folder(tmp_path, "eval.json", "an evaluation", resume=False) is False
    (tmp_path / "letters").touch()
    with pytest.raises(ValueError, match="has something else than an evaluation in it; give another --output"):
        check_folder(tmp_path, "eval.json", "an evaluation", resume=True)


def test_a_file_that_cannot_be_written_leaves_no_part_of_it(tmp_path):
    (tmp_path / "page").mkdir()
    with pytest.raises(OSError, match=r"page could not be written \(it is no file\); give another place for it"):
        write_whole(tmp_path / "page", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["page"]


def test_a_device_stays_one_and_a_link_leads_where_it_led(tmp_path, monkeypatch):
    rename = os.rename
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"pipe could not be written \(it is no file\); give another place"):
        write_whole(tmp_path / "pipe", "text", "give another place")
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to(tmp_path / "far" / "page")
    on_disk = []
    monkeypatch.setattr("sparse_rl.runfolder._to_disk", on_disk.append)
    monkeypatch.setattr(
        "sparse_rl.runfolder.os.replace", lambda part, place: on_disk.append(part) or rename(part, place)
    )
    write_whole(tmp_path / "near", "text")
    assert (tmp_path / "near").is_symlink() and (tmp_path / "far" / "page").read_text() == "text"
    assert on_disk == [tmp_path / "far" / ".page.part", tmp_path / "far"], "all in the file's own folder"
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("loop", "n" * 300):
        with pytest.raises(OSError, match=f"{name} could not be written"):
            write_whole(tmp_path / name, "text")


def test_a_folder_that_stood_aside_for_another_is_removed(tmp_path):
    folder, aside = tmp_path / "model", tmp_path / "model.old"
    for text in ("older", "newer"):
        unfinished(folder).mkdir()
        (unfinished(folder) / "file").write_text(text)
        publish(unfinished(folder), folder)
    assert (folder / "file").read_text() == "newer" and not aside.exists()


def test_a_file_that_is_written_again_is_the_older_one_until_it_is_on_disk(tmp_path, monkeypatch):
    path, met = tmp_path / "page", []

    def full(_):
        met.append(path.read_text())
        raise OSError(28, "No space left on device")

    write_whole(path, "older")
    with monkeypatch.context() as patch:
        patch.setattr("sparse_rl.runfolder.os.fsync", full)
        with pytest.raises(OSError, match="page could not be written"):
            write_whole(path, "newer")
    assert met == ["older"] and path.read_text() == "older" and list(tmp_path.iterdir()) == [path]
    write_whole(path, "newer")
    assert path.read_text() == "newer"


def test_all_of_a_folder_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint-2"
    (unfinished(folder) / "state").mkdir(parents=True)
    for name in ("state/one", "two"):
        (unfinished(folder) / name).write_text(name)
    on_disk = []
    monkeypatch.setattr("sparse_rl.runfolder._to_disk", lambda path: on_disk.append((path, folder.exists())))
    publish(unfinished(folder), folder)
    *before, last = on_disk
    names = (".", "state", "state/one", "two")
    assert sorted(before) == sorted((unfinished(folder) / name, False) for name in names)
    assert last == (tmp_path, True) and digests(folder).keys() == {"state/one", "two"}


def test_a_folder_that_is_deleted_loses_its_name_first(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()

    def killed(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("sparse_rl.runfolder.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            discard(folder)
    assert list(tmp_path.iterdir()) == [unfinished(folder)]
    folder.mkdir()
    discard(folder)
    assert not list(tmp_path.iterdir())


def test_records_are_json_whatever_their_numbers_are(tmp_path):
    settings = {"upper": math.inf, "several": (-math.inf, 1.5), "deeper": [{"lower": math.nan}], 3: "three"}
    written = {"upper": ".inf", "several": ["-.inf", 1.5], "deeper": [{"lower": ".nan"}], "3": "three"}
    assert as_settings(settings) == written == as_settings(written)
    assert yaml.safe_load("[.inf, -.inf]") == [math.inf, -math.inf]
    write_json(tmp_path / "record.json", {"settings": as_settings(settings), "loss": (math.nan, {"best": -math.inf})})
    text = (tmp_path / "record.json").read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found == {"settings": written, "loss": [None, {"best": None}]} and text.endswith("}\n")


def test_damage_names_the_first_file_that_is_not_as_it_was(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/one").write_text("1")
    (tmp_path / "two").write_text("2")
    files = digests(tmp_path)
    assert sorted(files) == ["a/one", "two"] and damage(tmp_path, files) == ""
    (tmp_path / "new").touch()
    assert damage(tmp_path, files) == ""
    (tmp_path / "a/one").write_text("3")
    assert damage(tmp_path, files) == "a/one is not what was written"
    (tmp_path / "a/one").unlink()
    assert damage(tmp_path, files) == "a/one is missing"


def test_a_file_system_without_locks_is_not_another_process(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(
        ValueError, match=r"file system without locks \(.*No locks available\); give a folder on another"
    ):
        lock(tmp_path)
