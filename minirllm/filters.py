"""Which of a step's episodes take part in the update, and why the others do not.

Owns: the options that leave episodes and tasks out, the sentences about it. Does not know: advantages, tokens.

A choice among episodes goes by their order, of rollouts in a task and of tasks in a step, never by which ended first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from minirllm.config import Config, nearest
from minirllm.errors import ConfigError
from minirllm.returns import means
from minirllm.types import Episode, TerminationReason

PLACE = "place"  # in an episode's metadata: of its task among those of the step
NEVER_GRADED = ("error", "timeout", "no_calls", "grading_error", "grading_timeout", "unknown")

SAID = {  # of a metric that is not zero
    "tasks_surplus": "{tasks_surplus:.0f} tasks to spare",
    "tasks_passed_over": "{tasks_passed_over:.0f} tasks passed over for their solve rate",
    "refill_tasks": "refilled by {refill_tasks:.0f} tasks in {refill_rounds:.0f} rounds",
    "step_rewards_unused": "{step_rewards_unused:.0f} rewards of calls not used (credit = trajectory)",
}


def reasons(config: Config) -> frozenset[str]:
    """How episodes may end that are left out. Raises ConfigError for an end that there is not, or is never graded."""
    named = [name for name in map(str.strip, config.drop_reasons.split(",")) if name]
    known = [reason.value for reason in TerminationReason if reason.value not in NEVER_GRADED]
    for name in named:
        if name in NEVER_GRADED:
            raise ConfigError(f"drop_reasons: episodes that end by {name} have no reward and are left out anyway.")
        if name not in known:
            near = nearest(name, known)
            raise ConfigError(f"drop_reasons: no episode ends by {name!r}{near}: use {', '.join(known)}.")
    return frozenset(named)


def validate(config: Config, tasks: int) -> None:
    """Raises ConfigError for options that have no effect with so many tasks."""
    reasons(config)
    for option in ("spare_tasks", "refill"):
        if getattr(config, option) and tasks <= config.batch_size:
            raise ConfigError(
                f"{option} has no effect: a step takes batch_size = {config.batch_size} of the {tasks} tasks, and none "
                "is left. Lower batch_size, or leave it out."
            )


def left_out(episodes: Sequence[Episode], config: Config) -> dict[str, str]:
    """By id, why graded episodes take no part: how they ended ("dropped"), or there were enough of their task
    ("surplus"). They set no baseline either."""
    dropped, taken, found = reasons(config), Counter[str](), dict[str, str]()
    for episode in sorted(episodes, key=lambda episode: (episode.task_id, episode.rollout_idx)):
        if episode.reward is None:
            continue
        if episode.termination_reason.value in dropped:
            found[episode.id] = "dropped"
        elif config.spare_rollouts and taken[episode.task_id] >= config.group_size:
            found[episode.id] = "surplus"
        else:
            taken[episode.task_id] += 1
    return found


def surplus(episodes: Sequence[Episode], signal: Collection[str], config: Config) -> set[str]:
    """The tasks with a signal behind the first `batch_size` of them, in the step's order."""
    if not config.spare_tasks:
        return set()
    place = {episode.task_id: episode.metadata.get(PLACE, 0) for episode in episodes}
    return set(sorted(signal, key=lambda task: (place[task], task))[config.batch_size :])


def solved(episodes: Sequence[Episode]) -> dict[str, float]:
    """Of each task the share of its graded rollouts that was correct."""
    return means((episode.task_id, episode.is_correct) for episode in episodes if episode.reward is not None)


def metrics(episodes: Sequence[Episode], why: Mapping[str, str], beyond: Collection[str]) -> dict[str, float]:
    """How many episodes were left out for how they ended, and how many tasks there were to spare."""
    ended = Counter(e.termination_reason.value for e in episodes if why.get(e.id) == "dropped")
    found = {f"dropped/{reason}": float(count) for reason, count in sorted(ended.items())}
    return found | ({"tasks_surplus": float(len(beyond))} if beyond else {})


def nothing_left(row: Mapping[str, Any], graded: int, config: Config) -> str:
    """Why they left nothing of a step's graded episodes to learn from, and what to do; empty when they did not."""
    groups = int(row["groups"])
    if not groups:
        left = f"All {graded} graded answers were left out (drop_reasons = {config.drop_reasons})"
        return f"{left}, so nothing was learned: name fewer reasons."
    if row.get("groups_with_signal"):
        cut = f"All that could be learned from was cut off at {config.max_tokens} tokens (mask_truncated)"
        return f"{cut}, so nothing was learned: raise --max-tokens."
    alone = config.teacher or config.group_size == 1  # then one is no reason by itself
    least = config.min_group_size if alone else max(2, config.min_group_size)
    if row.get("groups_too_small", 0) < groups or least == 1:
        return ""
    lower = "lower min_group_size, or " if config.min_group_size > (1 if alone else 2) else ""
    few = f"Each of the {groups} groups has fewer than {least} graded trajectories"
    return f"{few}, so nothing was learned: {lower}raise --group-size."


def sentences(row: Mapping[str, Any]) -> list[str]:
    """What a step's line says of all that."""
    told = [f"{row[name]:.0f} left out that ended by {name[8:]}" for name in row if name.startswith("dropped/")]
    told += [words.format_map(row) for name, words in SAID.items() if row.get(name)]
    absent = [name[7:] for name in row if name.startswith("absent/")]
    return [*told, f"no trajectory named {' or '.join(absent)}, as roles has it"] if absent else told
