"""Which tokens lie in which slot, and what a new prompt can take over from them.

Owns: the bookkeeping of the slot cache, on the event loop, in numpy. Slots that no request owns keep their tokens: they
are the prefix cache, overwritten least recently used first. Does not know: tensors, when to run what.

Legend: S slots, C positions per slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

LEAST_SHARED = 8  # a shorter common prefix is not worth a copy
OWN = -1  # in place of a version: the policy's own weights, as they are now


class Owner(Protocol):
    """A request that sits in a slot."""

    slot: int


@dataclass(slots=True)
class Placement:
    """Where a prompt goes: `reused` tokens of `source` are its own; a copy is needed when the slots differ."""

    target: int
    source: int
    reused: int


class Slots:
    """`chunk` > 0 means prefixes are reused in whole prefill chunks only (fixed shapes)."""

    def __init__(self, slots: int, capacity: int, chunk: int = 0):
        self.chunk = chunk
        self.owner: list[Owner | None] = [None] * slots
        self.ids_SC = np.zeros((slots, capacity), np.int64)
        self.known_S = np.zeros(slots, np.int64)  # tokens of the sequence, the last of which may not be stored yet
        self.stored_S = np.zeros(slots, np.int64)  # tokens whose keys and values are in the cache
        # tokens of the prompt; its last hidden state is kept once it is stored
        self.prompt_S = np.zeros(slots, np.int64)
        self.used_S = np.zeros(slots, np.int64)  # a clock: when the slot was last given back
        self.weights_S = np.full(slots, OWN)  # version of the weights that computed it
        self._clock = 0

    @property
    def free(self) -> list[int]:
        """Slots that no request owns."""
        return [slot for slot, owner in enumerate(self.owner) if owner is None]

    def place(self, prompt: np.ndarray, weights: int = OWN) -> Placement | None:
        """The best slot for a prompt, which takes over what the same weights have computed. None: no slot is free, or a
        prompt that is being prefilled right now shares more with this one than anything stored does, so waiting is
        cheaper."""
        free = self.free
        if not free:
            return None
        agree_SN = self.ids_SC[:, : len(prompt)] == prompt
        shared_S = np.where(agree_SN.all(1), len(prompt), agree_SN.argmin(1))
        shared_S = np.where(self.weights_S == weights, np.minimum(shared_S, self.known_S), 0)
        now_S = self._reusable(len(prompt), shared_S, self.stored_S)
        soon_S = self._reusable(len(prompt), shared_S, np.maximum(self.stored_S, self.prompt_S))
        owned_S = np.array([owner is not None for owner in self.owner])
        source = int(now_S.argmax())
        if (soon_S * owned_S).max() > now_S[source]:
            return None
        reused = int(now_S[source])
        for slot in free:  # a slot with nothing but the reused prefix loses nothing by being continued in place
            if reused and now_S[slot] == self.stored_S[slot] == reused:
                return Placement(slot, slot, reused)
        target = min(free, key=lambda slot: (self.used_S[slot], slot))
        return Placement(target, source if reused else target, reused)

    def _reusable(self, n: int, shared_S: np.ndarray, stored_S: np.ndarray) -> np.ndarray:
        """How many tokens of an n-token prompt each slot can give. All n only to an identical prompt, whose last hidden
        state is kept; otherwise at least one token is left to run."""
        ready_S = np.minimum(shared_S, stored_S)
        part_S = np.minimum(ready_S, n - 1)
        if self.chunk:
            part_S = np.minimum(part_S, self.prompt_S) // self.chunk * self.chunk
        part_S[part_S < LEAST_SHARED] = 0
        return np.where((ready_S >= n) & (self.prompt_S == n), n, part_S)

    def take(self, owner: Owner, placement: Placement, prompt: np.ndarray, weights: int = OWN) -> None:
        """Give the target slot to a request."""
        slot, n = placement.target, len(prompt)
        assert self.owner[slot] is None, slot
        owner.slot, self.owner[slot] = slot, owner
        self.ids_SC[slot, :n], self.weights_S[slot] = prompt, weights
        self.known_S[slot] = self.prompt_S[slot] = n
        self.stored_S[slot] = placement.reused

    def append(self, slot: int, token: int) -> None:
        """A token was sampled: known, not stored."""
        self.ids_SC[slot, self.known_S[slot]] = token
        self.known_S[slot] += 1

    def give_back(self, owner: Owner) -> None:
        """The request is gone; what is stored stays, for others to reuse."""
        slot, owner.slot, self._clock = owner.slot, -1, self._clock + 1
        self.owner[slot], self.used_S[slot] = None, self._clock
        self.known_S[slot] = self.stored_S[slot]

    def forget(self, slot: int | slice | np.ndarray = slice(None)) -> None:
        """Nothing in this slot (default: in any; or in those of a mask) may be reused."""
        self.known_S[slot] = self.stored_S[slot] = self.prompt_S[slot] = self.used_S[slot] = 0

    def exchange(self, a: int, b: int) -> None:
        """Two slots change places."""
        for column in (self.ids_SC, self.known_S, self.stored_S, self.prompt_S, self.used_S, self.weights_S):
            column[[a, b]] = column[[b, a]]
        self.owner[a], self.owner[b] = self.owner[b], self.owner[a]
        for slot in (a, b):
            owner = self.owner[slot]
            if owner is not None:
                owner.slot = slot
