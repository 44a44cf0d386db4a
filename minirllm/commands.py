"""What ``minirllm eval`` and ``minirllm serve`` do, once their options are a Config.

Owns: which weights are loaded before the rollouts or the serving. Does not know: options, printing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from minirllm import checkpoint
from minirllm.config import Config
from minirllm.errors import CheckpointError
from minirllm.evaluate import EvalResult, evaluate
from minirllm.flow import TaskModule
from minirllm.policy import Policy
from minirllm.rollouts import Runner
from minirllm.stack import serving
from minirllm.types import Episode


async def evaluate_task(
    task: TaskModule,
    config: Config,
    *,
    n: int = 1,
    split: str = "held_out",
    weights: Path | None = None,
    output: Path | None = None,
    say: Callable[[str], None] | None = None,
    on_done: Callable[[Episode], None] | None = None,
) -> EvalResult:
    """`n` rollouts of the first `config.eval_tasks` tasks of a split, under the weights of a run or checkpoint folder.

    With `output`, ``items.jsonl`` and ``summary.json`` are written there. Raises UserError for what the user can mend.
    """
    tasks = (task.held_out(config) if split == "held_out" else task.train(config))[: config.eval_tasks]
    path = find_weights(weights) if weights is not None else None
    async with serving(config, say=say) as stack:
        if path is not None:
            await stack.policy.run(Policy.load_weights, stack.policy, path)
        runner = Runner(stack.sessions, stack.base_url, task.flow, task.evaluator, config)
        try:
            return await evaluate(runner, tasks, n, folder=output, on_done=on_done)
        finally:
            await runner.close()


async def serve(
    config: Config,
    *,
    host: str,
    port: int,
    key: str,
    weights: Path | None = None,
    say: Callable[[str], None] | None = None,
    ready: Callable[[str], None],
) -> None:
    """Serve every dialect to bearers of `key` until cancelled; `ready` is called with the base URL, ``/v1`` included."""
    path = find_weights(weights) if weights is not None else None
    async with serving(config, say=say, host=host, port=port, open_key=key) as stack:
        if path is not None:
            await stack.policy.run(Policy.load_weights, stack.policy, path)
            stack.engine.weights_changed()
        ready(f"{stack.base_url}/v1")
        await asyncio.Event().wait()


def find_weights(folder: Path) -> Path:
    """The newest whole checkpoint of a run folder; any other folder is one of weights itself. Raises CheckpointError."""
    if (folder / "checkpoints").is_dir():
        newest, skipped = checkpoint.newest(folder / "checkpoints")
        if newest is None:
            raise CheckpointError(" ".join([f"{folder} has no whole checkpoint.", *skipped]))
        return newest
    if (folder / checkpoint.MANIFEST).exists():
        checkpoint.verify(folder)
    return folder
