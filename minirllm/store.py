"""Finished episodes on disk: one JSON line each, so that a killed run loses none.

Owns: the files ``step_00001.jsonl`` of a folder, Episode <-> plain values. Does not know: how episodes are made.

A line is whole once `append` returns: written at once, flushed to the disk. What a crash left of a last line is ignored
when reading and cut off by the next `append`. Reading restores token trees, rewards and steps exactly, floats bit for
bit; values of the user's own types in fields of type Any come back as their `repr`, tuples as lists.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np

from minirllm.errors import CheckpointError
from minirllm.files import sync, why, write_whole
from minirllm.tree import TokenTree
from minirllm.types import Episode, Message, SamplingParams, Step, Task, TerminationReason, ToolCall, Trajectory

FORMAT = 1  # of a line
MAX_DEPTH = 50  # of nested values in fields of type Any
_NAME = re.compile(r"step_(\d+)\.jsonl")
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError)  # what reading a damaged line can raise
_REPR = reprlib.Repr()  # survives a __repr__ that raises
_REPR.maxother = _REPR.maxstring = 1000


class EpisodeStore:
    """The episodes of a run, by step. One process writes; any number may read."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self._mended: set[int] = set()  # steps whose file is known to end in a whole line

    def append(self, step: int, episode: Episode) -> None:
        """Write one episode. Raises CheckpointError when the disk does not take it; the file is then as before."""
        line = json.dumps(episode_to_dict(episode)).encode() + b"\n"
        path = self._path(step)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if step not in self._mended:
                self._mend(path)
                self._mended.add(step)
            with path.open("ab", buffering=0) as file:
                size = file.tell()
                try:
                    while line:
                        line = line[file.write(line) :]
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(size)
                    raise
        except OSError as error:
            raise CheckpointError(f"Cannot write {path}: {why(error)}. Then continue with --resume.") from error

    def finished(self, step: int) -> dict[tuple[str, int], Episode]:
        """The step's episodes by (task id, rollout index); of two equal ones the last. Without attempts that were to be
        made again. Empty when there is no file. Raises CheckpointError for a damaged line that is not the last."""
        return {key: episode for key, episode in self.attempts(step).items() if not episode.retried}

    def attempts(self, step: int) -> dict[tuple[str, int], Episode]:
        """The same with failed attempts, where the process ended before another one did."""
        path = self._path(step)
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        found = {}
        for number, line in enumerate(lines, 1):
            try:
                episode = _read(line)
            except _UNREADABLE as error:
                if number == len(lines):
                    break
                advice = "delete the file to sample that step again"
                raise CheckpointError(f"Line {number} of {path} is damaged ({error!r}): {advice}.") from error
            found[episode.task_id, episode.rollout_idx] = episode
        return found

    def drop(self, step: int) -> None:
        """Remove the episodes of a step. Raises CheckpointError when the disk refuses."""
        self._mended.discard(step)
        try:
            self._path(step).unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"Cannot remove {self._path(step)}: {why(error)}.") from error

    def keep(self, step: int, episodes: Sequence[Episode]) -> None:
        """These alone of a step. Raises UserError when the disk does not take them; the file is then as before."""
        write_whole(self._path(step), "".join(json.dumps(episode_to_dict(episode)) + "\n" for episode in episodes))

    def steps(self) -> list[int]:
        """The steps that have a file, ascending."""
        names = (_NAME.fullmatch(path.name) for path in self.folder.glob("step_*.jsonl"))
        return sorted(int(name[1]) for name in names if name)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:05d}.jsonl"

    def _mend(self, path: Path) -> None:
        """Cut off a last line that a crash left unreadable; makes the file, durably, when there is none."""
        with path.open("a+b") as file:
            file.seek(0)
            raw = file.read()
            last = raw.splitlines(keepends=True)[-1:]
            try:
                for line in last:
                    _read(line)
            except _UNREADABLE:
                file.truncate(len(raw) - len(last[0]))
            os.fsync(file.fileno())
        sync(self.folder)


def _read(line: bytes) -> Episode:
    """One line, newline included. Raises one of `_UNREADABLE`."""
    if not line.endswith(b"\n"):
        raise ValueError("no newline at the end")
    return episode_from_dict(json.loads(line))


# ---- Episode <-> plain values ----


def episode_to_dict(episode: Episode) -> dict[str, Any]:
    """Plain values for JSON. Fields that have their default are left out."""
    data = _pack(episode, "tree", "trajectories", "task")
    data["format"] = FORMAT
    data["task"] = _task_to_dict(episode.task)
    data["trajectories"] = [
        {
            **_pack(trajectory, "steps", "task"),
            "task": _task_to_dict(trajectory.task),
            "steps": [_pack(step) for step in trajectory.steps],
        }
        for trajectory in episode.trajectories
    ]
    if episode.tree is not None:
        data["tree"] = episode.tree.to_dict()
    return data


def episode_from_dict(data: Mapping[str, Any]) -> Episode:
    """The inverse. Raises ValueError, TypeError, LookupError or AttributeError for what the other did not make."""
    values = dict(data)
    if values.pop("format") != FORMAT:
        raise ValueError(f"format {data['format']}, expected {FORMAT}")
    if "termination_reason" in values:
        values["termination_reason"] = TerminationReason(values["termination_reason"])
    if "tree" in values:
        values["tree"] = TokenTree.from_dict(values["tree"])
    values["task"] = _task_from_dict(values["task"])
    values["trajectories"] = [_trajectory(row) for row in values["trajectories"]]
    return Episode(**values)


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    return Trajectory(**{**row, "task": _task_from_dict(row["task"]), "steps": [_step(step) for step in row["steps"]]})


def _step(row: Mapping[str, Any]) -> Step:
    values = dict(row)
    values["messages"] = [_message(message) for message in values.get("messages", ())]
    if "response" in values:
        values["response"] = _message(values["response"])
    if "params" in values:
        lists = {name: tuple(values["params"][name]) for name in ("stop", "stop_token_ids") if name in values["params"]}
        values["params"] = SamplingParams(**{**values["params"], **lists})
    return Step(**values)


def _message(row: Mapping[str, Any]) -> Message:
    return Message(**{**row, "tool_calls": tuple(ToolCall(**call) for call in row.get("tool_calls", ()))})


def _task_to_dict(task: Any) -> dict[str, Any]:
    """A task says that it is one, since any other value may stand in its place."""
    return {"task": _pack(task)} if isinstance(task, Task) else {"value": plain(task)}


def _task_from_dict(data: Mapping[str, Any]) -> Any:
    if "task" not in data:
        return data["value"]
    paths = {name: Path(data["task"][name]) for name in ("dataset_dir", "sub_dir") if name in data["task"]}
    return Task(**{**data["task"], **paths})


def _pack(record: Any, *without: str) -> dict[str, Any]:
    """The fields of one of our dataclasses as plain values, without those and without those that have their default."""
    packed = {}
    for f in fields(record):
        value = getattr(record, f.name)
        default = f.default if f.default is not MISSING else f.default_factory() if callable(f.default_factory) else f
        if f.name in without or (type(value) is type(default) and not isinstance(value, float) and value == default):
            continue
        packed[f.name] = plain(value)
    return packed


def plain(value: Any, depth: int = 0) -> Any:
    """`value` as JSON has it: arrays as lists, keys as text, paths as text, other objects as their repr."""
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return value if value.bit_length() < 10_000 else hex(value)  # Python refuses to write longer ones in decimal
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Message | ToolCall | SamplingParams):
        return _pack(value)
    if depth < MAX_DEPTH:
        if isinstance(value, np.ndarray | np.generic):
            return plain(value.tolist(), depth + 1)
        if isinstance(value, Mapping):
            return {k if isinstance(k, str) else _REPR.repr(k): plain(v, depth + 1) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item, depth + 1) for item in value]
    return _REPR.repr(value)
