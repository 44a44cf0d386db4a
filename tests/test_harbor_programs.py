"""Agent programs at Harbor tasks: a real program in the sandbox, a scripted model behind the endpoint, graded there."""

from __future__ import annotations

from pathlib import Path

import pytest

from minirllm import evaluate, flow
from minirllm.config import Config
from minirllm.types import Episode

CONFIG = {
    "model": "tiny", "engine": "minirllm.tools.harness:CheckEngine", "max_context": 4096, "max_tokens": 256,
    "determinism": "off", "retries": 0, "episode_timeout": 90.0,
}  # fmt: skip


def task(folder: Path, toml: str = "", wanted: str = "made") -> str:
    for path, text in {
        "task.toml": f"agent.timeout_sec = 40\n{toml}",
        "instruction.md": "Make it.",
        "tests/test.sh": f'test "$(cat made.txt)" = {wanted}; echo $((1 - $?)) > /logs/verifier/reward.txt',
    }.items():
        (folder / "task" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "task" / path).write_text(text)
    return str(folder / "task")


def evaluated(path: str, **options: object) -> Episode:
    config = Config(**{**CONFIG, "harness": "bash", **options})
    return evaluate.run(flow.load_task(path), config).episodes[0]


def test_a_program_works_in_the_sandbox_and_is_graded_there(tmp_path: Path) -> None:
    episode = evaluated(task(tmp_path), sandbox="local")
    assert (episode.reward, episode.reason, episode.artifacts["exit_code"]) == (1.0, "", 0)
    assert [step.response_length > 0 for step in episode.trajectories[0].steps] == [True, True]
    assert evaluated(task(tmp_path, wanted="other"), sandbox="local").reward == 0.0


@pytest.mark.docker
def test_a_program_works_in_a_container(tmp_path: Path, docker_image: str) -> None:
    toml = f'environment = {{docker_image = "{docker_image}", workdir = "/app"}}'
    episode = evaluated(task(tmp_path, toml), sandbox="docker")
    assert (episode.reward, episode.reason, episode.artifacts["exit_code"]) == (1.0, "", 0)
