"""tools/install.py: whole or not at all, once, with an interpreter that fits; what is missing is one sentence."""

from __future__ import annotations

import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from minirllm.errors import UserError
from minirllm.harness import Harness, Launch, bins
from minirllm.tools import install

PROGRAM = "import sys\n\ndef main():\n    print('runs in', sys.prefix)\n"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Harness:
    """A harness whose package is a wheel in a folder: no network."""
    monkeypatch.setenv("MINIRLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wheel = tmp_path / "own_agent-7-py3-none-any.whl"
    info = "own_agent-7.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("own_agent.py", PROGRAM)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: own-agent\nVersion: 7\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/entry_points.txt", "[console_scripts]\nown = own_agent:main\n")
        archive.writestr(f"{info}/RECORD", "")
    return Harness("own", "7", "", "chat", lambda context: Launch((context.program("own"),)), (), pip=(str(wheel),))


def silent(line: str) -> None:
    pass


def test_installed_once_into_its_own_folder_and_compiled(own: Harness, tmp_path: Path) -> None:
    said: list[str] = []
    assert not own.installed
    threads = [threading.Thread(target=install.ensure, args=(own, said.append)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert own.installed
    assert len(said) == 1
    assert said[0].startswith(f"Installing own 7 into {tmp_path}/cache/harnesses/own-7 ")
    assert (bins(own.folder)[0] / "own").is_file()
    assert list(own.folder.glob("lib/python3*/site-packages/__pycache__/own_agent.*.pyc")) != []
    assert not replace(own, pip=("own-agent==8",)).installed  # another recipe under the same name


def test_what_fails_leaves_nothing_that_counts_and_says_why(own: Harness) -> None:
    broken = replace(own, pip=("surely-not-a-package==1",))
    with pytest.raises(UserError, match=r"^own cannot be installed: python -m pip install says ERROR: .*surely-not-a"):
        install.ensure(broken, silent)
    assert not broken.installed
    install.ensure(own, silent)  # what was left in the folder is no hindrance
    assert own.installed


def test_a_cache_that_cannot_be_written(own: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINIRLLM_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"^own cannot be installed into .*: Not a directory\.$"):
        install.ensure(own, silent)


@pytest.mark.parametrize(
    ("need", "sentence"),
    [
        ("surely-not-a-program", r"^own needs surely-not-a-program, which is not on PATH: install it with "),
        ("python>=9.9", r"^own needs Python 9\.9 or newer, and none is here: install python9\.9\.$"),
    ],
)
def test_what_is_missing_is_named(own: Harness, need: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        install.ensure(replace(own, requires=(need,)), silent)


def test_node_is_needed_or_npm(own: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nothing")
    with pytest.raises(UserError, match=r"^own needs Node 22 or newer, or npm to fetch it: install Node\.js\.$"):
        install.needs(replace(own, requires=("node>=22",)))


def test_a_node_that_is_too_old_is_replaced(own: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """npm itself is a script here, which writes down what it is asked for."""
    (tmp_path / "bin").mkdir()
    for name, text in (("npm", f'echo "$@" > {tmp_path}/asked'), ("node", "echo v20.1.0")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    needs_node = replace(own, pip=(), npm=("own@1.2.3",), requires=("node>=22",))
    install.ensure(needs_node, silent)
    asked = (tmp_path / "asked").read_text().split()
    assert asked[:3] == ["install", "--prefix", str(own.folder)]
    assert asked[-2:] == ["own@1.2.3", "node@22"]
    install.ensure(replace(needs_node, version="8", requires=("node>=20",)), silent)
    assert (tmp_path / "asked").read_text().split()[-1] == "own@1.2.3"


def test_the_oldest_fitting_interpreter_is_taken(own: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/nothing")
    for minor in (97, 98, 99):
        place = tmp_path / "pyenv" / "versions" / f"3.{minor}.1" / "bin"
        place.mkdir(parents=True)
        (place / f"python3.{minor}").write_text(f"#!/bin/sh\necho 3 {minor}\n")
        (place / f"python3.{minor}").chmod(0o755)
    assert install._python(replace(own, requires=("python>=3.98",))).endswith("3.98.1/bin/python3.98")
    assert "pyenv/versions/3.9" not in install._python(own)
