"""Checkpoints: everything a run is, in one folder that is either whole or ignored.

Owns: the folder's files, atomic writing, checksums, which old ones go. Does not know: what a step does, when to save.

``checkpoints/step_000010/`` holds the weights in their standard form (peft adapter, or transformers model and
tokenizer), ``older.safetensors`` (earlier weights that rollouts ahead of training still sample from),
``optimizer.safetensors`` (AdamW's moments), ``state.json`` (trainer numbers and the caller's extra: run
seed, data cursor, best metric) and, written last, ``MANIFEST.json`` with the SHA-256 of every other file. There is no
generator state to keep: all randomness is drawn from (seed, position). The folder is written under another name, synced
to the disk and renamed, so a kill at any moment leaves the previous one.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from minirllm.errors import CheckpointError, ModelError
from minirllm.files import sha256, sync, why
from minirllm.policy import Policy

MANIFEST, STATE, OPTIMIZER = "MANIFEST.json", "state.json", "optimizer.safetensors"
NAME = re.compile(r"step_(\d{6,})")
PARTIAL = ".partial"  # suffix of folders that are being written or removed


class Stateful(Protocol):
    """What is saved of the trainer: tensors by name, and plain numbers."""

    def state_dict(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]: ...

    def load_state_dict(self, tensors: dict[str, torch.Tensor], numbers: dict[str, Any]) -> None: ...


def save(
    folder: Path,
    step: int,
    policy: Policy,
    trainer: Stateful,
    extra: dict[str, Any],
    keep: int = 2,
    best_step: int | None = None,
) -> Path:
    """Write the state after `step` steps into `folder`; then remove all but the newest `keep` and that of `best_step`.

    Reads tensors and waits for the disk: call it through ``policy.run``. `extra` is any JSON value that `load` shall
    give back. Raises CheckpointError when it cannot be written (a full disk, say): nothing of it is left behind, older
    checkpoints are untouched, and training can go on.
    """
    final = folder / f"step_{step:06d}"
    partial = folder / f".{final.name}{PARTIAL}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_partial(folder)
        partial.mkdir()
        _write(partial, step, policy, trainer, extra)
        if final.exists():  # a resumed run saves this step again: a folder cannot be renamed over another
            final.rename(folder / f".{final.name}.old{PARTIAL}")
        partial.rename(final)
        sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        last = newest(folder)[0]
        raise CheckpointError(
            f"Cannot save a checkpoint of step {step} in {folder}: {why(error)}. "
            f"The last whole one is {last.name if last else 'none'}."
        ) from None
    _remove_partial(folder)
    steps = _steps(folder)  # any later than this one are torn ones that the run was not resumed from
    kept = {*[number for number, _ in steps if number <= step][-keep:], best_step}
    for number, path in steps:
        if number not in kept:
            shutil.rmtree(path, ignore_errors=True)
    return final


def newest(folder: Path, until: float = math.inf) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint in `folder` of a step up to `until`, if any; one sentence for each that is not whole
    and newer."""
    skipped = []
    for step, path in reversed(_steps(folder)):
        if step > until:
            continue
        try:
            verify(path)
        except CheckpointError as error:
            skipped.append(str(error))
        else:
            return path, skipped
    return None, skipped


def of_run(folder: Path) -> Path:
    """The newest whole checkpoint of the run in `folder`. Raises CheckpointError, saying why each is none."""
    path, skipped = newest(folder / "checkpoints")
    if path is None:
        raise CheckpointError(" ".join([f"{folder} holds no whole checkpoint.", *skipped]))
    return path


def verify(path: Path) -> None:
    """Raises CheckpointError, naming the file, unless every file of the checkpoint has the bytes that were written."""
    try:
        text = (path / MANIFEST).read_text()
        files = json.loads(text)["files"]
        for name, digest in files.items():
            if not (path / name).is_file():
                raise CheckpointError(f"Checkpoint {path} is not whole: {name} is missing.")
            if sha256(path / name) != digest:
                raise CheckpointError(
                    f"Checkpoint {path} is not whole: the bytes of {name} have changed since it was written."
                )
        if text != _manifest(files):
            raise ValueError("it is not as it was written")
    except FileNotFoundError:
        raise CheckpointError(f"Checkpoint {path} is not whole: it has no {MANIFEST}, which is written last.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"Checkpoint {path} is not whole: {MANIFEST} cannot be read ({error}).") from None


def load(path: Path, policy: Policy, trainer: Stateful) -> dict[str, Any]:
    """Put weights, moments, step and version back; returns the `extra` of `save`. Torch work: call by ``policy.run``.

    Raises CheckpointError when the checkpoint is not whole or belongs to other parameters, ModelError as
    `Policy.load_weights` does.
    """
    verify(path)
    try:
        state = json.loads((path / STATE).read_text())
        policy.load_weights(path)
        policy.load_kept(path)
        trainer.load_state_dict(load_file(path / OPTIMIZER), state["trainer"])
    except SafetensorError as error:
        raise CheckpointError(f"Checkpoint {path} holds a file that is no safetensors file: {error}.") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"Checkpoint {path} holds a {STATE} that is no JSON: {error}.") from None
    except (KeyError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise CheckpointError(
            f"Checkpoint {path} belongs to a model with other trainable parameters: {error}."
        ) from None
    if policy.weights_sha256() != state["weights_sha256"]:
        raise CheckpointError(
            f"Checkpoint {path} has other trainable parameters: use the model and lora options it was trained with."
        )
    extra: dict[str, Any] = state["extra"]
    return extra


def _write(folder: Path, step: int, policy: Policy, trainer: Stateful, extra: dict[str, Any]) -> None:
    tensors, numbers = trainer.state_dict()
    policy.save(folder)
    save_file({name: value.cpu().contiguous() for name, value in tensors.items()}, folder / OPTIMIZER)
    state = {"step": step, "trainer": numbers, "weights_sha256": policy.weights_sha256(), "extra": extra}
    (folder / STATE).write_text(json.dumps(state, indent=1))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    digests = {path.relative_to(folder).as_posix(): sha256(path) for path in files}
    (folder / MANIFEST).write_text(_manifest(digests))
    for path in [*files, folder / MANIFEST, *(path for path in folder.rglob("*") if path.is_dir()), folder]:
        sync(path)


def _manifest(digests: dict[str, str]) -> str:
    """The manifest's bytes are a function of what they say: a changed one is noticed."""
    return json.dumps({"files": digests}, indent=1)


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every checkpoint folder, oldest first, whole or not."""
    found = [(NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(match[1]), path) for match, path in found if match and path.is_dir())


def _remove_partial(folder: Path) -> None:
    for path in folder.glob(f".step_*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)
