"""The surroundings a run's bits depend on: hardware, versions, environment variables, the commit of this code.

Owns: what a manifest records about the machine. Does not know: torch, the run.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from minirllm import cpuinfo, set_too_late

PACKAGES = (
    "minirllm", "torch", "transformers", "tokenizers", "peft", "safetensors", "numpy", "starlette", "uvicorn", "httpx",
    "anyio", "datasets",
)  # fmt: skip
ENVIRONMENT = (
    "MKL_CBWR", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
)  # fmt: skip


def machine() -> dict[str, Any]:
    """This process's surroundings, as the manifest records them."""
    found = {name: next(iter(importlib.metadata.distributions(name=name)), None) for name in PACKAGES}
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "packages": {name: installed and installed.version for name, installed in found.items()},
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
        "set_too_late": list(set_too_late),
        "commit": _commit(),
    }


def _cpu() -> str:
    names = [line.partition(":")[2].strip() for line in cpuinfo().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str | None:
    """The git commit this code runs from, with ``+changes``; None when it is not a checkout of this project."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():  # installed: a repository further up would be somebody else's
        return None
    describe = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    try:
        done = subprocess.run(describe, cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git
        return None
    return done.stdout.strip() or None
