"""What a run writes down and says: ``metrics.jsonl``, ``manifest.json``, ``config.toml``, the console.

Owns: the run folder's lock and those three files, the live progress, the one line per step and its diagnosis.
Does not know: torch, models, episodes; a metric is a name and a number.

``metrics.jsonl`` has one JSON object per step. Numbers that are not finite are the strings "nan", "inf", "-inf" (JSON
has no other place for them); null means *not measured*. Methods that write wait for the disk: call them in a thread.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from minirllm import filters, trackers
from minirllm.config import Config
from minirllm.diagnostics import AGREED, ALONE, SHOWN, tripwires
from minirllm.errors import UserError
from minirllm.files import why, write_whole
from minirllm.machine import machine

METRICS, MANIFEST, CONFIG = "metrics.jsonl", "manifest.json", "config.toml"
UNIFORM = {
    "groups_too_easy": "too easy",
    "groups_too_hard": "too hard",
    "groups_uniform": "all alike",
    "groups_too_small": "too small",
}
TROUBLE = {"truncated": "truncated", "ungraded": "ungraded", "malformed_tool_calls": "parse failures"}
DISCARDED = {
    "discarded/no_signal": "without signal",
    "discarded/truncated": "of trajectories cut off",
    "discarded/too_small": "of groups too small",
    "discarded/dropped": "of episodes left out",
    "discarded/surplus": "to spare",
    "discarded/ungraded": "ungraded",
    "discarded/auxiliary": "of auxiliary calls",
    "discarded/unclaimed": "of calls that no trajectory claims",
    "discarded/aborted": "cut off",
    "discarded/retried": "of attempts that were run again",
}
BRANCHES = {"edited": "edited", "rerendered": "rewritten by the template", "unprovable": "not provable"}
IDENTITY = ("seed", "model", "task")  # facts of the manifest: with another one it is another run
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class RunLog:
    """One process's hold on a run folder. Raises UserError when it is in use, or used before and not resumed."""

    def __init__(
        self, folder: Path, config: Config, *, resume: bool = False, quiet: bool = False, console: Console | None = None
    ):
        self.folder, self.config, self.quiet, self.level = folder, config, quiet, ""
        self.console = console or Console(highlight=False)
        self._bar: Progress | None = None
        self._rows: list[dict[str, Any]] = []  # of the steps so far
        with ExitStack() as undo:
            undo.enter_context(_lock(folder))
            self._resumed = any((folder / name).exists() for name in (METRICS, "episodes", "checkpoints"))
            if self._resumed and not resume:
                raise UserError(f"{folder} already holds a run: continue it with --resume, or name another with --run.")
            if not self._resumed:
                write_whole(folder / CONFIG, config.to_toml())
            self._trackers = trackers.build(config.trackers, folder, config)
            for tracker in self._trackers:
                undo.callback(tracker.close)
            undo.callback(self._end_bar)
            self._exit = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the progress display and the trackers, and releases the folder."""
        self._exit.close()

    def manifest(self, **facts: Any) -> None:
        """Writes what the run's bits depend on: `facts` (JSON values), the configuration, this machine.

        A resumed run keeps its first manifest and adds what has changed since, which is also said on the console.
        Raises UserError when it is another run by its nature (see IDENTITY).
        """
        self.level = str(facts.get("level", ""))
        new = {"config": self.config.to_dict(), **facts, **machine()}
        path = self.folder / MANIFEST
        if self._resumed and path.exists():
            first = read_json(path)
            for name in IDENTITY:
                if first.get(name) != new.get(name):
                    was = f"{self.folder} began with {name} {first.get(name)!r}, not {new.get(name)!r}"
                    raise UserError(f"{was}: resume it with its own, or name another run with --run.")
            changed = changes(first, new)
            first.setdefault("resumed", []).append({"time": new["time"], "changed": changed})
            new = first
            if changed:
                listed = ", ".join(f"{name} {old!r} -> {now!r}" for name, (old, now) in changed.items())
                self.warn(f"Resumed with changes, so the bits may differ from an uninterrupted run: {listed}.")
        write_whole(path, json.dumps(new, indent=1) + "\n")

    def rewind(self, step: int) -> None:
        """The resumption has succeeded: the configuration is written. Drops the rows after `step`, and a torn last
        line: a resumed run writes them again."""
        write_whole(self.folder / CONFIG, self.config.to_toml())
        manifest = read_json(self.folder / MANIFEST) if (self.folder / MANIFEST).exists() else {}
        if "resumed" in manifest:
            manifest["resumed"][-1]["after"] = max(step, 0)  # the step behind which the changes hold
            write_whole(self.folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        path = self.folder / METRICS
        rows = read_metrics(path) if path.exists() else []
        kept = [row for row in rows if row["step"] <= step]
        write_whole(path, "".join(map(_line, kept)))
        self._rows = [row for row in kept if row["step"]]

    def step(self, metrics: Mapping[str, Any]) -> None:
        """One row, on disk when this returns; one line on the console, and a sentence when nothing could be learned.

        `metrics` has ``step``; other values are numbers, booleans, texts or None. Raises UserError for anything else.
        """
        row = {name: _plain(name, value) for name, value in metrics.items()}
        try:
            with (self.folder / METRICS).open("a", encoding="utf-8") as file:
                file.write(_line(row))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            what = f"Cannot write {self.folder / METRICS}: {why(error)}"
            raise UserError(f"{what}. Then continue with --resume.") from None
        numbers = {
            name: value for name, value in row.items() if isinstance(value, int | float) and math.isfinite(value)
        }
        for tracker in self._trackers:
            tracker.log(row["step"], numbers)
        self._end_bar()
        self.say(explain(row, self.config.steps, self.level))
        if sentence := diagnose(row, self.config, str(self.folder)):
            self.warn(sentence)
        if row["step"]:
            self._rows.append(row)
            for sentence in tripwires(self._rows):
                self.warn(sentence)

    def say(self, sentence: str) -> None:
        """A line on the console, unless quiet."""
        if not self.quiet:
            self._print(sentence, "")

    def warn(self, sentence: str) -> None:
        """A line on the console, quiet or not."""
        self._print(sentence, "yellow")

    def progress(self, phase: str, done: int, total: int, *, in_flight: int = 0, tokens: int = 0) -> None:
        """Moves the live display, on a terminal; nothing otherwise. `tokens` were generated so far in this phase."""
        if self.quiet or not self.console.is_terminal:
            return
        if self._bar is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[detail]}"),
            )
            self._bar = Progress(*columns, TimeRemainingColumn(compact=True), console=self.console, transient=True)
            self._bar.add_task(phase, total=total, detail="")
            self._bar.start()
        (task,) = self._bar.tasks
        if phase != task.description:
            self._bar.reset(task.id, description=phase, total=total, detail="")
        detail = [f"{in_flight} in flight"] if in_flight else []
        if tokens and task.elapsed:
            detail.append(f"{tokens / task.elapsed:.0f} tok/s")
        self._bar.update(task.id, completed=done, total=total, detail=", ".join(detail))

    def _print(self, sentence: str, style: str) -> None:
        self.console.print(Text(printable(sentence), style), soft_wrap=True)

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = None


def explain(row: Mapping[str, Any], steps: int, level: str = "") -> str:
    """One line: what was learned from, what was not, how fast. Leaves out what was not measured, and counts of zero."""
    parts = [f"step {row['step']}/{steps}"]
    if "groups" not in row:  # of fine-tuning
        losses = {"loss": "loss"} if _count(row, "trained_tokens") else {}
        losses |= {"val_loss": "held-out loss"} if "val_loss" in row else {}
        parts += [f"{text} {_show(row, name, '.4f')}" for name, text in losses.items()]
    if row.get("reward_mean") is not None:
        parts.append(f"reward {_show(row, 'reward_mean', '.3f')} ± {_show(row, 'reward_std', '.2f')}")
    if row.get("eval_reward") is not None:
        interval = f"[{_show(row, 'eval_low', '.2f')}, {_show(row, 'eval_high', '.2f')}]"
        parts.append(f"held-out {_show(row, 'eval_reward', '.3f')} {interval}")
        parts += _counts(row, {"eval_without_reward": "held-out without reward"})
    elif none := _count(row, "eval_without_reward"):
        parts.append(f"held-out: none of {none} could be graded ({row.get('eval_ungraded_reason', 'no reason given')})")
    if row.get("groups") is not None:
        signal = f"signal in {_count(row, 'groups_with_signal')} of {_count(row, 'groups')} groups"
        parts.append(", ".join([signal, *_counts(row, UNIFORM), *_counts(row, TROUBLE)]))
    parts += filters.sentences(row)
    parts += _ledger(row, level)
    parts += [f"{text} {_show(row, name, form)}" for name, text, form in SHOWN if row.get(name) is not None]
    tokens = _count(row, "tokens_generated") - _count(row, "tokens_kept")  # those now, in these seconds
    if tokens > 0 and row.get("seconds_generate"):
        parts.append(f"{tokens / row['seconds_generate']:.0f} tok/s")
    seconds = (
        ("seconds_generate", "generate"),
        ("seconds_waited", "waited"),
        ("seconds_train", "train"),
        ("seconds_eval", "evaluate"),
    )
    parts += [f"{text} {row[name]:.1f} s" for name, text in seconds if row.get(name)]
    if level:
        parts.append(f"determinism {level}")
    if row.get("seconds_step") and row["step"] < steps:
        parts.append(f"{_duration(row['seconds_step'] * (steps - row['step']))} left")
    return " | ".join(parts)


def _ledger(row: Mapping[str, Any], level: str) -> list[str]:
    """Sampled tokens that are not trained on, those read otherwise than sampled, and sampler against trainer: why."""
    parts = []
    if drift := _count(row, "drift") + _count(row, "eval_drift"):
        parts.append(f"drift in {drift} calls: their text, as sent, is not what their tokens say")
    if _count(row, "discarded_tokens"):
        counts = f"{_count(row, 'discarded_tokens')} of {_count(row, 'sampled_tokens')} tokens"
        parts.append(f"discarded {counts} ({', '.join(_counts(row, DISCARDED))})")
    if _count(row, "branches"):
        why = ", ".join(_counts(row, {**BRANCHES, "reread_tokens": "tokens read otherwise"}))
        parts.append(f"{_count(row, 'branches')} branches ({why})")
    if row.get("mismatch_max") is not None:
        why = " where exact promises 0" if level == "exact" and row["mismatch_max"] != 0 else ""
        why = f" (of weights up to {row['lag_max']:.0f} updates old)" if row.get("lag_max") else why
        parts.append(f"mismatch {_show(row, 'mismatch_max', '.2g')}{why}")
    return parts


def diagnose(row: Mapping[str, Any], config: Config, run: str) -> str:
    """Why a step had nothing to learn from and what to do, in plain sentences; empty when it had something."""
    groups, graded = _count(row, "groups"), _count(row, "episodes") - _count(row, "ungraded")
    if row.get("groups") is None or row.get("trained_tokens", row.get("groups_with_signal")):
        return ""
    look = f"`minirllm show {run}` prints some."
    if graded <= 0:
        why = ", ".join(
            f"{name.removeprefix('ungraded/')} {_count(row, name)}" for name in row if name.startswith("ungraded/")
        )
        if row.get("ungraded_reason"):
            why += f"; the first: {row['ungraded_reason']}"
        none = f"None of the {_count(row, 'episodes')} answers could be graded"
        return f"{none} ({why or 'no reason given'}), so nothing was learned: {look}"
    if sentence := filters.nothing_left(row, graded, config) or (AGREED if config.teacher else ""):
        return sentence
    if _count(row, "groups_too_hard") == groups:
        sentence = f"0 of {graded} answers were graded above 0, so nothing was learned."
        if _count(row, "truncated") * 2 > _count(row, "calls"):
            cut = f"{_count(row, 'truncated')} were cut off at {config.max_tokens} tokens"
            return f"{sentence} {cut}: raise --max-tokens."
        if _count(row, "malformed_tool_calls") * 2 > _count(row, "calls"):
            return f"{sentence} {_count(row, 'malformed_tool_calls')} had tool calls that could not be parsed: {look}"
        return f"{sentence} Easier tasks, examples in the prompt or a larger --group-size help; {look}"
    if _count(row, "groups_too_easy") == groups:
        return f"All {graded} answers got the full reward, so nothing was learned: these tasks are solved, take harder."
    if config.group_size == 1:
        return ALONE
    return (
        f"In each of the {groups} groups all answers got the same reward ({', '.join(_counts(row, UNIFORM))}), "
        "so nothing was learned: a larger --group-size or a higher --temperature makes them differ."
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl`` in order of step; of two rows of a step the later counts.

    A torn last line is left out. Raises UserError for a broken line anywhere else.
    """
    rows: dict[int, dict[str, Any]] = {}
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line else None
        except json.JSONDecodeError:
            row = "torn"
        if row is None or (row == "torn" and number == len(lines)):
            continue
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise UserError(f"{path} is damaged: line {number} is not a metrics row; delete that line.")
        rows[row["step"]] = {
            name: NON_FINITE.get(value, value) if isinstance(value, str) else value for name, value in row.items()
        }
    return [rows[step] for step in sorted(rows)]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises UserError when it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read {path}: {error}.") from None
    if not isinstance(found, dict):
        raise UserError(f"Cannot read {path}: it is not a JSON object.")
    return found


def printable(text: str) -> str:
    """`text` with control characters spelled out: what a model or an agent wrote must not steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def _lock(folder: Path) -> TextIO:
    """An open file that holds the folder's lock until it is closed or the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undo:
            file = undo.enter_context((folder / "lock").open("a+"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise UserError(
                    f"{folder} is in use by process {file.read().strip()}: wait for it, or name another run with --run."
                ) from None
            file.truncate(0)
            os.write(file.fileno(), str(os.getpid()).encode())  # nothing is left to be flushed when the disk is full
            undo.pop_all()
    except OSError as error:
        raise UserError(f"Cannot use run folder {folder}: {why(error)}.") from None
    return file


def changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> dict[str, list[Any]]:
    """``{dotted name: [old, new]}`` of the leaves that differ, but for when and where."""
    changed: dict[str, list[Any]] = {}
    for name in [*new, *(name for name in old if name not in new)]:
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            changed.update(changes(before, after, f"{prefix}{name}."))
        elif before != after and prefix + name not in ("time", "resumed", "config.run", "config.runs_dir"):
            changed[prefix + name] = [before, after]
    return changed


def _plain(name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise UserError(f"Metric {name!r} must be a number, got {type(value).__name__}: convert it where it is made.")


def _line(row: Mapping[str, Any]) -> str:
    return (
        json.dumps({k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}) + "\n"
    )


def _count(row: Mapping[str, Any], name: str) -> int:
    return int(row.get(name) or 0)


def _counts(row: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    """``3 too easy`` for every one of `names` that is not zero."""
    return [f"{_count(row, name)} {text}" for name, text in names.items() if _count(row, name)]


def _show(row: Mapping[str, Any], name: str, form: str) -> str:
    value = row.get(name)
    return "?" if value is None else format(value, form)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
