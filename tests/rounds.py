"""A task of two roles whose groups are often without a signal: for the proofs of refills, curriculum and roles.

With ``KILL_AFTER=N`` and a file ``COUNT`` the process kills itself in the middle of the rollout after N others.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from minirllm import AgentConfig, Episode, EvalOutput, Task, Trajectory, evaluator, rollout
from minirllm.client import chat
from tests.delayed import held_out as held_out
from tests.delayed import train as train

DEFAULTS = {
    "model": "tiny", "steps": 4, "batch_size": 2, "group_size": 2, "max_tokens": 4, "lr": 1e-3, "lora_rank": 4,
    "eval_tasks": 0, "save_every": 1, "keep_checkpoints": 9, "max_context": 512, "threads": 1, "concurrency": 2,
    "refill": 1, "curriculum": "learnable", "roles": "judge=rloo",
}  # fmt: skip


@rollout
async def two(task: Task, config: AgentConfig) -> list[Trajectory]:
    solved = await chat(config, [{"role": "user", "content": task.instruction}])
    if "KILL_AFTER" in os.environ:
        count = Path(os.environ["COUNT"])
        begun = int(count.read_text() or 0) if count.exists() else 0
        count.write_text(str(begun + 1))
        if begun == int(os.environ["KILL_AFTER"]):
            os.kill(os.getpid(), signal.SIGKILL)
    judged = await chat(config, [{"role": "user", "content": f"Is {solved.output!r} right?"}])
    return [Trajectory("solver", [solved]), Trajectory("judge", [judged])]


@evaluator
def score(task: Task, episode: Episode) -> EvalOutput:
    solver, judge = (sum(str(t.steps[0].output).encode()) for t in episode.trajectories)
    episode.trajectories[0].reward, episode.trajectories[1].reward = float(solver % 3 == 0), float(judge % 4 == 0)
    return EvalOutput(float(solver % 3 == 0), solver % 3 == 0)
