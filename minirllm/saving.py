"""When a run's state is saved and found again: after a step, and at the beginning of a resumed run.

Owns: what a full disk, a torn checkpoint or a step that cannot be learned from means for a run. Does not know: what a
step does.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from minirllm import checkpoint
from minirllm.config import Config
from minirllm.errors import CheckpointError, LedgerError, UserError
from minirllm.log import RunLog
from minirllm.policy import Policy
from minirllm.trainer import Trainer


def unlearned(error: UserError, step: int, episodes: Path) -> UserError:
    """That nothing was learned from a step, and what to do; `episodes` is the folder of those that were sampled."""
    nothing = f"{error} Nothing was learned from step {step}"
    if not isinstance(error, LedgerError):
        return UserError(f"{nothing}: it is sampled; when this is mended, --resume goes on from there.")
    look = f"`minirllm show {episodes.parent} --step {step} --episode {error.episode!r} --tokens`"
    again = f"to sample the step again, delete its file in {episodes} and --resume"
    return UserError(f"{nothing}: {look} shows it; {again}.")


class Saving:
    """Of one run."""

    def __init__(self, config: Config, log: RunLog, policy: Policy, trainer: Trainer):
        self.config, self.log, self.policy, self.trainer = config, log, policy, trainer
        self.folder = log.folder / "checkpoints"

    async def save(self, step: int, extra: dict[str, Any], best_step: int | None = None) -> None:
        """A checkpoint. A full disk costs the checkpoint, not the run; but no run ends well without its last one."""
        extra = {"step": step, "seed": self.config.seed, **extra}
        arguments = (self.folder, step, self.policy, self.trainer, extra, self.config.keep_checkpoints, best_step)
        try:
            await self.policy.run(checkpoint.save, *arguments)
        except CheckpointError as error:
            if step == self.config.steps:
                raise CheckpointError(f"{error} All steps are done: --resume saves them later.") from None
            self.log.warn(str(error))

    async def restore(self) -> tuple[int, dict[str, Any]]:
        """Loads the newest whole checkpoint; returns how many steps are done (0: there is none), and its `extra`."""
        path, skipped = await asyncio.to_thread(checkpoint.newest, self.folder)
        for sentence in skipped:
            self.log.warn(f"{sentence} Taking {path.name if path else 'none, so from step 1 on,'} instead.")
        extra: dict[str, Any] = {"step": 0}
        if path is not None:
            extra = await self.policy.run(checkpoint.load, path, self.policy, self.trainer)
            if extra["seed"] != self.config.seed:
                seeds = f"belongs to seed {extra['seed']}, not {self.config.seed}"
                raise CheckpointError(f"{path} {seeds}: resume with its own seed.")
        done: int = extra["step"]
        after = f"Resuming after step {done} of {self.config.steps}."
        self.log.say(after if done else "There is no checkpoint yet: starting from step 1.")
        await asyncio.to_thread(self.log.rewind, done if done else -1)
        return done, extra
