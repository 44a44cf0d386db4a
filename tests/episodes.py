"""Hand-built episodes and their batches, for tests without a model."""

import numpy as np

from minirllm.algorithms.roles import of
from minirllm.batch import build
from minirllm.config import Config
from minirllm.store import episode_to_dict
from minirllm.tree import TokenTree
from minirllm.types import Completion, Episode, Step, Trajectory

PROMPT = [1, 2, 3, 4]


def episode(task, index, reward, answers=((7, 8),), prompt=None, names=None, version=0, **more):
    """One rollout whose calls each answer the prompt; `names` gives each call's trajectory."""
    tree, trajectories = TokenTree(), {}
    for n, answer in enumerate(answers):
        call = f"{task}-{index}-{n}"
        node = tree.add(prompt or PROMPT, Completion(list(answer), [-0.5] * len(answer), "stop", version, 0.7), call)
        name = (names or ["default"] * len(answers))[n]
        trajectories.setdefault(name, Trajectory(name)).steps.append(
            Step(call, node=node, prompt_length=len(prompt or PROMPT), response_length=len(answer))
        )
    return Episode(
        id=f"{task}:{index}",
        task_id=task,
        rollout_idx=index,
        reward=reward,
        tree=tree,
        trajectories=list(trajectories.values()),
        **more,
    )


def make(episodes, version=0, algorithm="grpo", **options):
    config = Config(**{"norm_std": False, "algorithm": algorithm, **options})
    return build(episodes, config, of(config), version)


def trained(batch, name):
    return np.concatenate([getattr(forest, name)[forest.trained_T] for forest in batch.forests])


def same_content(one, other):
    """Do two rollouts say the same? Not how long they took."""
    plain = [episode_to_dict(made) for made in (one, other)]
    for values in plain:
        values["metrics"].pop("seconds", None)
    return plain[0] == plain[1]
