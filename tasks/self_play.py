"""self_play: Nim against itself. One to three stones are taken in turn; who takes the last one wins.

In training the model plays both seats. Each seat is a trajectory of its own, with reward 1 for the winner and -1 for
the loser, and is compared with the same seat of the other games from the same heap. A reply that is no move loses at
once; a seat that never came to move is no trajectory. The episode's own reward, from which nothing is learned, says
whether the game was played to its end. In evaluation the model has one seat against an opponent that moves at random,
and the reward is 1 for a game won: about 0.5 for knowing the rules, near 1 for knowing the game (leave a multiple of
four).
"""

from __future__ import annotations

import random
import re
from itertools import cycle

from minirllm import AgentConfig, Config, Episode, EvalOutput, Signal, Step, Task, Trajectory, evaluator, rollout
from minirllm.client import chat

DEFAULTS = {
    "model": "smollm2-135m", "steps": 20, "batch_size": 8, "group_size": 8, "max_tokens": 4, "lr": 3e-4,
    "lr_schedule": "linear", "eval_every": 10, "eval_tasks": 64, "save_every": 10,
}  # fmt: skip
RULES = "Take one, two or three stones. Who takes the last one wins. Answer with a number."
EXAMPLES = ((15, 2), (14, 1), (13, 3))  # legal moves, not good ones
SEATS = ("first", "second")
MOST, HEAPS, GAMES = 3, range(4, 12), 8  # stones taken at once, stones to begin with, held-out games of a heap and seat


def taken(reply: str, heap: int) -> int:
    """How many stones a reply takes; 0 when that is no move."""
    number = re.search(r"\d{1,9}", reply)
    stones = int(number.group()) if number else 0
    return stones if 1 <= stones <= min(MOST, heap) else 0


def messages(heap: int) -> list[dict[str, str]]:
    """A position says all that a player has to know, so each move is a conversation of its own."""
    found = [{"role": "system", "content": RULES}]
    for stones, move in EXAMPLES:
        found += [{"role": "user", "content": f"{stones} stones"}, {"role": "assistant", "content": str(move)}]
    return [*found, {"role": "user", "content": f"{heap} stones"}]


@rollout
async def play(task: Task, config: AgentConfig) -> Episode:
    """The moves in order as the answer, the last one 0 where it was none."""
    opponent = task.metadata.get("opponent") if config.is_validation else None  # a seat; None: the model has both
    draw, heap, moves = random.Random(task.id), int(task.metadata["heap"]), list[int]()
    made: dict[str, list[Step]] = {seat: [] for seat in SEATS}
    for seat in cycle(SEATS):
        if seat == opponent:
            moves.append(draw.randint(1, min(MOST, heap)))
        else:
            step = await chat(config, messages(heap))
            moves.append(taken(str(step.output), heap))
            made[seat].append(step)
        heap -= moves[-1]
        if heap == 0 or moves[-1] == 0:
            break
    trajectories = [Trajectory(seat, steps) for seat, steps in made.items() if steps]
    return Episode(trajectories=trajectories, artifacts={"answer": " ".join(map(str, moves))})


@evaluator
def score(task: Task, episode: Episode) -> EvalOutput:
    moves = [int(move) for move in episode.answer.split() if move.isascii() and move.isdecimal() and len(move) < 4]
    legal = bool(moves) and min(moves) > 0 and sum(moves) == task.metadata["heap"]
    last = SEATS[(len(moves) - 1) % 2]  # to move: who took the last stone, or made no move
    winner = last if legal else next(seat for seat in SEATS if seat != last)
    for trajectory in episode.trajectories:
        trajectory.reward = 1.0 if trajectory.name == winner else -1.0
    if not episode.metadata.get("validation"):
        return EvalOutput(float(legal), legal)
    won = bool(moves) and winner != task.metadata["opponent"]
    ours = moves[task.metadata["opponent"] == "first" :: 2]
    return EvalOutput(float(won), won, [Signal("legal", sum(move > 0 for move in ours) / len(ours))] if ours else [])


def reference(task: Task) -> str:
    return " ".join("1" * int(task.metadata["heap"]))


def train(config: Config) -> list[Task]:
    return [Task(f"heap-{heap}", f"Nim with {heap} stones", {"heap": heap}) for heap in HEAPS]


def held_out(config: Config) -> list[Task]:
    """Games whose first ones are of all heaps and seats."""
    games = [(game, heap, seat) for game in range(GAMES) for heap in HEAPS for seat in SEATS]
    return [
        Task(f"{heap}-{seat}-{game}", f"Game {game} from {heap}, {seat} at random", {"heap": heap, "opponent": seat})
        for game, heap, seat in games
    ]
