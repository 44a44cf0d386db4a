"""From a name to a model in memory: `smollm2-135m`, `tiny`, a local folder or a hub id, with an optional ``@revision``.

Owns: what a name means, the files behind it, and one clear sentence for everything that can be wrong with it. Every
model is loaded with the attention of `minirllm.attention`, and that each layer really goes through it is checked at
once. Does not know: adapters, optimizers, sampling.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from minirllm import embedded, tiny
from minirllm.attention import IMPLEMENTATION, ForestLayout
from minirllm.config import nearest
from minirllm.embedded import Progress
from minirllm.errors import ModelError

BUILT_IN = (embedded.NAME, "tiny")
NETWORK_ERRORS: Any = (
    OSError,
    *HfHubHTTPError.__bases__,
)  # among the bases: the error of the hub library's HTTP client
FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]  # never pickles, never code


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to train or sample, and where it came from."""

    model: Any  # transformers.PreTrainedModel, in eval mode
    tokenizer: Any  # transformers.PreTrainedTokenizerBase, with a chat template
    name: str  # as asked for, without the revision
    path: Path | None  # the folder its files were read from; None for `tiny`
    revision: str  # hub: the commit; built in: the digest of the source file or the seed; local folder: ""
    template_hash: str  # first 16 hex digits of the SHA-256 of the chat template


@dataclass(frozen=True, slots=True)
class Source:
    """What a name resolved to."""

    name: str
    path: Path | None
    revision: str


def load(
    name: str, device: str = "cpu", dtype: torch.dtype | None = None, progress: Progress | None = None
) -> LoadedModel:
    """The model on `device`, in fp32 on the CPU and bf16 elsewhere unless `dtype` says otherwise.

    Raises ModelError. `progress` hears of a conversion (half a minute, once per machine).
    """
    source = resolve(name, progress)
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    model, tokenizer = tiny.build() if source.path is None else _from_folder(source.path, source.name, dtype)
    template = tokenizer.chat_template
    if not isinstance(template, str):
        raise ModelError(
            f"Model {source.name} has no {'default ' if template else ''}chat template: use an instruction-tuned model "
            "(-Instruct, -it), or put a chat_template.jinja into a local copy of its folder."
        )
    model = model.to(device=device, dtype=dtype).eval()
    _check_attention(model, source.name)
    digest = hashlib.sha256(template.encode()).hexdigest()[:16]
    return LoadedModel(model, tokenizer, source.name, source.path, source.revision, digest)


def resolve(name: str, progress: Progress | None = None) -> Source:
    """The folder behind a name, fetched or converted if need be. Raises ModelError."""
    bare, _, revision = name.partition("@")
    if bare not in BUILT_IN and name and Path(name).expanduser().is_dir():  # a folder's own name may contain an @
        return _local(name, "")
    if name.endswith("@"):
        raise ModelError(
            f"Model {name!r} ends in @ without a revision: write {bare} or {bare}@<branch, tag or commit>."
        )
    if bare in BUILT_IN:
        own = embedded.GGUF_SHA256[:12] if bare == embedded.NAME else "0"
        if revision not in ("", own):
            raise ModelError(f"Model {bare} is built in and has one revision, {own}: drop @{revision}.")
        return Source(bare, embedded.folder(progress) if bare == embedded.NAME else None, own)
    if bare.startswith((".", "/", "~")) or (bare and Path(bare).expanduser().exists()):
        return _local(bare, revision)
    if bare.count("/") != 1:
        raise ModelError(
            f"There is no model {bare!r}{nearest(bare, list(BUILT_IN))}: "
            f"use {', '.join(BUILT_IN)}, a local folder, or a hub id like Qwen/Qwen3-0.6B."
        )
    path = _from_hub(bare, revision or None)
    return Source(bare, path, path.name)


def _local(name: str, revision: str) -> Source:
    path = Path(name).expanduser()
    if revision:
        raise ModelError(f"Model {name} is a local folder, which has no revisions: drop @{revision}.")
    if not path.is_dir():
        raise ModelError(
            f"Model {name} is {'a file' if path.exists() else 'not there'}: "
            "--model takes a folder with config.json and *.safetensors."
        )
    if not (path / "config.json").is_file():
        adapter = (path / "adapter_config.json").is_file()
        hint = (
            "it holds a LoRA adapter: give --model its base model and --checkpoint this folder"
            if adapter
            else "save one there with save_pretrained, or name another folder"
        )
        raise ModelError(f"Folder {name} has no config.json, so it is no model; {hint}.")
    return Source(name, path, "")


def _from_hub(repo: str, revision: str | None) -> Path:
    """The snapshot folder, named after the commit. What is already on disk is not fetched again."""
    at = f"{repo}@{revision}" if revision else repo
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=FILES, ignore_patterns=["*/*"]))
    except GatedRepoError:
        raise ModelError(
            f"Model {at} is gated: accept its terms on its hub page, then run `hf auth login` or set HF_TOKEN."
        ) from None
    except RevisionNotFoundError:
        raise ModelError(
            f"Model {repo} has no revision {revision!r}: use a branch, tag or commit listed on its hub page."
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"The hub has no model {repo!r}, or it is private: "
            "check the spelling, or set HF_TOKEN to a token that may read it."
        ) from None
    except HFValidationError as error:
        raise ModelError(
            f"{repo!r} is neither a local folder nor a hub id ({str(error).rstrip('.')}): "
            f"use {', '.join(BUILT_IN)}, a folder, or owner/name."
        ) from None
    except OfflineModeIsEnabled:
        raise ModelError(
            f"Model {at} is not on this machine and HF_HUB_OFFLINE is set: "
            f"unset it, or use {embedded.NAME} or a local folder."
        ) from None
    except NETWORK_ERRORS as error:
        raise ModelError(
            f"Cannot fetch model {at} from the hub ({_first_line(error)}): "
            f"check the network, or use {embedded.NAME} or a local folder."
        ) from None


def _from_folder(path: Path, name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            model = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=IMPLEMENTATION,
                trust_remote_code=False,
                use_safetensors=True,
            )
    except (
        OSError,
        ValueError,
        KeyError,
        ImportError,
        RuntimeError,
        SafetensorError,
    ) as error:  # what transformers raises for files it cannot use
        reason = _first_line(error)
        if "trust_remote_code" in str(error) or "custom code" in str(error):
            reason = "it needs code from its own repository, which is never run"
        raise ModelError(
            f"Cannot load model {name} ({reason}): use a causal language model that transformers supports."
        ) from error
    return model, tokenizer


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers into a log file."""
    shown = transformers_logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


class _Counting(ForestLayout):
    """Counts which layers came to ask for attention."""

    def __init__(self, length: int):
        super().__init__([[(0, length)]])
        self.seen: set[int] = set()

    def attend(self, layer: int, *args: Any) -> torch.Tensor:
        self.seen.add(layer)
        return super().attend(layer, *args)


def _check_attention(model: Any, name: str) -> None:
    """Every layer's attention must go through ours, else training and sampling would not see the same keys."""
    layout = _Counting(4)
    layers = model.config.get_text_config().num_hidden_layers
    ids_1T, position_1T = (torch.arange(4, device=model.device)[None] for _ in range(2))
    mask = torch.ones(
        1, 1, 1, 1, dtype=torch.bool, device=model.device
    )  # taken as it is, and not read by our attention
    try:
        with torch.no_grad():
            model(input_ids=ids_1T, position_ids=position_1T, attention_mask=mask, layout=layout, use_cache=False)
        reason = f"{len(layout.seen)} of its {layers} layers use exchangeable attention"
    except (TypeError, KeyError, ValueError, RuntimeError, AttributeError) as error:
        reason = f"it cannot take a layout: {error}"
    if len(layout.seen) != layers:
        raise ModelError(
            f"Model {name} ({type(model).__name__}) cannot be used: {reason}; "
            "choose one whose every layer is plain attention (Llama, Qwen, Gemma, Mistral)."
        )
