"""``minirllm dataset``: rows to learn from."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from minirllm.commands import find_run, module
from minirllm.config import FIELDS, Config
from minirllm.errors import UserError


@click.group()
def dataset() -> None:
    """Make rows for `minirllm sft`."""


@dataset.command("from-eval")
@click.argument("sources", nargs=-1, required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The file of JSON lines to write.")
@click.option(
    "--filter", default="solved", show_default=True, help="Which tasks are taken, as in 'solved and avg < 0.9'."
)
@click.option(
    "--select",
    type=click.Choice(("correct", "best", "best-n", "shortest", "all")),
    default="correct",
    show_default=True,
    help="Which episodes of such a task; best-n: the --max-per-task best.",
)
@click.option("--max-per-task", "most", type=click.IntRange(1), help="At most this many episodes of a task.")
@click.option("--min-reward", type=float, help="Leave out episodes with a lower reward.")
@click.option("--dedup", is_flag=True, help="Keep one of several equal conversations.")
@click.option(
    "--val", type=click.Path(path_type=Path), help="File for the rows of some tasks, which are then not in --out."
)
@click.option(
    "--val-fraction",
    type=float,
    help="Share of the tasks that go to --val, between 0 and 1.  [default: 0.1]",
)
@click.option("--seed", type=int, help="Draws the tasks for --val.  [default: 0]")
@click.option("--runs-dir", default=Config.runs_dir, show_default=True, help=FIELDS["runs_dir"].metadata["doc"])
def from_eval(
    sources: tuple[str, ...],
    out: Path,
    val: Path | None,
    val_fraction: float | None,
    seed: int | None,
    runs_dir: str,
    **wanted: Any,
) -> None:
    """Turn finished episodes into conversations.

    SOURCES are runs, or folders that `minirllm eval --output` wrote. --filter is an expression about one task: n (how
    many rollouts were graded), n_correct, solved (at least one was correct), avg, best, worst (rewards), pass@K,
    numbers, comparisons, and, or, not."""
    curate = module("tools.curate")
    if val is not None and val.resolve() == out.resolve():
        raise UserError("--val and --out name the same file: one would take the place of the other.")
    if val is None and (val_fraction is not None or seed is not None):
        raise UserError("--val-fraction and --seed say what --val gets: name a file by --val, or leave them out.")
    fraction = 0.1 if val_fraction is None else val_fraction
    if not 0 < fraction < 1:
        raise UserError(f"--val-fraction must be between 0 and 1, got {fraction:g}.")
    folders = [Path(name) if Path(name).is_dir() else find_run(name, runs_dir) for name in sources]
    folders = list(dict.fromkeys(folder.resolve() for folder in folders))  # one given twice counts once
    rows, tasks = curate.curate(folders, curate.Wanted(**wanted))
    if not rows:
        raise UserError(f"No episode of {tasks} tasks was taken: --filter and --select choose others.")
    kept, held = curate.split(rows, fraction, seed or 0) if val else (rows, [])
    if val is not None and not (kept and held):
        fell = f"All {len({row['task_id'] for row in rows})} tasks that were taken fell to --{'out' if kept else 'val'}"
        raise UserError(f"{fell}: set another --val-fraction than {fraction:g}, or another --seed, or take more tasks.")
    curate.write(out, kept)
    said = f"{len(kept)} rows of {len({row['task_id'] for row in kept})} of {tasks} tasks in {out}"
    if val is not None:
        curate.write(val, held)
        said += f", {len(held)} in {val}"
    held_out = ["--val", str(val)] if val else []
    click.echo(f"{said}; learn from them: {shlex.join(['minirllm', 'sft', str(out), *held_out])} (with their --model)")
