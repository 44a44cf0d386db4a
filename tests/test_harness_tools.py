"""``minirllm harness``: the table, what is shown, the check of those built in, and a run that trains with one."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from minirllm import cli, flow, harness
from minirllm.tools import harness as tools
from minirllm.tools import programs
from minirllm.tools.harness import written
from minirllm.types import Episode, Step, Trajectory

ROOT = Path(__file__).parent.parent


def invoke(*args: str) -> Result:
    return CliRunner().invoke(cli.cli, args, prog_name="minirllm")


def test_the_list_has_all_and_names_those_that_cannot_be_had() -> None:
    lines = invoke("harness", "list").output.splitlines()
    names = [line.split()[0] for line in lines[1:]]
    assert {"bash", "react", "command", "mini-swe-agent"} <= set(names)
    assert names[-3:] == ["crush", "goose", "swe-agent"]
    assert all("not available" in line for line in lines[-3:])
    files = {path.stem.replace("_", "-") for path in (ROOT / "harnesses").glob("[!_]*.py")}
    assert files <= set(names)


@pytest.mark.parametrize(
    "command",
    ["harness install crush", "harness check crush", "train smoke --harness crush", "eval smoke --harness crush"],
)
def test_a_program_that_is_listed_and_not_available_says_why(command: str) -> None:
    result = invoke(*command.split())
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "error: The agent program crush is not available: its npm package downloads" in result.output


@pytest.mark.parametrize("path", sorted((ROOT / "harnesses").glob("[!_]*.py")), ids=lambda path: path.stem)
def test_every_harness_file_is_whole(path: Path) -> None:
    one = harness.find(path.stem.replace("_", "-"))
    assert one.name.replace("-", "_") == path.stem
    assert one.about
    assert one.about[-1] != "."
    assert one.script
    pins = [*one.pip, *one.npm]
    assert all("==" in pin or "@" in pin[1:] or "<" in pin for pin in pins), "pinned"
    for full in (False, True):
        shown = programs.show(one, full)
        assert shown == programs.show(one, full)
        assert "INSTRUCTION" in shown
        assert "SESSION-KEY" in shown
        assert "sessions/SESSION" in shown
        assert "SESSION-KEY" not in next(line for line in shown.splitlines() if line.startswith("command: "))


@pytest.mark.parametrize("name", ["aider", "hermes", "kimi-cli"])
@pytest.mark.parametrize("instruction", ["- a", "/compact", "--help"])
def test_an_instruction_is_no_option_and_no_command(name: str, instruction: str) -> None:
    home = Path("/e/home")
    word = harness.find(name).launch(harness.Context(instruction, Path("/e/work"), home, "http://x", "key")).argv[-1]
    assert word.removeprefix("--message=") in (f"\n{instruction}", f"Task: {instruction}")


def test_what_is_shown_is_what_is_run() -> None:
    shown = invoke("harness", "show", "command:./agent.sh --task {instruction}").output
    assert "\ncommand: ./agent.sh --task INSTRUCTION\n" in shown
    assert "\n  OPENAI_BASE_URL=http://127.0.0.1:PORT/sessions/SESSION/v1\n" in shown
    assert "\n  HOME=/EPISODE/home\n" in shown


def test_a_harness_that_is_not_there() -> None:
    result = invoke("harness", "show", "bahs")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: There is no harness 'bahs' (did you mean bash?)")


@pytest.mark.parametrize("name", ["bash", "react", "command"])
def test_those_built_in_pass_their_check(name: str) -> None:
    result = invoke("harness", "check", name)
    assert result.exit_code == 0, result.output
    assert f"{len(harness.find(name).script)} calls captured" in result.output


def test_a_check_that_fails_says_why_and_exits_1(tmp_path: Path) -> None:
    (tmp_path / "lazy.py").write_text(
        "from minirllm.harness import Harness, Launch\n"
        "HARNESS = Harness('lazy', '1', '', 'chat', lambda c: Launch(('bash', '-c', 'echo tired >&2')), ('x',))"
    )
    result = invoke("harness", "check", str(tmp_path / "lazy.py"))
    assert result.exit_code == 1
    assert "lazy 1: FAILED: the agent never called the model" in result.output
    assert "tired" in result.output


def test_calls_are_written_as_the_tiny_model_would() -> None:
    call = harness.Call("bash", {"command": "ls"})
    text = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    assert written("plain") == "plain"
    assert written(call) == text
    assert written((call, call)) == f"{text}\n{text}"


def test_what_the_loop_of_bash_and_react_tells_the_model_of_a_command() -> None:
    loop = flow.import_path(ROOT / "harnesses" / "_loop.py", "Harness")
    assert loop.shell("echo out; echo err >&2; cat", 20) == "out\nerr\n"
    assert loop.shell("echo out; exit 3", 20) == "out\n\n(exit code 3)"
    assert loop.shell("echo begun; sleep 90 & sleep 90", 1) == "begun\n\n(ended after 1 s)"
    pid, _, rest = loop.shell("setsid sleep 93201 & echo $!", 1).partition("\n")  # left its group, holds the output
    os.kill(int(pid), signal.SIGKILL)
    assert rest == "\n(ended after 1 s)"
    shown = loop.shell("seq 100000", 20)
    assert shown.startswith("1\n2\n")
    assert "\n...\n" in shown
    assert shown.endswith("99999\n100000\n")
    assert len(shown) == loop.MOST + len("\n...\n")
    for name, text in (("other", '{"command": "ls"}'), ("bash", "{"), ("bash", "[]"), ("bash", '{"command": 1}')):
        assert loop.arguments({"function": {"name": name, "arguments": text}}) is None
    assert loop.arguments({"function": {"name": "bash", "arguments": '{"command": "ls"}'}}) == "ls"


def test_a_report_counts_and_finds_calls_missing() -> None:
    one = harness.find("bash")
    steps = [Step(prompt_length=50, response_length=7)]
    episode = Episode(trajectories=[Trajectory(steps=steps)], reward=1.0, metrics={"seconds": 1.5, "branches": 2.0})
    report = tools.judged(one, episode)
    assert (report.calls, report.prompt_tokens, report.sampled_tokens, report.counters) == (1, 50, 7, {"branches": 2})
    assert (report.passed, report.problem) == (False, "it made 1 calls; its script has 2")


TRAIN = (
    "--steps", "2", "--set", "batch_size=2", "--set", "group_size=2", "--set", "max_tokens=24", "--set", "lora_rank=0",
    "--set", "eval_tasks=1", "--set", "eval_every=0", "--threads", "1", "--model", "tiny",
)  # fmt: skip


@pytest.mark.slow
def test_a_task_without_an_agent_trains_with_a_harness_and_repeats(tmp_path: Path) -> None:
    hashes = []
    for name in ("one", "two"):
        options = (*TRAIN, "--runs-dir", str(tmp_path), "--run", name)
        result = invoke("train", str(ROOT / "tasks/make_file.py"), "--harness", "react", *options)
        assert result.exit_code == 0, result.output
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [0, 1, 2]
        assert rows[-1]["weights_sha256"] != rows[0].get("weights_sha256")
        assert rows[-1]["ungraded"] == 0
        hashes.append([row["weights_sha256"] for row in rows[1:]])
    assert hashes[0] == hashes[1]
    manifest = json.loads((tmp_path / "one" / "manifest.json").read_text())
    assert (manifest["harness"], manifest["config"]["harness"]) == ("react 1", "react")
    assert invoke("replay", str(tmp_path / "one")).exit_code == 0
