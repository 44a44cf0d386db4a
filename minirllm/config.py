"""One frozen Config: every knob, its default, its meaning. TOML file + `--set key=value` + flags, later wins.

Owns: names, types and bounds of options. Does not know: what they do.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import importlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from minirllm.errors import ConfigError, Users
from minirllm.types import MOST


def option(default: Any, doc: str, low: float | None = None, high: float = MOST) -> Any:
    """A field with its one-line meaning and inclusive bounds; the doc is what ``--help`` prints."""
    return field(default=default, metadata={"doc": doc, "low": low, "high": high})


@dataclass(frozen=True)
class Config:
    """Everything a run depends on besides its task file."""

    # what to train
    model: str = option("smollm2-135m", "smollm2-135m, tiny, a local folder or a hub id, each with optional @revision")
    max_context: int = option(2048, "longest prompt + completion, tokens (clamped to the model's own limit)", 16)
    history: Literal["keep", "rerender"] = option(
        "keep", "past assistant turns: as sampled, or as the chat template rewrites them"
    )
    matcher: str = option("normalized", "how messages sent back by a client are recognised: normalized, or module:attr")
    tool_syntax: str = option(
        "auto", "how the model writes tool calls, auto: as its chat template does; see docs/tools.md; or module:attr"
    )
    date: str = option("", "the date, YYYY-MM-DD, that some chat templates print (default: the day the run began)")
    # who answers instead of that model, in evaluation and `serve` (never in training)
    provider: str = option("", "outside provider: active or another stored by `minirllm model setup`, or openai, ...")
    base_url: str = option("", "the base URL of an outside OpenAI-compatible provider; --model names its model")
    key_env: str = option("", "environment variable that holds the provider's key (default: the stored or usual one)")
    # who acts
    harness: str = option("", "the agent program, in place of the task's own: see `minirllm harness list`")
    harness_full: bool = option(False, "the harness as its users run it, not in its leanest form")
    sandbox: str = option("", "where to act and to grade: local, docker, daytona, modal, local-unsafe, or module:attr")
    setup: str = option("", "a line of bash that prepares each sandbox before an agent works in it")
    snapshots: Literal["use", "make", "off"] = option(
        "use", "prepared sandboxes: begin with those that `minirllm snapshot` lists, also keep new ones, or do neither"
    )
    warm: int = option(0, "sandboxes started ahead of the rollouts that are to come", 0)
    # how long, how wide
    steps: int = option(20, "optimizer steps in the whole run", 1)
    batch_size: int = option(8, "tasks (or rows, of fine-tuning) per step", 1)
    group_size: int = option(8, "rollouts per task", 1)
    lag: int = option(0, "how many later steps have their rollouts run, by older weights, while a step is trained", 0)
    partial_calls: int = option(
        0, "with a lag: calls that an episode makes before it waits for the next update (0 = no limit)", 0
    )
    seed: int = option(0, "the run seed: same seed, same bits", 0, 2**63 - 1)
    concurrency: int = option(64, "rollouts that run at once", 1)
    episode_timeout: float = option(600.0, "one deadline per episode for agent and grader together, seconds", 0.01)
    grading_timeout: float = option(60.0, "for one grading, seconds; an evaluator may have its own", 0.01)
    retries: int = option(1, "new attempts when an episode ends in an error", 0)
    max_calls: int = option(200, "model calls one session may make", 1)
    max_session_tokens: int = option(0, "prompt and sampled tokens of all calls of one session (0 = no limit)", 0)
    max_streams: int = option(16, "model calls of one session that are sampled at once; more of them wait", 1)
    max_body: int = option(4 * 2**20, "largest body of one model call, bytes", 1024)
    # sampling (training overrides what an agent asks for)
    temperature: float = option(1.0, "sampling temperature in training", 0.0, 2.0)
    max_tokens: int = option(256, "new tokens per model call; agents may ask for less, and in evaluation for more", 1)
    eval_temperature: float = option(1.0, "sampling temperature in evaluation when the agent asks for none", 0.0, 2.0)
    # algorithm
    algorithm: str = option(
        "grpo",
        "grpo, dr_grpo, dapo, gspo, cispo, sapo, rloo, reinforce, gpg, prpo, reinforce_pp, reinforce_pp_baseline, or "
        "module:attr; distill: see `minirllm distill`",
    )
    roles: str = option("", "roles with an algorithm of their own, by name: solver=grpo,judge=reinforce")
    group_by: str = option("task", "who is compared: trajectories of one task and name (task), or module:attr")
    credit: str = option("trajectory", "what a call's advantage comes from: trajectory, returns, gigpo, or module:attr")
    baseline: Literal["group", "task"] = option("group", "the algorithm's own, or (reinforce) the task's earlier mean")
    discount: float = option(1.0, "credit returns or gigpo: what a reward is worth one call earlier", 0.0, 1.0)
    state_weight: float = option(1.0, "credit gigpo: weight of the advantage among calls that saw the same state", 0.0)
    # which of a step's rollouts are learned from
    min_group_size: int = option(1, "groups with fewer graded trajectories are not learned from", 1)
    drop_reasons: str = option("", "episodes that ended for these reasons are left out: max_turns_exceeded, ...")
    spare_rollouts: int = option(0, "extra rollouts of each task: learn from the first group_size that were graded", 0)
    spare_tasks: int = option(0, "extra tasks in each step: learn from the first batch_size with a signal", 0)
    refill: int = option(0, "at most this many rounds of other tasks in place of those without a signal", 0)
    # which tasks are taken
    curriculum: Literal["off", "learnable", "unsolved"] = option(
        "off", "off: each once an epoch; else drawn by solve rate p: learnable by p (1 - p), unsolved by 1 - p"
    )
    solve_rate_low: float = option(0.0, "tasks with a lower running solve rate are passed over", 0.0, 1.0)
    solve_rate_high: float = option(1.0, "tasks with a higher running solve rate are passed over", 0.0, 1.0)
    running_rate: float = option(0.5, "weight of the newest step in those rates and means (1 = it alone)", 0.01, 1.0)
    # the update
    inner_epochs: int = option(1, "how often each batch is gone through; from the second step on the ratio leaves 1", 1)
    mini_batches: int = option(1, "optimizer steps each time a batch is gone through, each on some of its tasks", 1)
    norm_std: bool = option(True, "GRPO: divide advantages by the group's standard deviation")
    clip_low: float = option(0.2, "ratio clip below: 1 - clip_low", 0.0, 1.0)
    clip_high: float = option(0.28, "ratio clip above: 1 + clip_high", 0.0)
    dual_clip: float = option(0.0, "a negative advantage costs at most this times itself (0 = off, else above 1)", 0.0)
    correction: Literal["auto", "off", "token", "sequence", "mask"] = option(
        "auto",
        "weight of what another policy sampled, up to correction_cap: each token's, or its trajectory's (sequence), or "
        "none beyond the cap (mask); auto: token with a lag, else off",
    )
    correction_cap: float = option(2.0, "largest weight of a correction; mask: also the smallest, 1 / cap", 1.0)
    kl_beta: float = option(0.0, "weight of the KL to the frozen base model (0 = off)", 0.0)
    kl_in: Literal["loss", "reward"] = option("loss", "the KL is added to a token's loss, or taken from the reward")
    kl_estimator: Literal["k3", "k2", "k1"] = option(
        "k3", "per token, d = reference - logprob: e^d - d - 1; d^2 / 2; or -d, in the reward only"
    )
    kl_target: float = option(0.0, "KL per token that kl_beta is steered to (0 = kl_beta stays)", 0.0)
    entropy_bonus: float = option(0.0, "weight of the entropy at each token, which the loss then raises", 0.0)
    overlong_buffer: int = option(0, "a reward falls by up to 1 over the last this many of max_tokens (0 = off)", 0)
    mask_truncated: bool = option(False, "trajectories with an answer cut off at max_tokens are not trained on")
    loss_aggregation: Literal["token", "sequence", "constant"] = option(
        "token",
        "token: mean over tokens; sequence: mean over trajectories of token means; "
        "constant: sum / (trajectories x max_tokens)",
    )
    # distillation: who teaches, and what the teacher knows
    teacher: str = option(
        "", "who scores the student's tokens: a model, a run, a checkpoint, a URL; or the student's base, or self"
    )
    teacher_model: str = option("", "the model's name at the teacher's URL (default: the only one there)")
    teacher_tokenizer: str = option("", "the model whose tokenizer that URL has (default: the student's)")
    teacher_top_k: int = option(
        0, "0: learn from the sampled tokens; K: from the teacher's K most likely, the rest as one", 0, 4096
    )
    privileged: str = option("", "what only the teacher is told: a key of Task.metadata, or a function module:attr")
    # optimizer
    lr: float = option(3e-4, "peak learning rate of AdamW", 0.0)
    lr_schedule: Literal["constant", "linear", "cosine"] = option(
        "constant", "after the warm-up: stay, or decay to 0 at the last step"
    )
    warmup_steps: int = option(0, "steps of linear warm-up", 0)
    weight_decay: float = option(0.0, "AdamW weight decay", 0.0)
    grad_clip: float = option(1.0, "clip the global gradient norm to this (0 = off)", 0.0)
    lora_rank: int = option(16, "rank of the LoRA adapter on all linear layers (0 = train all parameters)", 0)
    lora_alpha: float = option(32.0, "LoRA scale: alpha / rank", 0.0)
    lora_targets: str = option("all-linear", "comma-separated module names, or all-linear")
    gradient_checkpointing: bool = option(False, "recompute activations in backward: less memory, a third slower")
    micro_batch_tokens: int = option(640, "forest tokens per forward and backward", 16)
    packing: Literal["forest", "paths"] = option("forest", "forest: shared prefixes once; paths: one sequence per row")
    # engine
    engine: str = option("hf", "hf, scripted, or module:attr")
    determinism: Literal["auto", "exact", "fixed", "off"] = option(
        "auto",
        "auto: the best level the start-up probe finds; exact or fixed: refuse to start without it; off: no promise",
    )
    slots: int = option(0, "rows decoded together (0 = 32 on CPU, by free memory on CUDA)", 0)
    prefill_chunk: int = option(512, "prompt tokens per prefill forward", 16)
    threads: int = option(0, "torch CPU threads (0 = 2, or 1 for a model below 20M parameters); bits depend on it", 0)
    device: str = option("auto", "auto, cpu, cuda")
    # evaluation and saving
    eval_every: int = option(10, "steps between evaluations on held-out tasks (0 = only before and after)", 0)
    eval_tasks: int = option(64, "held-out tasks per evaluation (0 = none)", 0)
    save_every: int = option(10, "steps between checkpoints; the best evaluated step and the last are saved, too", 1)
    keep_checkpoints: int = option(2, "newest checkpoints to keep, besides the best", 1)
    # task data and output
    data: str = option("", "JSON-lines rows for tasks that read a dataset, instead of the hub")
    runs_dir: str = option("runs", "folder that holds one folder per run")
    run: str = option("", "name of the run (default: TASK-MODEL-SEED, of distill TASK-distill-MODEL-SEED)")
    trackers: str = option("", "comma-separated: tensorboard, wandb, trackio")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = _typed(f.name, getattr(self, f.name))
            object.__setattr__(self, f.name, value)
            low, high = f.metadata["low"], f.metadata["high"]
            if low is not None and not low <= value <= high:
                raise ConfigError(f"{f.name} must be at least {low} and at most {high}, got {value}.")

    @property
    def outside(self) -> bool:
        """Does a provider answer, and not the model in this process?"""
        return bool(self.provider or self.base_url)

    def trainable(self) -> Config:
        """This Config, with today's `date` if it has none. Raises ConfigError where a provider answers, and for options
        of an adapter that there is not."""
        if self.outside:
            raise ConfigError("A provider's model cannot be trained, its tokens are not known: leave the provider out.")
        if not self.lora_rank:
            refuse("lora_rank = 0", self, "lora_alpha", "lora_targets")
        return dataclasses.replace(self, date=self.date or datetime.date.today().isoformat())

    def to_dict(self) -> dict[str, Any]:
        """Field name to plain value."""
        return dataclasses.asdict(self)

    def to_toml(self) -> str:
        """A file that `load` reads back to an equal Config."""
        lines = []
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON is TOML here, but for DEL
            lines.append(f"# {f.metadata['doc']}\n{f.name} = {text}")
        return "\n".join(lines) + "\n"

    def run_folder(self, task: str) -> Path:
        """Where a run of the task named `task` writes: ``runs_dir / run``, or a name made of task, model and seed. A
        distillation is told from a training of the same task, perhaps its teacher."""
        model = self.model.partition("@")[0].rstrip("/").rpartition("/")[2]
        task += "-distill" if self.algorithm == "distill" else ""
        name = self.run or re.sub(r"[^\w.-]+", "-", f"{task}-{model}-{self.seed}")
        if name in (".", "..") or Path(name).name != name:
            raise ConfigError(f"run is a name, not a path, got {name!r}; the folder around it is runs_dir.")
        return Path(self.runs_dir) / name


_TYPES = get_type_hints(Config)
FIELDS = {f.name: f for f in dataclasses.fields(Config)}


def nearest(name: str, names: list[str]) -> str:
    """`` (did you mean x?)`` when a name is close, else an empty string."""
    close = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def find(kind: str, name: str, table: Mapping[str, str]) -> Any:
    """What `name` stands for in the table of a family, or what lies at ``module:attr``. Raises ConfigError."""
    module, colon, attribute = table.get(name, name).partition(":")
    if not (colon and all(map(str.isidentifier, module.split(".")))):
        others = f"use {', '.join(table)}, or module:attr"
        raise ConfigError(f"There is no {kind} {name!r}{nearest(name, list(table))}: {others}.")
    failed = f"The {kind} {name!r} cannot be imported: "
    with Users(failed, kind=ConfigError):
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{failed}{error}.") from None


class NoEffect(ConfigError):
    """An option is set that has no effect."""

    def __init__(self, option: str, name: str, default: Any):
        super().__init__(f"{option} has no effect with {name}: leave it {f'at {default}' if default != '' else 'out'}.")
        self.option, self.default = option, default


def refuse(name: str, config: Config, *options: str) -> None:
    """Raises NoEffect when one of these options, which have no effect with what `name` says, is not at its default."""
    for option in options:
        if getattr(config, option) != (default := getattr(Config, option)):
            raise NoEffect(option, name, default)


def _typed(name: str, value: Any) -> Any:
    """`value` (perhaps text from a flag) as the field's type; ConfigError otherwise."""
    kind = _TYPES[name]
    if get_origin(kind) is Literal:
        names = list(get_args(kind))
        if value not in names:
            raise ConfigError(f"{name} must be one of {', '.join(names)}, got {value!r}{nearest(str(value), names)}.")
        return value
    try:
        if kind is bool and isinstance(value, str):
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[value.lower()]
        wrong = (kind is bool) != isinstance(value, bool) or (kind is str and not isinstance(value, str))
        if wrong or (kind is int and isinstance(value, float) and value != int(value)):
            raise ValueError
        if kind is str:
            value.encode()  # bytes of a file name that are no UTF-8 could not be written to config.toml
        return kind(value)
    except (ValueError, KeyError, TypeError, OverflowError):
        raise ConfigError(f"{name} must be of type {kind.__name__}, got {value!r}.") from None


def from_mapping(values: Mapping[str, Any]) -> Config:
    """A Config from plain values. Raises ConfigError naming the unknown key and its nearest neighbour."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"Options are a mapping from their names to values, got {values!r:.80}.")
    for key in map(str, values):
        if key not in FIELDS:
            raise ConfigError(f"Unknown option {key!r}{nearest(key, list(FIELDS))}.")
    return Config(**values)


def read_toml(path: Path) -> dict[str, Any]:
    """The keys of a TOML file. Raises ConfigError when it cannot be read or parsed."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        from_mapping(values)
        return values
    except ConfigError as error:
        raise ConfigError(f"Config file {path}: {error}") from None
    except OSError as error:
        raise ConfigError(f"Cannot read config file {path}: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"Config file {path} is not valid TOML: {error}.") from None


def load(
    path: Path | None = None,
    settings: tuple[str, ...] = (),
    overrides: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Config:
    """Defaults, then `defaults` (a task's), the TOML file, ``key=value`` settings, `overrides` except None."""
    values = {**(defaults or {}), **(read_toml(path) if path is not None else {})}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set takes key=value, got {setting!r}.")
        values[key.strip()] = value.strip()
    values.update({key: value for key, value in (overrides or {}).items() if value is not None})
    return from_mapping(values)
