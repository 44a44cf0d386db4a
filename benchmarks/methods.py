"""Every training method on the same task with the same samples: held-out reward before and after, three seeds each.

Owns: what a method is here (options, or commands), the JSON, and the table of it in docs/algorithms.md. A seed that the
JSON holds already is not run again, so the benchmark goes on where it was ended.
``python -m benchmarks.methods [--methods rloo sft] [--seeds 0 1 2] [--seconds]``

A method that samples makes 10 steps of 16 words x 8 rollouts, ``distill`` with a teacher that ``grpo`` trained (one for
all seeds, kept in runs/); ``sft`` learns, for two epochs, what was right of as many rollouts of the model as it is.
``--seconds`` measures the time of a step instead: two steps after one that is not counted, nothing held out. It needs a
quiet machine; the rewards do not.
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

from benchmarks.learning import one
from minirllm.log import read_metrics
from minirllm.machine import machine

TASK, STEPS, GROUP = "first_letter", 10, 8
WORDS = 16 * STEPS  # that are sampled from, by every method
OPTIONS: dict[str, list[str]] = {  # of the methods that are an algorithm of `minirllm train`
    "grpo": [],
    "rloo": [],
    "reinforce_pp": [],
    # a second step on each batch: at the first the ratio is 1, and these two would be grpo
    "gspo": ["inner_epochs=2", "clip_low=3e-4", "clip_high=4e-4", "loss_aggregation=sequence"],
    "cispo": ["inner_epochs=2", "clip_low=1", "clip_high=0.28"],
}
METHODS = (*OPTIONS, "sft", "distill")
RL = [*("--steps", str(STEPS)), *("--eval-every", "0"), *("--save-every", "1000")]
TEACHER, TEACHER_SEED = "learning-methods-teacher", 9
OUT, PAGE = Path("benchmarks/baselines/learning_methods.json"), Path("docs/algorithms.md")
HEAD = "| method | seed 0 | seed 1 | seed 2 | seconds a step |\n|---|---|---|---|---|\n"
SFT_OPTIONS = ["--epochs", "2", "--batch-size", "16", "--lr", "3e-4", "--lr-schedule", "linear"]


def minirllm(*arguments: object) -> None:
    """One command of the command line. Ends the benchmark when it fails."""
    command = [sys.executable, "-m", "minirllm.cli", *map(str, arguments)]
    if code := subprocess.run(command, stdout=sys.stderr).returncode:
        raise SystemExit(f"{' '.join(command)} ended with {code}")


def evaluated(folder: Path, *options: object) -> list[float]:
    """Held-out reward with its interval, under the noise that training evaluates with."""
    minirllm("eval", TASK, "--tasks", 100, "--output", folder, *options)
    summary = json.loads((folder / "summary.json").read_text())
    return [summary["reward_mean"], *summary["reward_interval"]]


def rows(folder: Path, seed: int, words: int) -> Path:
    """Conversations of the model's own right answers to `words` training tasks."""
    minirllm("eval", TASK, "--split", "train", "--tasks", words, "--n", GROUP, "--seed", seed, "--output", folder)
    minirllm("dataset", "from-eval", folder, "--dedup", "--out", folder / "rows.jsonl")
    return folder / "rows.jsonl"


def sft(seed: int) -> dict[str, Any]:
    """Rejection sampling: what the model as it is gets right, learned as given conversations."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = evaluated(folder / "before", "--seed", seed)
        data = rows(folder / "own", seed, WORDS)
        command = ["sft", data, "--model", "smollm2-135m", "--seed", seed, *SFT_OPTIONS, "--save-every", 1000]
        minirllm(*command, "--runs-dir", folder, "--run", "curve")
        after = evaluated(folder / "after", "--seed", seed, "--checkpoint", folder / "curve")
        steps = [row for row in read_metrics(folder / "curve/metrics.jsonl") if row["step"]]
        return {
            "seed": seed,
            "seconds": time.perf_counter() - began,
            "held_out": {"0": before, str(len(steps)): after},
            "rows": len(data.read_text().splitlines()),
            "loss": [row["loss"] for row in steps],
            "weights_sha256": steps[-1]["weights_sha256"],
            "config": json.loads((folder / "curve/manifest.json").read_text())["config"],
        }


def teacher() -> Path:
    """A run of ``grpo`` that is not one of the table's."""
    folder = Path("runs") / TEACHER
    if not (folder / "checkpoints").is_dir():
        minirllm("train", TASK, "--seed", TEACHER_SEED, *RL, "--run", TEACHER)
    return folder


def flags(method: str) -> list[str]:
    """What makes the commands that sample a method's."""
    if method == "distill":
        return ["--teacher", str(teacher())]
    return [flag for setting in (f"algorithm={method}", *OPTIONS[method]) for flag in ("--set", setting)]


def curve(method: str, seed: int) -> dict[str, Any]:
    """One row of the table."""
    if method == "sft":
        return sft(seed)
    return one(TASK, seed, [*RL, *flags(method)], verb(method))


def verb(method: str) -> str:
    return method if method in ("distill", "sft") else "train"


def seconds(method: str) -> float:
    """Seconds of a step, the median of two after the first."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        where: list[object] = ["--runs-dir", folder, "--run", "curve", "--save-every", 1000]
        if method == "sft":
            data = rows(folder / "own", 0, 16)
            minirllm("sft", data, "--model", "smollm2-135m", "--steps", 3, "--batch-size", 16, *where)
        else:
            minirllm(verb(method), TASK, "--steps", 3, "--set", "eval_tasks=0", *where, *flags(method))
        steps = [row for row in read_metrics(folder / "curve/metrics.jsonl") if row["step"] > 1]
        return statistics.median(row["seconds_step"] for row in steps)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="None: just write the table.")
    parser.add_argument("--seconds", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT, help="Another file than this one is no table in docs.")
    options = parser.parse_args()
    for seed in [0] if options.seconds else options.seeds:
        for method in options.methods:
            runs = read(options.out)["methods"].get(method, {"runs": []})["runs"]
            if options.seconds:
                found: dict[str, Any] = {"seconds_per_step": seconds(method), "seconds_machine": machine()}
            elif any(run["seed"] == seed for run in runs):
                continue
            else:
                found = {"runs": [*runs, {**curve(method, seed), "machine": machine()}]}
            result = read(options.out)
            entry = result["methods"].setdefault(method, {"options": options_of(method), "runs": runs})
            entry |= found
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n")
            print(f"{method}, seed {seed}: done", flush=True)
    if options.out == OUT:
        page = PAGE.read_text()
        PAGE.write_text(page.replace(HEAD + shown(page), HEAD + table(read(OUT))))


def table(result: dict[str, Any]) -> str:
    """The rows of the page: a method, what each seed ended up with and its 95 % interval, seconds a step."""
    lines = []
    for method in (name for name in METHODS if name in result["methods"]):
        entry = result["methods"][method]
        cells = {
            run["seed"]: "{:.2f} to {:.2f} [{:.2f}, {:.2f}]".format(*before_and_after(run)) for run in entry["runs"]
        }
        seconds = f"{entry['seconds_per_step']:.1f}" if "seconds_per_step" in entry else "not measured"
        lines.append(f"| {' | '.join([f'`{method}`', *(cells.get(seed, '') for seed in range(3)), seconds])} |\n")
    return "".join(lines)


def before_and_after(run: dict[str, Any]) -> tuple[float, float, float, float]:
    """Held-out reward before; after, and its interval."""
    (before, *_), (after, low, high) = (run["held_out"][step] for step in sorted(run["held_out"], key=int))
    return before, after, low, high


def shown(page: str) -> str:
    """The rows that a page shows."""
    rows = page.partition(HEAD)[2]
    return rows[: rows.index("\n\n") + 1]


def options_of(method: str) -> list[str]:
    return SFT_OPTIONS if method == "sft" else OPTIONS.get(method, [])


def read(out: Path) -> dict[str, Any]:
    """What is known so far."""
    return dict(json.loads(out.read_text())) if out.exists() else {"task": TASK, "methods": {}}


if __name__ == "__main__":
    main()
