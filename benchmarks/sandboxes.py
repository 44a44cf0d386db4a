"""What a sandbox costs: milliseconds of each operation on each backend, and how many code rewards a second are given.

Owns: the measurement and its JSON. ``python benchmarks/sandboxes.py [--repeat 20] [--rewards 64] [--out FILE]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from minirllm.errors import SandboxError
from minirllm.machine import machine
from minirllm.rewards.code import code
from minirllm.sandboxes import MIB, SANDBOXES, Limits, Spec, create

LIMITS = Limits(memory=256 * MIB, disk=128 * MIB)
TARGET = 20.0  # code rewards a second, on two cores
FILE = 10 * MIB  # what a snapshot holds
ANSWER = "```python\ndef add(a, b):\n    return a + b\n```"
PROBLEMS: dict[str, dict[str, Any]] = {
    "calls": {"function": "add", "calls": [[[n, n], 2 * n] for n in range(10)]},
    "tests": {"tests": [f"assert add({n}, {n}) == {2 * n}" for n in range(10)]},
}


async def operations(name: str, repeat: int) -> dict[str, float]:
    """Median milliseconds; `cold`: from nothing to the end of the first command."""
    times: dict[str, list[float]] = defaultdict(list)

    async def timed(what: str, work: Awaitable[Any]) -> Any:
        began = time.perf_counter()
        result = await work
        times[what].append(1000 * (time.perf_counter() - began))
        return result

    async def cold(spec: Spec) -> None:
        async with create(name, spec) as box:
            await box.execute(("/usr/bin/true",), timeout=60)

    for _ in range(repeat):
        await timed("cold", cold(Spec(limits=LIMITS)))
        box = create(name, Spec(limits=LIMITS))
        await timed("start", box.start())
        await timed("exec_true", box.execute(("/usr/bin/true",), timeout=60))
        await timed("exec_python", box.execute(("/usr/bin/python3", "-I", "-c", "print(1)"), timeout=60))
        await timed("write_1k", box.write("small", bytes(1024)))
        await box.write("large", bytes(FILE))
        await timed("read_10m", box.read("large"))
        id = await timed("snapshot_10m", box.snapshot())
        await timed("close", box.close())
        await timed("restore_10m", cold(Spec(snapshot=id, limits=LIMITS)))
    return {what: round(statistics.median(values), 2) for what, values in times.items()}


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
    for name in SANDBOXES:
        try:
            result["milliseconds"][name] = await operations(name, repeat)
        except SandboxError as error:
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
