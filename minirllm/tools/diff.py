"""``minirllm diff``: the first step, episode, call and token where two runs part, and what differs around them.

Owns: what is compared, in which order. Does not know: why runs differ; how one is made. Writes nothing.

Compared are, step by step, the episodes (by task and rollout: every token, log-probability, reward), then the row of
metrics up to the hash of the weights. Not compared: clock times, how much a resumed step had on disk, texts for people,
evaluations' conversations (no run keeps them). Manifests are shown side by side and decide nothing: two machines may
well make one run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from minirllm.log import changes
from minirllm.tools.runs import Call, Run, calls, equal, page, part, write
from minirllm.types import Episode


class Parting(NamedTuple):
    """A place where two runs differ, and what each has there."""

    place: str
    one: Any
    other: Any


def diff(first: Path, second: Path, console: Console | None = None) -> bool:
    """Print where two runs part and what differs around them. True when they are equal."""
    console, runs, seen = page(console), (Run(first), Run(second)), Counter[str]()
    for name, run in zip("AB", runs, strict=True):
        write(console, f"{name}: {_title(run)}")
    around = changes(runs[0].manifest, runs[1].manifest)
    if around:
        write(console, "\nTheir manifests differ in")
    for name, (a, b) in around.items():
        write(console, f"  {name}: A {_value(a)}, B {_value(b)}")
    found = next(_partings(*runs, seen), None)
    whole = ", ".join(f"{seen[name]} {name}" for name in ("steps", "episodes", "calls", "tokens"))
    if found is None:
        write(console, f"\nEqual: {whole}.")
    else:
        write(console, f"\nThey part at {found.place}:\n  A: {_value(found.one)}\n  B: {_value(found.other)}", "bold")
        write(console, f"Equal before that: {whole}.")
    return found is None


def _title(run: Run) -> str:
    resumed = [entry for entry in run.manifest.get("resumed", ()) if entry.get("changed") and "after" in entry]
    parts = [f"{name} {run.manifest[name]}" for name in ("task", "level") if name in run.manifest]
    parts.append(f"{len(run.steps)} steps" if run.manifest else f"{len(run.steps)} steps, no manifest")
    parts += [f"resumed after step {entry['after']} with other {', '.join(entry['changed'])}" for entry in resumed]
    return f"{run.folder}: {', '.join(parts)}"


def _partings(one: Run, other: Run, seen: Counter[str]) -> Iterator[Parting]:
    """Where they part, in the order in which things happened. `seen` counts what was compared and found equal."""
    for step in [*([0] if 0 in one.rows or 0 in other.rows else []), *sorted({*one.steps, *other.steps})]:
        if step and (step in one.steps) != (step in other.steps):
            yield Parting(f"step {step}", *("there" if step in run.steps else "no such step" for run in (one, other)))
        theirs = [{(e.task_id, e.rollout_idx): e for e in run.episodes(step)} for run in (one, other)]
        for key in sorted({*theirs[0], *theirs[1]}):
            where = f"step {step}, episode {key[0]}:{key[1]}"
            if (key in theirs[0]) != (key in theirs[1]):
                yield Parting(where, *("there" if key in found else "no such episode" for found in theirs))
            else:
                yield from (
                    p._replace(place=f"{where}, {p.place}") for p in _episodes(theirs[0][key], theirs[1][key], seen)
                )
            seen["episodes"] += 1
        rows = [run.rows.get(step) for run in (one, other)]
        if rows[0] is None or rows[1] is None:
            if rows != [None, None]:
                yield Parting(
                    f"step {step}, its end", *("no row of metrics" if row is None else "done" for row in rows)
                )
        else:
            yield from (p._replace(place=f"step {step}, {p.place}") for p in _rows(rows[0], rows[1]))
        seen["steps"] += step > 0


def _episodes(one: Episode, other: Episode, seen: Counter[str]) -> Iterator[Parting]:
    """Calls are paired by id, or by place when the ids are others: parallel ones may have arrived in another order."""
    a, b = calls(one), calls(other)
    order = {call.id: place for place, call in enumerate(a)}
    if set(order) == {call.id for call in b}:
        b.sort(key=lambda call: order[call.id])
    for left, right in zip(a, b, strict=False):
        yield from _calls(left, right)
        seen["calls"] += 1
        seen["tokens"] += len(left.token_ids)
    if len(a) != len(b):
        yield Parting("its end", f"{len(a)} calls", f"{len(b)} calls")
    for name in ("attempt", "termination_reason", "reward", "signals"):
        values = getattr(one, name), getattr(other, name)
        if not equal(*values):
            yield Parting(name.replace("_", " "), *(getattr(value, "value", value) for value in values))


def _calls(one: Call, other: Call) -> Iterator[Parting]:
    named = f"call {one.id}" if one.id == other.id else f"call {one.id} (A), {other.id} (B)"
    if found := part(one, other):
        yield Parting(f"{named}, {found[0]}", *found[1:])
    if one.id != other.id:
        yield Parting("the id of a call with equal tokens", one.id, other.id)
    if one.step and other.step and one.step.finish_reason != other.step.finish_reason:
        yield Parting(f"{named}, finish reason", one.step.finish_reason, other.step.finish_reason)


def _rows(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Parting]:
    for name in {**one, **other}:
        a, b = one.get(name), other.get(name)
        text = any(isinstance(value, str) for value in (a, b)) and name != "weights_sha256"
        if not (name.startswith("seconds_") or name == "tokens_kept" or text or equal(a, b)):
            yield Parting(f"metric {name}", a, b)


def _value(value: Any) -> str:
    return "none" if value is None else str(value)
