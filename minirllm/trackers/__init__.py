"""Where metrics go besides ``metrics.jsonl``: pick by name from `TRACKERS`, or as ``module:attr``.

Owns: the protocol and the names. Each service is one small file here and an optional package, imported when it is asked
for. Does not know: what the metrics mean.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from minirllm.config import Config, find
from minirllm.errors import ConfigError


class Tracker(Protocol):
    """Built with (run folder, config). The run's name is the folder's."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """`metrics` holds finite numbers only."""

    def close(self) -> None:
        """Everything is written when this returns."""


TRACKERS: dict[str, str] = {  # each named as the package it needs, and as the extra that installs it
    "tensorboard": "minirllm.trackers.tensorboard:TensorBoard",
    "wandb": "minirllm.trackers.wandb:WandB",
    "trackio": "minirllm.trackers.trackio:Trackio",
}


def build(names: str, folder: Path, config: Config) -> list[Tracker]:
    """The trackers of a comma-separated list. Raises ConfigError for an unknown or uninstalled one."""
    built = []
    for name in filter(None, map(str.strip, names.split(","))):
        if name in TRACKERS and importlib.util.find_spec(name) is None:
            raise ConfigError(f"Tracker {name} is not installed: pip install 'minirllm[{name}]'.")
        built.append(find("tracker", name, TRACKERS)(folder, config))
    return built
