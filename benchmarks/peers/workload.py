"""The workload that every peer runs: chat prompts of a given length, and a reward that varies.

Owns: the prompts' texts. Needs the standard library only, so it runs in any environment: ours, TRL's, vLLM's.
"""

from __future__ import annotations

import hashlib

SUBJECTS = ("rivers", "mountains", "painters", "metals", "birds", "languages", "bridges", "planets")
SENTENCE = "Name three {} and say in one plain sentence which of them you would show to a friend and why. "


def prompts(count: int, sentences: int) -> list[str]:
    """`count` different user messages of `sentences` sentences (SmolLM2: 22 tokens each, and 31 for the template)."""
    return ["".join(SENTENCE.format(SUBJECTS[(i + j) % len(SUBJECTS)]) for j in range(sentences)) for i in range(count)]


def reward(text: str) -> float:
    """0 or 1, by the text's hash: every group has something to learn from, and no peer is favoured."""
    return float(hashlib.sha256(text.encode()).digest()[0] % 2)
