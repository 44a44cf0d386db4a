"""Trackio, kept on this machine: ``trackio show``.

Owns: the service's run. Does not know: what the metrics mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import trackio

from minirllm.config import Config
from minirllm.trackers.identity import PROJECT, run_id


class Trackio:
    """See `trackers.Tracker`."""

    def __init__(self, folder: Path, config: Config):
        name = f"{folder.name}-{run_id(folder)}"
        trackio.init(project=PROJECT, name=name, config=config.to_dict(), resume="allow", embed=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        trackio.finish()
