"""Where metrics go besides ``metrics.jsonl``: TensorBoard, Weights & Biases, Trackio, or ``module:attr``.

Owns: one small class per service and the dict of their names. Each service is an optional package.
Does not know: what the metrics mean.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from minirllm.config import Config, nearest
from minirllm.errors import ConfigError

PROJECT = "minirllm"  # the project that runs appear under


class Tracker(Protocol):
    """Built with (run folder, config). The run's name is the folder's."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """`metrics` holds finite numbers only."""

    def close(self) -> None:
        """Everything is written when this returns."""


def _package(name: str, module: str | None = None) -> Any:
    try:
        return importlib.import_module(module or name)
    except ModuleNotFoundError:
        raise ConfigError(f"Tracker {name} is not installed: pip install 'minirllm[{name}]'.") from None


def _id(folder: Path) -> str:
    """One random id per run folder: a resumed run continues its curve, a new run of an old name starts another."""
    path = folder / "tracker_id"
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text()


class TensorBoard:
    """Event files in the run's folder: ``tensorboard --logdir runs``."""

    def __init__(self, folder: Path, config: Config):
        self.writer = _package("tensorboard", "tensorboard.summary").Writer(str(folder / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Weights & Biases, logged in as the machine's user; ``WANDB_MODE=offline`` keeps everything here."""

    def __init__(self, folder: Path, config: Config):
        wandb = _package("wandb")
        self.run = wandb.init(
            project=PROJECT, name=folder.name, id=_id(folder), dir=str(folder), config=config.to_dict(), resume="allow"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """Trackio, kept on this machine: ``trackio show``."""

    def __init__(self, folder: Path, config: Config):
        self.trackio = _package("trackio")
        name = f"{folder.name}-{_id(folder)}"
        self.trackio.init(project=PROJECT, name=name, config=config.to_dict(), resume="allow", embed=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        self.trackio.finish()


TRACKERS: dict[str, Callable[[Path, Config], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
}


def build(names: str, folder: Path, config: Config) -> list[Tracker]:
    """The trackers of a comma-separated list. Raises ConfigError for an unknown or uninstalled one."""
    return [_find(name.strip())(folder, config) for name in names.split(",") if name.strip()]


def _find(name: str) -> Callable[[Path, Config], Tracker]:
    if name in TRACKERS:
        return TRACKERS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(
            f"Unknown tracker {name!r}{nearest(name, list(TRACKERS))}: take {', '.join(TRACKERS)} or module:attr."
        )
    try:
        found: Callable[[Path, Config], Tracker] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"Tracker {name!r} cannot be imported: {error}.") from None
    return found
