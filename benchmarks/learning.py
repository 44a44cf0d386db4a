"""Learning curves: train a task with several seeds from the command line and keep what it wrote down.

Owns: the runs and their JSON: for every seed the training reward of each step, the held-out reward with its 95 %
interval where it was measured, seconds, the hash of the final weights.
``python benchmarks/learning.py first_letter --seeds 0 1 2 [--steps 40] [--set key=value ...] [--out FILE]``
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from minirllm.log import read_metrics
from minirllm.machine import machine


def one(task: str, seed: int, options: list[str], verb: str = "train") -> dict[str, Any]:
    """Train once in a process of its own; the curve and what it cost."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "minirllm.cli", verb, task, "--seed", str(seed), *options]
        command += ["--runs-dir", folder, "--run", "curve"]
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=sys.stderr)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
        seconds = time.perf_counter() - began
        rows = read_metrics(Path(folder) / "curve/metrics.jsonl")
        manifest = json.loads((Path(folder) / "curve/manifest.json").read_text())
    measured = ("eval_reward", "eval_low", "eval_high")
    held_out = {row["step"]: [row[key] for key in measured] for row in rows if "eval_reward" in row}
    signals = {
        row["step"]: {name: value for name, value in row.items() if name.startswith("eval_signal/")}
        for row in rows
        if "eval_reward" in row
    }
    steps = [row for row in rows if row["step"]]
    return {
        "seed": seed,
        "seconds": seconds,
        "seconds_training": sum(row["seconds_step"] - row.get("seconds_eval", 0.0) for row in steps),
        "peak_rss_gib": usage.ru_maxrss / 2**20,
        "level": manifest["level"],
        "held_out": held_out,
        "signals": signals,
        "train": [row["reward_mean"] for row in steps],
        "entropy": [row.get("entropy") for row in steps],
        "agreement": [row["teacher_agreement"] for row in steps if "teacher_agreement" in row],
        "mismatch_max": max(row.get("mismatch_max") or 0.0 for row in steps),
        "weights_sha256": steps[-1]["weights_sha256"],
        "config": manifest["config"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out or Path(f"benchmarks/baselines/learning_{Path(options.task).stem}.json")
    flags = ["--steps", str(options.steps), "--eval-every", str(options.eval_every), "--save-every", "1000"]
    flags += ["--model", options.model] if options.model else []
    for setting in options.settings:
        flags += ["--set", setting]
    result: dict[str, Any] = {"task": options.task, "machine": machine(), "runs": []}
    for seed in options.seeds:
        run = one(options.task, seed, flags)
        result["runs"].append(run)
        first, last = min(run["held_out"], default=None), max(run["held_out"], default=None)
        change = f"held-out {run['held_out'].get(first)} -> {run['held_out'].get(last)}"
        print(f"seed {seed}: {change}, {run['seconds']:.0f} s", flush=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
