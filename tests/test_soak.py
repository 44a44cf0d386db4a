"""The short form of the soak: a real server, hostile and dying clients; and that each broken promise is noticed."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import soak

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module", params=["auto", "fixed"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("soak") / "soak.json"
    command = [sys.executable, "benchmarks/soak.py", "--sessions", "40", "--seconds", "12", "--processes", "2"]
    command += ["--determinism", request.param, "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert out.exists(), done.stderr[-3000:]
    result: dict[str, Any] = json.loads(out.read_text())
    assert done.returncode == bool(result["broken"])
    return result


@pytest.mark.timeout(300)
def test_nothing_is_lost_crossed_or_leaked(found: dict[str, Any]) -> None:
    assert found["broken"] == []
    assert found["client_processes_killed"] >= 1
    assert found["server"]["calls"] == found["server"]["finished"] + found["server"]["aborted"]
    assert found["server"]["aborted"] > 0
    assert found["answers_received"] > 40
    assert found["asked_again"] > 40
    assert found["alive_after"] == {}
    assert len(found["each_minute"]) >= 9


@pytest.mark.timeout(300)
def test_every_broken_promise_is_noticed(found: dict[str, Any]) -> None:
    damage: list[dict[str, Any]] = [
        {"lost_count": 1, "lost": ["s: 3 calls began, 2 finished, 0 were aborted"]},
        {"clients": {"wrong": 2}, "problems": ["talk: status 500, expected [200]"]},
        {"answers_not_recorded": 1},
        {"asked_again_different": 1},
        {"server": {**found["server"], "drift": 1}},
        {"slots_taken_after": 1},
        {"alive_after": {"Session": 1}},
        *[{"after": {**found["after"], name: found["before"][name] + 1}} for name in ("descriptors", "tasks")],
        {"seconds": 600, "each_minute": [{"rss_mib": 100.0}] * 5 + [{"rss_mib": 106.0}]},
        {"server": {"finished": 0, "aborted": 3}},
    ]
    assert soak.broken(found) == []
    for change in damage:
        assert len(soak.broken({**copy.deepcopy(found), **change})) == 1, change
