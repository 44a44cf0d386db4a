"""Slots: which prefix a prompt takes over, from where, and what it costs others."""

from __future__ import annotations

import numpy as np

from minirllm.engines.slots import LEAST_SHARED, Placement, Slots


class Request:
    slot = -1


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int64)


def run(slots: Slots, prompt: np.ndarray, sampled: int = 0, keep: bool = False) -> tuple[Request, Placement]:
    """A request that prefills its prompt and samples; unless `keep`, it then leaves."""
    request = Request()
    placement = slots.place(prompt)
    assert placement is not None
    slots.take(request, placement, prompt)
    slots.stored_S[request.slot] = len(prompt)
    for token in range(sampled):
        slots.append(request.slot, 1000 + token)
        slots.stored_S[request.slot] = len(prompt) + token
    if not keep:
        slots.give_back(request)
    return request, placement


A, B = np.arange(100), np.arange(200, 300)


def test_an_empty_cache_gives_the_lowest_slot_then_the_one_used_longest_ago() -> None:
    slots = Slots(3, 256)
    assert [run(slots, prompt)[1].target for prompt in (A, B, A + 500, B + 500)] == [0, 1, 2, 0]


def test_an_identical_prompt_is_reused_whole_and_copied_beside_its_owner() -> None:
    slots = Slots(3, 256)
    run(slots, A, sampled=3, keep=True)
    assert slots.place(A) == Placement(1, 0, 100)


def test_a_longer_or_shorter_prompt_keeps_one_token_to_run() -> None:
    slots = Slots(3, 256)
    run(slots, A, keep=True)
    assert slots.place(np.concatenate([A, B])) == Placement(1, 0, 100)
    assert slots.place(A[:60]) == Placement(1, 0, 59)
    assert slots.place(np.concatenate([A[:60], B])) == Placement(1, 0, 60)


def test_a_short_common_beginning_is_not_worth_a_copy() -> None:
    slots = Slots(3, 256)
    run(slots, A, keep=True)
    assert slots.place(np.concatenate([A[: LEAST_SHARED - 1], B])) == Placement(1, 1, 0)
    assert slots.place(np.concatenate([A[:LEAST_SHARED], B])) == Placement(1, 0, LEAST_SHARED)


def test_the_next_turn_takes_over_the_slot_and_leaves_out_the_token_not_stored() -> None:
    slots = Slots(3, 256)
    run(slots, A, sampled=3)
    assert slots.place(np.concatenate([A, ids(1000, 1001, 1002, 7, 8)])) == Placement(0, 0, 102)


def test_a_branch_copies_and_spares_the_longer_conversation() -> None:
    slots = Slots(3, 256)
    run(slots, A, sampled=3)
    assert slots.place(np.concatenate([A, ids(5, 6)])) == Placement(1, 0, 100)


def test_without_another_slot_the_tail_is_overwritten_in_place() -> None:
    slots = Slots(1, 256)
    run(slots, A, sampled=3)
    assert slots.place(np.concatenate([A, ids(5, 6)])) == Placement(0, 0, 100)


def test_a_prompt_waits_for_a_prefill_that_shares_more() -> None:
    slots = Slots(3, 256)
    first = Request()
    slots.take(first, Placement(0, 0, 0), A)  # nothing stored yet
    assert slots.place(A) is None
    assert slots.place(B) == Placement(1, 1, 0)
    slots.stored_S[0] = 64
    assert slots.place(A) is None
    assert slots.place(A[:65]) == Placement(1, 0, 64)
    slots.give_back(first)  # cancelled: nobody waits for it
    assert slots.place(A) == Placement(0, 0, 64)


def test_no_free_slot() -> None:
    slots = Slots(1, 256)
    run(slots, A, keep=True)
    assert slots.place(B) is None


def test_fixed_shapes_reuse_whole_chunks_of_prompts_only() -> None:
    slots = Slots(3, 256, chunk=32)
    run(slots, A, sampled=40, keep=True)
    grown = np.concatenate([A, 1000 + np.arange(40), B])
    assert slots.place(grown[:150]) == Placement(1, 0, 96)  # not 139: those were decoded
    assert slots.place(np.concatenate([A[:70], B])) == Placement(1, 0, 64)
    assert slots.place(A) == Placement(1, 0, 100)
    assert slots.place(np.concatenate([A[:31], B])) == Placement(1, 1, 0)


def test_nothing_is_reused_after_forgetting() -> None:
    slots = Slots(2, 256)
    run(slots, A)
    slots.forget()
    assert slots.place(A) == Placement(0, 0, 0)


def test_exchanged_slots_keep_their_owners() -> None:
    slots = Slots(3, 256)
    request, _ = run(slots, A, keep=True)
    slots.exchange(0, 2)
    assert request.slot == 2
    assert slots.owner == [None, None, request]
    assert slots.place(A) == Placement(0, 2, 100)
