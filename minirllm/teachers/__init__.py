"""Teachers: models that score what the student sampled. Local ones (local.py), or at a URL (remote.py).

Owns: what a teacher reads and says, and the protocol of those who compute it. Does not know: how a teacher's scores
become advantages (teacher.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from minirllm.renderer import Renderer

OWN = ("base", "self")  # the student's own model: before any training, or as it is now


@dataclass(frozen=True)
class Reading:
    """A call as the teacher reads it: behind `prompt` the student said `answer`, in the teacher's tokens."""

    id: str
    prompt: list[int]
    answer: list[int]
    after: str | None = None  # the reading whose conversation this one continues


@dataclass(frozen=True)
class Scores:
    """Of the tokens of one answer (A): their log-probabilities, and the most likely ones (K) in their places."""

    logprob_A: np.ndarray
    top_id_AK: np.ndarray
    top_logprob_AK: np.ndarray
    best_A: np.ndarray  # bool: it is the most likely one

    @classmethod
    def none(cls, k: int) -> Scores:
        """Of an answer without tokens."""
        empty = np.empty((0, k))
        return cls(empty[:, 0], empty.astype(np.int64), empty.astype(np.float32), empty[:, 0].astype(np.bool_))


class Scorer(Protocol):
    """What computes. `renderer` is None where the student's is the teacher's."""

    renderer: Renderer | None
    facts: dict[str, Any]  # for the manifest

    async def score(self, tasks: Sequence[Sequence[Sequence[Reading]]], k: int) -> dict[str, Scores]:
        """The scores of each reading, by id. `tasks` holds rollouts, which hold readings: those of one task begin
        alike. Raises TeacherError."""
