"""Running means of tasks: the baseline, the curriculum and the bounds that are made of them, by hand."""

import json
from collections import Counter
from dataclasses import asdict

import pytest

from minirllm import grouping
from minirllm.algorithms import roles
from minirllm.batch import select
from minirllm.collect import Plan
from minirllm.config import Config
from minirllm.errors import ConfigError
from minirllm.log import explain
from minirllm.rollouts import Job
from minirllm.standing import NOTHING, Standing, choose, schedule, within
from minirllm.types import Task
from tests.episodes import episode

TASKS = [Task(f"t{i}") for i in range(10)]
ALONE = {"algorithm": "reinforce", "baseline": "task", "group_size": 1}


def learn(standing, rewards, **options):
    """(the advantage of each task's only rollout, the standing after) of one step."""
    config = Config(**{**ALONE, **options})
    episodes = [episode(task, 0, reward, is_correct=reward >= 1) for task, reward in rewards.items()]
    batch = select(episodes, config, roles.of(config), standing)
    found = {e.task_id: batch.members[e.id, f"{e.task_id}-0-0"].advantages[f"{e.task_id}-0-0"] for e in episodes}
    return found, standing.after(*batch.means, config)


def test_the_baseline_of_a_group_of_one_is_what_its_task_earned_before():
    found, after = learn(NOTHING, {"a": 1.0, "b": 0.5}, running_rate=0.25)
    assert found == {"a": 1.0, "b": 0.5}, "nothing is known yet"
    found, after = learn(after, {"a": 0.0, "c": 1.0}, running_rate=0.25)
    assert found == {"a": 0.0 - 1.0, "c": 1.0 - 0.75}, "of a new task the mean of all"
    found, _ = learn(after, {"a": 0.0, "b": 0.5}, running_rate=0.25)
    assert found == {"a": 0.0 - 0.75, "b": 0.0}, "a: 1 + (0 - 1) / 4"
    assert learn(NOTHING, {"a": 1.0}, baseline="group")[1] == NOTHING, "what no option asks for is not kept"


def test_a_baseline_is_of_one_role():
    def both(index, solver, judge):
        made = episode("a", index, 0.0, [(7,), (8, 8)], names=["solver", "judge"])
        made.trajectories[0].reward, made.trajectories[1].reward = solver, judge
        return made

    config = Config(**{**ALONE, "roles": "judge=reinforce_pp"})
    batch = select([both(0, 0.25, 4.0)], config, roles.of(config))
    after = NOTHING.after(*batch.means, config)
    assert sorted(after.reward.values()) == [0.25, 4.0]
    assert after.baseline('0:["b", "solver"]') == 0.25
    assert after.baseline('1:["b", "judge"]') == 4.0


def test_a_standing_is_the_same_after_it_was_saved():
    _, after = learn(NOTHING, {"a": 0.1, "b": 1 / 3, "c": 1.0}, curriculum="unsolved", running_rate=0.3)
    _, after = learn(after, {"b": 0.7, "d": 0.2}, curriculum="unsolved", running_rate=0.3)
    again = Standing(**json.loads(json.dumps(asdict(after))))
    assert again == after
    assert again.baseline("0:new") == after.baseline("0:new")
    assert after.solved == {"a": 0.0, "b": 0.0, "c": 1.0, "d": 0.0}


def test_tasks_out_of_bounds_are_passed_over_while_there_are_others():
    solved = {"t0": 1.0, "t1": 0.95, "t2": 0.0, "t3": 0.5}
    config = Config(batch_size=4, solve_rate_low=0.1, solve_rate_high=0.9)
    assert [task.id for task in within(TASKS, config, Standing({}, solved))] == [f"t{i}" for i in range(3, 10)]
    chosen = {task.id for step in range(1, 30) for task in choose(TASKS, config, step, Standing({}, solved))}
    assert chosen == {f"t{i}" for i in range(3, 10)}
    few = within(TASKS[:4], Config(batch_size=2, solve_rate_low=0.1, solve_rate_high=0.9), Standing({}, solved))
    assert [task.id for task in few] == ["t1", "t3"], "0.95 is nearest of those beyond"
    assert choose(TASKS, Config(batch_size=4), 3, NOTHING) == schedule(TASKS, Config(batch_size=4), 3)
    plan = Plan(TASKS, Job(TASKS[0], step=1), config, roles.of(config), Standing({}, solved))
    assert plan.metrics() == {"tasks_passed_over": 3}
    assert "3 tasks passed over for their solve rate" in explain({"step": 1, **plan.metrics()}, 2)


def shares(curriculum, solved):
    """How often each of two tasks is drawn, one a step."""
    config = Config(batch_size=1, curriculum=curriculum)
    steps = 4000
    drawn = Counter(choose(TASKS[:2], config, step, Standing({}, solved))[0].id for step in range(steps))
    return drawn["t0"] / steps


def test_the_curriculum_draws_by_weight():
    """learnable: 0.25 + 0.05 against 0.09 + 0.05; unsolved: 0.5 + 0.05 against 0.1 + 0.05; untried counts as a half."""
    assert shares("learnable", {"t1": 0.9}) == pytest.approx(0.30 / 0.44, abs=0.03)
    assert shares("unsolved", {"t1": 0.9}) == pytest.approx(0.55 / 0.70, abs=0.03)
    assert shares("unsolved", {"t0": 1.0, "t1": 0.0}) == pytest.approx(0.05 / 1.10, abs=0.02), "none is forgotten"


def test_a_curriculum_repeats_none_in_a_step_and_is_a_function_of_seed_step_and_standing():
    config = Config(batch_size=3, refill=1, curriculum="learnable")
    first = choose(TASKS, config, 5, NOTHING)
    assert len({task.id for task in first}) == 6
    assert choose(TASKS, config, 5, NOTHING) == first
    others = choose(TASKS, config, 6, NOTHING), choose(TASKS, Config(**{**config.to_dict(), "seed": 1}), 5, NOTHING)
    assert first not in others


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baseline": "task"}, "baseline = task has no effect with algorithms that subtract the mean of the group"),
        ({**ALONE, "credit": "returns"}, "baseline = task is of whole trajectories, but credit is returns"),
        ({"running_rate": 0.1}, "running_rate has no effect"),
        ({"solve_rate_low": 0.6, "solve_rate_high": 0.5}, r"No task is solved at least 0\.6 and at most 0\.5"),
        ({"curriculum": "learnible"}, r"curriculum must be one of .* \(did you mean learnable\?\)"),
    ],
)
def test_what_has_no_effect_or_cannot_be_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        grouping.validate(config := Config(**options), roles.of(config))


def test_a_baseline_needs_one_role_that_it_changes():
    for options in (ALONE, {"algorithm": "reinforce_pp", "baseline": "task"}, {"roles": "judge=reinforce"}):
        grouping.validate(config := Config(**{**options, "baseline": "task"}), roles.of(config))
