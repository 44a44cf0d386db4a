"""uppercase: write a word in capital letters, after three examples.

The reward is 1 for exactly that word (outer white space and one full stop do not matter), else 0. Many words are
needed: few are learned by heart, and held-out words gain nothing. A fifth of the words is held out.
"""

from __future__ import annotations

from pathlib import Path

from minirllm import AgentConfig, Config, Episode, Task, evaluator, rollout
from minirllm.client import chat
from minirllm.flow import import_path

DEFAULTS = {
    "model": "smollm2-135m", "steps": 60, "batch_size": 32, "group_size": 8, "lr": 3e-4, "lr_schedule": "linear",
    "max_tokens": 12, "eval_every": 15, "eval_tasks": 128, "save_every": 15,
}  # fmt: skip
words = import_path(Path(__file__).with_name("_words.py"))
EXAMPLES = ("cat", "sun", "tree")


def question(word: str) -> str:
    return f"Uppercase: {word}"


@rollout
async def answer(task: Task, config: AgentConfig) -> str:
    messages = []
    for word in EXAMPLES:
        messages += [{"role": "user", "content": question(word)}, {"role": "assistant", "content": word.upper()}]
    reply = await chat(config, [*messages, {"role": "user", "content": task.instruction}])
    return str(reply.output)


@evaluator
def score(task: Task, episode: Episode) -> float:
    return float(episode.answer.strip().removesuffix(".") == reference(task))


def reference(task: Task) -> str:
    return str(task.metadata["word"]).upper()


def train(config: Config) -> list[Task]:
    return tasks(held_out=False)


def held_out(config: Config) -> list[Task]:
    return tasks(held_out=True)


def tasks(held_out: bool) -> list[Task]:
    return [Task(word, question(word), {"word": word}) for word in words.split(held_out) if word not in EXAMPLES]
