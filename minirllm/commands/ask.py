"""``minirllm eval`` and ``minirllm serve``: what uses weights."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import click

from minirllm import flow
from minirllm.commands import module, prepare, with_checkpoint
from minirllm.commands.options import EVAL, SERVE, flags
from minirllm.config import Config


@click.command("eval")
@click.argument("task")
@flags(EVAL)
@click.option(
    "--n", "n", type=click.IntRange(1), default=1, show_default=True, help="Rollouts per task: pass@1 to pass@n."
)
@click.option(
    "--tasks", "eval_tasks", type=int, default=None, help=f"How many tasks, 0 for all.  [default: {Config.eval_tasks}]"
)
@click.option(
    "--split",
    type=click.Choice(["held_out", "train"]),
    default="held_out",
    show_default=True,
    help="Which of the two sets of TASK.",
)
@click.option(
    "--checkpoint", help="A run (its newest checkpoint), or a checkpoint folder.  [default: the model as it is]"
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Folder that items.jsonl, summary.json and the episodes are written to.",
)
def evaluate(task: str, n: int, split: str, checkpoint: str | None, output: Path | None, **options: Any) -> None:
    """Evaluate a model on the held-out tasks of TASK.

    The model runs in this process, or it is an outside provider's (--provider)."""
    loaded = flow.load_task(task)
    settings, folder = with_checkpoint(options, loaded.defaults, checkpoint)
    prepare(settings.harness, own=loaded.own_agents)
    click.echo(module("evaluate").run(loaded, settings, n=n, split=split, checkpoint=folder, output=output))


@click.command()
@flags(SERVE)
@click.option(
    "--checkpoint", help="A run (its newest checkpoint), or a checkpoint folder.  [default: the model as it is]"
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option("--key", help="The key clients must send.  [default: a new random one]")
@click.option("--admin-key", default="", help="The key of the admin routes.  [default: there are no admin routes]")
def serve(host: str, port: int, key: str | None, admin_key: str, checkpoint: str | None, **options: Any) -> None:
    """Serve a model to OpenAI's, Anthropic's and Google's clients.

    The model runs in this process, or it is an outside provider's (--provider)."""
    settings, folder = with_checkpoint(options, {}, checkpoint)
    secret = key or "sk-" + secrets.token_urlsafe(24)

    def ready(base_url: str, model: str) -> None:
        click.echo(f"base URL: {base_url}/v1\nkey: {secret}\nmodel: {model}\n")
        for name, url in (("OPENAI", f"{base_url}/v1"), ("ANTHROPIC", base_url)):
            click.echo(f"export {name}_BASE_URL={url} {name}_API_KEY={secret}")
        click.echo(f"export GOOGLE_GEMINI_BASE_URL={base_url} GEMINI_API_KEY={secret}")
        body = '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}'
        click.echo(
            f"\ncurl {base_url}/v1/chat/completions -H 'Authorization: Bearer {secret}' "
            f"-H 'Content-Type: application/json' -d '{body}'"
        )

    try:
        address, keys = (host, port), (secret, admin_key)
        module("providers.serving").serve(settings, address=address, keys=keys, checkpoint=folder, ready=ready)
    except KeyboardInterrupt:
        click.echo("\nStopped.", err=True)
