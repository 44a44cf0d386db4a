"""Load and soak: hundreds of sessions at once, hostile and dying clients, one real server on the tiny model.

    python benchmarks/soak.py [--sessions 500] [--seconds 600] [--processes 5] [--out FILE]

Owns: the server, what is measured in its process, and the verdict. The clients (`soak_client.py`) are processes of
their own, some of which are killed on the way. Whatever they do:

- lost:    every call that began ends in its session as finished or aborted (cancelled or failed).
- crossed: every answer that a client got has the tokens that its session recorded; and a sample of completions, asked
           for again alone on the quiet engine, has the same tokens and the same bits of their log-probabilities.
- leaked:  afterwards no slot is taken, no task, session, request or exchange is alive, and no descriptor is open that
           was not before.
- memory:  resident memory grows by no more than `GROWTH` from the first fifth of the time to its end.
- free:    the event loop's own delay (p99) and the latency of ``/health`` (p99, in a client) are reported, beside how
           long the loop's thread waited for a processor: on a busy machine that is most of both.
Exits with 1 when one of the promises is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

import minirllm  # noqa: F401  # before torch: sets the variables that its arithmetic depends on
from minirllm.config import Config
from minirllm.machine import machine
from minirllm.session import Session
from minirllm.stack import Stack, serving
from minirllm.types import Completion, SamplingParams

ADMIN = "soak-admin"
CLIENT = Path(__file__).with_name("soak_client.py")
KEPT = 200  # completions that are asked for again
GROWTH = 0.05  # of resident memory, from a fifth of the time to its end
MORTAL = ("Session", "Flight", "Exchange", "_Request", "TokenTree", "RequestResponseCycle", "H11Protocol")
TICK = 0.02  # seconds between looks at the loop's clock


def sha(token_ids: list[int]) -> str:
    return hashlib.sha256(repr(token_ids).encode()).hexdigest()[:16]


class Books:
    """What the server's sessions recorded, written down as each of them closes; and a sample of completions."""

    def __init__(self, stack: Stack, out: TextIO):
        self.stack, self.out, self.chance = stack, out, random.Random(0)
        self.sums, self.lost = Counter[str](), list[str]()
        self.kept: list[tuple[list[int], SamplingParams, int, Any, Completion]] = []
        self._close, self._generate = stack.sessions.close, stack.engine.generate
        stack.sessions.close = self.close  # type: ignore[method-assign]
        stack.engine.generate = self.generate  # type: ignore[method-assign]

    def close(self, sid: str) -> None:
        session = self.stack.sessions.get(sid) if sid in self.stack.sessions else None
        self._close(sid)
        if session is not None:
            self.enter(session)

    def enter(self, session: Session) -> None:
        counted, finished = session.counters, len(session.steps)
        calls, aborted = counted["calls"], counted["aborted"]
        self.sums.update(sessions=1, calls=calls, finished=finished, aborted=aborted)
        self.sums.update(replayed=counted["replayed"], drift=counted["drift"])
        if calls != finished + aborted or session._flights:
            self.lost.append(f"{session.id}: {calls} calls began, {finished} finished, {aborted} were aborted")
        first = {session._arrival[s.id][0]: s.id for s in session.steps if session._arrival[s.id][1] == 0}
        for step in session.steps:
            number, index = session._arrival[step.id]
            ids = session.tree.response(step.node)[0] if step.node is not None else []
            self.sums["tokens"] += len(ids)
            self.out.write(json.dumps([session.id, f"{first[number]}-{index}", sha(ids)]) + "\n")

    async def generate(self, prompt_ids: Any, params: SamplingParams, seed: int, **rest: Any) -> Completion:
        completion = await self._generate(prompt_ids, params, seed, **rest)
        self.sums["completions"] += 1
        place = self.chance.randrange(self.sums["completions"])  # a reservoir: each has the same chance to be kept
        entry = (list(prompt_ids), params, seed, rest.get("stop"), completion)
        if len(self.kept) < KEPT:
            self.kept.append(entry)
        elif place < KEPT:
            self.kept[place] = entry
        return completion

    async def ask_again(self) -> int:
        """How many of the kept completions differ when asked for alone."""
        different = 0
        for prompt_ids, params, seed, stop, before in self.kept:
            self.stack.engine.weights_changed()  # nothing to reuse
            now = await self._generate(prompt_ids, params, seed, stop=stop)
            different += (now.token_ids, now.logprobs) != (before.token_ids, before.logprobs)
        return different


class Loop:
    """How late the event loop is: a histogram in ms, of constant size."""

    def __init__(self) -> None:
        self.count_ms = [0] * 5000

    async def watch(self) -> None:
        while True:
            due = time.perf_counter() + TICK
            await asyncio.sleep(TICK)
            self.count_ms[min(4999, int((time.perf_counter() - due) * 1000))] += 1

    def percentile(self, share: float) -> int:
        """In ms, rounded up."""
        left = share * sum(self.count_ms)
        for ms, count in enumerate(self.count_ms):
            left -= count
            if left <= 0:
                return ms + 1
        return len(self.count_ms)


def usage(stack: Stack) -> dict[str, Any]:
    """This process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_mib": round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "tasks": len(asyncio.all_tasks()),
        "sessions_open": len(list(stack.sessions)),
    }


def scheduled() -> dict[str, float]:
    """Seconds that this thread, the loop's, has run, and has waited for a processor."""
    ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return {"ran": int(ran) / 1e9, "waited": int(waited) / 1e9}


def alive() -> dict[str, int]:
    """Objects that belong to a session or a call."""
    gc.collect()
    return dict(Counter(name for o in gc.get_objects() if (name := type(o).__name__) in MORTAL))


class Clients:
    """The client processes: kept at their number, killed now and then, their sessions closed as a runner would."""

    def __init__(self, stack: Stack, options: argparse.Namespace, folder: Path):
        self.stack, self.options, self.folder = stack, options, folder
        self.until, self.names, self.killed = time.monotonic() + options.seconds, 0, 0

    async def one(self, agents: int, killable: bool) -> None:
        """A process until time is up; one that was killed is replaced."""
        chance = random.Random(self.names)
        while (left := self.until - time.monotonic()) > 0.5:
            name, self.names = f"p{self.names}", self.names + 1
            command = [sys.executable, str(CLIENT), "--url", self.stack.base_url, "--admin", ADMIN, "--name", name]
            command += ["--agents", str(agents), "--seconds", str(left), "--out", str(self.folder / f"{name}.jsonl")]
            process = await asyncio.create_subprocess_exec(*command)
            if killable and left > self.options.seconds / 4:
                await asyncio.sleep(left * chance.uniform(0.15, 0.5))
                process.kill()
                self.killed += 1
            await process.wait()
            for session in self.stack.sessions:
                if session.id.startswith(f"{name}-"):
                    self.stack.sessions.close(session.id)
                    await asyncio.sleep(0)

    async def run(self) -> None:
        count = self.options.processes
        each = [self.options.sessions // count + (i < self.options.sessions % count) for i in range(count)]
        await asyncio.gather(*[self.one(agents, killable=i > 0) for i, agents in enumerate(each)])


async def watch_usage(stack: Stack, seconds: float, rows: list[dict[str, Any]]) -> None:
    """A row each minute, or each tenth of a shorter time."""
    began, every = time.monotonic(), min(60.0, seconds / 10)
    while True:
        await asyncio.sleep(began + every * (len(rows) + 1) - time.monotonic())
        rows.append({"second": round(time.monotonic() - began, 1), **usage(stack)})
        print(rows[-1], flush=True)


def read_lines(folder: Path) -> tuple[set[tuple[str, ...]], list[dict[str, Any]]]:
    """(answers that clients got, the summaries of those processes that lived)."""
    got, summaries = set[tuple[str, ...]](), []
    for path in sorted(folder.glob("p*.jsonl")):
        lines = path.read_text().split("\n")[:-1]  # the last is empty, or torn when the process was killed
        for line in map(json.loads, lines):
            if isinstance(line, dict):
                summaries.append(line)
            else:
                got.add(tuple(line))
    return got, summaries


async def quiet(stack: Stack, tasks: int) -> None:
    """Wait until the last connections are gone: those of killed processes end by themselves."""
    for _ in range(200):
        if len(asyncio.all_tasks()) <= tasks and not alive().get("Session"):
            return
        await asyncio.sleep(0.05)


async def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    config = Config(model="tiny", max_tokens=24, max_context=1024, max_calls=40, determinism=options.determinism)
    books_path, rows, loop = folder / "server.jsonl", list[dict[str, Any]](), Loop()
    async with serving(config, admin_key=ADMIN) as stack:
        with books_path.open("w") as out:
            books, clients = Books(stack, out), Clients(stack, options, folder)
            before, alive_before, scheduled_before = usage(stack), alive(), scheduled()
            watching = (watch_usage(stack, options.seconds, rows), loop.watch())
            watchers = [asyncio.create_task(watch) for watch in watching]
            await clients.run()
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            loop_thread = {name: round(now - scheduled_before[name], 1) for name, now in scheduled().items()}
            await quiet(stack, before["tasks"])
        engine: Any = stack.engine
        after, alive_after = usage(stack), alive()
        taken = sum(owner is not None for owner in engine._slots.owner) + len(engine._running) + len(engine._waiting)
        different = await books.ask_again()
        level, slots = stack.policy.level, engine._runner.slots
    got, summaries = read_lines(folder)
    recorded = {tuple(json.loads(line)) for line in books_path.read_text().splitlines()}
    health_ms = sorted(ms for summary in summaries for ms in summary["health_ms"])
    counts = sum((Counter(summary["counts"]) for summary in summaries), Counter[str]())
    return {
        "machine": machine(), "level": level, "slots": slots, "sessions_at_once": options.sessions,
        "seconds": options.seconds, "client_processes": clients.names, "client_processes_killed": clients.killed,
        "server": dict(books.sums), "lost": books.lost[:20], "lost_count": len(books.lost),
        "clients": dict(counts), "problems": [p for s in summaries for p in s["problems"]][:20],
        "answers_received": len(got), "answers_not_recorded": len(got - recorded),
        "asked_again": len(books.kept), "asked_again_different": different,
        "slots_taken_after": taken, "alive_before": alive_before, "alive_after": alive_after,
        "before": before, "each_minute": rows, "after": after,
        "load_average": os.getloadavg(), "loop_thread_seconds": loop_thread,
        "loop_delay_ms": {"p50": loop.percentile(0.5), "p99": loop.percentile(0.99), "max": loop.percentile(1.0)},
        "health_ms": {"p50": health_ms[len(health_ms) // 2], "p99": health_ms[int(len(health_ms) * 0.99)]},
    }  # fmt: skip


def broken(found: dict[str, Any]) -> list[str]:
    """The promises that were not kept, one sentence each."""
    rows, promises = found["each_minute"], []
    if found["lost_count"]:
        promises.append(f"{found['lost_count']} sessions lost calls, the first: {found['lost'][0]}")
    if found["clients"].get("wrong"):
        promises.append(f"{found['clients']['wrong']} deeds got a wrong answer, the first: {found['problems'][0]}")
    if found["answers_not_recorded"]:
        promises.append(f"{found['answers_not_recorded']} answers have other tokens than their session recorded")
    if found["asked_again_different"] and found["level"] != "off":
        promises.append(f"{found['asked_again_different']} of {found['asked_again']} completions differ when alone")
    if found["server"].get("drift"):
        promises.append(f"{found['server']['drift']} answers said something else than their tokens")
    if found["slots_taken_after"]:
        promises.append(f"{found['slots_taken_after']} slots are taken or waited for by nobody")
    leaked = {name: n for name, n in found["alive_after"].items() if n > found["alive_before"].get(name, 0)}
    if leaked:
        promises.append(f"still alive: {leaked}")
    for name in ("descriptors", "tasks", "sessions_open"):
        if found["after"][name] > found["before"][name]:
            promises.append(f"{name}: {found['before'][name]} before, {found['after'][name]} after")
    if found["seconds"] >= 300:  # before that, caches are still filling
        early, late = rows[len(rows) // 5]["rss_mib"], rows[-1]["rss_mib"]
        if late > early * (1 + GROWTH):
            promises.append(f"memory grew from {early} to {late} MiB")
    if not (found["server"].get("finished") and found["server"].get("aborted") and found["answers_received"]):
        promises.append("nothing happened")
    return promises


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--determinism", default="auto")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/baselines/soak.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(soak(options, Path(folder)))
    found["broken"] = broken(found)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(found["broken"]) or "every promise kept")
    sys.exit(bool(found["broken"]))


if __name__ == "__main__":
    main()
