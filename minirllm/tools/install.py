"""``minirllm harness install``: a harness's packages, pinned, into a folder of its own in the cache.

Owns: finding an interpreter that fits, the installation (whole or not at all, one process at a time). Does not know:
what the programs are, how they are run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from minirllm.errors import UserError
from minirllm.files import why, write_whole
from minirllm.harness import MARKER, Harness

NODE = "node"  # the npm package that carries a Node of the version that is asked for
LOOK = "import sys, ensurepip; print(*sys.version_info[:2])"


def ensure(harness: Harness, say: Callable[[str], None]) -> None:
    """Install what is not installed yet. Raises UserError with what is missing, or with the installer's last words."""
    needs(harness)
    if harness.installed:
        return
    folder = harness.folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if harness.installed:  # another process was quicker
                return
            say(f"Installing {harness.name} {harness.version} into {folder} (once; minutes).")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            if harness.pip:
                _pip(harness)
            if harness.npm:
                _npm(harness)
            write_whole(folder / MARKER, harness.receipt())
    except OSError as error:
        raise UserError(f"{harness.name} cannot be installed into {folder}: {why(error)}.") from None


def needs(harness: Harness) -> None:
    """Raises UserError when a program that it stands on is not there."""
    for need in harness.requires:
        name, least = _need(need)
        if name == "python":
            if harness.pip and not harness.installed:
                _python(harness)
        elif name == "node":
            if not (_node_fits(least) or harness.installed or shutil.which("npm")):
                raise UserError(f"{harness.name} needs Node {least[0]} or newer, or npm to fetch it: install Node.js.")
        elif shutil.which(name) is None:
            raise UserError(f"{harness.name} needs {name}, which is not on PATH: install it with the system's tools.")


def _need(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, least = text.partition(">=")
    return name, tuple(int(part) for part in least.split(".") if part)


def _pip(harness: Harness) -> None:
    folder = harness.folder
    _do(harness, [_python(harness), "-m", "venv", str(folder)])
    python = str(folder / "bin" / "python")
    _do(harness, [python, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check", *harness.pip])
    # a start that compiles everything anew costs more than all the rest of it
    subprocess.run([python, "-m", "compileall", "-q", str(folder / "lib")], capture_output=True, check=False)


def _npm(harness: Harness) -> None:
    if shutil.which("npm") is None:
        raise UserError(f"{harness.name} needs npm to be installed: install Node.js.")
    packages = list(harness.npm)
    for name, least in map(_need, harness.requires):
        if name == "node" and not _node_fits(least):
            packages.append(f"{NODE}@{least[0]}")
    quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
    _do(harness, ["npm", "install", "--prefix", str(harness.folder), *quiet, *packages])


def _node_fits(least: tuple[int, ...]) -> bool:
    node = shutil.which("node")
    if node is None:
        return False
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
    return tuple(int(part) for part in re.findall(r"\d+", said)) >= least


def _python(harness: Harness) -> str:
    """This interpreter if it fits, else the oldest that does: packages are most likely to be built for it."""
    least = max((version for name, version in map(_need, harness.requires) if name == "python"), default=())
    own = str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}")
    others = [place for minor in range(11, 20) if (place := shutil.which(f"python3.{minor}"))]
    for root in (Path(os.environ.get("PYENV_ROOT") or "~/.pyenv", "versions"), Path("~/.local/share/uv/python")):
        found = root.expanduser().glob("*/bin/python3.*")
        others += [str(path) for path in sorted(found) if re.fullmatch(r"python3\.\d+", path.name)]
    fitting = []
    for place in [own, *others]:
        said = _version(place)
        if said >= least and said:
            if place == own:
                return own
            fitting.append((said, place))
    if not fitting:
        wanted = ".".join(map(str, least))
        raise UserError(f"{harness.name} needs Python {wanted} or newer, and none is here: install python{wanted}.")
    return min(fitting)[1]


def _version(python: str) -> tuple[int, ...]:
    """Of an interpreter that can make environments; () of none, or of a name that does not run."""
    try:
        said = subprocess.run([python, "-c", LOOK], capture_output=True, text=True, check=False).stdout
    except OSError:
        return ()
    return tuple(int(part) for part in said.split())


def _do(harness: Harness, argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        said = next((line for line in lines if re.match(r"(npm )?(error|fatal)", line, re.IGNORECASE)), "")
        tool = " ".join([Path(argv[0]).name, *argv[1:4]])
        raise UserError(f"{harness.name} cannot be installed: {tool} says {said or (lines or ['nothing'])[-1]}")
