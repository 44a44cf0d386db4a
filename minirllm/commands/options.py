"""Config's fields as options of commands: one copy of their meaning.

Owns: which command shows which of them, their flags, which value wins. Does not know: what commands do.

A value is the last of: Config's default, the task's DEFAULTS, the ``--config`` file, ``--set key=value``, its own flag.
With ``--resume``, and for the model of a ``--checkpoint``, the run's ``config.toml`` stands above the task's DEFAULTS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from minirllm import config
from minirllm.config import FIELDS, Config

TRAIN = (
    "model", "harness", "harness_full", "sandbox", "steps", "seed", "batch_size", "group_size", "lag", "lr",
    "lora_rank", "temperature", "max_tokens", "concurrency", "algorithm", "determinism", "threads", "eval_every",
    "save_every", "data", "runs_dir", "run", "trackers",
)  # fmt: skip
DISTILL = (
    "teacher", "teacher_top_k", "privileged", *(name for name in TRAIN if name not in ("algorithm", "temperature")),
)  # fmt: skip
OUTSIDE = ("provider", "base_url", "key_env")
SFT = (
    "model", "steps", "seed", "batch_size", "lr", "lr_schedule", "warmup_steps", "lora_rank", "max_context",
    "eval_every", "save_every", "determinism", "threads", "runs_dir", "run", "trackers",
)  # fmt: skip
EVAL = (
    "model", *OUTSIDE, "harness", "harness_full", "sandbox", "seed", "eval_temperature", "max_tokens", "concurrency",
    "determinism", "threads", "data", "runs_dir",
)  # fmt: skip
SERVE = ("model", *OUTSIDE, "max_tokens", "max_context", "determinism", "threads", "device", "runs_dir")
FLAGS = {"eval_temperature": "--temperature", "teacher_top_k": "--top-k"}  # where the flag is not the field's name
TYPES = get_type_hints(Config)
# what a checkpoint only fits with
FROM_RUN = (
    *("model", "max_context", "history", "matcher", "tool_syntax", "date"),
    *("lora_rank", "lora_alpha", "lora_targets"),
)


def flags(names: tuple[str, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The flags of these Config fields, in this order, then ``--config`` and ``--set``. A flag not given is None."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        command = click.option(
            "--set",
            "settings",
            multiple=True,
            metavar="KEY=VALUE",
            help="Any option, with a flag or without; may be repeated. `minirllm options` explains them all.",
        )(command)
        command = click.option(
            "--config", "config_file", type=click.Path(path_type=Path), help="TOML file of options."
        )(command)
        for name in reversed(names):
            flag = FLAGS.get(name, "--" + name.replace("_", "-"))
            default = FIELDS[name].default
            text = FIELDS[name].metadata["doc"] + (f"  [default: {default}]" if default != "" else "")
            kind = TYPES[name]
            if get_origin(kind) is Literal:
                kind = click.Choice(get_args(kind))
            elif kind is bool:
                flag += f"/--no-{name.replace('_', '-')}"
            command = click.option(flag, name, type=kind, default=None, help=text)(command)
        return command

    return decorate


def chosen(
    options: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, run_defaults: Mapping[str, Any] | None = None
) -> Config:
    """The Config of a command's options; see the module's docstring for which value wins."""
    given = {name: value for name, value in options.items() if name in FIELDS}
    return config.load(options["config_file"], options["settings"], given, {**(defaults or {}), **(run_defaults or {})})
