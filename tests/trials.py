"""Harbor tasks made for a test, and trials at them: what the tests of Harbor share."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from minirllm.harbor import spec, trial
from minirllm.harbor.task import HarborTask, read
from minirllm.harbor.trial import Agent, Order, Outcome
from minirllm.sandboxes.pool import Pool
from minirllm.types import AgentConfig

FIXTURES = Path(__file__).parent / "fixtures" / "harbor"


def maker(tmp_path: Path) -> Any:
    """Makes task directories: the smallest whole one, with `toml` and more files."""

    def made(toml: str = "", files: dict[str, str] | None = None, name: str = "made") -> Path:
        folder = tmp_path / name
        whole = {"task.toml": toml, "instruction.md": "Do it.\n", "tests/test.sh": "echo 1 > /logs/verifier/reward.txt"}
        for path, text in (whole | (files or {})).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        return folder

    return made


async def tried(
    task: HarborTask | Path | str, agent: Agent, seconds: float = 60.0, kind: str = "local"
) -> dict[str, Any]:
    if not isinstance(task, HarborTask):
        task = await asyncio.to_thread(read, FIXTURES / task)
    spec.check(task, kind)
    boxes, model = Pool(kind), AgentConfig("", "tiny", metadata={"timeout": seconds})
    episode = await trial.run(task, agent, boxes, trial.recipe(task, boxes), model)
    return episode.artifacts


def does(command: str) -> Agent:
    """An agent that runs a line of bash."""

    async def agent(order: Order) -> Outcome:
        done = await order.box.run(command, timeout=order.seconds, cwd=order.cwd, user=order.step.agent_user)
        return Outcome("was out of time" if done.timed_out else f"said {done.stdout!r}")

    return agent
