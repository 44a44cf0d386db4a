"""Does TRL's GRPOTrainer repeat itself? The same seed twice, and killed in step 3 and resumed; prints one JSON line.

    python benchmarks/peers/trl_repeat.py MODEL_FOLDER --prompts 2 --group 4 --new-tokens 16 --steps 4

A run is known by the hash of its trained weights after the last step. Seed 0, a checkpoint after each step.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import trl
import trl_steps
from transformers import TrainerCallback

KILLED_IN = 3


class Kill(TrainerCallback):
    """Ends the process without a word once step `KILLED_IN` has begun."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == KILLED_IN - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def one(options: Any, mode: str, folder: str) -> str:
    """Train; the hash of the adapter."""
    trainer = trl_steps.trainer_of(options, folder, save_strategy="steps", save_steps=1, seed=0)
    if mode == "kill":
        trainer.add_callback(Kill())
    trainer.train(resume_from_checkpoint=mode == "resume")
    digest = hashlib.sha256()
    for _, parameter in sorted((n, p) for n, p in trainer.model.named_parameters() if p.requires_grad):
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = trl_steps.parser()
    parser.add_argument("--mode", choices=["run", "kill", "resume"], help="(internal) one run")
    parser.add_argument("--folder", help="(internal) of that run")
    options = parser.parse_args()
    if options.mode:
        print(one(options, options.mode, options.folder))
        return

    def child(mode: str, folder: str) -> str:
        command = [sys.executable, *sys.argv, "--mode", mode, "--folder", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != (-signal.SIGKILL if mode == "kill" else 0):
            raise SystemExit(f"{mode} ended with {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout.strip().splitlines()[-1] if mode != "kill" else ""

    with tempfile.TemporaryDirectory() as place:
        first, second = (child("run", str(Path(place) / name)) for name in ("first", "second"))
        child("kill", str(Path(place) / "third"))
        resumed = child("resume", str(Path(place) / "third"))
    result = {"trl": trl.__version__, "weights": first, "same_seed_twice": second, "killed_and_resumed": resumed}
    print(json.dumps(result | {"twice_equal": first == second, "resumed_equal": first == resumed}))


if __name__ == "__main__":
    main()
