"""Sampling: noise, inverse CDF, truncation, penalties; each row independent of the others, to the bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from minirllm.engines import sampling
from minirllm.engines.sampling import Ending, Rows, invert_cdf, key, most_likely, sample, truncate, uniform
from minirllm.types import SamplingParams


def rows(temperatures: list[float], seeds: list[int], index: int = 0, special: list | None = None) -> Rows:
    n = len(temperatures)
    return Rows(
        np.array(temperatures, np.float32),
        np.array([key(s) for s in seeds], np.uint64),
        np.full(n, index),
        special or [],
    )


def probs(*values: float) -> torch.Tensor:
    return torch.tensor([values]).log()


def test_uniform_is_splitmix64() -> None:
    # SplitMix64 started at state 0 gives 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4 (published test vector)
    got = uniform(np.zeros(2, np.uint64), np.array([0, 1]))
    assert got.tolist() == [(0xE220A8397B1DCDAF >> 11) * 2.0**-53, (0x6E789E6AA1B965F4 >> 11) * 2.0**-53]


def test_uniform_fills_the_unit_interval_and_keys_do_not_overlap() -> None:
    draws = uniform(np.repeat(np.array([key(s) for s in range(100)], np.uint64), 100), np.tile(np.arange(100), 100))
    assert len(set(draws.tolist())) == 10_000
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.01
    assert abs(draws.var() - 1 / 12) < 0.005


def test_any_integer_is_a_seed() -> None:
    assert len({key(s) for s in (0, 1, -1, 2**64 + 5, 2**200 + 7, -(2**70) + 3)}) == 6
    assert key(5) == key(2**64 + 5)


@pytest.mark.parametrize(("u", "token"), [(0.0, 1), (0.199, 1), (0.2, 2), (0.4999, 2), (0.5, 4), (1 - 2**-53, 4)])
def test_inverse_cdf_by_hand(u: float, token: int) -> None:
    assert invert_cdf(probs(0, 0.2, 0.3, 0, 0.5, 0), torch.tensor([u], dtype=torch.float64)).tolist() == [token]


def test_inverse_cdf_across_blocks_never_picks_probability_zero() -> None:
    logprob_V = torch.full((1000,), float("-inf"))
    logprob_V[[255, 256, 700]] = math.log(1 / 3)
    got = [
        int(invert_cdf(logprob_V[None], torch.tensor([u], dtype=torch.float64)))
        for u in (0, 0.33, 0.34, 0.66, 0.67, 1 - 2**-53)
    ]
    assert got == [255, 255, 256, 256, 700, 700]


def test_samples_follow_the_distribution() -> None:
    n = 20_000
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().repeat(n, 1)
    got = sample(logits, Rows(np.ones(n, np.float32), np.full(n, key(3), np.uint64), np.arange(n)))
    share = np.bincount(got.token_ids, minlength=4) / n
    np.testing.assert_allclose(share, [0.1, 0.2, 0.3, 0.4], atol=0.012)  # 3.5 standard errors


def test_logprob_is_of_the_tempered_distribution() -> None:
    got = sample(probs(0.5, 0.25, 0.25), rows([2.0], [0]))
    weights = [math.sqrt(0.5), 0.5, 0.5]
    assert got.logprobs[0] == pytest.approx(math.log(weights[got.token_ids[0]] / sum(weights)), abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1e-9])
def test_cold_is_greedy_with_the_logprob_at_temperature_one(temperature: float) -> None:
    got = sample(probs(0.2, 0.5, 0.3), rows([sampling.effective_temperature(temperature)], [0]))
    assert got.token_ids == [1]
    assert got.logprobs[0] == pytest.approx(math.log(0.5), abs=1e-6)


def test_coldest_temperature_gives_numbers() -> None:
    got = sample(torch.tensor([[30.0, 29.0, -30.0]]), rows([sampling.COLDEST], [0]))
    assert got.token_ids == [0]
    assert got.logprobs == [0.0]


def test_truncation_by_hand() -> None:
    logprob_V = probs(0.4, 0.1, 0.3, 0.2)[0]
    cases = {
        (0.0, 2, 1.0): [4 / 7, 0, 3 / 7, 0],
        (0.0, 0, 0.7): [4 / 7, 0, 3 / 7, 0],
        (0.0, 0, 0.71): [4 / 9, 0, 3 / 9, 2 / 9],
        (0.0, 0, 1e-9): [1, 0, 0, 0],
        (0.5, 0, 1.0): [4 / 9, 0, 3 / 9, 2 / 9],
        (1.0, 0, 1.0): [1, 0, 0, 0],
        (0.0, 3, 0.5): [4 / 7, 0, 3 / 7, 0],  # top_p counts what top_k left: 4/9 < 0.5
        (0.0, 99, 1.0): [0.4, 0.1, 0.3, 0.2],
    }
    for (min_p, top_k, top_p), want in cases.items():
        got = truncate(logprob_V, SamplingParams(min_p=min_p, top_k=top_k, top_p=top_p)).exp()
        np.testing.assert_allclose(got, want, atol=1e-6, err_msg=str((min_p, top_k, top_p)))


def test_truncated_rows_report_the_renormalised_logprob() -> None:
    params = SamplingParams(top_k=1)
    got = sample(probs(0.5, 0.3, 0.2).repeat(2, 1), rows([1.0, 1.0], [0, 0], special=[(1, params, [])]))
    assert got.token_ids[1] == 0
    assert got.logprobs[1] == 0.0


def test_penalties_by_hand() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    logits = torch.zeros(2, 3)
    sample(logits, rows([1.0, 1.0], [0, 1], special=[(1, params, [2, 0, 2])]))
    np.testing.assert_allclose(logits, [[0, 0, 0], [-0.75, 0, -1.0]])


def test_most_likely_is_sorted_and_leaves_out_the_impossible() -> None:
    got = most_likely(probs(0.25, 0, 0.75)[0], 3)
    assert [i for i, _ in got] == [2, 0]
    assert got[0][1] == pytest.approx(math.log(0.75))
    asked = sample(probs(0.25, 0, 0.75), rows([1.0], [0], special=[(0, SamplingParams(top_logprobs=1), [])]))
    assert [i for i, _ in asked.top[0]] == [2]


@pytest.mark.parametrize("vocabulary", [272, 1000, 49_152])
def test_a_row_alone_equals_the_row_among_others(vocabulary: int) -> None:
    n = 33
    logits = torch.randn(n, vocabulary, generator=torch.Generator().manual_seed(0)) * 3
    temperatures, seeds = [(0.0, 0.7, 1.0, 1.3)[i % 4] for i in range(n)], list(range(n))
    asks = [
        SamplingParams(top_k=20, top_p=0.9, top_logprobs=3),
        SamplingParams(frequency_penalty=1.0),
        SamplingParams(min_p=0.02),
    ]
    special = [(i, asks[i % 3], [1, 2]) for i in range(n) if i % 5 == 1]
    together = sample(logits.clone(), rows(temperatures, seeds, 7, special))
    for width in (1, 2, 7):
        for at in range(0, n, width):
            part = slice(at, at + width)
            mine = [(i - at, p, s) for i, p, s in special if at <= i < at + width]
            got = sample(logits[part].clone(), rows(temperatures[part], seeds[part], 7, mine))
            assert got.token_ids == together.token_ids[part]
            assert got.logprobs == together.logprobs[part]
            assert all(together.top[at + i] == top for i, top in got.top.items())


def test_endings() -> None:
    eos = frozenset({2})
    assert Ending(SamplingParams(), eos, 9, None).reason([5, 2]) == "stop"
    assert Ending(SamplingParams(ignore_eos=True), eos, 9, None).reason([5, 2]) is None
    assert Ending(SamplingParams(ignore_eos=True, stop_token_ids=(7,)), eos, 9, None).reason([5, 7]) == "stop"
    assert Ending(SamplingParams(), eos, 2, None).reason([5, 6]) == "length"
    assert Ending(SamplingParams(), eos, 2, None).reason([5]) is None
    assert Ending(SamplingParams(), eos, 9, lambda ids: list(ids) == [5, 6]).reason([5, 6]) == "stop"
    assert Ending(SamplingParams(), eos, 1, None).reason([2]) == "stop"  # both at once: it did end by itself
