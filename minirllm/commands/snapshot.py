"""``minirllm snapshot``: prepared sandboxes that are kept."""

from __future__ import annotations

from typing import Any

import click

from minirllm import flow
from minirllm.commands import module, prepare
from minirllm.commands.options import chosen, flags
from minirllm.errors import UserError

LONGEST = 876_000  # hours: a hundred years


def _hours(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if not 0 < value <= LONGEST:  # nor is it no number
        raise click.BadParameter(f"{value:g} is not above 0 and at most {LONGEST}.")
    return value


HOURS = click.option("--ttl-hours", type=float, default=168.0, show_default=True, callback=_hours,
                     help="How long to keep it.")  # fmt: skip


@click.group()
def snapshot() -> None:
    """Keep prepared sandboxes, so that rollouts begin with them.

    What prepares one is the option setup, and the files of a Harbor task; the option snapshots says how rollouts use
    them."""


@snapshot.command("create")
@click.argument("task")
@flags(("sandbox", "harness", "data"))
@HOURS
def create(task: str, ttl_hours: float, **options: Any) -> None:
    """Make the snapshots that rollouts of TASK begin with.

    TASK is a folder of Harbor tasks, or any task with --set setup=... A snapshot that is there already is kept for at
    least --ttl-hours from now."""
    loaded = flow.load_task(task)
    settings = chosen(options, {"harness": "nop" if "nop" in loaded.own_agents else "bash", **loaded.defaults})
    prepare(settings.harness, own=loaded.own_agents)
    module("tools.snapshot").create(loaded, settings, ttl_hours, click.echo)


@snapshot.command("list")
def list_snapshots() -> None:
    """List the snapshots, after what has expired was removed."""
    rows = [*module("tools.snapshot").table()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


@snapshot.command("inspect")
@click.argument("key")
def inspect(key: str) -> None:
    """Show all that is known of the snapshot whose key begins with KEY."""
    click.echo(module("tools.snapshot").inspect(key))


@snapshot.command("renew")
@click.argument("key")
@HOURS
def renew(key: str, ttl_hours: float) -> None:
    """Keep the snapshot whose key begins with KEY for longer.

    It then expires --ttl-hours from now."""
    click.echo(module("tools.snapshot").renew(key, ttl_hours))


@snapshot.command("destroy")
@click.argument("key", default="")
@click.option("--all", "every", is_flag=True, help="Remove all snapshots.")
def destroy(key: str, every: bool) -> None:
    """Remove the snapshot whose key begins with KEY, or --all."""
    if bool(key) == every:
        raise UserError("Say which snapshot to remove: the beginning of its KEY, or --all.")
    for line in module("tools.snapshot").destroy(key):
        click.echo(line)
