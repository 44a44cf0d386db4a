"""first_letter: name the first letter of a word, after three examples. The quickest task to improve SmolLM2-135M on.

The reward is 1 when the answer is that letter (case, outer white space and one full stop do not matter), else 0.
A fifth of the words is held out.
"""

from __future__ import annotations

from pathlib import Path

from minirllm import AgentConfig, Config, Episode, Task, evaluator, rollout
from minirllm.client import chat
from minirllm.flow import import_path
from minirllm.rewards.exact import exact

DEFAULTS = {
    "model": "smollm2-135m", "steps": 30, "batch_size": 16, "group_size": 8, "lr": 3e-4, "lr_schedule": "linear",
    "max_tokens": 10, "eval_every": 10, "eval_tasks": 100, "save_every": 10,
}  # fmt: skip
words = import_path(Path(__file__).with_name("_words.py"))
EXAMPLES = ("apple", "house", "river")


def question(word: str) -> str:
    return f"First letter of {word}"


def messages(task: Task) -> list[dict[str, str]]:
    """The examples, the word."""
    found = []
    for word in EXAMPLES:
        found += [{"role": "user", "content": question(word)}, {"role": "assistant", "content": word[0]}]
    return [*found, {"role": "user", "content": str(task.instruction)}]


@rollout
async def answer(task: Task, config: AgentConfig) -> str:
    return str((await chat(config, messages(task))).output)


@evaluator
def score(task: Task, episode: Episode) -> float:
    return exact(episode.answer, reference(task))


def reference(task: Task) -> str:
    return str(task.metadata["word"])[0]


def train(config: Config) -> list[Task]:
    return tasks(held_out=False)


def held_out(config: Config) -> list[Task]:
    return tasks(held_out=True)


def tasks(held_out: bool) -> list[Task]:
    return [Task(word, question(word), {"word": word}) for word in words.split(held_out) if word not in EXAMPLES]
