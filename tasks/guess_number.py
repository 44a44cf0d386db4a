"""guess_number: find a hidden number among seven with the hints "higher" and "lower". One conversation, up to 4 turns.

The reward is half for obeying the hints (the share of guesses that they allowed) and half for finding the number: all
of it within the 3 guesses that halving needs, 0.1 less for the fourth. A reply without a number is a guess that
no hint allows. So babble scores near 0, sensible guesses well above 0.5, halving 1. A fifth of the ranges is held out.
"""

from __future__ import annotations

import random
import re
from typing import Any

from minirllm import AgentConfig, Config, Episode, EvalOutput, Signal, Task, evaluator, rollout
from minirllm.client import chat

SIZE, ENOUGH, GUESSES = 7, 3, 4  # numbers to choose from, guesses that halving needs, guesses allowed
DEFAULTS = {
    "model": "smollm2-135m", "steps": 20, "batch_size": 4, "group_size": 8, "lr": 3e-4, "lr_schedule": "linear",
    "max_tokens": 4, "eval_every": 10, "eval_tasks": 64, "save_every": 10,
}  # fmt: skip
EXAMPLE = [
    {"role": "user", "content": "A number from 40 to 46."},
    {"role": "assistant", "content": "43"},
    {"role": "user", "content": "Higher: from 44 to 46."},
    {"role": "assistant", "content": "45"},
    {"role": "user", "content": "Lower: from 44 to 44."},
    {"role": "assistant", "content": "44"},
]


class Game:
    """The state: which numbers the hints so far allow."""

    def __init__(self, low: int, number: int):
        self.low, self.high, self.number = low, low + SIZE - 1, number

    def allows(self, guess: int | None) -> bool:
        return guess is not None and self.low <= guess <= self.high

    def hint(self, guess: int | None) -> str:
        """The answer to a wrong guess."""
        if guess is None:
            return f"Say a number from {self.low} to {self.high}."
        if guess < self.number:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        return f"{'Higher' if guess < self.number else 'Lower'}: from {self.low} to {self.high}."


@rollout
async def play(task: Task, config: AgentConfig) -> str:
    """The guesses, in order, as text; ``?`` for a reply without a number."""
    game = Game(task.metadata["low"], task.metadata["number"])
    messages: list[dict[str, Any]] = [*EXAMPLE, {"role": "user", "content": task.instruction}]
    guesses: list[int | None] = []
    while len(guesses) < GUESSES:
        reply = str((await chat(config, messages)).output)
        found = re.search(r"\d{1,6}", reply)
        guesses.append(int(found.group()) if found else None)
        if guesses[-1] == game.number:
            break
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": game.hint(guesses[-1])}]
    return " ".join("?" if guess is None else str(guess) for guess in guesses)


@evaluator
def score(task: Task, episode: Episode) -> EvalOutput:
    game = Game(task.metadata["low"], task.metadata["number"])
    guesses = [int(word) if word.isdecimal() else None for word in episode.answer.split()[:GUESSES]]
    allowed = 0
    for guess in guesses:
        allowed += game.allows(guess)
        game.hint(guess)
    found = game.number in guesses
    reward = 0.5 * allowed / max(1, len(guesses)) + (0.5 - 0.1 * max(0, len(guesses) - ENOUGH) if found else 0.0)
    return EvalOutput(reward, found, [Signal("guesses", len(guesses))])


def reference(task: Task) -> str:
    """Halving."""
    game = Game(task.metadata["low"], task.metadata["number"])
    guesses = [(game.low + game.high) // 2]
    while guesses[-1] != game.number:
        game.hint(guesses[-1])
        guesses.append((game.low + game.high) // 2)
    return " ".join(map(str, guesses))


def train(config: Config) -> list[Task]:
    return [task for task in games() if task.metadata["low"] % 5]


def held_out(config: Config) -> list[Task]:
    return [task for task in games() if task.metadata["low"] % 5 == 0]


def games() -> list[Task]:
    """Every number of every range that begins at 1 to 89 and does not meet the example's, in a fixed random order."""
    starts = [low for low in range(1, 90) if abs(low - 40) >= SIZE]
    made = [
        Task(f"{low}+{i}", f"A number from {low} to {low + SIZE - 1}.", {"low": low, "number": low + i})
        for low in starts
        for i in range(SIZE)
    ]
    random.Random(0).shuffle(made)
    return made
