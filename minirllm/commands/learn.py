"""``minirllm train``, ``distill`` and ``sft``: what changes weights."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from minirllm import config, flow
from minirllm.commands import module, prepare, sentence
from minirllm.commands.options import DISTILL, SFT, TRAIN, chosen, flags
from minirllm.config import Config
from minirllm.errors import CheckpointError, EngineError, UserError
from minirllm.interrupt import Terminated

RESUME = click.option(
    "--resume", is_flag=True, help="Continue the newest whole checkpoint of --run, with the run's own options."
)
QUIET = click.option("--quiet", is_flag=True, help="Print warnings and errors only.")


@click.command()
@click.argument("task")
@flags(TRAIN)
@RESUME
@QUIET
def train(task: str, resume: bool, quiet: bool, **options: Any) -> None:
    """Train a model on TASK by reinforcement learning.

    TASK is the name of an installed task, a task file such as tasks/first_letter.py, or a folder of Harbor tasks. It
    may set options of its own (DEFAULTS in its file); the defaults below hold where it does not."""
    _run("train", task, resume, quiet, options)


@click.command()
@click.argument("task")
@flags(DISTILL)
@RESUME
@QUIET
def distill(task: str, resume: bool, quiet: bool, **options: Any) -> None:
    """Train a student on what a teacher thinks of its tokens.

    The student acts on TASK, as in train, and --teacher says how likely each of the student's tokens is. Rewards are
    shown; nothing is learned from them.

    The teacher is a model (a name, a hub id or a folder), a run or one of its checkpoints, the URL of a server that
    scores given tokens (such as vLLM), or the student's own model: base, as it was before training, or self, as it is
    now. With --privileged the teacher is told what the student is not."""
    if any(setting.partition("=")[0].strip() == "algorithm" for setting in options["settings"]):
        raise UserError("distill is the algorithm of this command: leave --set algorithm out, or use `minirllm train`.")
    _run("distill", task, resume, quiet, {**options, "algorithm": "distill"})


def _run(verb: str, task: str, resume: bool, quiet: bool, options: dict[str, Any]) -> None:
    """A run of `verb` on a task."""
    loaded = flow.load_task(task)
    settings = _settings(loaded.name, resume, options, loaded.defaults)
    prepare(settings.harness, quiet, loaded.own_agents)
    work = partial(module("train").run, loaded, settings, resume=resume, quiet=quiet)
    _told([verb, task], settings.run_folder(loaded.name), quiet, lambda: (work(), settings.steps))


def _settings(name: str, resume: bool, options: dict[str, Any], defaults: dict[str, Any]) -> Config:
    """The options of a run; of one that is resumed its own, but for those that are given. `name`: of what it learns."""
    settings = chosen(options, defaults)
    folder = settings.run_folder(name)
    if not resume:
        return settings
    if not folder.is_dir():
        raise CheckpointError(f"There is no run {folder} to resume: name one with --run, or leave out --resume.")
    own = config.read_toml(folder / "config.toml") if (folder / "config.toml").exists() else {}
    return replace(chosen(options, defaults, own), run=folder.name, runs_dir=str(folder.parent))


def _told(command: list[str], folder: Path, quiet: bool, work: Callable[[], tuple[dict[str, Any], int]]) -> None:
    """Does the work of a run, which returns its last row and how many steps it was to have, and tells of its end."""
    where = ["--runs-dir", str(folder.parent)] if folder.parent != Path(Config.runs_dir) else []
    again = shlex.join(["minirllm", *command, "--run", folder.name, *where, "--resume"])
    try:
        summary, steps = work()
    except (KeyboardInterrupt, Terminated) as end:
        click.echo(f"\nStopped. Continue with: {again}", err=True)
        raise SystemExit(end.code if isinstance(end, Terminated) else 130) from None
    except EngineError as error:
        raise UserError(f"{sentence(error)} What was finished is kept; continue with: {again}") from error
    if summary and summary["step"] < steps:
        click.echo(f"Stopped after step {summary['step']} of {steps}. Continue with: {again}", err=True)
    elif not quiet:
        done = (
            "Done" if summary else f"Nothing to do: all {steps} steps were done before; --steps takes the run further"
        )
        click.echo(f"{done}. Weights: {folder / 'checkpoints'}. Look at it: minirllm show {folder}")


@click.command()
@click.argument("data", type=click.Path(path_type=Path))
@flags(SFT)
@click.option(
    "--val", type=click.Path(path_type=Path), help="File of rows whose loss is measured; nothing is learned from them."
)
@click.option("--epochs", type=click.IntRange(1), help="How often each row is learned from; sets --steps.")
@RESUME
@QUIET
def sft(data: Path, resume: bool, quiet: bool, val: Path | None, epochs: int | None, **options: Any) -> None:
    """Fine-tune a model on given conversations.

    DATA is a file of JSON lines, {"messages": [...], "tools": [...]} as in chat completions. Every token of every
    assistant message is learned."""
    named = options["steps"] is not None or any(one.partition("=")[0].strip() == "steps" for one in options["settings"])
    if epochs is not None and named:
        raise UserError("Give --epochs or --steps, not both.")
    settings = _settings(data.stem, resume, options, {})
    folder = settings.run_folder(data.stem)

    def work() -> tuple[dict[str, Any], int]:
        row = module("sft").run(data, settings, val=val, epochs=epochs, resume=resume, quiet=quiet)
        return row, config.load(folder / "config.toml").steps  # as epochs set them

    _told(["sft", str(data), *(["--val", str(val)] if val else [])], folder, quiet, work)
