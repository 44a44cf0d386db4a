"""The verb ``dataset from-eval``: graded episodes become rows for ``sft``: rejection sampling.

Owns: the filter's expression language, which episodes of a task are taken, how an episode is told as messages. Does not
know: how rows are learned.

A filter is an expression about one task: ``n`` (graded rollouts), ``n_correct``, ``solved`` (some were correct),
``avg``, ``best`` and ``worst`` (rewards), ``pass@K`` (of fewer than K: was any correct), numbers, comparisons, ``and``,
``or``, ``not``, brackets. Nothing else is evaluated.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from minirllm.dialects.chat import message_json
from minirllm.errors import UserError
from minirllm.evaluate import pass_at_k
from minirllm.files import write_whole
from minirllm.store import EpisodeStore
from minirllm.types import Episode, Step

COMPARE = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip
NAMES = ("n", "n_correct", "solved", "avg", "best", "worst")


@dataclass(frozen=True)
class Wanted:
    """Which tasks and which of their episodes. `select`: correct, best, best-n, shortest or all; `most`: episodes of a
    task, None for any number."""

    filter: str = "solved"
    select: str = "correct"
    most: int | None = None
    min_reward: float | None = None
    dedup: bool = False


def curate(sources: Sequence[Path], wanted: Wanted) -> tuple[list[dict[str, Any]], int]:
    """(rows, how many tasks there were). Rows are in the order of task ids, then rollouts. Raises UserError when a
    source holds no episodes, or for a filter that is none."""
    keep = predicate(wanted.filter)
    if wanted.select == "best-n" and wanted.most is None:
        raise UserError("best-n needs to know how many: give --max-per-task.")
    if wanted.select in ("best", "shortest") and wanted.most is not None:
        raise UserError(f"--select {wanted.select} takes one episode of each task: leave --max-per-task out.")
    if wanted.min_reward is not None and math.isnan(wanted.min_reward):
        raise UserError("--min-reward must be a number, got nan.")
    tasks: dict[str, list[Episode]] = {}
    for episode in (episode for source in sources for episode in read(source)):
        tasks.setdefault(episode.task_id, []).append(episode)
    rows, seen = [], set[str]()
    for _, episodes in sorted(tasks.items()):
        graded = [episode for episode in episodes if episode.reward is not None]
        if not graded or not keep(figures(graded)):
            continue
        for episode in chosen(graded, wanted):
            row = told(episode)
            text = json.dumps(row["messages"], sort_keys=True)
            if row["messages"] and not (wanted.dedup and text in seen):
                seen.add(text)
                rows.append(row)
    return rows, len(tasks)


def read(source: Path) -> list[Episode]:
    """The episodes of a run, or of the ``--output`` of an evaluation, in a fixed order."""
    store = EpisodeStore(source / "episodes")
    found = [episode for step in store.steps() for _, episode in sorted(store.finished(step).items())]
    if not found:
        raise UserError(f"{source} holds no episodes: give the folder of a run, or of `minirllm eval --output`.")
    return found


def figures(episodes: Sequence[Episode]) -> dict[str, float]:
    """What a filter may speak of, of the graded episodes of one task."""
    rewards = [float(episode.reward) for episode in episodes if episode.reward is not None]
    correct = sum(episode.is_correct for episode in episodes)
    return {
        "n": len(rewards),
        "n_correct": correct,
        "solved": correct > 0,
        "avg": sum(rewards) / len(rewards),
        "best": max(rewards),
        "worst": min(rewards),
    }


def chosen(episodes: list[Episode], wanted: Wanted) -> list[Episode]:
    """Of one task's graded episodes those that are taken; the earlier of equals."""
    if wanted.min_reward is not None:
        episodes = [episode for episode in episodes if (episode.reward or 0.0) >= wanted.min_reward]
    if wanted.select in ("correct", "shortest"):
        episodes = [episode for episode in episodes if episode.is_correct]
    if wanted.select in ("best", "best-n"):
        episodes = sorted(episodes, key=lambda episode: -(episode.reward or 0.0))
    if wanted.select == "shortest":
        episodes = sorted(episodes, key=lambda episode: episode.metrics.get("response_tokens", 0.0))
    return episodes[: 1 if wanted.select in ("best", "shortest") else wanted.most]


def told(episode: Episode) -> dict[str, Any]:
    """The conversation that the episode ended with: from its last call back to where it began."""
    steps = [step for step in episode.steps if step.response is not None and not step.auxiliary]
    by_id = {step.id: step for step in steps}
    chain: list[Step] = []
    step = steps[-1] if steps else None
    while step is not None:
        chain.insert(0, step)
        step = by_id.get(step.parent or "")
    messages = [message for step in chain for message in (*step.messages, step.response) if message is not None]
    row: dict[str, Any] = {"messages": list(map(message_json, messages))}
    if chain and chain[0].tools:
        row["tools"] = chain[0].tools
    return {**row, "task_id": episode.task_id, "rollout_idx": episode.rollout_idx, "reward": episode.reward}


def split(rows: Iterable[dict[str, Any]], fraction: float, seed: int) -> tuple[list[Any], list[Any]]:
    """(training rows, validation rows): all rows of a task are on one side, a function of its id and `seed` alone."""

    def held(row: dict[str, Any]) -> bool:
        noise = blake2b(f"{seed} {row['task_id']}".encode(), digest_size=8).digest()
        return int.from_bytes(noise) < fraction * 2**64

    rows = list(rows)
    return [row for row in rows if not held(row)], [row for row in rows if held(row)]


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """JSON lines. Raises UserError when they cannot be written."""
    write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def predicate(text: str) -> Any:
    """The filter as a function of `figures`. Raises UserError saying what of it is not allowed."""
    try:
        tree = ast.parse(re.sub(r"pass@(\d+)", r"pass_at(\1)", text.strip()), mode="eval").body
        _value(tree, figures([Episode(reward=0.0)]))  # says what is wrong before anything is read
    except (SyntaxError, ValueError, RecursionError) as error:
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        unread = f"--filter {text!r:.200} cannot be read ({what:.200})"
        raise UserError(f"{unread}: use {', '.join(NAMES)}, pass@K.") from None
    return lambda values: bool(_value(tree, values))


def _value(node: ast.expr, values: dict[str, float]) -> Any:
    match node:
        case ast.BoolOp(op=op, values=parts):
            return (all if isinstance(op, ast.And) else any)([_value(part, values) for part in parts])
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return not _value(part, values)
        case ast.UnaryOp(op=ast.USub(), operand=part):
            return -_value(part, values)
        case ast.Compare(left=left, ops=ops, comparators=others):
            found = [_value(part, values) for part in (left, *others)]
            known = all(type(op) in COMPARE for op in ops)
            if known:
                return all(COMPARE[type(op)](a, b) for op, a, b in zip(ops, found, found[1:], strict=False))
        case ast.Constant(value=bool() | int() | float() as value):
            return value
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.Call(func=ast.Name(id="pass_at"), args=[ast.Constant(value=int() as k)], keywords=[]) if k > 0:
            n, correct = int(values["n"]), int(values["n_correct"])
            return pass_at_k(n, correct, k) if k <= n else float(correct > 0)
    raise ValueError(f"{ast.unparse(node)} is not known")
