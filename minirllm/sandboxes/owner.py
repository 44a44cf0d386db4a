"""Who made a container or a machine: a label by which the next process tells what a killed one left behind.

Owns: `OWNER`, `owner`, `orphaned`. Does not know: engines, providers.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

OWNER = "minirllm.owner"  # the label


@cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _began(pid: int) -> str:
    """When a process began; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def owner() -> str:
    """This process, as no other will ever be called."""
    return f"{_boot()}.{os.getpid()}.{_began(os.getpid())}"  # of signs that any provider takes


def orphaned(label: str) -> bool:
    """Was this a process of this machine, since it was started, that is no more?"""
    boot, pid, began = [*label.split("."), "", ""][:3]
    return boot == _boot() and pid.isdigit() and _began(int(pid)) != began
