"""The command line: ``minirllm train | distill | sft | eval | serve | show | replay | diff | dataset | harness |
snapshot | model | options``.

Owns: which commands there are, how errors are shown. Does not know: what a command does.
"""

from __future__ import annotations

from typing import Any

import click

from minirllm import __version__, watchdog
from minirllm.commands import sentence
from minirllm.commands.ask import evaluate, serve
from minirllm.commands.dataset import dataset
from minirllm.commands.explain import options
from minirllm.commands.harness import harness
from minirllm.commands.learn import distill, sft, train
from minirllm.commands.model import provider
from minirllm.commands.runs import diff, replay, show
from minirllm.commands.snapshot import snapshot
from minirllm.errors import EngineError, UserError


class _Refusal(click.ClickException):
    """A UserError as the command line shows it: one line, exit code 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"error: {' '.join(self.message.split())}", err=True)


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of COMMANDS, not of the alphabet

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            raise _Refusal(str(error)) from error
        except EngineError as error:
            raise _Refusal(sentence(error)) from error
        except KeyboardInterrupt:
            click.echo("\nStopped.", err=True)
            raise SystemExit(130) from None


COMMANDS = (train, distill, sft, evaluate, serve, show, replay, diff, dataset, harness, snapshot, provider, options)
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


@click.group(cls=_Group, commands=COMMANDS, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="minirllm")
def cli() -> None:
    """Train language agents with reinforcement learning without rewriting them."""


def main() -> None:
    """The console script."""
    try:
        cli(prog_name="minirllm")
    except SystemExit as end:
        watchdog.leave(end.code if isinstance(end.code, int) else int(bool(end.code)))
        raise


if __name__ == "__main__":
    main()
