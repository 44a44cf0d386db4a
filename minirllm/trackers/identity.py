"""What services that hold many runs are told a run is called.

Owns: the project's name and each run's id. Does not know: the services.
"""

from __future__ import annotations

import secrets
from pathlib import Path

PROJECT = "minirllm"  # the project that runs appear under


def run_id(folder: Path) -> str:
    """One random id per run folder: a resumed run continues its curve, a new run of an old name starts another."""
    path = folder / "tracker_id"
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text()
