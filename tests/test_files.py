"""Files written whole, and named when they cannot be."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from minirllm.errors import UserError
from minirllm.files import sha256, sync, write_whole


def test_a_file_is_written_whole_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.txt"
    write_whole(path, "é\n")
    write_whole(path, "ü\n")
    assert path.read_bytes() == b"\xc3\xbc\n"
    assert [other.name for other in path.parent.iterdir()] == ["a.txt"]
    assert sha256(path) == hashlib.sha256(b"\xc3\xbc\n").hexdigest()
    sync(path)
    sync(path.parent)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_what_stood_there_stays_when_the_disk_is_full(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "old")
    (tmp_path / "a.txt.partial").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"Cannot write .*a\.txt: No space left on device"):
        write_whole(path, "new")
    assert path.read_text() == "old"


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"Cannot write .*file/a\.txt: "):
        write_whole(tmp_path / "file" / "a.txt", "text")
