"""Train language agents with reinforcement learning without rewriting them: the public names.

Owns: the names users import, and the process environment that arithmetic depends on. The variables below only count
when they are set before torch is loaded, so importing this package is what sets them; a value the user has set always
wins. Does not know: torch. The names resolve on first use (PEP 562), so a process that only grades never loads it.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minirllm.agent_trainer import AgentTrainer
    from minirllm.config import Config
    from minirllm.flow import evaluator, rollout
    from minirllm.types import (
        AgentConfig,
        Episode,
        EvalOutput,
        Message,
        Signal,
        Step,
        Task,
        TerminationReason,
        Trajectory,
    )

__version__ = "0.1.0"

_HOMES = ("types", "config", "flow", "agent_trainer")  # where the public names live, the lightest module first

__all__ = [
    "AgentConfig",
    "AgentTrainer",
    "Config",
    "Episode",
    "EvalOutput",
    "Message",
    "Signal",
    "Step",
    "Task",
    "TerminationReason",
    "Trajectory",
    "__version__",
    "evaluator",
    "rollout",
]


def arithmetic_settings(cpuinfo: str) -> dict[str, str]:
    """Environment variables that make arithmetic quick and independent of the batch, by the text of /proc/cpuinfo.

    MKL's strict modes give a row of a matrix product the same bits whatever the other rows are. They exist on Intel
    only; elsewhere MKL's default already does so at whole multiples of four rows, and its COMPATIBLE mode does not.
    GOMP_SPINCOUNT: with anything else running, idle OpenMP threads that spin make a decode step 5 times slower.
    CUBLAS_WORKSPACE_CONFIG: without memory of a fixed size for itself, cuBLAS does not promise the same bits twice.
    """
    settings = {"GOMP_SPINCOUNT": "1000", "TOKENIZERS_PARALLELISM": "false", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    words = set(cpuinfo.split())
    if "GenuineIntel" in words and "avx512f" in words:
        settings["MKL_CBWR"] = "AVX512,STRICT"
    elif "GenuineIntel" in words and "avx2" in words:
        settings["MKL_CBWR"] = "AVX2,STRICT"
    return settings


def cpuinfo() -> str:
    """The text of /proc/cpuinfo; empty where there is none."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return ""


_missing = {name: value for name, value in arithmetic_settings(cpuinfo()).items() if name not in os.environ}
os.environ.update(_missing)

#: Variables that were set here too late, because torch was already loaded; the run manifest says so.
set_too_late: tuple[str, ...] = tuple(sorted(_missing)) if "torch" in sys.modules else ()


def __getattr__(name: str) -> Any:
    for home in _HOMES if name in __all__ else ():
        module = importlib.import_module(f"{__name__}.{home}")
        if hasattr(module, name):
            globals()[name] = getattr(module, name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
