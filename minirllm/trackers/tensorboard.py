"""TensorBoard: event files in the run's folder, shown by ``tensorboard --logdir runs``.

Owns: the writer. Does not know: what the metrics mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tensorboard.summary import Writer

from minirllm.config import Config


class TensorBoard:
    """See `trackers.Tracker`."""

    def __init__(self, folder: Path, config: Config):
        self.writer = Writer(str(folder / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()
