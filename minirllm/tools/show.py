"""``minirllm show``: a run folder in the terminal, as a curve, a table of steps and the conversations behind them.

Owns: choosing and laying out what is printed. Does not know: how a run is made. Writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from minirllm.config import nearest
from minirllm.errors import UserError
from minirllm.tools.runs import Run, page, write
from minirllm.types import Episode, Message, Step

TABLE_ROWS = 24
TEXT_LIMIT = 2000  # characters of one message
COLUMNS = {  # of the table: metric, title, format
    "step": ("step", "d"),
    "reward_mean": ("reward", ".3f"),
    "eval_reward": ("held-out", ".3f"),
    "groups_with_signal": ("signal", ".0f"),
    "groups_too_easy": ("easy", ".0f"),
    "groups_too_hard": ("hard", ".0f"),
    "truncated": ("truncated", ".0f"),
    "ungraded": ("ungraded", ".0f"),
    "malformed_tool_calls": ("parse failures", ".0f"),
    "mismatch_max": ("mismatch", ".2g"),
    "entropy": ("entropy", ".2f"),
    "loss": ("loss", ".3g"),
    "val_loss": ("held-out loss", ".4f"),
    "seconds_step": ("seconds", ".1f"),
}

MATCHED = {  # how a call that does not extend the one it continues was recognised
    "edited": ", a later answer edited",
    "rerendered": ", its history rewritten by the template",
    "unprovable": ", whose tokens it could not be proved to extend",
}


class Picked(NamedTuple):
    """Episodes of one step, each with the word it is shown under."""

    step: int
    counts: str
    shown: list[tuple[str, Episode]]


class Wanted(NamedTuple):
    """Which episodes: so many best and worst of a step (None: the last finished one), or the one with this id."""

    step: int | None = None
    episodes: int = 1
    episode: str | None = None


def show(folder: Path, wanted: Wanted, console: Console | None = None) -> None:
    """Print a run; of one episode, wanted by its id, its conversation only."""
    console, run = page(console), Run(folder)
    rows, manifest, picked = list(run.rows.values()), run.manifest, choose(run, wanted)
    write(console, _title(folder, manifest, rows))
    if wanted.episode is None and (curve := plot(rows, console.width - 12)):
        write(console, "\n" + curve)
    if wanted.episode is None and rows:
        console.print()
        console.print(table(rows))
    if picked is not None:
        write(console, f"\nConversations of step {picked.step}: {picked.counts}")
        for word, one in picked.shown:
            write(console, "\n" + heading(word, one), "bold")
            for who, text in transcript(one):
                write(console, f"{who}: {text}")


def choose(run: Run, wanted: Wanted) -> Picked | None:
    """None when no episode has finished. Of an id the last finished step that has it, if no step is named."""
    if wanted.episode is None:
        return _pick(run, wanted)
    id, known = wanted.episode, list[str]()
    steps = sorted(run.store.steps(), key=lambda number: (number in run.rows, number), reverse=True)
    for number in steps if wanted.step is None else [wanted.step]:
        found = {one.id: one for one in run.store.finished(number).values()}
        if id in found:
            return Picked(number, f"{len(found)} episodes", [("episode", found[id])])
        known = known or list(found)
    where = f"{run.folder} has no episode {id!r}" + ("" if wanted.step is None else f" of step {wanted.step}")
    listed = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
    raise UserError(f"{where}{nearest(id, known)}: " + (f"it has {listed}." if known else "there are none."))


def _pick(run: Run, wanted: Wanted) -> Picked | None:
    """The best and worst graded episodes of a step, without repeats; ungraded ones when none was graded."""
    steps, step, count = run.store.steps(), wanted.step, wanted.episodes
    if step is None:
        if not steps:
            return None
        step = ([s for s in steps if s in run.rows] or steps)[-1]
    elif step not in steps:
        there = f"there are episodes of steps {steps[0]} to {steps[-1]}" if steps else "it has no episodes"
        raise UserError(f"{run.folder} has no episodes of step {step}: {there}.")
    found = list(run.store.finished(step).values())
    graded = sorted((e for e in found if e.reward is not None), key=lambda e: -float(e.reward or 0))
    ungraded = [e for e in found if e.reward is None]
    best = graded[:count]
    worst = graded[max(len(best), len(graded) - count) :][::-1]
    shown = (
        [("best", e) for e in best]
        + [("worst", e) for e in worst]
        + [("ungraded", e) for e in ungraded[: 0 if graded else count]]
    )
    counts = f"{len(graded)} graded, {len(ungraded)} ungraded" if ungraded else f"{len(graded)} graded"
    return Picked(step, counts, shown)


def plot(rows: Iterable[Mapping[str, Any]], width: int, height: int = 10) -> str:
    """Train reward and held-out reward over steps, in characters; empty when there is nothing to plot."""
    series = {
        mark: [(row["step"], float(row[name])) for row in rows if _is_number(row.get(name))]
        for mark, name in (("•", "reward_mean"), ("○", "eval_reward"))
    }
    points = [point for values in series.values() for point in values]
    if len({step for step, _ in points}) < 2:
        return ""
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    if high == low:
        low, high = low - 0.5, high + 0.5
    width = max(2, min(width, 2 * (last - first) + 1))
    grid = [[" "] * width for _ in range(height)]
    for mark, values in series.items():
        columns: dict[int, list[float]] = {}
        for step, value in values:
            columns.setdefault(round((step - first) / (last - first) * (width - 1)), []).append(value)
        for column, held in columns.items():
            line = round((high - sum(held) / len(held)) / (high - low) * (height - 1))
            grid[line][column] = mark
    labels = [f"{high:.3g}", *[""] * (height - 2), f"{low:.3g}"]
    lines = [f"{label:>9} │{''.join(cells)}".rstrip() for label, cells in zip(labels, grid, strict=True)]
    axis = f"{'step':>9}  {first}{str(last).rjust(width - len(str(first)))}"
    legend = f"{'reward':>9}   • train" + ("   ○ held-out" if series["○"] else "")
    return "\n".join([legend, *lines, f"{'':>9} └{'─' * width}", axis])


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Columns that have a value. Of a long run TABLE_ROWS steps, evenly spread with both ends, and those evaluated."""
    if len(rows) > TABLE_ROWS:
        spread = {rows[round(i * (len(rows) - 1) / (TABLE_ROWS - 1))]["step"] for i in range(TABLE_ROWS)}
        evaluated = [row["step"] for row in rows if row.get("eval_reward", row.get("val_loss")) is not None]
        spread.update(evaluated if len(evaluated) <= TABLE_ROWS else ())
        rows = [row for row in rows if row["step"] in spread]
    names = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    grid = Table(box=None, pad_edge=False)
    for name in names:
        grid.add_column(COLUMNS[name][0], justify="right")
    for row in rows:
        grid.add_row(*["" if row.get(name) is None else format(row[name], COLUMNS[name][1]) for name in names])
    return grid


def heading(word: str, episode: Episode) -> str:
    """One line about an episode."""
    calls = sum(len(trajectory.steps) for trajectory in episode.trajectories)
    verdict = "no reward" if episode.reward is None else f"reward {episode.reward:g}"
    parts = [
        f"task {episode.task_id}, rollout {episode.rollout_idx}",
        verdict,
        episode.termination_reason.value,
        f"{calls} {'call' if calls == 1 else 'calls'}",
    ]
    return f"{word}: {', '.join(parts)}" + (f" ({episode.reason})" if episode.reason else "")


def transcript(episode: Episode) -> list[tuple[str, str]]:
    """(who, text) in the order it was said. A call that does not continue the one before says where it goes on from."""
    lines: list[tuple[str, str]] = []
    for trajectory in episode.trajectories:
        if len(episode.trajectories) > 1:
            lines.append(("trajectory", trajectory.name))
        before: Step | None = None
        for number, step in enumerate(trajectory.steps, 1):
            if step.auxiliary or before is not None:
                lines.append((f"call {number}", matched(step)))
            lines += [(message.role, _text(message)) for message in step.messages]
            if step.response is not None:
                lines.append(
                    ("assistant" + (" (cut off)" if step.finish_reason == "length" else ""), _text(step.response))
                )
            before = step
    return lines


def matched(step: Step) -> str:
    """How its session recognised the request of a call, and which side call of a harness it is."""
    how = str(step.metadata.get("match", ""))
    if step.parent is None:
        text = "a new conversation" + (", made by editing an answer" if how == "edited" else "")
    else:
        text = f"{'extends' if how == 'extended' else 'continues'} call {step.parent}{MATCHED.get(how, '')}"
    return f"auxiliary call ({step.auxiliary}), not trained; {text}" if step.auxiliary else text


def _text(message: Message) -> str:
    parts = [f"(thinks) {message.reasoning}"] if message.reasoning else []
    parts += [message.content] if message.content else []
    parts += [f"-> {call.name}({call.arguments})" for call in message.tool_calls]
    text = "\n".join(parts)
    if len(text) > TEXT_LIMIT:
        text = f"{text[: TEXT_LIMIT // 2]}\n[... {len(text) - TEXT_LIMIT} characters ...]\n{text[-TEXT_LIMIT // 2 :]}"
    return text + (" (a tool call that could not be parsed)" if message.malformed else "")


def _title(folder: Path, manifest: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    config = manifest.get("config", {})
    parts = [f"{name} {value}" for name in ("task", "level") if (value := manifest.get(name))]
    parts += [f"{name} {config[name]}" for name in ("model", "seed") if name in config]
    done = f"{rows[-1]['step']} of {config.get('steps', '?')} steps" if rows else "no step has finished yet"
    return f"{folder}: {', '.join([*parts, done])}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
