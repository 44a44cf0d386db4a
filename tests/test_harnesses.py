"""The real programs, installed and run against the endpoint: each makes a file, and every call it made is captured.

Skipped, and said so, only where one cannot be installed: no package registry, no npm. `make test-harnesses`
goes over all the others.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from minirllm import cli
from minirllm.tools import harness as tools
from tests.programs import installed

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def invoke(*args: str) -> Result:
    return CliRunner().invoke(cli.cli, args, prog_name="minirllm")


@pytest.mark.parametrize("name", ["mini-swe-agent", "terminus-2"])
def test_the_real_program_makes_a_file_and_every_call_is_captured(name: str) -> None:
    one = installed(name)
    report = tools.check(name)
    assert report.passed, str(report)
    assert report.calls - report.counters.get("auxiliary", 0) == len(one.script), str(report)
    assert report.counters["drift"] == 0, str(report)
    assert report.sampled_tokens > 0


def test_mini_swe_agent_trains_and_repeats_bit_for_bit(tmp_path: Path) -> None:
    installed("mini-swe-agent")
    small = {"batch_size": 1, "group_size": 2, "max_tokens": 24, "lora_rank": 0, "eval_tasks": 0, "max_context": 8192}
    options = [word for name, value in small.items() for word in ("--set", f"{name}={value}")]
    options += ["--model", "tiny", "--steps", "2", "--threads", "1", "--runs-dir", str(tmp_path)]
    task = str(ROOT / "tasks/make_file.py")
    hashes = []
    for name in ("one", "two"):
        result = invoke("train", task, "--harness", "mini-swe-agent", "--run", name, *options)
        assert result.exit_code == 0, result.output
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [1, 2]
        assert [row["ungraded"] for row in rows] == [0, 0]
        assert [row["drift"] for row in rows] == [0, 0]
        assert all(row["grad_norm"] > 0 for row in rows)
        hashes.append([row["weights_sha256"] for row in rows])
    assert hashes[0] == hashes[1]
    assert hashes[0][0] != hashes[0][1]
    result = invoke("diff", str(tmp_path / "one"), str(tmp_path / "two"))
    assert result.exit_code == 0, result.output
