"""Which episodes take part: by how they ended, to spare, too few, without a signal; and what a step runs instead."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from minirllm import filters
from minirllm.algorithms import roles
from minirllm.batch import select
from minirllm.collect import Plan, collect
from minirllm.config import Config
from minirllm.diagnostics import AGREED
from minirllm.errors import ConfigError
from minirllm.grouping import COST
from minirllm.log import diagnose, explain
from minirllm.rollouts import Job
from minirllm.standing import NOTHING, schedule
from minirllm.store import EpisodeStore
from minirllm.types import Task, TerminationReason
from tests.episodes import episode, make, trained

LONG = TerminationReason.MAX_TURNS_EXCEEDED


def fates(batch, *episodes):
    return [batch.fate(one, node) for one in episodes for node in one.tree.nodes if node.sampled]


def test_episodes_that_ended_so_are_left_out_and_set_no_baseline():
    episodes = [episode("a", 0, 1.0), episode("a", 1, 0.0), episode("a", 2, 0.0, termination_reason=LONG)]
    batch = make(episodes, drop_reasons="max_turns_exceeded, env_done")
    assert trained(batch, "advantage_T").tolist() == [0.5, 0.5, -0.5, -0.5]
    assert fates(batch, *episodes) == ["trained", "trained", "dropped"]
    assert (batch.metrics["dropped/max_turns_exceeded"], batch.metrics["discarded/dropped"]) == (1, 2)
    line = explain({"step": 1, **batch.metrics}, 2)
    assert "1 left out that ended by max_turns_exceeded" in line
    assert "discarded 2 of 6 tokens (2 of episodes left out)" in line
    assert trained(make(episodes), "advantage_T") == pytest.approx([2 / 3] * 2 + [-1 / 3] * 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop_reasons": "max_turn_exceeded"}, r"ends by 'max_turn_exceeded' \(did you mean max_turns_exceeded\?\)"),
        ({"drop_reasons": "timeout"}, "episodes that end by timeout have no reward and are left out anyway"),
        ({"refill": 1, "batch_size": 3}, "refill has no effect: a step takes batch_size = 3 of the 3 tasks"),
        ({"spare_tasks": 1, "batch_size": 4}, "spare_tasks has no effect"),
    ],
)
def test_what_has_no_effect_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        filters.validate(Config(**options), 3)
    filters.validate(Config(drop_reasons="env_done", refill=1, spare_tasks=1, batch_size=2), 3)


@pytest.mark.parametrize(
    ("row", "options", "sentence"),
    [
        ({"groups_too_hard": 8, "trained_tokens": 9}, {"entropy_bonus": 0.1}, ""),  # the bonus taught something
        (
            {"groups": 0, "dropped/env_done": 64},
            {"drop_reasons": "env_done"},
            "All 64 graded answers were left out (drop_reasons = env_done), so nothing was learned: "
            "name fewer reasons.",
        ),
        (
            {"groups_with_signal": 8},
            {"mask_truncated": True},
            "All that could be learned from was cut off at 256 tokens (mask_truncated), so nothing was learned: "
            "raise --max-tokens.",
        ),
        (
            {"groups_too_small": 8},
            {"min_group_size": 9},
            "Each of the 8 groups has fewer than 9 graded trajectories, so nothing was learned: lower min_group_size, "
            "or raise --group-size.",
        ),
        (
            {"groups_too_small": 8},
            {},
            "Each of the 8 groups has fewer than 2 graded trajectories, so nothing was learned: raise --group-size.",
        ),
    ],
)
def test_a_step_of_which_nothing_was_left_says_so(row, options, sentence):
    found = {"episodes": 64, "groups": 8, "trained_tokens": 0, **row}
    assert diagnose(found, Config(**options), "mine") == sentence
    if sentence and options:  # distillation, and groups of one, say the same of what was left out
        assert diagnose(found, Config(**options, teacher="base"), "mine") == sentence
        assert diagnose(found, Config(**options, group_size=1), "mine") == sentence


@pytest.mark.parametrize("row", [{"groups_too_small": 8}, {"groups_uniform": 8}, {"groups_too_hard": 8}])
def test_a_student_that_agrees_is_told_so_whatever_its_groups(row):
    found = {"episodes": 64, "groups": 8, "trained_tokens": 0, **row}
    assert diagnose(found, Config(teacher="base"), "mine") == AGREED


@pytest.mark.parametrize(
    ("kind", "begins"), [("too_hard", "0 of 64 answers were graded"), ("too_easy", "All 64 answers got the full")]
)
def test_answers_alone_that_all_failed_or_succeeded_are_told_so(kind, begins):
    """As of `reinforce`, which compares none with others: more rollouts of a task would not help."""
    found = {"episodes": 64, "groups": 64, "trained_tokens": 0, f"groups_{kind}": 64}
    assert diagnose(found, Config(group_size=1, algorithm="reinforce"), "mine").startswith(begins)


def test_small_groups_are_left_out():
    episodes = [episode("a", i, float(i)) for i in (0, 1)] + [episode("b", i, float(i)) for i in (0, 1, 2)]
    batch = make(episodes, min_group_size=3)
    assert fates(batch, *episodes) == ["too_small"] * 2 + ["trained"] * 3
    assert (batch.metrics["groups_too_small"], batch.metrics["groups_with_signal"]) == (1, 1)
    assert "discarded 4 of 10 tokens (4 of groups too small)" in explain({"step": 1, **batch.metrics}, 2)
    assert fates(make(episodes, min_group_size=3, kl_beta=0.1), *episodes)[:2] == ["too_small"] * 2


def test_of_spare_rollouts_the_first_that_are_graded_are_taken():
    """The first of four failed: the second and third are the group of two, the fourth is not looked at."""
    episodes = [episode("a", i, reward) for i, reward in enumerate([None, 1.0, 0.0, 9.0])]
    batch = make(episodes, group_size=2, spare_rollouts=2)
    assert trained(batch, "advantage_T").tolist() == [0.5, 0.5, -0.5, -0.5]
    assert fates(batch, *episodes) == ["ungraded", "trained", "trained", "surplus"]
    assert batch.metrics["discarded/surplus"] == 2


def grouped(task, place, rewards):
    return [episode(task, i, float(r), metadata={filters.PLACE: place}) for i, r in enumerate(rewards)]


def test_of_spare_tasks_the_first_with_a_signal_are_taken():
    """In the order of the step d, c, b, a: d teaches nothing, c and b are the two, a is to spare."""
    rewards = {"d": [1, 1], "c": [0, 1], "b": [1, 0], "a": [0, 1]}
    episodes = [e for place, (task, values) in enumerate(rewards.items()) for e in grouped(task, place, values)]
    batch = make(episodes, batch_size=2, spare_tasks=2)
    assert fates(batch, *episodes) == ["no_signal"] * 2 + ["trained"] * 4 + ["surplus"] * 2
    assert (batch.metrics["tasks_surplus"], batch.metrics["trajectories"]) == (1, 4)
    assert "1 tasks to spare" in explain({"step": 1, **batch.metrics}, 2)
    # whitened without a: of 12 tokens 8 are half up or down, and the 4 of d are 0
    whitened = make(episodes, batch_size=2, spare_tasks=2, algorithm="reinforce_pp_baseline", norm_std=True)
    assert np.abs(trained(whitened, "advantage_T")) == pytest.approx([0.5 / np.sqrt(8 * 0.25 / 11)] * 8)
    kept = make(episodes, batch_size=2, spare_tasks=2, kl_beta=0.1)
    assert fates(kept, *episodes)[:2] == ["no_signal"] * 2, "others stand in its place"


# ---- what a step runs ----

TASKS = [Task(f"t{i}") for i in range(12)]
CONFIG = Config(batch_size=2, group_size=2, refill=2)


def test_tasks_that_may_replace_others_are_no_other_steps():
    epoch = [[task.id for task in schedule(TASKS, CONFIG, step)] for step in (1, 2)]
    assert [len(tasks) for tasks in epoch] == [6, 6]
    assert len({*epoch[0], *epoch[1]}) == 12
    assert schedule(TASKS, CONFIG, 3) != schedule(TASKS, CONFIG, 1)
    few = schedule(TASKS[:5], CONFIG, 7)
    assert sorted(task.id for task in few) == [f"t{i}" for i in range(5)]


class Rewarded:
    """Runs nothing: the rewards of a task's rollouts are given."""

    def __init__(self, rewards):
        self.rewards, self.ran = rewards, []

    async def run_many(self, jobs, on_done, on_retry):
        for job in reversed(jobs):  # the order in which they end does not matter
            self.ran.append(job.key)
            reward = self.rewards[job.task.id][job.rollout_idx]
            on_done(episode(job.task.id, job.rollout_idx, reward, [(7, 8 + job.rollout_idx)]))


def run(folder, rewards, config=CONFIG, weights="w"):
    """(episodes, plan, what ran) of step 1; `rewards` are those of its first task, t0, its second, and so on."""
    plan = Plan(TASKS, Job(TASKS[0], step=1), config, roles.of(config), NOTHING)
    runner = Rewarded({task: rewards.get(f"t{place}", (0.0, 1.0, 0.0, 1.0)) for task, place in plan.place.items()})
    ticks = []
    store = EpisodeStore(folder)

    async def digest(step, episode):
        return weights

    found, _ = asyncio.run(collect(runner, store, plan, digest, lambda *numbers: ticks.append(numbers)))
    assert ticks[-1][:2] == (len(found), len(found))
    assert store.finished(1).keys() == {(e.task_id, e.rollout_idx) for e in found}
    return found, plan, runner.ran


def ran(found):
    return [f"t{e.metadata[filters.PLACE]}" for e in found if e.rollout_idx == 0]


def test_tasks_without_a_signal_are_replaced_by_the_next_up_to_the_bound(tmp_path):
    same = (1.0, 1.0)
    found, plan, _ = run(tmp_path / "none", {})
    assert (ran(found), plan.metrics()) == (["t0", "t1"], {"refill_rounds": 0, "refill_tasks": 0})
    found, plan, _ = run(tmp_path / "one", {"t1": same})
    assert (ran(found), plan.metrics()) == (["t0", "t1", "t2"], {"refill_rounds": 1, "refill_tasks": 1})
    found, plan, _ = run(tmp_path / "two", {"t0": same, "t1": same, "t3": same})
    assert (ran(found), plan.metrics()) == (["t0", "t1", "t2", "t3", "t4"], {"refill_rounds": 2, "refill_tasks": 3})
    found, plan, _ = run(tmp_path / "bound", dict.fromkeys([f"t{i}" for i in range(6)], same))
    assert ran(found) == ["t0", "t1", "t2", "t3", "t4", "t5"], "two rounds, and no more"
    row = {"step": 1, **select(found, CONFIG, roles.of(CONFIG)).metrics, **plan.metrics()}
    assert "refilled by 4 tasks in 2 rounds" in explain(row, 2)


def test_the_kl_that_a_reward_was_charged_is_no_signal_for_the_rounds(tmp_path):
    """A step that was trained and is run again has it on disk."""
    config = replace(CONFIG, kl_beta=0.1, kl_in="reward")
    found, _, _ = run(tmp_path, {"t1": (1.0, 1.0)}, config)
    for made in found:
        made.trajectories[0].steps[0].metadata[COST] = 0.1 * made.rollout_idx
    EpisodeStore(tmp_path).keep(1, found)
    again, _, missing = run(tmp_path, {"t1": (1.0, 1.0)}, config)
    assert (ran(again), missing) == (["t0", "t1", "t2"], [])


def test_a_killed_step_goes_on_with_the_same_rounds(tmp_path):
    rewards = {"t0": (1.0, 1.0), "t1": (1.0, 1.0), "t2": (0.0, 0.0)}
    whole, _, everything = run(tmp_path / "whole", rewards)
    assert ran(whole) == ["t0", "t1", "t2", "t3", "t4"]
    lines = (tmp_path / "whole/step_00001.jsonl").read_bytes().splitlines(keepends=True)
    for count in range(len(lines)):
        folder = tmp_path / str(count)
        folder.mkdir()
        (folder / "step_00001.jsonl").write_bytes(b"".join(lines[:count]))
        again, _, missing = run(folder, rewards)
        assert [e.id for e in again] == [e.id for e in whole]
        assert missing == everything[count:], "and what it had is not run again"


def test_rounds_that_are_no_longer_asked_for_leave_the_disk(tmp_path):
    """Resumed with an algorithm for which equal rewards are a signal, a step needs no refill."""
    run(tmp_path, {"t0": (1.0, 1.0)})
    config = Config(batch_size=2, group_size=2, refill=2, algorithm="reinforce")
    found, _, missing = run(tmp_path, {"t0": (1.0, 1.0)}, config)
    assert (ran(found), missing) == (["t0", "t1"], [])


def test_spare_rollouts_and_tasks_are_run(tmp_path):
    config = Config(batch_size=2, group_size=2, spare_rollouts=1, spare_tasks=1)
    found, _, _ = run(tmp_path, {}, config)
    places = [(e.metadata[filters.PLACE], e.rollout_idx) for e in found]
    assert places == [(place, i) for place in range(3) for i in range(3)]
    batch = select(found, config, roles.of(config))
    assert batch.signal == {found[0].task_id, found[3].task_id}
