"""Figures of a step by hand, and what trips a wire and what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minirllm.config import Config
from minirllm.diagnostics import WINDOW, episode_metrics, tripwires
from minirllm.log import RunLog
from minirllm.tree import TokenTree
from minirllm.types import Completion, Episode, TerminationReason


def episode(task: str, index: int, answer: str, tokens: list[int], reward: float | None = 1.0, **more: Any) -> Episode:
    tree = TokenTree()
    tree.add([1, 2], Completion(tokens, [0.0] * len(tokens), "stop", 0), f"{task}{index}")
    return Episode(task_id=task, rollout_idx=index, reward=reward, artifacts={"answer": answer}, tree=tree, **more)


def test_variety_by_hand() -> None:
    """Task a: two answers of three are new; task b: one of one. Runs of four: two that differ, three alike, one."""
    found = episode_metrics([
        episode("a", 0, "x", [1, 2, 3, 4, 5]), episode("a", 1, "x", [7, 7, 7, 7, 7, 7]),
        episode("a", 2, "y", [1, 2, 3, 4]), episode("b", 0, "x", [9]),
    ])  # fmt: skip
    assert found["distinct_answers"] == pytest.approx((2 / 3 + 1) / 2)
    assert found["distinct_grams"] == pytest.approx((1 + 1 / 3 + 1) / 3)
    assert found["answer_length"] == 16 / 4
    assert "distinct_grams" not in episode_metrics([episode("b", 0, "x", [9])])
    assert episode_metrics([])["episodes"] == 0


def test_rewards_by_how_episodes_ended() -> None:
    done, full = TerminationReason.ENV_DONE, TerminationReason.MAX_TURNS_EXCEEDED
    found = episode_metrics([
        episode("a", 0, "x", [1], 1.0, termination_reason=done),
        episode("a", 1, "x", [1], 0.5, termination_reason=done),
        episode("a", 2, "x", [1], 0.25, termination_reason=full), episode("a", 3, "x", [1], None),
    ])  # fmt: skip
    assert found["reward_by_end/env_done"] == 0.75
    assert found["reward_by_end/max_turns_exceeded"] == 0.25


def rows(before: dict[str, float], now: dict[str, float]) -> list[dict[str, Any]]:
    return [{"step": i + 1, **(before if i < WINDOW else now)} for i in range(2 * WINDOW)]


SURE = {"entropy": 0.1, "distinct_answers": 0.2}
OPEN = {"entropy": 1.0, "distinct_answers": 0.9}
LOW, HIGH = {"reward_mean": 0.2}, {"reward_mean": 0.6}


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (OPEN, SURE, "collapsed: entropy is 0.1 where it began at 1, and of a task's rollouts only 20%"),
        (OPEN | {"reward_mean": 0.5}, SURE | {"reward_mean": 0.99}, ""),  # sure, and right
        (OPEN | {"reward_mean": 0.5}, SURE | {"reward_mean": 0.6}, "collapsed"),
        (OPEN | {"reward_mean": 0.99}, SURE | {"reward_mean": 0.99}, ""),  # and for long
        (OPEN, SURE | {"distinct_answers": 0.8}, ""),
        (OPEN, SURE | {"entropy": 0.5}, ""),
        (LOW | {"eval_reward": 0.4}, HIGH | {"eval_reward": 0.3}, "held-out reward fell from 0.40"),
        (LOW | {"distinct_grams": 0.8}, HIGH | {"distinct_grams": 0.3}, "30% of their runs of 4"),
        (LOW | {"distinct_grams": 0.8}, HIGH | {"distinct_grams": 0.5}, ""),
        (LOW | {"answer_length": 100.0}, HIGH | {"answer_length": 30.0}, "shrank from 100 to 30"),
        ({"reward_mean": 0.2, "answer_length": 100.0}, {"reward_mean": 0.2, "answer_length": 30.0}, ""),
        ({"reward_mean": 0.2, "eval_reward": 0.4}, {"reward_mean": 0.6, "eval_reward": 0.5}, ""),
        ({"reward_mean": 0.2}, {"reward_mean": 0.9}, ""),
        ({"distinct_grams": 0.8}, HIGH | {"distinct_grams": 0.3}, ""),  # nothing was graded before
        (LOW, HIGH | {"eval_reward": -1.0}, ""),  # nor evaluated
    ],
)  # fmt: skip
def test_what_trips_a_wire(before: dict[str, float], now: dict[str, float], words: str) -> None:
    told = " ".join(tripwires(rows(before, now)))
    assert (words in told) if words else told == ""


def test_evaluations_may_be_rarer_than_windows() -> None:
    """Every tenth step, as by default: between the two that are compared lies a window without any."""
    steps = [*rows(LOW, LOW), *rows(LOW, HIGH)]
    steps[9]["eval_reward"], steps[19]["eval_reward"] = 0.5, 0.25
    assert "fell from 0.50 to 0.25" in " ".join(tripwires(steps))


def test_a_slow_collapse_is_measured_from_the_beginning() -> None:
    slowly = [*rows(OPEN, OPEN | {"entropy": 0.5}), *rows(SURE | {"entropy": 0.3}, SURE)]
    assert "began at 1," in " ".join(tripwires(slowly))


def test_wires_wait_for_two_windows_and_speak_once_a_window() -> None:
    bad = rows(OPEN, SURE)
    assert [count for count in range(len(bad) + 1) if tripwires(bad[:count])] == [len(bad)]
    assert tripwires([*bad, {"step": 99, **SURE}]) == []
    assert tripwires([{**row, "entropy": float("nan")} for row in bad]) == []


def test_a_run_says_it_and_a_resumed_one_remembers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = rows(OPEN, SURE)
    with RunLog(tmp_path / "r", Config(), quiet=True) as log:
        for row in bad[:-1]:
            log.step(row)
    assert "collapsed" not in capsys.readouterr().out
    with RunLog(tmp_path / "r", Config(), resume=True, quiet=True) as log:
        log.rewind(len(bad) - 1)
        log.step(bad[-1])
    assert "collapsed" in capsys.readouterr().out
