"""smoke: answer in lower-case letters. A model from scratch learns it in under a minute, to show that learning works.

The reward is the number of lower-case letters in the answer over the four that fit, so that a random answer already has
a signal. Run it with ``--model tiny``.
"""

from __future__ import annotations

from minirllm import AgentConfig, Config, Episode, Task, evaluator, rollout
from minirllm.client import chat

LENGTH = 4  # new tokens; the tiny model has one per byte
DEFAULTS = {
    "model": "tiny", "steps": 20, "batch_size": 4, "group_size": 8, "max_tokens": LENGTH, "lora_rank": 0, "lr": 3e-3,
    "eval_every": 0, "eval_tasks": 16, "save_every": 20, "threads": 1,
}  # fmt: skip


@rollout
async def answer(task: Task, config: AgentConfig) -> str:
    reply = await chat(config, [{"role": "user", "content": task.instruction}])
    return str(reply.output)


@evaluator
def score(task: Task, episode: Episode) -> float:
    if len(episode.answer) > LENGTH:  # a token that stands for a whole word, <tool_call> say, was used
        return 0.0
    return sum("a" <= letter <= "z" for letter in episode.answer) / LENGTH


def reference(task: Task) -> str:
    return "abcd"


def train(config: Config) -> list[Task]:
    return [Task(id=f"train-{i}", instruction=f"{i}?") for i in range(64)]


def held_out(config: Config) -> list[Task]:
    return [Task(id=f"held-out-{i}", instruction=f"{i}?") for i in range(64, 96)]
