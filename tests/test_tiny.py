"""The tiny model: same seed same bits, every text survives its tokenizer, the template says what was asked."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minirllm.attention import IMPLEMENTATION, ForestLayout
from minirllm.models import tiny

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
TOKENIZER = tiny.build_tokenizer()


def digest(model: torch.nn.Module) -> str:
    """SHA-256 of all weights, in order."""
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def test_same_seed_same_bits_and_other_seed_other_bits() -> None:
    assert digest(tiny.build(3)[0]) == digest(tiny.build(3)[0]) != digest(tiny.build(4)[0])


def test_global_random_state_is_untouched() -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    tiny.build()
    assert torch.equal(torch.rand(3), expected)


def test_shapes_are_multiples_of_16_and_embeddings_are_tied() -> None:
    model, tokenizer = tiny.build()
    config = model.config
    sizes = [config.hidden_size, config.intermediate_size, config.head_dim, config.vocab_size]
    assert [size % 16 for size in sizes] == [0, 0, 0, 0]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert config._attn_implementation == IMPLEMENTATION
    assert len(tokenizer) == 256 + 7 <= config.vocab_size
    assert (
        model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id
    )
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_survives(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert all(0 <= token < len(TOKENIZER) for token in ids)


@pytest.mark.parametrize(
    "text", ["a . b , don 't", "\x00\r\n\t ", "<think>x</think><tool_call>", "", "  lead", "e\u0301"]
)
def test_awkward_text_survives(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_a_byte_is_its_own_id_and_markers_are_one_token() -> None:
    assert TOKENIZER.encode("A\xe9") == [0x41, 0xC3, 0xA9]
    assert [len(TOKENIZER.encode(token)) for token in tiny.CONTROL_TOKENS + tiny.MARKER_TOKENS] == [1] * 7
    assert TOKENIZER.decode(TOKENIZER.encode("<think>a<|im_end|>"), skip_special_tokens=True) == "<think>a"


def test_template_plain() -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n<|im_start|>assistant\n"
    )


def test_template_with_tools() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "r1"},
        {"role": "tool", "content": "r2"},
    ]
    text = TOKENIZER.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    head, tail = text.split("<|im_start|>user\nu<|im_end|>\n")
    assert head.startswith("<|im_start|>system\nS\n\n# Tools\n")
    assert '"name": "look"' in head
    assert head.count("system") == 1
    one = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    assert tail == (
        f"<|im_start|>assistant\n{one}\n{one}<|im_end|>\n<|im_start|>user\n<tool_response>\nr1\n</tool_response>\n"
        "<tool_response>\nr2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_forward_is_causal() -> None:
    model, _ = tiny.build()
    ids = torch.tensor([[72, 105, 33, 10]])
    other = torch.tensor([[72, 105, 99, 99]])
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)

    def logits(ids_1T: torch.Tensor) -> torch.Tensor:
        layout = ForestLayout([[(0, 4)]])
        with torch.no_grad():
            return model(
                ids_1T, attention_mask=mask, position_ids=torch.arange(4)[None], layout=layout, use_cache=False
            ).logits[0]

    first, second = logits(ids), logits(other)
    assert torch.equal(first[:2], second[:2])
    assert not torch.equal(first[2:], second[2:])
