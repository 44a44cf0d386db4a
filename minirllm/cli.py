"""The command line: ``minirllm train | sft | eval | serve | dataset | model | show | replay | diff | harness``.

Owns: the commands, how errors are shown. Does not know: how anything is done. What needs torch is imported when a
command runs it, so that ``--help`` and ``show`` are fast.
"""

from __future__ import annotations

import importlib
import secrets
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from minirllm import __version__, config, flow, watchdog
from minirllm.config import FIELDS, Config
from minirllm.errors import CheckpointError, EngineError, UserError
from minirllm.interrupt import Terminated
from minirllm.options import EVAL, FROM_RUN, SERVE, SFT, TRAIN, chosen, flags


class _Refusal(click.ClickException):
    """A UserError as the command line shows it: one line, exit code 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"error: {' '.join(self.message.split())}", err=True)


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            raise _Refusal(str(error)) from error
        except EngineError as error:
            raise _Refusal(_sentence(error)) from error
        except KeyboardInterrupt:
            click.echo("\nStopped.", err=True)
            raise SystemExit(130) from None


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="minirllm")
def cli() -> None:
    """Train language agents with reinforcement learning without rewriting them."""


@cli.command()
@click.argument("task")
@flags(TRAIN)
@click.option(
    "--resume", is_flag=True, help="Continue the newest whole checkpoint of --run, with the run's own options."
)
@click.option("--quiet", is_flag=True, help="Print warnings and errors only.")
def train(task: str, resume: bool, quiet: bool, **options: Any) -> None:
    """Train on TASK: a file such as tasks/first_letter.py, a folder of Harbor tasks, or an installed task's name.

    A task may set options of its own (DEFAULTS in its file); the defaults below hold where it does not."""
    module = flow.load_task(task)
    settings = chosen(options, module.defaults)
    folder = settings.run_folder(module.name)
    if resume:
        if not folder.is_dir():
            raise CheckpointError(f"There is no run {folder} to resume: name one with --run, or leave out --resume.")
        own = config.read_toml(folder / "config.toml") if (folder / "config.toml").exists() else {}
        settings = replace(chosen(options, module.defaults, own), run=folder.name, runs_dir=str(folder.parent))
    _prepare(settings.harness, quiet, module.own_agents)
    where = ["--runs-dir", settings.runs_dir] if settings.runs_dir != Config.runs_dir else []
    again = shlex.join(["minirllm", "train", task, "--run", folder.name, *where, "--resume"])
    try:
        summary = _module("train").run(module, settings, resume=resume, quiet=quiet)
    except (KeyboardInterrupt, Terminated) as end:
        click.echo(f"\nStopped. Continue with: {again}", err=True)
        raise SystemExit(end.code if isinstance(end, Terminated) else 130) from None
    except EngineError as error:
        raise UserError(f"{_sentence(error)} What was finished is kept; continue with: {again}") from error
    if summary and summary["step"] < settings.steps:
        click.echo(f"Stopped after step {summary['step']} of {settings.steps}. Continue with: {again}", err=True)
    elif not quiet:
        done = (
            "Done"
            if summary
            else f"Nothing to do: all {settings.steps} steps were done before; --steps takes the run further"
        )
        click.echo(f"{done}. Weights: {folder / 'checkpoints'}. Look at it: minirllm show {folder}")


@cli.command()
@click.argument("data", type=click.Path(path_type=Path))
@flags(SFT)
@click.option("--val", type=click.Path(path_type=Path), help="Rows whose loss is measured and never learned from.")
@click.option("--epochs", type=click.IntRange(1), help="How often each row is seen; sets --steps.")
@click.option("--resume", is_flag=True, help="Continue the newest whole checkpoint of --run, with the same options.")
@click.option("--quiet", is_flag=True, help="Print warnings and errors only.")
def sft(data: Path, resume: bool, quiet: bool, val: Path | None, epochs: int | None, **options: Any) -> None:
    """Fine-tune on DATA, a file of JSON lines: {"messages": [...], "tools": [...]} as in chat completions. Every token
    of every assistant message is learned."""
    if epochs is not None and options["steps"] is not None:
        raise UserError("Give --epochs or --steps, not both.")
    settings = chosen(options)
    row = _module("sft").run(data, settings, val=val, epochs=epochs, resume=resume, quiet=quiet)
    if not quiet:
        folder = settings.run_folder(data.stem)
        click.echo(f"Done after step {row['step']}. Weights: {folder / 'checkpoints'}: give them to --checkpoint.")


@cli.command("eval")
@click.argument("task")
@flags(EVAL)
@click.option(
    "--n", "n", type=click.IntRange(1), default=1, show_default=True, help="Rollouts per task: pass@1 to pass@n."
)
@click.option(
    "--tasks", "eval_tasks", type=int, default=None, help=f"How many tasks, 0 for all.  [default: {Config.eval_tasks}]"
)
@click.option(
    "--split", type=click.Choice(["held_out", "train"]), default="held_out", show_default=True, help="Which tasks."
)
@click.option(
    "--checkpoint", help="A run (its newest checkpoint), or a checkpoint folder.  [default: the model as it is]"
)
@click.option("--output", type=click.Path(path_type=Path), help="Folder for items.jsonl, summary.json and episodes.")
def evaluate(task: str, n: int, split: str, checkpoint: str | None, output: Path | None, **options: Any) -> None:
    """Evaluate a model, in this process or of an outside provider, on the held-out tasks of TASK."""
    module = flow.load_task(task)
    settings, folder = _with_checkpoint(options, module.defaults, checkpoint)
    _prepare(settings.harness, own=module.own_agents)
    click.echo(_module("evaluate").run(module, settings, n=n, split=split, checkpoint=folder, output=output))


@cli.command()
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
    """Serve a model, in this process or of an outside provider, to OpenAI's, Anthropic's and Google's clients."""
    settings, folder = _with_checkpoint(options, {}, checkpoint)
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
        _module("providers.serving").serve(settings, address=address, keys=keys, checkpoint=folder, ready=ready)
    except KeyboardInterrupt:
        click.echo("\nStopped.", err=True)


@cli.group("model")
def provider_model() -> None:
    """Store a provider, its model and its key, for --provider of eval and serve."""


@provider_model.command("setup")
@click.option("--provider", help="openai, anthropic, openrouter, vllm, ...; any other with --base-url.")
@click.option("--base-url", help="Where it answers, such as https://api.example.com/v1.")
@click.option("--model", help="The model, as the provider names it.")
@click.option("--key", "key_from", help="Only -: the key is read from standard input, as arguments are seen by others.")
@click.option("--key-env", metavar="NAME", help="Environment variable that holds the key; only its name is stored.")
@click.option("--name", help="Of this profile.  [default: the provider's]")
def model_setup(key_from: str | None, **options: str | None) -> None:
    """Store a provider and make it the active one. What is not given is asked for at a terminal."""
    if key_from not in (None, "-"):
        raise UserError("A key in an argument is seen by everyone here: give --key - and write it to standard input.")
    given = {name: value for name, value in options.items() if value}
    if key_from:
        given["key"] = sys.stdin.readline()

    def ask(question: str, default: str, secret: bool) -> str:
        empty = default if default or secret else None  # None: it asks again
        answer: str = click.prompt(question, default=empty, hide_input=secret, show_default=bool(default))
        return answer

    click.echo(_module("providers.setup").setup(given, ask if sys.stdin.isatty() else None))


@provider_model.command("show")
def model_show() -> None:
    """Print what is stored; of a key only its end."""
    click.echo(_module("providers.setup").show())


@provider_model.command("swap")
@click.argument("profile", default="")
@click.option("--model", default="", help="The model to use from now on.")
def model_swap(profile: str, model: str) -> None:
    """Make PROFILE the active one, or change the model of it (of the active one, if none is named)."""
    if not (profile or model):
        raise UserError("Swap to what? Name a profile of `minirllm model show`, or another --model.")
    click.echo(_module("providers.setup").swap(profile, model))


@cli.group()
def dataset() -> None:
    """Make rows to learn from."""


@dataset.command("from-eval")
@click.argument("sources", nargs=-1, required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The file of JSON lines to write.")
@click.option("--filter", default="solved", show_default=True, help="Tasks to take, e.g. 'solved and avg < 0.9'.")
@click.option(
    "--select",
    type=click.Choice(("correct", "best", "best-n", "shortest", "all")),
    default="correct",
    show_default=True,
    help="Which of a task's episodes.",
)
@click.option("--max-per-task", "most", type=click.IntRange(1), help="At most so many episodes of a task.")
@click.option("--min-reward", type=float, help="Leave out episodes with less.")
@click.option("--dedup", is_flag=True, help="Take equal conversations once.")
@click.option("--val", type=click.Path(path_type=Path), help="Put the rows of some tasks here instead.")
@click.option("--val-fraction", type=click.FloatRange(0, 1), default=0.1, show_default=True, help="How many of them.")
@click.option("--seed", type=int, default=0, show_default=True, help="Which tasks those are.")
@click.option("--runs-dir", default=Config.runs_dir, show_default=True, help=FIELDS["runs_dir"].metadata["doc"])
def from_eval(
    sources: tuple[str, ...], out: Path, val: Path | None, val_fraction: float, seed: int, runs_dir: str, **wanted: Any
) -> None:
    """Turn episodes of SOURCES (runs, or folders of `eval --output`) into conversations for `minirllm sft`."""
    curate = _module("tools.curate")
    if val is not None and val.resolve() == out.resolve():
        raise UserError("--val and --out name the same file: one would take the place of the other.")
    folders = [Path(name) if Path(name).is_dir() else _run(name, runs_dir) for name in sources]
    folders = list(dict.fromkeys(folder.resolve() for folder in folders))  # one given twice counts once
    rows, tasks = curate.curate(folders, curate.Wanted(**wanted))
    if not rows:
        raise UserError(f"No episode of {tasks} tasks was taken: --filter and --select choose others.")
    kept, held = curate.split(rows, val_fraction, seed) if val else (rows, [])
    curate.write(out, kept)
    said = f"{len(kept)} rows of {len({row['task_id'] for row in kept})} of {tasks} tasks in {out}"
    if val is not None:
        curate.write(val, held)
        said += f", {len(held)} in {val}"
    held_out = ["--val", str(val)] if val else []
    click.echo(f"{said}; learn from them: {shlex.join(['minirllm', 'sft', str(out), *held_out])} (with their --model)")


@cli.command()
@click.argument("run")
@click.option("--step", type=int, help="Whose conversations to print.  [default: the last step]")
@click.option("--episodes", type=click.IntRange(0), help="How many best and how many worst.  [default: 1]")
@click.option("--episode", metavar="ID", help="One episode by its id, task:rollout.  [default: the best and the worst]")
@click.option("--tokens", is_flag=True, help="Token by token: logprobs, what was trained, what was not, and why.")
@click.option("--runs-dir", default=Config.runs_dir, show_default=True, help=FIELDS["runs_dir"].metadata["doc"])
def show(run: str, step: int | None, episodes: int | None, episode: str | None, tokens: bool, runs_dir: str) -> None:
    """Print the curve, the steps and the best and worst conversations of RUN: a name or a folder."""
    if episode and episodes is not None:
        raise UserError("One episode is asked for by its id: give --episode without --episodes.")
    wanted = _module("tools.show").Wanted(step, 1 if episodes is None else episodes, episode)
    _module("tools.ledger" if tokens else "tools.show").show(_run(run, runs_dir), wanted)


@cli.command()
@click.argument("run")
@click.option("--step", type=int, help="Only this step: its calls and its update.")
@click.option("--episode", help="Only the calls of this episode: TASK:ROLLOUT, or its session's id.")
@click.option("--call", help="Only the call with this id.")
@click.option("--runs-dir", default=Config.runs_dir, show_default=True, help=FIELDS["runs_dir"].metadata["doc"])
def replay(run: str, step: int | None, episode: str | None, call: str | None, runs_dir: str) -> None:
    """Compute RUN again from its folder alone: exit code 0 when every bit matches, 1 at the first difference."""
    if episode and call:
        raise UserError("A call has one episode: give --call without --episode.")
    again = _module("tools.replay").replay(_run(run, runs_dir), step=step, episode=episode, call=call)
    raise SystemExit(0 if again else 1)


@cli.command()
@click.argument("run_a")
@click.argument("run_b")
@click.option("--runs-dir", default=Config.runs_dir, show_default=True, help=FIELDS["runs_dir"].metadata["doc"])
def diff(run_a: str, run_b: str, runs_dir: str) -> None:
    """Say where RUN_A and RUN_B part, and what differs around them: exit code 0 when they are equal, else 1."""
    alike = _module("tools.diff").diff(_run(run_a, runs_dir), _run(run_b, runs_dir))
    raise SystemExit(0 if alike else 1)


@cli.group()
def harness() -> None:
    """Agent programs that can be trained as they are: --harness NAME of train and eval."""


@harness.command("list")
def list_harnesses() -> None:
    """What there is, installed or not."""
    rows = [("NAME", "VERSION", "DIALECT", "STATE", ""), *_module("tools.harness").table()]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, [*widths, 0], strict=True)).rstrip())


@harness.command("show")
@click.argument("name")
@click.option("--full", is_flag=True, help="As its users run it, not in its leanest form.")
def show_harness(name: str, full: bool) -> None:
    """The exact command, environment and files with which NAME is run."""
    click.echo(_module("tools.harness").show(_module("harness").find(name), full))


@harness.command("install")
@click.argument("name")
def install_harness(name: str) -> None:
    """Install NAME into the cache folder; `train` and `eval` do it when they need it."""
    _prepare(name)
    click.echo(f"{name} is installed: {_module('harness').find(name).folder}")


@harness.command("check")
@click.argument("name")
@click.option("--full", is_flag=True, help="As its users run it, not in its leanest form.")
@click.option("--sandbox", default="", help=FIELDS["sandbox"].metadata["doc"])
def check_harness(name: str, full: bool, sandbox: str) -> None:
    """Run NAME against a scripted model: exit code 0 when it changed a file and every call was captured, else 1."""
    _prepare(name)
    report = _module("tools.harness").check(name, full, sandbox)
    click.echo(report)
    raise SystemExit(0 if report.passed else 1)


def _prepare(name: str, quiet: bool = False, own: tuple[str, ...] = ()) -> None:
    """Install the harness of this name, unless it is one of the task's own or installed already."""
    if name and name not in own:
        say = (lambda line: None) if quiet else click.echo
        _module("tools.install").ensure(_module("harness").find(name), say)


def _with_checkpoint(
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
        folder = _run(checkpoint, settings.runs_dir)
    files = [
        place / "config.toml" for place in (folder, *folder.resolve().parents[:2]) if (place / "config.toml").is_file()
    ]
    own = config.read_toml(files[0]) if files else {}
    return chosen(options, defaults, {name: own[name] for name in FROM_RUN if name in own}), folder


def _run(name: str, runs_dir: str) -> Path:
    folder: Path = _module("tools.runs").find_run(name, runs_dir)
    return folder


def _sentence(error: Exception) -> str:
    text = str(error)
    return f"{text[:1].upper()}{text[1:]}."


def _module(name: str) -> Any:
    """A module of ours that is slow to import, or not needed by every command."""
    return importlib.import_module(f"minirllm.{name}")


def main() -> None:
    """The console script."""
    try:
        cli(prog_name="minirllm")
    except SystemExit as end:
        watchdog.leave(end.code if isinstance(end.code, int) else int(bool(end.code)))
        raise


if __name__ == "__main__":
    main()
