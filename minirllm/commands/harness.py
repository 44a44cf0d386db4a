"""``minirllm harness``: agent programs."""

from __future__ import annotations

import click

from minirllm.commands import module, prepare
from minirllm.config import FIELDS


@click.group()
def harness() -> None:
    """List, install and check agent programs for --harness NAME."""


@harness.command("list")
def list_harnesses() -> None:
    """List the agent programs, installed or not."""
    rows = [("NAME", "VERSION", "DIALECT", "STATE", ""), *module("tools.programs").table()]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, [*widths, 0], strict=True)).rstrip())


@harness.command("show")
@click.argument("name")
@click.option("--full", is_flag=True, help="Run it as its users do, not in its leanest form.")
def show_harness(name: str, full: bool) -> None:
    """Show with which command, environment and files NAME is run."""
    click.echo(module("tools.programs").show(module("harness").find(name), full))


@harness.command("install")
@click.argument("name")
def install_harness(name: str) -> None:
    """Install NAME into the cache folder.

    `train` and `eval` do it when they need it."""
    prepare(name)
    click.echo(f"{name} is installed: {module('harness').find(name).folder}")


@harness.command("check")
@click.argument("name")
@click.option("--full", is_flag=True, help="Run it as its users do, not in its leanest form.")
@click.option("--sandbox", default="", help=FIELDS["sandbox"].metadata["doc"])
def check_harness(name: str, full: bool, sandbox: str) -> None:
    """Run NAME against a scripted model.

    The exit code is 0 when it changed a file and all its calls were captured, else 1."""
    prepare(name)
    report = module("tools.harness").check(name, full, sandbox)
    click.echo(report)
    raise SystemExit(0 if report.passed else 1)
