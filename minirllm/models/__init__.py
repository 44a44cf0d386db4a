"""From a name to a model in memory: `smollm2-135m`, `tiny`, a local folder or a hub id, with an optional ``@revision``.

Owns: what a name means, and one clear sentence when it means nothing. A place that models come from is a module here:
`embedded` (a package), `tiny` (code), `hub`; all are loaded by `folder`. Does not know: adapters, optimizers, sampling.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minirllm.config import nearest
from minirllm.errors import ModelError
from minirllm.models import embedded, folder, hub, tiny
from minirllm.models.embedded import Progress

BUILT_IN = (embedded.NAME, "tiny")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to train or sample, and where it came from."""

    model: Any  # transformers.PreTrainedModel, in eval mode
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    name: str  # as asked for, without the revision
    path: Path | None  # the folder its files were read from; None for `tiny`
    revision: str  # hub: the commit; built in: the digest of the source file or the seed; local folder: ""


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
    with _one_thread():
        model, tokenizer = tiny.build() if source.path is None else folder.load(source.path, source.name, dtype)
        model = model.to(device=device, dtype=dtype).eval()
        folder.check_attention(model, source.name)
    return LoadedModel(model, tokenizer, source.name, source.path, source.revision)


def load_tokenizer(name: str) -> Any:
    """The model's tokenizer alone. Raises ModelError."""
    source = resolve(name)
    return tiny.build_tokenizer() if source.path is None else folder.load_tokenizer(source.path, source.name)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Loading must not leave a pool of OpenMP threads behind: with more of them than processors libgomp lets the
    threads of every pool sleep at once, and waking them costs a decode step a third of its speed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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
    path = hub.fetch(bare, revision or None)
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
