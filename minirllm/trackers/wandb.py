"""Weights & Biases, logged in as the machine's user; ``WANDB_MODE=offline`` keeps everything here.

Owns: the service's run. Does not know: what the metrics mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import wandb

from minirllm.config import Config
from minirllm.trackers.identity import PROJECT, run_id


class WandB:
    """See `trackers.Tracker`."""

    def __init__(self, folder: Path, config: Config):
        about = {"project": PROJECT, "name": folder.name, "id": run_id(folder), "config": config.to_dict()}
        self.run = wandb.init(**about, dir=str(folder), resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()
