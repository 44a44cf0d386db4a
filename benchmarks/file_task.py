"""An agent with a shell learns a file task in the sandbox: task and harness for the tiny model, and the measurement.

Owns: the task ("word.txt holds four lower-case letters"), its agent program, the JSON. The program puts what the model
says into a shell command as it stands, ``echo ... > word.txt``, and runs it in the sandbox; the reward is read off the
file that is then there, never off what was said. ``python benchmarks/file_task.py [--sandbox local] [--out FILE]``
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from minirllm import Config, Episode, Task, evaluator
from minirllm.harness import Context, Harness, Launch
from minirllm.machine import machine

FILE, LENGTH = "word.txt", 4  # the tiny model has one token per byte
DEFAULTS = {
    "model": "tiny", "steps": 25, "batch_size": 4, "group_size": 8, "max_tokens": LENGTH, "lora_rank": 0, "lr": 3e-3,
    "eval_every": 0, "eval_tasks": 32, "save_every": 25, "threads": 1, "concurrency": 8,
}  # fmt: skip
PROGRAM = f"""\
import json, os, subprocess, urllib.request
body = {{"model": os.environ["MINIRLLM_MODEL"],
        "messages": [{{"role": "user", "content": os.environ["MINIRLLM_INSTRUCTION"]}}]}}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {{"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}})
with urllib.request.urlopen(request) as reply:
    said = json.load(reply)["choices"][0]["message"]["content"].replace("\\0", "")
subprocess.run(["bash", "-c", "echo " + said + " > {FILE}"], timeout=5)
"""
TARGET = 0.8  # of the held-out reward at the end


def launch(context: Context) -> Launch:
    argv = (context.python, "-I", str(context.home / "agent.py"))
    return Launch(argv, context.variables, {"agent.py": PROGRAM})


HARNESS = Harness("echo", "1", "one answer, put into a shell command", "chat", launch, script=("abcd",))


@evaluator
async def score(task: Task, episode: Episode) -> float:
    text = episode.artifacts["files"].get(FILE, "").removesuffix("\n")
    return sum("a" <= letter <= "z" for letter in text) / LENGTH if len(text) <= LENGTH else 0.0


def train(config: Config) -> list[Task]:
    return [Task(id=f"train-{i}", instruction=f"{i}?") for i in range(64)]


def held_out(config: Config) -> list[Task]:
    return [Task(id=f"held-out-{i}", instruction=f"{i}?") for i in range(64, 96)]


def measure(sandbox: str) -> dict[str, Any]:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as runs:
        command = ["-m", "minirllm.cli", "train", __file__, "--harness", __file__, "--sandbox", sandbox]
        subprocess.run([sys.executable, *command, "--runs-dir", runs, "--run", "file"], check=True)
        rows = [json.loads(line) for line in (Path(runs) / "file" / "metrics.jsonl").read_text().splitlines()]
    curve = [row["reward_mean"] for row in rows if "reward_mean" in row]
    held_out_rewards = [row["eval_reward"] for row in rows if "eval_reward" in row]
    return {
        "machine": machine(),
        "sandbox": sandbox,
        "target_last": TARGET,
        "curve": curve,
        "first_3": statistics.mean(curve[:3]),
        "last_3": statistics.mean(curve[-3:]),
        "held_out_first_and_last": [held_out_rewards[0], held_out_rewards[-1]],
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sandbox", default="local")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/baselines/file_task.json"))
    options = parser.parse_args()
    result = measure(options.sandbox)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
