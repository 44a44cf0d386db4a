"""The problem that every example here solves: how many of an item are in stock? Only the tool knows.

The tool, the grader and the two sets of tasks are the same for all; what differs is how the agent is written.
"""

import json
from pathlib import Path

from minirllm import Task, evaluator

STOCK = json.loads(Path(__file__).with_name("stock.json").read_text())


def stock(item: str) -> str:
    """How many of an item are in stock.

    Args:
        item: The item, in the plural.
    """
    return str(STOCK.get(item, 0))


@evaluator
def score(task, episode):
    return float(task.metadata["count"] in episode.answer)


def train(config):
    return [_task(item) for item in list(STOCK)[:4]]


def held_out(config):
    return [_task(item) for item in list(STOCK)[4:]]


def _task(item):
    return Task(item, f"How many {item} are in stock?", {"count": str(STOCK[item])})
