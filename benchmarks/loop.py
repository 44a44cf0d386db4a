"""Is the event loop free? Latency of ``/health`` while nothing happens, while 32 rows decode, and while training.

Owns: the measurement and its JSON. The client is another process, so that its own work is not measured.
``python benchmarks/loop.py [--seconds 20] [--out FILE]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from minirllm import algorithms, batch
from minirllm.config import Config
from minirllm.machine import machine
from minirllm.stack import Stack, serving
from minirllm.trainer import Trainer
from minirllm.tree import TokenTree
from minirllm.types import Completion, Episode, SamplingParams, Step, Trajectory

CLIENT = """
import http.client, json, sys, time
host, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
end, times = time.perf_counter() + seconds, []
connection = http.client.HTTPConnection(host, port)
while time.perf_counter() < end:
    began = time.perf_counter()
    connection.request("GET", "/health")
    connection.getresponse().read()
    times.append(time.perf_counter() - began)
    time.sleep(0.02)
print(json.dumps(times))
"""
TARGET_MS = 50.0


async def latencies(base_url: str, seconds: float) -> dict[str, float]:
    """p50, p99 and maximum in ms over `seconds`."""
    host, _, port = base_url.removeprefix("http://").partition(":")
    command = [sys.executable, "-c", CLIENT, host, port, str(seconds)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    times_ms = np.array(json.loads(out)) * 1000
    p50, p99 = np.percentile(times_ms, [50, 99]).tolist()
    return {"requests": len(times_ms), "p50_ms": p50, "p99_ms": p99, "max_ms": float(times_ms.max())}


async def decoding(stack: Stack, rows: int) -> None:
    """Keeps `rows` rows busy until cancelled."""
    rng = np.random.default_rng(0)

    async def client(row: int) -> None:
        for turn in range(10**6):
            prompt = rng.integers(1000, 40000, 92).tolist()
            await stack.engine.generate(prompt, SamplingParams(max_tokens=64, ignore_eos=True), row * 1000 + turn)

    await asyncio.gather(*[client(row) for row in range(rows)])


async def training(stack: Stack, config: Config) -> None:
    """Updates on one group of 8 answers of 64 tokens to a 300-token prompt, until cancelled."""
    algorithm = algorithms.create("grpo")
    trainer = Trainer(stack.policy, config, algorithm)
    rng = np.random.default_rng(0)
    prompt = rng.integers(1000, 40000, 300).tolist()
    while True:
        episodes = []
        for index in range(8):
            tree = TokenTree()
            sample = Completion(rng.integers(1000, 40000, 64).tolist(), [-5.0] * 64, "length", stack.policy.version)
            node = tree.add(prompt, sample, str(index))
            steps = [Step(id=str(index), node=node, prompt_length=len(prompt), response_length=64)]
            graded = {"task_id": "t", "rollout_idx": index, "reward": float(index % 2), "tree": tree}
            episodes.append(Episode(**graded, trajectories=[Trajectory(steps=steps)]))
        await trainer.update(batch.build(episodes, config, algorithm, stack.policy.version))


async def measure(model: str, seconds: float) -> dict[str, Any]:
    config = Config(model=model, lr=0.0, threads=2)
    result: dict[str, Any] = {"machine": machine(), "target_p99_ms": TARGET_MS}
    async with serving(config) as stack:
        result["level"] = stack.policy.level
        result["idle"] = await latencies(stack.base_url, seconds)
        for name, work in (("decoding_32_rows", decoding(stack, 32)), ("training", training(stack, config))):
            load = asyncio.create_task(work)
            await asyncio.sleep(2.0)
            result[name] = await latencies(stack.base_url, seconds)
            assert not load.done(), "the load ended early"
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
            print(name, result[name])
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/baselines/loop.json"))
    options = parser.parse_args()
    began = time.perf_counter()
    result = asyncio.run(measure(options.model, options.seconds)) | {"seconds": time.perf_counter() - began}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
