"""``minirllm model``: outside providers."""

from __future__ import annotations

import sys

import click

from minirllm.commands import module
from minirllm.errors import UserError


@click.group("model")
def provider() -> None:
    """Store outside providers for --provider, with model and key."""


@provider.command("setup")
@click.option("--provider", help="openai, anthropic, openrouter, vllm, ...; any other with --base-url.")
@click.option("--base-url", help="Where it answers, such as https://api.example.com/v1.")
@click.option("--model", help="The model, as the provider names it.")
@click.option(
    "--key", "key_from", help="Must be -: the key is read from standard input, since other users can see arguments."
)
@click.option("--key-env", metavar="NAME", help="Environment variable that holds the key; only its name is stored.")
@click.option("--name", help="Name of the stored profile.  [default: the provider's name]")
def model_setup(key_from: str | None, **options: str | None) -> None:
    """Store a provider and make it the active one.

    At a terminal, what is not given is asked for."""
    if key_from not in (None, "-"):
        raise UserError("A key in an argument is seen by everyone here: give --key - and write it to standard input.")
    given = {name: value for name, value in options.items() if value}
    if key_from:
        given["key"] = sys.stdin.readline()

    def ask(question: str, default: str, secret: bool) -> str:
        empty = default if default or secret else None  # None: it asks again
        answer: str = click.prompt(question, default=empty, hide_input=secret, show_default=bool(default))
        return answer

    click.echo(module("providers.setup").setup(given, ask if sys.stdin.isatty() else None))


@provider.command("show")
def model_show() -> None:
    """Show the stored providers; of a key only its end."""
    click.echo(module("providers.setup").show())


@provider.command("swap")
@click.argument("profile", default="")
@click.option("--model", default="", help="The model to use from now on.")
def model_swap(profile: str, model: str) -> None:
    """Make PROFILE the active one, or change its model.

    Without PROFILE, --model is the new model of the active one."""
    if not (profile or model):
        raise UserError("Swap to what? Name a profile of `minirllm model show`, or another --model.")
    click.echo(module("providers.setup").swap(profile, model))
