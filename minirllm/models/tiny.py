"""A whole language model small enough to build in milliseconds: for tests, smoke runs and reading.

Owns: `build()`: a two-layer Llama with weights from a seed, a byte-level tokenizer and a ChatML template with tools,
all made in code, no file read. Does not know: how models are found or trained.
"""

from __future__ import annotations

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from minirllm.attention import IMPLEMENTATION

# Every dimension is a multiple of 16 (vector width), as the start-up probe of exact arithmetic expects of a real model.
HIDDEN = 64
INTERMEDIATE = 192
LAYERS = 2
HEADS = 4
KEY_VALUE_HEADS = 2
MAX_POSITIONS = 131_072  # rotary positions cost nothing; a token is a byte, so agents' prompts are long

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # never part of an answer's text
MARKER_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # text that a parser looks for
VOCABULARY = 272  # 256 bytes + 7 added tokens, padded to a multiple of 16; the last 9 ids have no text

TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages and messages[0].role == 'system' %}
{{- messages[0].content + '\\n\\n' }}
{%- endif %}
{{- '# Tools\\n\\nYou may call one or more functions. Their signatures are within <tools></tools>:\\n<tools>' }}
{%- for tool in tools %}
{{- '\\n' + (tool | tojson) }}
{%- endfor %}
{{- '\\n</tools>\\n\\nFor each call, return a JSON object within <tool_call></tool_call>:\\n' }}
{{- '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first and tools %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{%- if message.content or not loop.first %}
{{- '\\n' }}
{%- endif %}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + (message.content or '') + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def build(seed: int = 0) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model (fp32, eval mode, on the CPU) and its tokenizer. The same seed gives the same bits."""
    tokenizer = build_tokenizer()
    end, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        attn_implementation=IMPLEMENTATION,
    )
    with torch.random.fork_rng(devices=[]):  # the constructor draws weights from the global generator; we draw our own
        model = LlamaForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # the norms stay at one
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    return model, tokenizer


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, its value the id; then the added tokens. ``decode(encode(text)) == text`` for any text."""
    letters = byte_letters()
    core = Tokenizer(token_models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.Sequence(  # BPE caches whole words; single characters keep the cache small
        [
            pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in CONTROL_TOKENS])
    core.add_tokens([AddedToken(token, special=False) for token in MARKER_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def byte_letters() -> list[str]:
    """The stand-in of each byte in byte-level BPE (GPT-2): itself where printable, else 256, 257, ... in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]
