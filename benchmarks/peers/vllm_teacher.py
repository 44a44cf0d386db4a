"""A real vLLM server as the teacher: its scores beside a local teacher's, runs of `minirllm distill`, its refusals.

    python benchmarks/peers/vllm_teacher.py --vllm-python .venv-vllm/bin/python [--out FILE]

Owns: the server, the measurement and its JSON. The server has the student's own model, so a difference between the two
teachers is one of arithmetic, or a mistake. A quarter of an hour on two cores: SmolLM2-135M in float32, on the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import workload

from minirllm import AgentConfig, Episode, Task, flow, models, rollout, stack, train
from minirllm.client import chat
from minirllm.config import Config
from minirllm.errors import UserError
from minirllm.log import read_metrics
from minirllm.machine import machine
from minirllm.store import EpisodeStore
from minirllm.teachers import teacher

MODEL, K = "smollm2-135m", 8
LONGEST, CHUNK = 1024, 512  # tokens of a call; of one forward: longer prompts are scored in pieces
STARTING = 600.0  # seconds
WAYS = {
    "sampled": [],
    "top-k": ["--top-k", str(K)],
    "privileged": ["--privileged", "word"],
    "privileged-top-k": ["--privileged", "word", "--top-k", str(K)],
}
ROWS = ("teacher_kl", "teacher_agreement", "reward_mean", "grad_norm", "seconds_teacher", "seconds_step")


class Server:
    """vLLM's, at one address, started and killed as often as asked."""

    def __init__(self, python: str, folder: Path, model: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}/v1", folder / "vllm.log"
        self.flags = {
            "dtype": "float32", "max-model-len": LONGEST, "max-num-batched-tokens": CHUNK, "max-num-seqs": 8,
        }  # fmt: skip
        flags = [word for name, value in self.flags.items() for word in (f"--{name}", str(value))]
        where = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL, "--enforce-eager"]
        self.argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *where, *flags]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Seconds until it answers."""
        began = time.perf_counter()
        fixed = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | fixed
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.argv, env=env, stdout=log, stderr=log, start_new_session=True, cwd=self.log.parent
            )
        while time.perf_counter() - began < STARTING:
            if self.process.poll() is not None:
                break
            try:
                httpx.get(f"{self.url}/models").raise_for_status()
                return time.perf_counter() - began
            except httpx.HTTPError:
                time.sleep(1)
        self.kill()
        raise SystemExit(f"vLLM does not answer:\n{self.log.read_text(errors='replace')[-3000:]}")

    def kill(self) -> None:
        """It and all its processes, at once."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@contextmanager
def serving(python: str, folder: Path) -> Iterator[Server]:
    server = Server(python, folder, str(models.resolve(MODEL).path))
    try:
        yield server
    finally:
        server.kill()


# ---- runs of the command ----


class Runs:
    """`minirllm distill first_letter`, with the server as its teacher."""

    def __init__(self, server: Server, folder: Path):
        self.server, self.folder = server, folder

    def argv(self, name: str, *options: str) -> list[str]:
        where = ["--run", name, "--runs-dir", str(self.folder), "--set", "eval_tasks=0"]
        sizes = ["--batch-size", "4", "--group-size", "4"]
        command = [sys.executable, "-m", "minirllm.cli", "distill", "first_letter", "--teacher", self.server.url]
        return [*command, *where, *sizes, *options]

    def whole(self, name: str, *options: str) -> list[dict[str, Any]]:
        """The figures of two steps."""
        subprocess.run(self.argv(name, "--steps", "2", "--quiet", *options), check=True)
        return [{row: float(step[row]) for row in ROWS if row in step} for step in self.rows(name)]

    def killed(self) -> dict[str, Any]:
        """A run whose teacher is killed behind step 2, what it says, what it kept, and whether it goes on."""
        argv = self.argv("killed", "--steps", "50", "--save-every", "1000", "--quiet")
        process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        while process.poll() is None and len(self.rows("killed")) < 2:
            time.sleep(0.2)
        self.server.kill()
        began = time.perf_counter()
        _, said = process.communicate()
        seconds = time.perf_counter() - began
        kept = sorted(path.name for path in (self.folder / "killed" / "checkpoints").glob("step_*"))
        self.server.start()
        last = max(row["step"] for row in self.rows("killed"))
        again = ["--resume", "--steps", str(last + 1), "--quiet"]
        subprocess.run(self.argv("killed", *again), check=True)
        assert max(row["step"] for row in self.rows("killed")) == last + 1
        told = said.strip().replace(self.server.url, "URL/v1")
        return {
            "exit": process.returncode,
            "seconds_to_end": seconds,
            "said": told,
            "kept": kept,
            "resumed_to": last + 1,
        }

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name / "metrics.jsonl"
        return [row for row in read_metrics(path) if row["step"]] if path.exists() else []


# ---- the two teachers beside each other ----


def chats() -> flow.TaskModule:
    """Eight short prompts and two that vLLM scores in pieces."""

    @rollout
    async def agent(task: Task, config: AgentConfig) -> str:
        return str((await chat(config, [{"role": "user", "content": str(task.instruction)}])).output)

    async def grade(task: Task, episode: Episode) -> float:
        return workload.reward(str(episode.answer))

    prompts = [*workload.prompts(8, 3), *workload.prompts(2, 40)]
    return flow.task_of(agent, grade, [Task(str(n), text) for n, text in enumerate(prompts)])


async def sampled(url: str, folder: Path) -> list[Episode]:
    """Answers of 32 tokens to those."""
    sizes = {"batch_size": 10, "group_size": 4, "max_tokens": 32, "steps": 1, "eval_tasks": 0}
    options = {"model": MODEL, "algorithm": "distill", "teacher": url, "runs_dir": str(folder), "run": "chats"}
    await train.train(chats(), Config(**{**options, **sizes}), quiet=True)
    return list(EpisodeStore(folder / "chats" / "episodes").finished(1).values())


async def thoughts(place: Any, config: Config, episodes: list[Episode]) -> dict[str, Any]:
    """What a teacher says of each call: log-probabilities (less the student's) and the likely tokens."""
    async with teacher.opened(config, place.policy, place.renderer) as found:
        began = time.perf_counter()
        figures = await found.teach(episodes)
        seconds = time.perf_counter() - began
    steps = [step for episode in episodes for trajectory in episode.trajectories for step in trajectory.steps]
    gaps = [np.array(step.advantage) for step in steps]
    ids, tops = (np.concatenate([step.targets[n] for step in steps]) for n in (0, 1))
    told = {"teacher_kl": figures["teacher_kl"], "teacher_agreement": figures["teacher_agreement"], "seconds": seconds}
    return {"gap": np.concatenate(gaps), "id": ids, "top": tops, "calls": len(steps), "figures": told}


async def compared(place: Any, local: Config, url: str, episodes: list[Episode]) -> dict[str, Any]:
    """The server beside the student's base in this process."""
    near = await thoughts(place, local, episodes)
    far = await thoughts(place, replace(local, teacher=url), episodes)
    gap, same = np.abs(far["gap"] - near["gap"]), far["id"] == near["id"]
    top = np.abs(far["top"] - near["top"])  # by rank: two tokens that are nearly as likely may change places
    assert gap.max() < 1e-2, "the two read different tokens, or at different places"
    return {
        "answers": near["calls"],
        "tokens": len(gap),
        "logprob_max": float(gap.max()),
        "logprob_mean": float(gap.mean()),
        f"top_{K}_logprob_max": float(top.max()),
        f"top_{K}_logprob_mean": float(top.mean()),
        f"top_{K}_same_id": float(same.mean()),
        "server": far["figures"],
        "local": near["figures"],
    }


async def refusals(place: Any, local: Config, url: str, episodes: list[Episode]) -> dict[str, str]:
    """What is said of mistakes that the server notices."""
    far, said = replace(local, teacher=url), {}
    for name, config in {
        "no such model": replace(far, teacher_model="smollm"),
        "no such model, sampled tokens": replace(far, teacher_model="smollm", teacher_top_k=0),
        "more likely tokens than --max-logprobs": replace(far, teacher_top_k=21),
        "no /v1": replace(far, teacher=url.removesuffix("/v1")),
        "a prompt longer than --max-model-len": replace(far, privileged=f"{__name__}:longer"),
    }.items():
        try:
            await thoughts(place, config, episodes)
        except UserError as error:
            said[name] = str(error).replace(url.removesuffix("/v1"), "URL")
    return said


def longer(task: Task, messages: list[Any]) -> list[Any]:
    """What the teacher reads: more than it can."""
    return [*messages[:-1], replace(messages[-1], content="word " * LONGEST)]


async def beside(server: Server, folder: Path) -> dict[str, Any]:
    """The comparisons, and the refusals."""
    letters = EpisodeStore(folder / "sampled" / "episodes")
    answers = {
        "first_letter": [*letters.finished(1).values(), *letters.finished(2).values()],
        "chats": await sampled(server.url, folder),
    }
    local = Config(model=MODEL, algorithm="distill", teacher="base", teacher_top_k=K)
    async with stack.serving(local) as place:
        found = {name: await compared(place, local, server.url, episodes) for name, episodes in answers.items()}
        return {"compared": found, "refusals": await refusals(place, local, server.url, answers["first_letter"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-python", required=True, help="of an environment that has vLLM")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/baselines/vllm_teacher.json"))
    options = parser.parse_args()
    ask = "import importlib.metadata as m; print(m.version('vllm'), m.version('torch'), m.version('transformers'))"
    python = str(Path(options.vllm_python).absolute())
    versions = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout
    result: dict[str, Any] = dict(zip(("vllm", "torch", "transformers"), versions.split(), strict=True))
    with tempfile.TemporaryDirectory() as name, serving(python, Path(name)) as server:
        folder, runs = Path(name) / "runs", Runs(server, Path(name) / "runs")
        result |= {"flags": server.flags, "seconds_to_start": server.start()}
        result["runs"] = {way: runs.whole(way, *more) for way, more in WAYS.items()}
        result |= asyncio.run(beside(server, folder))
        result["killed"] = runs.killed()
    options.out.write_text(json.dumps({**result, "machine": machine()}, indent=1) + "\n")
    print(options.out.read_text())


if __name__ == "__main__":
    main()
