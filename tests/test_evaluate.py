"""evaluate.py: the estimators by hand, what counts as what, the files."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from minirllm.errors import UserError
from minirllm.evaluate import Z, evaluate, normal, pass_at_k, summarise, wilson, write
from minirllm.log import explain
from minirllm.rollouts import Job, Runner
from minirllm.types import Episode, Task, TerminationReason


def episode(
    task: str, index: int, reward: float | None, why: TerminationReason = TerminationReason.ENV_DONE
) -> Episode:
    return Episode(
        task_id=task, rollout_idx=index, reward=reward, is_correct=reward is not None and reward >= 1,
        termination_reason=why, reason="" if reward is not None else "because", signals={"n": float(index)},
        metadata={"seed": [7, "eval", 0, task, index, 0]}, artifacts={"answer": "x"},
    )  # fmt: skip


def four() -> list[Episode]:
    """Task a: passed, errored; task b: 0.5 without passing, could not be graded."""
    return [
        episode("a", 0, 1.0),
        episode("a", 1, None, TerminationReason.ERROR),
        episode("b", 0, 0.5),
        episode("b", 1, None, TerminationReason.GRADING_TIMEOUT),
    ]


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [
        (1, 1, 1, 1.0),
        (4, 0, 3, 0.0),
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (4, 2, 2, 5 / 6),  # 1 - C(2,2)/C(4,2) = 1 - 1/6
        (4, 2, 3, 1.0),  # three of four always hold one of two
        (5, 2, 3, 9 / 10),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (100, 50, 99, 1.0),
    ],
)
def test_pass_at_k(n: int, c: int, k: int, value: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(value, abs=1e-12)


def test_wilson_by_hand() -> None:
    # one task, 4 rollouts, 3 passed: p = 0.75, n = 4, z^2 = 3.841459; centre (0.75 + 0.480182) / 1.960365 = 0.627527,
    # half width 1.959964 / 1.960365 * sqrt(0.1875 / 4 + 3.841459 / 64) = 0.326885
    assert wilson([0.75], 4) == pytest.approx((0.300642, 0.954412), abs=1e-5)
    # four tasks at 0, 0, 1, 1: var of the mean = (4 * 0.25 / 3) / 4 = 1/12, so n = 0.25 * 12 = 3
    low, high = wilson([0, 0, 1, 1], 1)
    assert low + high == pytest.approx(1.0)
    assert high - low == pytest.approx(2 * Z / (1 + Z * Z / 3) * math.sqrt(0.25 / 3 + Z * Z / 36))
    # every rollout of ten tasks passed: as ten, however many rollouts; z^2 / (10 + z^2) below 1
    assert wilson([1.0] * 10, 50) == pytest.approx((1 - Z * Z / (10 + Z * Z), 1.0))
    assert wilson([0.0] * 10, 50) == pytest.approx((0.0, Z * Z / (10 + Z * Z)))
    # tasks all alike at one half: every rollout counts
    assert wilson([0.5] * 2, 10) == pytest.approx(wilson([0.5], 20))


def test_normal_by_hand() -> None:
    # mean 2, sample variance 1, over 3: half width 1.959964 / sqrt(3)
    assert normal([1, 2, 3]) == pytest.approx((2 - 1.131586, 2 + 1.131586), abs=1e-6)
    assert normal([4.0]) == (4.0, 4.0)


def test_failures_stay_in_the_denominator_and_are_listed() -> None:
    result = summarise(four(), 2, seed=7)
    assert (result.tasks, result.rollouts, result.graded, result.seed) == (2, 2, 2, 7)
    assert result.pass_at == {1: 0.25, 2: 0.5}
    assert (result.errors, result.ungraded) == ({"error": 1}, {"grading_timeout": 1})
    assert result.reward_mean == 0.75
    assert result.reward_interval == pytest.approx((0.75 - Z * 0.25, 0.75 + Z * 0.25))
    assert result.signals == {"n": 0.0}
    text = str(result)
    assert "pass@1 0.250" in text
    assert "1 error (counted as not passed)" in text
    assert "n 0.000, 2 tasks x 2, 2 graded" in text
    assert result.metrics()["eval_signal/n"] == 0.0


def test_nothing_graded_is_no_reward() -> None:
    result = summarise([episode("a", 0, None, TerminationReason.TIMEOUT)], 1)
    assert (result.reward_mean, result.reward_interval, result.pass_at) == (None, None, {1: 0.0})
    assert "mean reward" not in str(result)
    figures = result.metrics()
    assert [figures[name] for name in ("eval_reward", "eval_low", "eval_high")] == [None] * 3  # not measured
    assert figures["eval_without_reward"] == 1.0
    said = explain({"step": 2, **figures}, 2)
    assert said == "step 2/2 | held-out: none of 1 could be graded (because)"


def test_the_first_reason_of_what_was_not_graded_is_said() -> None:
    """On the line of an evaluation, and on that of a training step whose held-out tasks all failed."""
    failed = [episode("a", index, None, TerminationReason.NO_CALLS) for index in range(3)]
    failed[0].reason, failed[1].reason, failed[2].reason = "", "every call was refused", "another"
    result = summarise(failed, 3)
    assert str(result).endswith("0 graded, 3 no_calls (counted as not passed), the first: every call was refused")
    said = explain({"step": 0, **result.metrics()}, 2)
    assert said == "step 0/2 | held-out: none of 3 could be graded (every call was refused)"


def test_the_rate_of_a_resumed_step_counts_what_was_sampled_since() -> None:
    kept = {"step": 1, "tokens_generated": 1200.0, "tokens_kept": 800.0, "seconds_generate": 4.0}
    assert explain(kept, 1) == "step 1/1 | 100 tok/s | generate 4.0 s"
    assert explain({**kept, "tokens_kept": 1200.0}, 1) == "step 1/1 | generate 4.0 s"


def test_one_task_speaks_of_its_rollouts() -> None:
    result = summarise([episode("a", i, float(i)) for i in range(2)], 2)
    assert result.reward_interval == pytest.approx((0.5 - Z * 0.5, 0.5 + Z * 0.5))


def test_rollouts_must_be_whole_groups() -> None:
    with pytest.raises(AssertionError, match="3 episodes are not 2 for each task"):
        summarise(four()[:3], 2)


def test_the_files(tmp_path: Path) -> None:
    write(tmp_path / "new" / "folder", summarise(four(), 2, seed=7))
    lines = [json.loads(line) for line in (tmp_path / "new/folder/items.jsonl").read_text().splitlines()]
    assert [(row["task_id"], row["rollout_idx"], row["reward"]) for row in lines] == [
        ("a", 0, 1.0),
        ("a", 1, None),
        ("b", 0, 0.5),
        ("b", 1, None),
    ]
    assert lines[1]["seed"] == [7, "eval", 0, "a", 1, 0]
    assert (lines[1]["termination_reason"], lines[1]["reason"], lines[1]["answer"]) == ("error", "because", "x")
    summary = json.loads((tmp_path / "new/folder/summary.json").read_text())
    assert (summary["pass_at"], summary["seed"], summary["errors"]) == ({"1": 0.25, "2": 0.5}, 7, {"error": 1})
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"Cannot write .*items\.jsonl"):
        write(tmp_path / "file", summarise(four(), 2))


class Recorded(Runner):
    """Gives made episodes instead of running any."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.config: Any = type("C", (), {"seed": 3})

    async def run_many(self, jobs: Any, on_done: Any = None) -> list[Episode]:
        self.jobs = list(jobs)
        return [episode(job.task.id, job.rollout_idx, 1.0) for job in jobs]


async def test_evaluate_runs_n_of_each_as_validation(tmp_path: Path) -> None:
    runner = Recorded()
    result = await evaluate(runner, [Task("a"), Task("b")], 3, step=5, folder=tmp_path)
    assert [(job.task.id, job.rollout_idx, job.step, job.validation) for job in runner.jobs] == [
        (task, i, 5, True) for task in "ab" for i in range(3)
    ]
    assert (result.pass_at[3], result.seed) == (1.0, 3)
    assert (tmp_path / "items.jsonl").exists()
    with pytest.raises(UserError, match="at least one task"):
        await evaluate(runner, [], 1)
    with pytest.raises(UserError, match="0 rollouts"):
        await evaluate(runner, [Task("a")], 0)
