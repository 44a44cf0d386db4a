"""Whole training steps beside TRL's GRPOTrainer, in one run on the same model, prompts, group size, LoRA and threads.

Owns: the comparison and its JSON. Both compute in fp32. Ours is the whole product: agents over HTTP, sessions, engine,
trainer, and the log.
``python benchmarks/side_by_side.py --trl-python PATH [--steps 3] [--rounds 2] [--out FILE]``; TRL has an environment of
its own (benchmarks/peers/trl_steps.py says how).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import minirllm  # noqa: F401  # before torch: sets the variables that its arithmetic depends on

# isort: split
import torch

from minirllm import Config, EvalOutput, Task, evaluator, linear, models, rollout
from minirllm.client import chat
from minirllm.flow import TaskModule
from minirllm.machine import machine
from minirllm.train import train

sys.path.insert(0, str(Path(__file__).parent / "peers"))
import workload

GROUP, PROMPTS, NEW_TOKENS = 8, 4, 64
BODY_WEIGHTS = 30 * (576 * (2 * 576 + 2 * 192) + 3 * 576 * 1536)  # of SmolLM2-135M's linear layers
HEAD_WEIGHTS = 576 * 49152
# prompts of about 94 and 300 tokens
CASES = {"a": {"sentences": 3, "target": 2.5}, "b": {"sentences": 12, "target": 4.0}}


@rollout
async def agent(task: Task, config: Any) -> None:
    await chat(config, [{"role": "user", "content": task.instruction}], ignore_eos=True)


@evaluator
async def grade(task: Task, episode: Any) -> EvalOutput:
    return EvalOutput(workload.reward(episode.answer))


def ours(sentences: int, steps: int, determinism: str) -> dict[str, Any]:
    """Runs `steps` training steps in this process; seconds and peak memory."""
    tasks = [Task(str(i), text) for i, text in enumerate(workload.prompts(PROMPTS, sentences))]
    task = TaskModule("side-by-side", agent, grade, lambda config: tasks, lambda config: tasks)
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            steps=steps, batch_size=PROMPTS, group_size=GROUP, max_tokens=NEW_TOKENS, lr=1e-6, lora_rank=16,
            lora_alpha=32.0, eval_tasks=0, save_every=steps, runs_dir=folder, run="ours", determinism=determinism,
            threads=2,
        )  # fmt: skip
        asyncio.run(train(task, config, quiet=True))
        rows = [json.loads(line) for line in (Path(folder) / "ours/metrics.jsonl").read_text().splitlines()]
        level = json.loads((Path(folder) / "ours/manifest.json").read_text())["level"]
    assert all(row["tokens_generated"] == GROUP * PROMPTS * NEW_TOKENS for row in rows)
    return {
        "level": level,
        "seconds": [row["seconds_step"] for row in rows],
        "generate_seconds": [row["seconds_generate"] for row in rows],
        "train_seconds": [row["seconds_train"] for row in rows],
        "trained_tokens": rows[-1]["trained_tokens"],
        "tokens": rows[-1]["tokens"],
        "mismatch_max": max(row.get("mismatch_max", 0.0) for row in rows),
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def gflops_per_second() -> float:
    """The fastest of a few products of 640 rows with weights of the model's shape: what this machine can do."""
    torch.set_num_threads(2)
    x_TI, weight_OI = torch.randn(640, 576), torch.randn(1536, 576)
    seconds = []
    for _ in range(50):
        start = time.perf_counter()
        linear.product(x_TI, weight_OI)
        seconds.append(time.perf_counter() - start)
    return 2 * 640 * 576 * 1536 / min(seconds) / 1e9


def floor_seconds(run: dict[str, Any], gflops: float) -> float:
    """What a step of ours takes if its products with weights, each once, ran at `gflops` and all else took no time.

    Generation runs each distinct token forward; training runs it forward and backward, to the input only: the weights
    are frozen, and an adapter is small. The head runs for each sampled token, and in training twice.
    """
    body, head = 2 * BODY_WEIGHTS / 1e9, 2 * HEAD_WEIGHTS / 1e9  # GFLOP of a token forward
    tokens, sampled = run["tokens"], run["trained_tokens"]
    return float((3 * tokens * body + 3 * sampled * head) / gflops)


def child(command: list[str]) -> dict[str, Any]:
    """The JSON object on the last line of what `command` prints."""
    environment = {**os.environ, "GOMP_SPINCOUNT": "1000"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trl-python")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--no-price", action="store_true", help="leave out ours at the other levels")
    parser.add_argument("--case", choices=list(CASES), action="append")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/baselines/side_by_side.json"))
    parser.add_argument("--ours", type=int, help="(internal) run ours with this many sentences and print JSON")
    parser.add_argument("--determinism", default="auto", help="(internal) and at this level")
    options = parser.parse_args()
    if options.ours:
        print(json.dumps(ours(options.ours, options.steps, options.determinism)))
        return
    folder = str(models.resolve("smollm2-135m").path)
    gflops = gflops_per_second()
    result: dict[str, Any] = {"machine": machine(), "gflops_per_second": gflops, "cases": {}}
    for name in options.case or list(CASES):
        sentences, found = CASES[name]["sentences"], {"trl": [], "ours": [], "fixed": [], "off": []}
        common = ["--steps", str(options.steps)]
        for _ in range(options.rounds):
            this = [sys.executable, __file__, "--ours", str(sentences), *common]
            found["ours"].append(child([*this, "--determinism", "auto"]))
            for level in () if options.no_price else ("fixed", "off"):
                found[level].append(child([*this, "--determinism", level]))
            if options.trl_python:
                script = str(Path(__file__).parent / "peers/trl_steps.py")
                found["trl"].append(child([options.trl_python, script, folder, "--sentences", str(sentences), *common]))
        seconds = {key: [s for run in runs for s in run["seconds"]] for key, runs in found.items() if runs}
        medians = {key: statistics.median(values) for key, values in seconds.items()}
        floor = floor_seconds(found["ours"][0], gflops)
        case = {"sentences": sentences, "target": CASES[name]["target"], "median_seconds": medians, **found}
        case |= {"floor_seconds": floor, "share_of_floor": {key: floor / value for key, value in medians.items()}}
        if "trl" in medians:
            case["times_faster"] = medians["trl"] / medians["ours"]
        result["cases"][name] = case
        print(name, medians, case.get("times_faster"))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
