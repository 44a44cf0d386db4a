"""``kill -9`` at random moments of a run, each followed by a resumption: the weights of every step have the same hash.

Owns: the moments, and what is compared. A moment is a phase (see phases.py), one of its entries and a delay, all drawn
at random; where the process really was when it died is read from what it left, and that is what is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from minirllm.log import read_metrics
from minirllm.store import EpisodeStore

from .phases import PHASES, now_in

ROOT = Path(__file__).parents[2]
DELAY = "0.1"  # seconds that agents and graders of the task wait at most
EACH = 2  # kills in every phase, at least
MORE = 10  # kills beyond those asked for, at most: some miss their phase


class Killer:
    """One task, run again and again in `folder`."""

    def __init__(self, folder: Path, steps: int = 6, seed: int = 0):
        self.folder, self.steps, self.random = folder, steps, random.Random(seed)
        began = time.perf_counter()
        process, pipe = self.start("whole", "rollouts:1", times=True)
        os.read(pipe, 1)
        self.seconds_to_start = time.perf_counter() - began
        self.end(process, pipe)
        self.hashes = self.rows("whole")
        assert len(set(self.hashes)) == steps, "every step changes the weights"
        self.seconds: dict[str, list[float]] = json.loads((folder / "times.json").read_text())
        assert all(self.seconds.values()), f"a phase was never entered: {self.seconds}"

    def start(self, name: str, moment: str, *more: str, times: bool = False) -> tuple[subprocess.Popen[str], int]:
        """The process, and the pipe that tells when it reaches the moment."""
        ours, theirs = os.pipe()
        environment = {
            **os.environ, "DELAY": DELAY, "PHASES_FILE": str(self.folder / f"{name}.phases"), "PHASES_MOMENT": moment,
            "PHASES_PIPE": str(theirs), "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        if times:
            environment["PHASES_TIMES"] = str(self.folder / "times.json")
        command = [sys.executable, str(Path(__file__).with_name("phases.py")), str(ROOT / "tests/delayed.py")]
        command += ["--runs-dir", str(self.folder), "--run", name, "--steps", str(self.steps), "--quiet", *more]
        process = subprocess.Popen(command, env=environment, pass_fds=[theirs], stderr=subprocess.PIPE, text=True)
        os.close(theirs)
        return process, ours

    def end(self, process: subprocess.Popen[str], pipe: int) -> None:
        """Wait for the process to end well."""
        _, said = process.communicate()
        os.close(pipe)
        assert process.returncode == 0, said

    def rows(self, name: str) -> list[str]:
        """The hash of the weights after each step."""
        return [row["weights_sha256"] for row in read_metrics(self.folder / name / "metrics.jsonl")]

    def episodes(self, name: str) -> dict[tuple[int, str, int], float]:
        """What tells one run of a rollout from another: how long it took."""
        store = EpisodeStore(self.folder / name / "episodes")
        found = {(step, *key): episode for step in store.steps() for key, episode in store.finished(step).items()}
        return {key: episode.metrics["seconds"] for key, episode in found.items()}

    def kill(self, name: str, phase: str) -> dict[str, Any]:
        """Start a run, kill it in the phase or near it, resume it."""
        entry = self.random.randint(1, len(self.seconds[phase]))
        delay = self.random.uniform(0, statistics.median(self.seconds[phase]))
        process, pipe = self.start(name, f"{phase}:{entry}")
        os.read(pipe, 1)
        time.sleep(delay)
        process.kill()
        process.communicate()
        os.close(pipe)
        assert process.returncode == -9, f"it ended by itself with {process.returncode}"
        hit, before = now_in((self.folder / f"{name}.phases").read_bytes()), self.episodes(name)
        metrics = self.folder / name / "metrics.jsonl"
        steps = len(read_metrics(metrics)) if metrics.exists() else 0
        began = time.perf_counter()
        process, pipe = self.start(name, "rollouts:1", "--resume")
        os.read(pipe, 1)
        seconds = time.perf_counter() - began
        self.end(process, pipe)
        after = self.episodes(name)
        return {
            "phase": phase, "entry": entry, "delay": delay, "hit": hit, "rows": steps, "episodes": len(before),
            "episodes_kept": sum(after[key] == value for key, value in before.items()),
            "seconds_to_resume": seconds, "same": self.rows(name) == self.hashes,
        }  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """At least `kills` kills, and EACH in every phase."""
    with tempfile.TemporaryDirectory() as folder:
        killer, done, hits = Killer(Path(folder), options.steps, options.seed), list[dict[str, Any]](), Counter[str]()
        while (len(done) < options.kills or min(hits[p] for p in PHASES) < EACH) and len(done) < options.kills + MORE:
            short = [phase for phase in PHASES if hits[phase] < EACH]
            phase = PHASES[len(done) % len(PHASES)] if len(done) < options.kills else short[0]
            done.append(killer.kill(f"kill{len(done)}", phase))
            hits[done[-1]["hit"]] += 1
            print(done[-1], flush=True)
    seconds = [one["seconds_to_resume"] for one in done]
    return {
        "kills": len(done),
        "survived": sum(one["same"] for one in done),
        "steps": options.steps,
        "weights_sha256": killer.hashes[-1],
        "hits": dict(sorted(hits.items())),
        "episodes_finished_before": sum(one["episodes"] for one in done),
        "episodes_kept": sum(one["episodes_kept"] for one in done),
        "seconds_to_start": killer.seconds_to_start,
        "seconds_to_resume": {"median": statistics.median(seconds), "max": max(seconds)},
        "each": done,
    }
