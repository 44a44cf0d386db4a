"""Run by Harbor's own Python: how Harbor reads task directories. Paths as arguments; JSON by path on stdout.

Owns: Harbor's reading in the plain form that benchmarks/harbor_peer.py has of ours. Does not know: minirllm.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

from harbor.models.task.task import Task
from harbor.models.task.verifier_mode import resolve_step_verifier_mode, resolve_task_verifier_mode


def health(check: Any) -> list[Any] | None:
    if check is None:
        return None
    return [
        check.command, check.interval_sec, check.timeout_sec, check.start_period_sec, check.start_interval_sec,
        check.retries,
    ]  # fmt: skip


def artifacts(items: Any) -> list[Any]:
    """Of the agent's container."""
    found = [(item, []) if isinstance(item, str) else (item.source, item.exclude) for item in items
             if isinstance(item, str) or item.service in (None, "main")]  # fmt: skip
    return [[source, list(exclude)] for source, exclude in found]


def user(value: Any) -> str | None:
    return None if value is None else str(value)


def first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def step(task: Task, own: Any) -> dict[str, Any]:
    """The task's one step, or one of several; what is looked up where is what Harbor's trials do."""
    config = task.config
    agent, verifier = (own or config).agent, (own or config).verifier
    least = own.min_reward if own else None
    mode = resolve_step_verifier_mode(config, own) if own else resolve_task_verifier_mode(config)
    return {
        "name": own.name if own else "",
        "instruction": task.step_instruction(own.name) if own else task.instruction,
        "agent_seconds": first(agent.timeout_sec, config.agent.timeout_sec),
        "agent_user": user(first(agent.user, config.agent.user)),
        "verifier_seconds": verifier.timeout_sec,
        "verifier_user": user(first(verifier.user, config.verifier.user)),
        "verifier_env": {**config.verifier.env, **verifier.env},
        "separate": mode.value == "separate",
        "min_reward": {"reward": least} if isinstance(least, float | int) else least or {},
        "health": health(own.healthcheck) if own else None,
        "artifacts": artifacts([*config.artifacts, *(own.artifacts if own else [])]),
    }


def read(path: str) -> dict[str, Any]:
    try:
        task = Task(path)
    except Exception as error:  # whatever Harbor refuses it with
        return {"refused": " ".join(str(error).replace(path, "TASK").split())[:300]}
    config, environment = task.config, task.config.environment
    return {
        "name": task.name if config.task else "",
        "steps": [step(task, own) for own in config.steps or [None]],
        "image": environment.docker_image or "",
        "workdir": environment.workdir or "",
        "cpus": environment.cpus,
        "memory_mb": environment.memory_mb,
        "storage_mb": environment.storage_mb,
        "network": environment.network_mode.value,
        "env": environment.env,
        "build_seconds": environment.build_timeout_sec,
        "health": health(environment.healthcheck),
        "solution_env": config.solution.env,
        "final": first(config.multi_step_reward_strategy and config.multi_step_reward_strategy.value, "mean")
        == "final",
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.stdout.write(json.dumps({path: read(path) for path in map(str, map(Path, sys.argv[1:]))}))
