"""``minirllm options``: what can be set."""

from __future__ import annotations

from typing import get_args

import click

from minirllm.commands.options import FLAGS, TYPES
from minirllm.config import FIELDS
from minirllm.errors import UserError


@click.command()
@click.argument("words", nargs=-1)
def options(words: tuple[str, ...]) -> None:
    """Explain every option: its default and its meaning.

    With WORDS, only options whose name or meaning has all of them. Give an option as a flag where a command has one, as
    --set NAME=VALUE anywhere, or in the file of --config."""
    rows = []
    for name, field in FIELDS.items():
        meaning, choices = field.metadata["doc"], " | ".join(map(str, get_args(TYPES[name])))
        flag = f"flag {FLAGS[name]}" if name in FLAGS else ""
        notes = "".join(f"  [{note}]" for note in (choices, flag) if note)
        if all(word.lower() in f"{name} {meaning}".lower() for word in words):
            rows.append((f"{name} = {field.default}".rstrip(), meaning + notes))
    if not rows:
        raise UserError(f"No option is named or explained with {' '.join(words)!r}: `minirllm options` lists all.")
    formatter = click.get_current_context().make_formatter()
    formatter.write_dl(rows)
    click.echo(formatter.getvalue(), nl=False)
