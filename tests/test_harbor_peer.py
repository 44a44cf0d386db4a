"""Task directories are read as Harbor reads them, but for the differences that are known and documented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harbor_peer

STORED: dict[str, Any] = json.loads((harbor_peer.ROOT / "benchmarks/baselines/harbor_peer.json").read_text())["cases"]
OWN = [*harbor_peer.CASES, *(f"instruction: {name}" for name in harbor_peer.INSTRUCTIONS)]
KNOWN = {  # docs/harbor.md says why
    "cpus as text", "a limit below zero", "a limit as text", "unknown schema", "a name without an organisation",
    "a task without a name", "windows", "steps below a verifier's limit", "fixture: several",
    "harbor's template-adapter/task-template",
}  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return harbor_peer.lay(tmp_path_factory.mktemp("cases"))


@pytest.mark.parametrize("name", OWN)
def test_harbor_reads_the_same(name: str, places: dict[str, Path]) -> None:
    found = harbor_peer.differences(STORED[name]["harbor"], harbor_peer.ours(places[name]))
    assert found == {} or name in KNOWN, "make harbor-peer after a change of the cases"
    assert set(found) == set(STORED[name]["differs"])


def test_the_differences_are_the_known_ones() -> None:
    assert {name for name, case in STORED.items() if case["differs"]} == KNOWN
    assert len(STORED) > 60
