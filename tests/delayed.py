"""A task for the repeatability proofs: two-turn conversations whose agent and grader may be slowed at random.

Owns: the task. The delays come from ``DELAY`` (seconds, at most) and the operating system's own randomness: they must
not change a bit. A model ``MODEL`` and few tokens keep it quick.
"""

from __future__ import annotations

import asyncio
import os
import random
import time

from minirllm import AgentConfig, Config, Episode, EvalOutput, Task, evaluator, rollout
from minirllm.client import chat

DELAY = float(os.environ.get("DELAY", "0"))
DEFAULTS = {
    "model": os.environ.get("MODEL", "tiny"), "steps": 4, "batch_size": 3, "group_size": 4, "max_tokens": 8, "lr": 1e-3,
    "lora_rank": 4, "eval_tasks": 0, "save_every": 1, "max_context": 512, "threads": 1,
}  # fmt: skip


@rollout
async def talk(task: Task, config: AgentConfig) -> str:
    """Two turns, then two side calls at once, in one session."""
    messages = [{"role": "user", "content": task.instruction}]
    for question in ("And then?", ""):
        await asyncio.sleep(random.SystemRandom().uniform(0, DELAY))
        reply = await chat(config, messages)
        messages += [{"role": "assistant", "content": reply.output}, {"role": "user", "content": question}]
    sides = [[{"role": "system", "content": f"Side {i}."}, {"role": "user", "content": "Hm?"}] for i in range(2)]
    await asyncio.gather(*[chat(config, side) for side in sides])
    return str(reply.output)


@evaluator
def score(task: Task, episode: Episode) -> EvalOutput:
    time.sleep(random.SystemRandom().uniform(0, DELAY))
    answer = episode.answer.encode()
    return EvalOutput(sum(answer) % 7 / 6)


def train(config: Config) -> list[Task]:
    return [Task(f"t:{i}/x", f"Tell me about {i}.") for i in range(6)]


def held_out(config: Config) -> list[Task]:
    return train(config)[:2]
