"""The policy against transformers' own forward, on several model families; scores, adapters, weights on disk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from minirllm import attention, tree
from minirllm.config import Config
from minirllm.errors import ConfigError, ModelError
from minirllm.models import tiny
from minirllm.policy import Policy
from minirllm.tree import TokenTree
from minirllm.types import Completion

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"sliding_window": 8, "attn_logit_softcapping": None}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"sliding_window": 8, "num_hidden_layers": 7}),
}


@contextmanager
def policy(model: Any, **options: Any) -> Iterator[Policy]:
    made = Policy(model, tiny.build()[1], Config(**options))
    try:
        yield made
    finally:
        made.close()


def random_model(family: str, implementation: str) -> Any:
    kind, config, extra = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind._from_config(config(**SIZES | extra), attn_implementation=implementation).eval()


def forest(branches: int = 3, prompt: int = 20, answer: int = 9) -> tree.Forest:
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 100, prompt).tolist()
    trees = []
    for index in range(branches):
        ids = rng.integers(3, 100, answer + index).tolist()
        one = TokenTree()
        one.add(shared, Completion(ids, [-1.0] * len(ids), "stop", 0), f"call{index}")
        trees.append(one)
    return tree.merge(trees)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_model_itself(family: str) -> None:
    ids = torch.randint(3, 100, (40,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = random_model(family, "eager")(ids[None]).logits[0]
    with policy(random_model(family, attention.IMPLEMENTATION), lora_rank=0) as p, torch.no_grad():
        got = p.logits(p.hidden(ids, torch.arange(40), attention.ForestLayout([[(0, 40)]])))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_a_forest_are_those_of_each_sequence_alone(family: str) -> None:
    whole = forest()
    with policy(random_model(family, attention.IMPLEMENTATION), lora_rank=0) as p:
        logprob_T, entropy_T, _ = p.score(whole)
        assert logprob_T.requires_grad
        assert not entropy_T.requires_grad
        together = sorted(logprob_T[torch.from_numpy(whole.trained_T)].tolist())
        alone = []
        for row in tree.unfold(whole):
            score_T = p.score(row)[0]
            alone += score_T[torch.from_numpy(row.trained_T)].tolist()
        assert logprob_T[torch.from_numpy(~whole.trained_T)].abs().sum() == 0
        if p.level == "exact":
            assert together == sorted(alone)
        assert together == pytest.approx(sorted(alone), abs=1e-5)


def test_a_soft_cap_is_part_of_the_score() -> None:
    with policy(random_model("gemma2", attention.IMPLEMENTATION), lora_rank=0) as p, torch.no_grad():
        assert p.logits(torch.full((1, 64), 1e4)).abs().max() <= 30.0  # Gemma 2 caps at 30


def test_a_model_that_caps_its_attention_is_refused() -> None:
    kind, config, extra = FAMILIES["gemma2"]
    model = kind._from_config(
        config(**SIZES | extra | {"attn_logit_softcapping": 50.0}), attn_implementation=attention.IMPLEMENTATION
    )
    with pytest.raises(ModelError, match="attn_logit_softcapping"), policy(model, lora_rank=0):
        pass


def test_a_fresh_adapter_changes_nothing_and_is_the_same_for_the_same_seed() -> None:
    hashes = []
    for seed in (0, 0, 1):
        with policy(tiny.build()[0], lora_rank=4, seed=seed) as p:
            whole = forest()
            assert torch.equal(p.score(whole)[0].detach(), p.score(whole, reference=True)[0])
            assert all("lora_" in name for name in p.trainable())
            hashes.append(p.weights_sha256())
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("rank", [0, 4])
def test_the_reference_stays_where_training_began(rank: int) -> None:
    with policy(tiny.build()[0], lora_rank=rank, kl_beta=0.1) as p:
        whole = forest()
        before, digest = p.score(whole)[0].detach(), p.weights_sha256()
        with torch.no_grad():
            for parameter in p.trainable().values():
                parameter += 0.05
        assert p.weights_sha256() != digest
        assert not torch.equal(p.score(whole)[0].detach(), before)
        reference = p.score(whole, reference=True)[0]
        assert torch.equal(reference, before)
        assert not reference.requires_grad


@pytest.mark.parametrize("rank", [0, 4])
def test_weights_round_trip(rank: int, tmp_path: Path) -> None:
    with policy(tiny.build()[0], lora_rank=rank) as p:
        with torch.no_grad():
            for parameter in p.trainable().values():
                parameter += 0.01
        digest = p.weights_sha256()
        p.save(tmp_path)
    with policy(tiny.build()[0], lora_rank=rank) as other:
        assert other.weights_sha256() != digest
        other.load_weights(tmp_path)
        assert other.weights_sha256() == digest
    with policy(tiny.build()[0], lora_rank=4 - rank) as wrong, pytest.raises(ModelError, match="lora_rank"):
        wrong.load_weights(tmp_path)
    if rank:
        with policy(tiny.build()[0], lora_rank=8) as wrong, pytest.raises(ModelError, match="does not fit"):
            wrong.load_weights(tmp_path)


def test_levels_are_found_refused_and_switched_off() -> None:
    with policy(tiny.build()[0]) as p:
        assert p.level in ("exact", "fixed")
    for wanted in ("fixed", "off"):
        with policy(tiny.build()[0], determinism=wanted) as p:
            assert p.level == wanted
    half = tiny.build()[0].to(torch.bfloat16)
    with pytest.raises(ConfigError, match="determinism = exact"), policy(half, determinism="exact"):
        pass


def test_unknown_lora_targets_are_a_sentence() -> None:
    with pytest.raises(ConfigError, match="no_such_layer"), policy(tiny.build()[0], lora_targets="no_such_layer"):
        pass


def test_everything_runs_on_one_thread() -> None:

    async def names() -> set[str]:
        return {await p.run(lambda: threading.current_thread().name) for _ in range(5)}

    with policy(tiny.build()[0], lora_rank=0) as p:
        assert len(asyncio.run(names())) == 1
        assert asyncio.run(p.run(torch.get_num_threads)) == p.threads
