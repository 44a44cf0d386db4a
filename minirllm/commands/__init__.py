"""The commands, one file per family of them. Nothing is done here: a command reads its options and calls who does it.

Owns: what commands share. Does not know: how anything is done. What needs torch is imported when a command runs it, so
that ``--help`` and ``show`` are fast.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from minirllm import config
from minirllm.commands.options import FROM_RUN, chosen
from minirllm.config import Config
from minirllm.errors import UserError


def module(name: str) -> Any:
    """A module of ours that is slow to import, or not needed by every command."""
    return importlib.import_module(f"minirllm.{name}")


def sentence(error: Exception) -> str:
    """What an error says, as a sentence."""
    text = str(error)
    return f"{text[:1].upper()}{text[1:]}."


def find_run(name: str, runs_dir: str) -> Path:
    """The folder of a run that is named, or given as a folder. Raises UserError."""
    folder: Path = module("tools.runs").find_run(name, runs_dir)
    return folder


def prepare(name: str, quiet: bool = False, own: tuple[str, ...] = ()) -> None:
    """Install the harness of this name, unless it is one of the task's own or installed already. Raises UserError."""
    if name and name not in own:
        if reason := module("tools.programs").ELSEWHERE.get(name):
            raise UserError(f"The agent program {name} is not available: {reason}.")
        say = (lambda line: None) if quiet else click.echo
        module("tools.install").ensure(module("harness").find(name), say)


def with_checkpoint(
    options: Mapping[str, Any], defaults: Mapping[str, Any], checkpoint: str | None
) -> tuple[Config, Path | None]:
    """The Config, and the run or checkpoint folder; model and adapter default to those of the run it lies in."""
    settings = chosen(options, defaults)
    if settings.outside:  # a task's own model is one of ours
        settings = chosen(options, defaults, {"model": ""})
    if checkpoint is None:
        return settings, None
    folder = Path(checkpoint)
    if not folder.exists():
        folder = find_run(checkpoint, settings.runs_dir)
    files = [
        place / "config.toml" for place in (folder, *folder.resolve().parents[:2]) if (place / "config.toml").is_file()
    ]
    own = config.read_toml(files[0]) if files else {}
    return chosen(options, defaults, {name: own[name] for name in FROM_RUN if name in own}), folder
