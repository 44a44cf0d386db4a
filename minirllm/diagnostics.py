"""What can be told from episodes and metrics: figures of a step, and sentences when a run goes wrong.

Owns: those figures, the tripwires. Does not know: what is learned, how it is shown. The bounds of the tripwires are
round numbers, chosen and not measured: they warn, and decide nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minirllm.returns import mean_signals, means
from minirllm.types import Episode

#: What sessions and rollouts counted in ``Episode.metrics`` that a step's metrics add up.
COUNTED = (
    "branches", "rerendered", "unprovable", "edited", "reasked", "replayed", "aborted", "unclaimed_calls", "auxiliary",
    "drift",
)  # fmt: skip

#: Figures on a step's line: metric, words, form.
SHOWN = (
    ("teacher_kl", "KL to the teacher", ".3f"),
    ("teacher_agreement", "agreement", ".2f"),
    ("entropy", "entropy", ".2f"),
    ("grad_norm", "gradient", ".2g"),
)
ALONE = "Nothing was learned: with --group-size 1 an answer has no others to be compared with; take at least 2."
AGREED = "Nothing was learned: of each of its tokens the student thinks exactly as the teacher does."

WINDOW = 5  # steps: the last so many are compared with those before them
GRAM = 4  # tokens of a run whose variety is counted


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """What happened, over all episodes; rewards and signals over those that could be graded."""
    graded = [episode for episode in episodes if episode.reward is not None]
    rewards = np.array([episode.reward for episode in graded], np.float64)
    steps = [step for episode in episodes for step in episode.steps]
    metrics = {
        "episodes": float(len(episodes)),
        "ungraded": float(len(episodes) - len(graded)),
        "calls": float(len(steps)),
        "truncated": float(sum(step.finish_reason == "length" for step in steps)),
        "malformed_tool_calls": float(sum(step.response is not None and step.response.malformed for step in steps)),
        **{name: float(sum(episode.metrics.get(name, 0) for episode in episodes)) for name in COUNTED},
    }
    if graded:
        metrics |= {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())}
    by_end = means((e.termination_reason.value, e.reward) for e in graded if e.reward is not None)
    metrics |= {f"reward_by_end/{reason}": mean for reason, mean in sorted(by_end.items())}
    why = Counter(episode.termination_reason.value for episode in episodes if episode.reward is None)
    metrics |= {f"ungraded/{reason}": float(count) for reason, count in sorted(why.items())}
    metrics |= _variety(episodes)
    return metrics | {f"signal/{name}": value for name, value in mean_signals(graded).items()}


def _variety(episodes: Sequence[Episode]) -> dict[str, float]:
    """``distinct_answers``: the share of a task's rollouts whose answer is like no earlier one's, mean over tasks;
    ``distinct_grams``: the same of the runs of GRAM tokens within one sample; ``answer_length``: tokens per episode."""
    answers: dict[str, list[str]] = {}
    variety, tokens = list[float](), 0
    for episode in episodes:
        answers.setdefault(episode.task_id, []).append(episode.answer)
        for node in episode.sampled:
            runs = list(zip(*(node.tokens[offset:] for offset in range(GRAM)), strict=False))
            variety += [len(set(runs)) / len(runs)] if runs else []
            tokens += len(node.tokens)
    if not answers:
        return {}
    return {
        "distinct_answers": float(np.mean([len(set(said)) / len(said) for said in answers.values()])),
        "answer_length": tokens / len(episodes),
        **({"distinct_grams": float(np.mean(variety))} if variety else {}),
    }


def tripwires(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the last WINDOW steps say beside the WINDOW before them, when it is bad; `rows` are those of training.

    Nothing before there are two whole windows, and only at the end of one, so that a sentence is not said every step.
    """
    if len(rows) < 2 * WINDOW or len(rows) % WINDOW:
        return []
    before, now = _mean(rows[-2 * WINDOW : -WINDOW]), _mean(rows[-WINDOW:])
    for row in rows[:-WINDOW]:  # evaluations may be rarer than windows: the last one counts
        before |= {name: value for name, value in _mean([row]).items() if name == "eval_reward"}
    told = [_collapse(now, _mean(rows[:WINDOW])), _hacking(before, now)]
    return [sentence for sentence in told if sentence]


def _collapse(now: Mapping[str, float], first: Mapping[str, float]) -> str:
    entropy, answers = now.get("entropy"), now.get("distinct_answers", 1.0)
    if entropy is None or "entropy" not in first or answers > 0.3 or entropy > 0.2 * first["entropy"]:
        return ""
    if now.get("reward_mean", 0.0) >= 0.95:
        return ""  # it is sure because it is right
    return (
        f"The policy has collapsed: entropy is {entropy:.2g} where it began at {first['entropy']:.2g}, and of a task's "
        f"rollouts only {answers:.0%} differ, so there is little left to learn from: go back to an earlier checkpoint "
        "with a lower --lr, or a kl_beta above 0."
    )


def _hacking(before: Mapping[str, float], now: Mapping[str, float]) -> str:
    if not before.keys() & now.keys() >= {"reward_mean"} or now["reward_mean"] - before["reward_mean"] < 0.05:
        return ""
    signs = []
    if before.keys() & now.keys() >= {"eval_reward"} and now["eval_reward"] < before["eval_reward"] - 0.05:
        signs.append(f"the held-out reward fell from {before['eval_reward']:.2f} to {now['eval_reward']:.2f}")
    if now.get("distinct_grams", 1.0) < 0.5 * before.get("distinct_grams", 0.0):
        signs.append(f"answers repeat themselves ({now['distinct_grams']:.0%} of their runs of {GRAM} tokens differ)")
    if now.get("answer_length", 0.0) < 0.4 * before.get("answer_length", 0.0):
        signs.append(f"answers shrank from {before['answer_length']:.0f} to {now['answer_length']:.0f} tokens")
    if not signs:
        return ""
    return (
        f"The reward rose from {before['reward_mean']:.2f} to {now['reward_mean']:.2f} while {' and '.join(signs)}: "
        "look at some conversations with `minirllm show`; the grader may pay for something else than was meant."
    )


def _mean(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of every number, over the rows that have it and in which it is finite."""
    numbers = ((name, value) for row in rows for name, value in row.items() if isinstance(value, int | float))
    return means((name, value) for name, value in numbers if np.isfinite(value))
