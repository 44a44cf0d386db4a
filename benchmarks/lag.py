"""What rollouts ahead of training save: seconds per step of agents that wait for their tools, with and without a lag.

Owns: the measurement and its JSON. The tiny model; each call is followed by a wait, as for a tool. Runs with and
without a lag alternate, so that a busy machine is busy for both. ``python benchmarks/lag.py [--wait 0.2 1]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from minirllm import AgentConfig, Episode, Task, flow, rollout, train
from minirllm.client import chat
from minirllm.config import Config
from minirllm.log import read_metrics
from minirllm.machine import machine

TURNS, STEPS, WARM = 3, 8, 2  # calls of an episode; steps of a run, and those that are not counted


def measure(wait: float, runs: int) -> dict[str, Any]:
    """Medians over the steps of all runs of a kind."""

    @rollout
    async def agent(task: Task, config: AgentConfig) -> str:
        messages = [{"role": "user", "content": str(task.instruction)}]
        for _ in range(TURNS):
            reply = await chat(config, messages)
            await asyncio.sleep(wait)
            messages += [{"role": "assistant", "content": reply.output}, {"role": "user", "content": "And then?"}]
        return str(reply.output)

    async def grade(task: Task, episode: Episode) -> float:
        return sum(episode.answer.encode()) % 7 / 6

    task = flow.task_of(agent, grade, [Task(str(i), f"Tell me about {i}.") for i in range(16)], [])
    found: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(runs):
            for lag, rows in found.items():
                name = f"{lag}-{number}"
                config = Config(
                    model="tiny", steps=STEPS, batch_size=4, group_size=4, max_tokens=24, lag=lag, eval_tasks=0,
                    save_every=STEPS, runs_dir=folder, run=name,
                )  # fmt: skip
                train.run(task, config, quiet=True)
                rows += read_metrics(Path(folder) / name / "metrics.jsonl")[WARM:]
    medians = {
        name: {str(lag): statistics.median(row[name] for row in rows) for lag, rows in found.items()}
        for name in ("seconds_step", "seconds_generate", "seconds_train")
    }
    ratio = medians["seconds_step"]["1"] / medians["seconds_step"]["0"]
    return {"wait": wait, **medians, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wait", type=float, nargs="+", default=[0.2, 1.0], help="seconds after each call")
    parser.add_argument("--runs", type=int, default=2, help="of each kind")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/baselines/lag.json"))
    options = parser.parse_args()
    result = {"turns": TURNS, "each": [measure(wait, options.runs) for wait in options.wait], "machine": machine()}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(options.out.read_text())


if __name__ == "__main__":
    main()
