"""Files written whole, and named when they cannot be."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from minirllm import files
from minirllm.config import Config
from minirllm.errors import UserError
from minirllm.files import sha256, sync, write_whole
from minirllm.log import RunLog


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
def test_a_link_stays_one_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a").write_text("old")
    (tmp_path / "link").symlink_to("real/a")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "a").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE) as reader:
        write_whole(tmp_path / "pipe", "through")
        assert reader.communicate(timeout=60)[0] == b"through"
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(UserError, match="No space left on device"):
        write_whole(Path("/dev/full"), "x")
    assert Path("/dev/full").is_char_device()


def test_what_stood_there_stays_when_the_disk_is_full(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "old")
    (tmp_path / "a.txt.partial").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"Cannot write .*a\.txt: No space left on device; free some space\."):
        write_whole(path, "new")
    assert path.read_text() == "old"


def test_space_is_advised_only_where_it_helps(tmp_path: Path) -> None:
    """The system's own errors: no right to write, a read-only disk, a file where a folder should be."""
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    write = "import sys; from minirllm.files import *; write_whole(Path(sys.argv[1]), 'text')"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}

    def said(*prefix: str) -> str:
        command = [*prefix, sys.executable, "-c", write, str(folder / "a.txt")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode and "UserError" not in done.stderr:
            pytest.skip(f"cannot be tried here: {done.stderr}")
        return done.stderr.splitlines()[-1]

    rights = [] if os.geteuid() else ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    assert said(*rights).endswith("a.txt: Permission denied; let this user write there, or choose another folder.")
    mount = 'mount -t tmpfs -o ro none $0 && exec "$@"'
    read_only = said("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(folder))
    assert read_only.endswith("a.txt: Read-only file system; choose another folder.")


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"Cannot write .*file/a\.txt: [A-Z][a-z ]*\.$"):  # nothing to advise
        write_whole(tmp_path / "file" / "a.txt", "text")


def test_nothing_is_left_of_what_could_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.txt").mkdir()  # no file can be renamed over it
    with pytest.raises(UserError, match="Cannot write"):
        write_whole(tmp_path / "a.txt", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_run_folder_whose_lock_cannot_be_written_is_refused_in_a_sentence_and_let_go(tmp_path: Path) -> None:
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        with pytest.raises(UserError, match=r"Cannot use run folder .*: File too large"):
            RunLog(tmp_path / "r", Config())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    RunLog(tmp_path / "r", Config()).close()


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIRLLM_CACHE", "~/here")
    assert files.cache_root() == Path.home() / "here"
    monkeypatch.delenv("MINIRLLM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert files.cache_root() == Path("/xdg/minirllm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files.cache_root() == Path.home() / ".cache" / "minirllm"
