"""``minirllm show``, ``replay`` and ``diff``: what reads a run's folder."""

from __future__ import annotations

import click

from minirllm.commands import find_run, module
from minirllm.config import FIELDS, Config
from minirllm.errors import UserError


@click.command()
@click.argument("run")
@click.option("--step", type=int, help="The step whose conversations are printed.  [default: the last]")
@click.option(
    "--episodes",
    type=click.IntRange(0),
    help="How many of the best, and how many of the worst, are printed.  [default: 1]",
)
@click.option("--episode", metavar="ID", help="One episode by its id, task:rollout.  [default: the best and the worst]")
@click.option("--tokens", is_flag=True, help="Token by token: logprobs, what was trained, what was not, and why.")
@click.option("--runs-dir", default=Config.runs_dir, show_default=True, help=FIELDS["runs_dir"].metadata["doc"])
def show(run: str, step: int | None, episodes: int | None, episode: str | None, tokens: bool, runs_dir: str) -> None:
    """Show what a run learned and what its agents said.

    Prints the reward curve, a row for each step, and the best and the worst conversations of one step. RUN is a run's
    name or folder."""
    if episode and episodes is not None:
        raise UserError("One episode is asked for by its id: give --episode without --episodes.")
    wanted = module("tools.show").Wanted(step, 1 if episodes is None else episodes, episode)
    module("tools.ledger" if tokens else "tools.show").show(find_run(run, runs_dir), wanted)


@click.command()
@click.argument("run")
@click.option("--step", type=int, help="Only this step: its calls and its update.")
@click.option("--episode", help="Only the calls of this episode: TASK:ROLLOUT, or its session's id.")
@click.option("--call", help="Only the call with this id.")
@click.option("--runs-dir", default=Config.runs_dir, show_default=True, help=FIELDS["runs_dir"].metadata["doc"])
def replay(run: str, step: int | None, episode: str | None, call: str | None, runs_dir: str) -> None:
    """Compute a run again and compare every bit.

    Only RUN's folder is used: not its agents, graders or task file. The exit code is 0 when everything matches, and 1
    at the first difference. RUN is a run's name or folder."""
    if episode and call:
        raise UserError("A call has one episode: give --call without --episode.")
    again = module("tools.replay").replay(find_run(run, runs_dir), step=step, episode=episode, call=call)
    raise SystemExit(0 if again else 1)


@click.command()
@click.argument("run_a")
@click.argument("run_b")
@click.option("--runs-dir", default=Config.runs_dir, show_default=True, help=FIELDS["runs_dir"].metadata["doc"])
def diff(run_a: str, run_b: str, runs_dir: str) -> None:
    """Find the first place where two runs differ.

    Nothing is computed. What else differs (options, versions, machine) is listed, too. The exit code is 0 when the runs
    are equal, else 1. RUN_A and RUN_B are names or folders of runs."""
    alike = module("tools.diff").diff(find_run(run_a, runs_dir), find_run(run_b, runs_dir))
    raise SystemExit(0 if alike else 1)
