"""rLLM's entry point in Python: an agent, a grader, two datasets, one call.

Owns: turning those objects into a task. Does not know: how training is done (train.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from minirllm import flow, train
from minirllm.config import Config, from_mapping, read_toml
from minirllm.types import Task

Dataset = Sequence[Task] | Callable[[Config], Iterable[Task]]


class AgentTrainer:
    """Trains `agent_flow` on `train_dataset`. A dataset is a list of Task, or a function of the Config giving one."""

    def __init__(
        self,
        agent_flow: Any,
        evaluator: Any,
        config: Config | Mapping[str, Any] | None = None,
        train_dataset: Dataset = (),
        val_dataset: Dataset = (),
    ):
        """`config` may be a mapping of option names. Without a `val_dataset` nothing is evaluated.

        Raises ConfigError for an unknown option, TaskError for a function that cannot be used.
        """
        chosen = config if isinstance(config, Config) else from_mapping(config or {})
        self.config = chosen if val_dataset else replace(chosen, eval_tasks=0)
        self.task = flow.task_of(agent_flow, evaluator, train_dataset, val_dataset)

    def train(self, *, resume: bool = False, quiet: bool = False) -> dict[str, Any]:
        """Blocks until the run is done; returns its last metrics row. Raises UserError for what the user can mend."""
        config, own = self.config, self.config.run_folder(self.task.name) / "config.toml"
        if resume and not config.date and own.is_file():
            config = replace(config, date=read_toml(own).get("date", ""))  # prompts may hold it
        return train.run(self.task, config, resume=resume, quiet=quiet)
