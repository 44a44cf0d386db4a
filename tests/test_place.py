"""place.py: an episode's folder is the same in every run, held by one, filled and read within bounds, deleted."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from minirllm.errors import TaskError, UserError
from minirllm.sandboxes import place
from minirllm.sandboxes.place import Place


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_the_folder_is_the_same_every_time_and_nothing_is_left(temporary: Path) -> None:
    first = Place("train", "org/task: 1", 3)
    assert sorted(path.name for path in first.root.iterdir()) == ["home", "tmp", "work"]
    assert first.root.name.startswith("train-org-task-1-")
    assert first.root.name.endswith("-3")
    assert first.root.parent.stat().st_mode & 0o777 == 0o700
    (first.work / "left").write_text("x")
    first.close()
    assert list(temporary.glob("*/*")) == []
    again = Place("train", "org/task: 1", 3)
    assert (again.root, list(again.work.iterdir())) == (first.root, [])
    others = [Place("eval", "org/task: 1", 3), Place("train", "org/task: 2", 3), Place("train", "org/task: 1", 4)]
    assert len({again.root, *(other.root for other in others)}) == 4


def test_one_that_is_held_is_not_shared(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Place("train", "t", 0), Place("train", "t", 0)
    assert str(second.root) == f"{first.root}-2"
    assert "so paths that the agent sees differ" in caplog.text
    first.close()
    assert second.work.is_dir()
    third = Place("train", "t", 0)
    assert third.root == first.root


def test_a_lock_whose_owner_has_just_deleted_it_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening the file and locking it, its owner ends: whoever opens it next has another file."""
    first = Place("train", "t", 0)
    flock = fcntl.flock

    def late(descriptor: int, how: int) -> None:
        if os.path.exists(f"{first.root}.lock"):
            first.close()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    second = Place("train", "t", 0)
    monkeypatch.undo()
    assert str(second.root) != str(first.root)


def test_what_a_killed_run_left_is_swept(temporary: Path) -> None:
    first = Place("train", "t", 0)
    (first.work / "shut" / "in").mkdir(parents=True)
    (first.work / "shut").chmod(0)
    os.close(first.lock)
    again = Place("train", "t", 0)
    assert (again.root, list(again.work.iterdir())) == (first.root, [])


def test_a_folder_of_somebody_else_is_refused(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary / "elsewhere").mkdir()
    (temporary / f"minirllm-{os.getuid()}").symlink_to(temporary / "elsewhere")
    with pytest.raises(UserError, match=r"belongs to somebody else: remove it, or set TMPDIR to another folder\.$"):
        Place("train", "t", 0)


@pytest.mark.parametrize("name", ["../out.txt", "/etc/x", "a/../../x", "."])
def test_files_that_would_lie_outside_are_refused(name: str) -> None:
    with pytest.raises(TaskError, match=r"must be a path below the work folder, and have a text"):
        Place("train", "t", 0).fill({name: "x"}, {})


def test_files_are_written_and_programs_can_be_run() -> None:
    own = Place("train", "t", 0)
    own.fill({"a/b.txt": "é", "run": "#!/bin/sh\n"}, {".own/config": "set"})
    assert (own.work / "a" / "b.txt").read_text(encoding="utf-8") == "é"
    assert os.access(own.work / "run", os.X_OK)
    assert not os.access(own.work / "a" / "b.txt", os.X_OK)
    assert (own.home / ".own" / "config").read_text() == "set"


def test_what_is_kept_of_a_large_folder_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "MAX_FILES", 2)
    monkeypatch.setattr(place, "MAX_BYTES", 5)
    for name in "abcdef":
        (tmp_path / name).write_text("1234" if name == "a" else "1")
    assert place.read_files(tmp_path) == ({"a": "1234", "b": "1"}, ["c", "d"])
