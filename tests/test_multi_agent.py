"""Tasks of several roles: what each role is asked, what it is paid, and who is compared with whom."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minirllm import evaluator, train
from minirllm.algorithms.grpo import GRPO
from minirllm.batch import select
from minirllm.config import Config, load
from minirllm.flow import TaskModule, load_task
from minirllm.log import read_metrics
from minirllm.rollouts import Job
from minirllm.types import Episode, Task
from tests.agent_server import running


async def played(
    name: str, problem: Task, answer: Callable[[str, int], str], validation: bool = False, n: int = 1
) -> list[Episode]:
    task = await asyncio.to_thread(load_task, f"tasks/{name}.py")
    async with running(task, answer) as runner:
        episodes = await runner.run_many([Job(problem, i, 1, validation=validation) for i in range(n)], lambda _: None)
    assert [episode.reason for episode in episodes] == [""] * n
    return episodes


def paid(episode: Episode) -> list[tuple[str, object, float | None]]:
    return [(t.name, t.output, t.reward) for t in episode.trajectories]


# ---- solver and judge ----

PROBLEM = Task("t", "Make 16 from 3, 5, 2.", {"numbers": [3, 5, 2], "target": 16})


def roles(proposals: list[str], ruling: str) -> Callable[[str, int], str]:
    """The solvers say the proposals, in order of arrival; the judge says the ruling."""
    left = list(proposals)
    return lambda prompt, seed: ruling if "Which one?" in prompt else left.pop(0)


@pytest.mark.parametrize("order", [1, -1])
async def test_a_judge_picks_and_each_role_is_paid_for_its_own(order: int) -> None:
    said = ["(3+5)*2", "3+5+2"][::order]  # whoever answers first
    (episode,) = await played("solver_judge", PROBLEM, roles(said, "2."))
    assert paid(episode) == [("solver", "(3+5)*2", 1.0), ("solver", "3+5+2", 0.1), ("judge", "3+5+2", 0.1)]
    assert (episode.reward, episode.is_correct) == (0.1, False)
    assert episode.signals == {"solver_right": 0.5, "judge_right": 0.0}
    asked = episode.trajectories[2].steps[0].messages[-1].content
    assert asked.splitlines() == [PROBLEM.instruction, "1: (3+5)*2", "2: 3+5+2", "Which one?"]


@pytest.mark.parametrize(("ruling", "reward"), [("1", 1.0), ("the 1st", 1.0), ("0", 0.0), ("3", 0.0), ("?", 0.0)])
async def test_a_ruling_that_names_no_proposal_is_worth_nothing(ruling: str, reward: float) -> None:
    (episode,) = await played("solver_judge", PROBLEM, roles(["(3+5)*2", "2"], ruling))
    assert (episode.reward, episode.trajectories[2].reward, episode.is_correct) == (reward, reward, reward == 1)


async def test_solvers_are_compared_with_solvers_and_judges_with_judges() -> None:
    episodes = await played("solver_judge", PROBLEM, roles(["(3+5)*2", "3", "4", "5"], "1"), n=2)
    batch = select(episodes, Config(), GRPO())
    found = {(m.trajectory.name, m.reward): m for m in batch.members.values()}
    assert (batch.metrics["groups"], batch.metrics["groups_with_signal"]) == (2.0, 2.0)
    assert batch.metrics["reward/solver"] == 0.25
    assert batch.metrics["reward/judge"] == 0.5
    solvers = [next(iter(found["solver", reward].advantages.values())) for reward in (1.0, 0.0)]
    judges = [next(iter(found["judge", reward].advantages.values())) for reward in (1.0, 0.0)]
    assert solvers == pytest.approx([0.75 / 0.1875**0.5, -0.25 / 0.1875**0.5], rel=1e-4)  # of four
    assert judges == pytest.approx([1.0, -1.0], rel=1e-4)  # of two


# ---- self-play ----


def nim(*replies: str) -> Callable[[str, int], str]:
    left = list(replies)
    return lambda prompt, seed: left.pop(0)


@pytest.mark.parametrize(
    ("replies", "rewards", "by_rules"),
    [
        (["3", "2 stones"], {"first": -1.0, "second": 1.0}, 1.0),
        (["1", "1", "I take 3"], {"first": 1.0, "second": -1.0}, 1.0),
        (["3", "3"], {"first": 1.0, "second": -1.0}, 0.0),  # more than there are
        (["3", "none"], {"first": 1.0, "second": -1.0}, 0.0),
        (["4"], {"first": -1.0}, 0.0),  # the second never came to move
    ],
)
async def test_a_seat_wins_what_the_other_loses(replies: list[str], rewards: dict[str, float], by_rules: float) -> None:
    (episode,) = await played("self_play", Task("h", "", {"heap": 5}), nim(*replies))
    assert {t.name: t.reward for t in episode.trajectories} == rewards
    assert (episode.reward, sum(len(t.steps) for t in episode.trajectories)) == (by_rules, len(replies))


@pytest.mark.parametrize("opponent", ["first", "second"])
async def test_in_evaluation_the_opponent_is_random_and_the_same_each_time(opponent: str) -> None:
    def greedy(prompt: str, seed: int) -> str:
        heap = int(prompt.rpartition(" stones")[0].rpartition("\n")[2])
        return str(heap % 4 or 1)  # never loses to one who errs

    problem = Task(f"h-{opponent}", "", {"heap": 11, "opponent": opponent})
    one, other = await played("self_play", problem, greedy, validation=True, n=2)
    assert one.answer == other.answer
    assert sum(map(int, one.answer.split())) == 11
    assert [t.name for t in one.trajectories] == [seat for seat in ("first", "second") if seat != opponent]
    assert (one.reward, one.is_correct, one.signals) == (1.0, True, {"legal": 1.0})
    (lost,) = await played("self_play", problem, lambda prompt, seed: "x", validation=True)
    assert (lost.reward, lost.signals) == (0.0, {"legal": 0.0})


# ---- self-verification ----

PLUM = Task("plum", "First letter of plum", {"word": "plum"})


@pytest.mark.parametrize("order", [1, -1])
async def test_a_knockout_finds_the_answer_to_give(order: int) -> None:
    left = ["a", "p", "u", "z"][::order]

    def model(prompt: str, seed: int) -> str:
        if "Which is right" not in prompt:
            return left.pop(0)
        return "2" if "1: u\n2: z" in prompt else "1"

    (episode,) = await played("self_verification", PLUM, model)
    assert [(t.output, t.reward) for t in episode.trajectories[:4]] == [("a", 0.0), ("p", 1.0), ("u", 0.0), ("z", 0.0)]
    # a beat p, which was wrong; z beat u, of two wrong ones; a beat z, as wrong
    assert [(t.output, t.reward, t.input) for t in episode.trajectories[4:]] == [
        ("a", 0.0, ("a", "p")), ("z", 1.0, ("u", "z")), ("a", 1.0, ("a", "z")),
    ]  # fmt: skip
    assert (episode.answer, episode.reward, episode.signals) == ("a", 0.0, {"single": 0.25, "any_right": 1.0})


async def test_alike_answers_need_no_verdict_and_no_verdict_names_the_first() -> None:
    left = ["p", "p", "p", "q"]
    model = lambda prompt, seed: "hm" if "Which is right" in prompt else left.pop(0)  # noqa: E731
    (episode,) = await played("self_verification", PLUM, model)
    assert paid(episode)[4:] == [("verifier", "", 0.0)] * 1  # p and q; then p and p
    assert (episode.answer, episode.reward, episode.is_correct) == ("p", 1.0, True)


# ---- with a real model ----

TINY = {
    "model": "tiny", "lora_rank": 0, "threads": 1, "lr": 3e-3, "max_tokens": 4, "eval_tasks": 0,
}  # fmt: skip


async def letters(task: Task, episode: Episode) -> float:
    """Every role is paid for small letters: random weights find none of the right answers."""
    for trajectory in episode.trajectories:
        said = "".join(str(step.output) for step in trajectory.steps)
        trajectory.reward = sum("a" <= letter <= "z" for letter in said) / 4
    return 1.0


def trained(task: TaskModule, runs: Path, run: str, **settings: Any) -> list[dict[str, Any]]:
    values = {**task.defaults, **TINY, "runs_dir": str(runs), "run": run, **settings}
    train.run(task, load(defaults=values), quiet=True)
    return read_metrics(runs / run / "metrics.jsonl")


@pytest.mark.parametrize(("name", "roles"), [("solver_judge", "judge=rloo"), ("self_verification", "")])
def test_roles_that_call_at_once_learn_the_same_each_time(name: str, roles: str, tmp_path: Path) -> None:
    task = replace(load_task(f"tasks/{name}.py"), evaluator=evaluator(letters))
    sizes = {"steps": 2, "batch_size": 2, "group_size": 4, "roles": roles}
    first, second = (trained(task, tmp_path, run, **sizes) for run in ("first", "second"))
    assert [row["weights_sha256"] for row in first] == [row["weights_sha256"] for row in second]
    assert len({row["weights_sha256"] for row in first}) == 2
    assert {row["ungraded"] for row in first} == {0.0}


def test_self_play_learns_moves_that_the_rules_allow(tmp_path: Path) -> None:
    sizes = {"steps": 8, "group_size": 16, "batch_size": 4, "eval_tasks": 32, "eval_every": 0}
    rows = trained(load_task("tasks/self_play.py"), tmp_path, "play", **sizes)
    assert rows[0]["eval_signal/legal"] < 0.15
    assert rows[-1]["eval_signal/legal"] > 0.3
    assert rows[0]["eval_reward"] < 0.1 < rows[-1]["eval_reward"]
