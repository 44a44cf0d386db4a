"""``minirllm snapshot``: prepared sandboxes that are kept, made ahead, looked at, kept for longer, removed.

Owns: those verbs and their words. Does not know: how snapshots are kept (sandboxes/kept.py), what is prepared.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import time
from collections.abc import Callable, Iterator

from minirllm import harness, watchdog
from minirllm.config import Config
from minirllm.errors import SandboxError, UserError
from minirllm.flow import TaskModule
from minirllm.sandboxes import kept, kind
from minirllm.sandboxes.kept import Recipe, Record
from minirllm.types import Task

NOWHERE = "http://127.0.0.1:1"  # no endpoint: nobody works in it yet
SHORT = 12  # characters of a key that are shown


def create(task: TaskModule, config: Config, hours: float, say: Callable[[str], object]) -> None:
    """Make the snapshots that the task's rollouts would begin with, and `say` what of each. Raises UserError."""
    agent = harness.agent(task, config)
    every = [*task.train(config), *task.held_out(config)] if task.host else [Task("any", "")]
    recipes = {recipe.key: recipe for recipe in agent.recipes(every, NOWHERE)}
    if not config.sandbox or not recipes:
        raise UserError("A snapshot is of a sandbox: choose one, as in --sandbox local, and --harness who works in it.")
    if not kind(config.sandbox).contained:
        raise UserError(f"The sandbox {config.sandbox} has no files that are all its own: take another one.")
    if not all(recipe.prepare for recipe in recipes.values()):
        raise UserError("Nothing is prepared in this sandbox: give what is, as in --set setup='python3 -m venv env'.")
    for recipe in recipes.values():
        say(watchdog.run(_create(recipe, hours)))


async def _create(recipe: Recipe, hours: float) -> str:
    bare = dataclasses.replace(recipe, spec=dataclasses.replace(recipe.spec, binds={}, forward={}))
    await kept.sweep()
    key = await asyncio.to_thread(lambda: bare.key)
    before, began = await asyncio.to_thread(kept.read, key), time.monotonic()
    async with kept.prepared(bare, "make", hours):
        record = await asyncio.to_thread(kept.read, key)
        how = f"made in {time.monotonic() - began:.1f} s"
        if record is not None and record == before:
            how, until = "was there", max(record.expires, time.time() + 3600 * hours)
            record = dataclasses.replace(record, expires=until)
            await asyncio.to_thread(record.write)
    if record is None:
        raise SandboxError(f"The sandbox {recipe.kind} kept no snapshot of {recipe.about}.")
    return f"{record.key[:SHORT]}  {recipe.about}  {how}, {_size(record.bytes)}, until {_date(record.expires)}"


def table() -> Iterator[tuple[str, ...]]:
    """A line of each, below their titles, after what has expired was removed."""
    watchdog.run(kept.sweep())
    yield ("KEY", "SANDBOX", "OF", "SIZE", "CREATED", "USED", "EXPIRES")
    for one in kept.records():
        times = (_date(one.created), _date(one.used), _date(one.expires))
        yield (one.key[:SHORT], one.kind, one.about, _size(one.bytes), *times)


def inspect(prefix: str) -> str:
    """All that is known of one."""
    one = _find(prefix)
    facts = dataclasses.asdict(one) | {"used": one.used}
    lines = [f"{name}: {_date(v) if name in ('created', 'used', 'expires') else v}" for name, v in facts.items()]
    return "\n".join(lines)


def renew(prefix: str, hours: float) -> str:
    """Keep one for so many hours from now."""
    one = dataclasses.replace(_find(prefix), expires=time.time() + 3600 * hours)
    one.write()
    watchdog.run(kept.sweep())
    return f"{one.key[:SHORT]}  {one.about}  until {_date(one.expires)}"


def destroy(prefix: str) -> Iterator[str]:
    """Remove one, or, without a prefix, all that can be removed. Raises UserError saying which stay, and why."""
    left = []
    for one in [_find(prefix)] if prefix else kept.records():
        try:
            if watchdog.run(kept.discard(one.key)):
                yield f"{one.key[:SHORT]}  {one.about}  removed"
            else:
                left.append(f"Snapshot {one.key[:SHORT]} is in use: end the run that uses it first.")
        except UserError as error:
            left.append(f"Snapshot {one.key[:SHORT]} cannot be removed: {error}")
    if left:
        raise UserError("\n".join(left))


def _find(prefix: str) -> Record:
    found = [one for one in kept.records() if one.key.startswith(prefix)]
    if len(found) != 1:
        what = f"{len(found)} snapshots begin" if found else "No snapshot begins"
        raise UserError(f"{what} with {prefix!r}: `minirllm snapshot list` shows them.")
    return found[0]


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
