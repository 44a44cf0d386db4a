"""rewards/: accept and reject tables, hostile inputs, and grader processes that end at their deadline."""

import asyncio
import importlib
import os
import sys
from collections.abc import AsyncIterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from minirllm.errors import GradingError, GradingTimeout
from minirllm.flow import Evaluator, evaluator, load_task
from minirllm.rewards import REWARDS, exact
from minirllm.rewards.countdown import calculate, countdown
from minirllm.rewards.math import equal, math
from minirllm.rewards.process import Graders, Reference, reference
from minirllm.types import Episode, Signal, Task, Trajectory

HANG = "99^{98^{97}}"

GRADER = """
import os, sys, time
from minirllm import EvalOutput, Signal, Task, evaluator, rollout

@rollout
def solve(task, config): ...

@evaluator
def score(task, episode):
    print("a grader may print")
    action = episode.answer
    if action == "hang":
        time.sleep(3600)
    if action == "spin":
        while True: pass
    if action == "raise":
        return 1 / 0
    if action == "exit":
        os._exit(3)
    if action == "memory":
        return len("x" * (8 << 30))
    if action == "nan":
        return float("nan")
    if action == "pid":
        return float(os.getpid())
    if action == "torch":
        return float("torch" in sys.modules)
    return EvalOutput(0.25, True, [Signal("n", 2)], {"id": task.id, "tree": episode.tree}, "")

def train(config): return [Task("a")]
def held_out(config): return [Task("b")]
"""


def saying(answer: str) -> Episode:
    return Episode(trajectories=[Trajectory(output=answer)], tree=object())


def in_file(folder: Path, text: str) -> Reference:
    (folder / "grader.py").write_text(text)
    where = reference(load_task(folder / "grader.py").evaluator)
    assert where is not None
    return where


@pytest.fixture
def where(tmp_path: Path) -> Reference:
    return in_file(tmp_path, GRADER)


@pytest.fixture
async def graders(where: Reference) -> AsyncIterator[Graders]:
    pool = Graders(where, size=1)
    yield pool
    await pool.close()


@pytest.fixture
def where_math(tmp_path: Path) -> Reference:
    text = GRADER.replace("    action = episode.answer\n", "    return math(episode.answer, '7')\n    action = ''\n")
    return in_file(tmp_path, "from minirllm.rewards.math import math\n" + text)


def test_every_registered_reward_is_there() -> None:
    for target in REWARDS.values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(
    ("answer", "expected", "reward"),
    [
        ("c", "c", 1.0),
        (" C.\n", "c", 1.0),
        ("c..", "c", 0.0),
        ("ca", "c", 0.0),
        ("", "c", 0.0),
        ("Straße", "STRASSE", 1.0),
    ],
)
def test_exact(answer: str, expected: str, reward: float) -> None:
    assert exact.exact(answer, expected) == reward


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("is 1,234.50 dollars", "1,234.50"),
        ("costs $18.", "$18"),
        ("x2 = 3", "3"),
        ("it is -5", "-5"),
        ("3 - 5", "5"),
        ("7\n#### 42\nbye 9", "42"),
        ("#### none", None),
        (r"so \boxed{3} not 4", "3"),
        (r"\boxed{\frac{1}{2}}", "2"),
        ("3/4 of it", "3/4"),
        ("no number", None),
        ("", None),
    ],
)
def test_final_number(text: str, number: str | None) -> None:
    assert exact.final_number(text) == number


@pytest.mark.parametrize(
    ("answer", "expected", "reward"),
    [
        ("#### 1,000", "1000", 1.0),
        ("1000.0", 1000, 1.0),
        ("1/2", 0.5, 1.0),
        ("0.1", "1/10", 1.0),
        ("18 dollars and 5", "18", 0.0),
        ("1/0", "1", 0.0),
        ("9" * 100_000, "9", 0.0),
        ("", "0", 0.0),
    ],
)
def test_number(answer: str, expected: Any, reward: float) -> None:
    assert exact.number(answer, expected) == reward


def test_last_boxed_balances_braces() -> None:
    assert exact.last_boxed(r"\boxed{1} \boxed{a{b}c} \boxed{open") == "a{b}c"
    assert exact.last_boxed(r"\fbox{1}") is None
    assert exact.last_boxed(r"\boxed{" * 20_000) is None


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ("0.5", r"\frac{1}{2}", True),
        ("x^2+2x+1", "(x+1)^2", True),
        (r"\{1,2\}", r"\{2,1\}", True),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        (r"50\%", "0.5", True),
        ("x=5", "5", True),
        (r"\text{abc}", r"\text{abc}", True),
        ("3", r"so \boxed{3}", True),
        ("12", "13", False),
        ("(1,2]", "[1,2]", False),
        ("99**98**97", "7", False),
        (r"\pi", "3.14", False),
        ("", "1", False),
        ("1" * 2000, "1" * 2000, False),
    ],
)
def test_mathematical_equality(given: str, expected: str, same: bool) -> None:
    assert equal(given, expected) is same


def test_math_takes_the_last_box_and_only_then_a_number() -> None:
    assert math(r"\boxed{1} then \boxed{2}", "2") == 1.0
    assert math("it is 2", "2") == 0.0
    assert math("it is 2", "2", fallback=True) == 1.0
    assert math(r"\boxed{1} or 2", "2", fallback=True) == 0.0


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("(3 + 5) * 2", 1.0),
        ("thinking...\n(3 + 5) * 2 = 16.", 1.0),
        ("<answer>3+5</answer> <answer> 2*(5+3) </answer> ok", 1.0),
        ("(3 + 5) × 2", 1.0),  # noqa: RUF001
        ("3 + 5 + 2", 0.1),
        ("(3 + 5) * 2 * 1", 0.0),
        ("16", 0.0),
        ("3 * 5 + 1", 0.0),
        ("2 ** (5 - 3)", 0.0),
        ("__import__('os').system('true')", 0.0),
        ("-(-3 - 5) * 2", 0.0),
        ("35 * 2", 0.0),
        ("", 0.0),
    ],
)
def test_countdown(answer: str, reward: float) -> None:
    assert countdown(answer, [2, 3, 5], 16, partial=0.1) == reward


@pytest.mark.parametrize(
    "text", ["1/0", "3+", "1_0", "007", "(" * 100 + "1" + ")" * 100, "9" * 201, "1e3", "5//2", "(1)(2)"]
)
def test_what_is_no_arithmetic_has_no_value(text: str) -> None:
    assert calculate(text) == (None, [])


def test_countdown_is_exact() -> None:
    assert calculate("1/3 + 1/3 + 1/3") == (Fraction(1), [1, 3, 1, 3, 1, 3])
    assert calculate("8 / (3 - 8 / 3)") == (Fraction(24), [8, 3, 8, 3])


async def test_a_verdict_comes_back_whole(graders: Graders) -> None:
    output = await graders.grade(Task("t"), saying("fine"), 30)
    assert (output.reward, output.is_correct, output.signals) == (0.25, True, [Signal("n", 2)])
    assert output.metadata == {"id": "t", "tree": None}
    assert await graders.grade(Task("t"), saying("torch"), 30) == await graders.grade(Task("t"), saying("torch"), 30)
    assert (await graders.grade(Task("t"), saying("torch"), 30)).reward == 0.0


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ("raise", r"evaluator failed: ZeroDivisionError: division by zero \(grader.py line 17\)"),
        ("nan", r"finite reward, between -1e\+30 and 1e\+30, got nan"),
        ("memory", "MemoryError"),
        ("exit", r"died \(exit status 3\)"),
    ],
)
async def test_a_failing_grader_says_why_and_the_next_one_works(graders: Graders, answer: str, sentence: str) -> None:
    with pytest.raises(GradingError, match=sentence):
        await graders.grade(Task("t"), saying(answer), 30)
    assert (await graders.grade(Task("t"), saying("fine"), 30)).reward == 0.25


@pytest.mark.parametrize("answer", ["hang", "spin"])
async def test_a_grader_that_does_not_end_is_killed(graders: Graders, answer: str) -> None:
    pid = int((await graders.grade(Task("t"), saying("pid"), 30)).reward or 0)
    with pytest.raises(GradingTimeout, match=r"longer than its 0.2 s"):
        await graders.grade(Task("t"), saying(answer), 30, 0.2)
    await asyncio.gather(*graders.reaping)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(GradingTimeout, match="episode's deadline"):
        await graders.grade(Task("t"), saying(answer), 1.5, 30)


async def test_waiting_for_a_worker_counts_for_the_deadline_only(graders: Graders) -> None:
    first = asyncio.ensure_future(graders.grade(Task("t"), saying("spin"), 30, 1.0))
    await asyncio.sleep(0)
    assert (await graders.grade(Task("t"), saying("fine"), 30, 0.9)).reward == 0.25
    with pytest.raises(GradingTimeout):
        await first


async def test_what_cannot_be_sent_is_an_error(graders: Graders) -> None:
    with pytest.raises(GradingError, match="cannot be sent"):
        await graders.grade(Task("t", metadata={"f": lambda: None}), saying("fine"), 30)


async def test_a_file_that_is_gone_is_an_error(graders: Graders) -> None:
    Path(graders.where.path).unlink()
    with pytest.raises(GradingError, match="no task file"):
        await graders.grade(Task("t"), saying("fine"), 30)


async def test_hostile_mathematics_ends_at_the_deadline(where_math: Reference) -> None:
    pool = Graders(where_math, size=1)
    try:
        with pytest.raises(GradingTimeout):
            await pool.grade(Task("t"), saying(rf"\boxed{{{HANG}}}"), 60, 1.0)
        assert (await pool.grade(Task("t"), saying(r"\boxed{\frac{14}{2}}"), 60, 20)).reward == 1.0
    finally:
        await pool.close()


def test_evaluators_that_cannot_be_imported_have_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    @evaluator
    def local(task: Task, episode: Episode) -> float:
        return 1.0

    in_main = Evaluator(top_level.fn, "x")
    in_main.home = "__main__"
    assert reference(local) is None
    assert reference(in_main) is None
    assert reference(top_level) == (__name__, "", "top_level")
    monkeypatch.delitem(sys.modules, __name__)
    assert reference(top_level) is None


@evaluator
def top_level(task: Task, episode: Episode) -> float:
    return 1.0
