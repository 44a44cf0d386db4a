"""What a sandbox costs: milliseconds of each operation on each backend, and how many code rewards a second are given.

Owns: the measurement and its JSON. ``python -m benchmarks.sandboxes [--repeat 20] [--rewards 64] [--out FILE]``

`start` and `close` are those alone, `cold` is from nothing to the end of the first command, `take_warm` is how long a
rollout waits for a sandbox that a pool has started ahead, `restore_10m` is a cold start with the snapshot. Where
DOCKER_HOST is not set, `docker` is the tests' own engine, with their image.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from minirllm.errors import SandboxError
from minirllm.machine import machine
from minirllm.rewards.code import code
from minirllm.sandboxes import MIB, Limits, Spec, create
from minirllm.sandboxes.pool import Pool
from tests import engine

LIMITS = Limits(memory=256 * MIB, disk=128 * MIB)
TARGET = 20.0  # code rewards a second, on two cores
FILE = 10 * MIB  # what a snapshot holds
ANSWER = "```python\ndef add(a, b):\n    return a + b\n```"
PROBLEMS: dict[str, dict[str, Any]] = {
    "calls": {"function": "add", "calls": [[[n, n], 2 * n] for n in range(10)]},
    "tests": {"tests": [f"assert add({n}, {n}) == {2 * n}" for n in range(10)]},
}


async def operations(name: str, repeat: int, image: str) -> dict[str, float]:
    """Median milliseconds, see the module."""
    base = Spec(limits=LIMITS, image=image)
    pool = Pool(name, warm=1, snapshots="off")
    times: dict[str, list[float]] = defaultdict(list)

    async def timed(what: str, work: Awaitable[Any]) -> Any:
        began = time.perf_counter()
        result = await work
        times[what].append(1000 * (time.perf_counter() - began))
        return result

    async def cold(spec: Spec) -> None:
        async with create(name, spec) as box:
            await box.execute(("/usr/bin/true",), timeout=60)

    async def warm() -> None:
        """Handed out alive, and a command run: what a rollout that begins waits for."""
        stack = AsyncExitStack()
        async with pool.ahead(lambda: [pool.recipe(base)]), stack:
            await pool.settled()
            box = await timed("take_warm", stack.enter_async_context(pool.take(pool.recipe(base))))
            await box.execute(("/usr/bin/true",), timeout=60)

    for _ in range(repeat):
        await timed("cold", cold(base))
        await warm()
        box = create(name, base)
        await timed("start", box.start())
        await timed("exec_true", box.execute(("/usr/bin/true",), timeout=60))
        await timed("exec_python", box.execute(("/usr/bin/python3", "-I", "-c", "print(1)"), timeout=60))
        await timed("write_1k", box.write("small", bytes(1024)))
        await box.write("large", bytes(FILE))
        await timed("read_10m", box.read("large"))
        id = await timed("snapshot_10m", box.snapshot())
        await timed("close", box.close())
        await timed("restore_10m", cold(replace(base, snapshot=id)))
        await type(box).forget(id)
    return {what: round(statistics.median(values), 2) for what, values in times.items()}


@contextlib.contextmanager
def docker() -> Iterator[str]:
    """An image on an engine that DOCKER_HOST then names."""
    if "DOCKER_HOST" in os.environ:
        yield ""
        return
    with engine.running() as url:
        os.environ["DOCKER_HOST"] = url
        try:
            yield engine.IMAGE
        finally:
            del os.environ["DOCKER_HOST"]


async def rewards(count: int) -> dict[str, dict[str, float]]:
    """Code rewards given at once, in the sandbox `local`."""
    found = {}
    for kind, problem in PROBLEMS.items():
        before = _cpu()
        began = time.perf_counter()
        verdicts = await asyncio.gather(*(code(ANSWER, problem, timeout=60.0) for _ in range(count)))
        seconds = time.perf_counter() - began
        assert all(verdict.reward == 1.0 for verdict in verdicts)
        found[kind] = {
            "count": count,
            "per_second": round(count / seconds, 2),
            "cpu_ms_each": round(1000 * (_cpu() - before) / count, 2),
        }
    return found


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


async def measure(repeat: int, count: int) -> dict[str, Any]:
    result: dict[str, Any] = {"machine": machine(), "target_rewards_per_second": TARGET, "milliseconds": {}}
    for name in ("docker", "local", "local-unsafe"):
        try:
            with docker() if name == "docker" else contextlib.nullcontext("") as image:
                result["milliseconds"][name] = await operations(name, repeat, image)
        except (SandboxError, engine.NoEngine) as error:
            result["milliseconds"][name] = f"not measured: {error}"
        print(name, result["milliseconds"][name])
    result["code_rewards"] = await rewards(count)
    print(result["code_rewards"])
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--rewards", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/baselines/sandboxes.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["MINIRLLM_CACHE"] = cache  # where snapshots lie
        result = asyncio.run(measure(options.repeat, options.rewards))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
