"""Runs whose steps depend on those before them (curriculum, baseline, refills, roles): resumed, killed, replayed."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from minirllm import flow, train
from minirllm.config import Config
from minirllm.log import read_metrics
from minirllm.store import EpisodeStore
from minirllm.tools.replay import replay
from tests.episodes import same_content

ROOT = Path(__file__).parents[1]
TASK = str(ROOT / "tests/rounds.py")
OPTIONS: dict[str, dict[str, Any]] = {
    "refill": {},
    "lag": {
        "algorithm": "reinforce_pp", "roles": "judge=reinforce", "baseline": "task", "curriculum": "unsolved", "lag": 1,
        "refill": 0, "spare_tasks": 1, "spare_rollouts": 1, "solve_rate_high": 0.8,
    },
}  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(folder: Path, name: str, *, resume: bool = False) -> Path:
    task = flow.load_task(TASK)
    where = {"runs_dir": str(folder.parent), "run": folder.name}
    train.run(task, Config(**{**task.defaults, **OPTIONS[name], **where}), resume=resume, quiet=True)
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "metrics.jsonl")


def hashes(folder: Path) -> list[str]:
    return [row["weights_sha256"] for row in rows(folder)]


@pytest.fixture(scope="module", params=list(OPTIONS))
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, run(tmp_path_factory.mktemp("whole") / "r", request.param)


def test_it_depends_on_the_steps_before(whole: tuple[str, Path]) -> None:
    name, folder = whole
    assert len(set(hashes(folder))) == 4
    if name == "refill":
        assert sum(row["refill_tasks"] for row in rows(folder)) > 0
    else:
        assert sum(row.get("discarded/surplus", 0) for row in rows(folder)) > 0


def test_resumed_after_any_step_it_goes_on_with_the_same_bits(whole: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = whole
    copy = Path(shutil.copytree(folder, tmp_path / "r"))
    for step in (3, 4):
        shutil.rmtree(copy / f"checkpoints/step_{step:06d}")
    (copy / "episodes/step_00004.jsonl").unlink()
    begun = copy / "episodes/step_00003.jsonl"
    begun.write_bytes(b"".join(begun.read_bytes().splitlines(keepends=True)[:3]))
    run(copy, name, resume=True)
    assert hashes(copy) == hashes(folder)
    for step in (1, 2, 3, 4):
        one, other = (EpisodeStore(path / "episodes").finished(step) for path in (folder, copy))
        assert one.keys() == other.keys()
        assert all(same_content(one[key], other[key]) for key in one)


def test_killed_in_the_middle_of_a_step_it_resumes_to_the_same_bits(whole: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = whole
    options = [f"{key}={value}" for key, value in OPTIONS[name].items()]
    command = [sys.executable, "-m", "minirllm.train", TASK, "--run", "r", "--runs-dir", str(tmp_path)]
    command += [word for setting in options for word in ("--set", setting)]
    begun = sum(int(row["episodes"]) for row in rows(folder)[:1]) + 3
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COUNT": str(tmp_path / "count"), "KILL_AFTER": str(begun)}
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = subprocess.run([*command, "--resume"], env=environment, capture_output=True, text=True, check=False)
    assert resumed.returncode == 0, resumed.stderr
    assert hashes(tmp_path / "r") == hashes(folder)


def test_it_replays(whole: tuple[str, Path]) -> None:
    _, folder = whole
    for step in (None, 3):  # from the seed, and from a checkpoint
        console = Console(file=io.StringIO(), highlight=False)
        same = replay(folder, console=console, step=step)
        assert same, console.file.getvalue()  # type: ignore[attr-defined]
    rest = Path(shutil.copytree(folder, folder.parent / "rest"))
    shutil.rmtree(rest / "checkpoints")
    console = Console(file=io.StringIO(), highlight=False)
    assert replay(rest, console=console, step=4), console.file.getvalue()  # type: ignore[attr-defined]
    shutil.rmtree(rest)
