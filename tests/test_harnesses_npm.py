"""Programs from npm: what their files say, and Claude Code, Codex and pi for real, in every dialect they speak."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from minirllm import harness
from minirllm.dialects import DIALECTS
from minirllm.errors import ConfigError
from minirllm.harness import PROOF, Call, Context
from minirllm.types import Episode, Message, ModelRequest, SamplingParams
from tests.programs import installed, run

NAMES = [
    "claude-code", "codex", "pi", "pi:responses", "pi:messages", "opencode", "opencode:responses", "opencode:messages",
    "qwen-code", "qwen-code:responses", "qwen-code:messages", "cline", "gemini-cli",
]  # fmt: skip
REAL = ["claude-code", "codex", "pi", "pi:responses", "pi:messages"]
FLOOD = "head -c 6000 /dev/zero | tr '\\0' x"  # more than is left of the window


def context(instruction: str = "INSTRUCTION", **options) -> Context:
    return Context(instruction, Path("/work"), Path("/home"), "http://127.0.0.1:1/sessions/s", "SECRET", **options)


def ask(*messages: tuple[str, str], **options) -> ModelRequest:
    return ModelRequest(messages=[Message(role, text) for role, text in messages], **options)


@pytest.mark.parametrize("name", NAMES)
def test_the_key_is_in_no_command_line_and_the_dialect_is_one(name: str) -> None:
    one = harness.find(name)
    assert one.dialect in DIALECTS
    for full in (False, True):
        launch = one.launch(context(full=full))
        assert not any("SECRET" in word for word in launch.argv)
        assert "SECRET" in str(dict(launch.env)) + str(dict(launch.files))


@pytest.mark.parametrize("name", ["claude-code", "pi", "qwen-code", "cline", "gemini-cli"])
@pytest.mark.parametrize("instruction", ["- a", "/compact", "@file", "!ls", "  /x"])
def test_an_instruction_is_no_option_no_file_and_no_command(name: str, instruction: str) -> None:
    assert f"\n{instruction}" in harness.find(name).launch(context(instruction)).argv
    assert "plain" in harness.find(name).launch(context("plain")).argv


@pytest.mark.parametrize("name", ["pi", "qwen-code", "gemini-cli"])
def test_a_run_without_a_date_leaves_the_clock_alone(name: str) -> None:
    with_date, without = (harness.find(name).launch(context(date=date)) for date in ("2026-01-31", ""))
    assert with_date.env["NODE_OPTIONS"] == "--require /home/clock.cjs"
    assert with_date.env["MINIRLLM_DATE"] == "2026-01-31"
    assert "clock.cjs" in with_date.files
    assert "NODE_OPTIONS" not in without.env


def test_opencode_is_given_its_instruction_without_quotes_or_numbers() -> None:
    text = '007 "two  words" -x'
    launch = harness.find("opencode").launch(context(text))
    assert launch.files["instruction.txt"] == text
    assert not any("007" in word for word in launch.argv)


@pytest.mark.parametrize("program", ["pi", "opencode", "qwen-code"])
def test_a_dialect_that_a_program_does_not_speak(program: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{program} has no dialect 'mesages' \(did you mean messages\?\): give chat"
    ):
        harness.find(f"{program}:mesages")


def test_codex_reads_its_settings_as_toml() -> None:
    launch = harness.find("codex").launch(context(window=4096))
    settings = tomllib.loads(launch.files[".codex/config.toml"])
    assert settings["model_providers"]["minirllm"]["base_url"] == "http://127.0.0.1:1/sessions/s/v1"
    assert settings["model_context_window"] == 4096
    assert settings["agents"] == {"enabled": False}
    assert launch.argv[-2:] == ("--", "INSTRUCTION")


SIDE_CALLS = [
    ("claude-code", "quota", ask(("user", "quota"), params=SamplingParams(max_tokens=1))),
    ("claude-code", "title", ask(("user", "hi"), response_format={"type": "json_schema"})),
    ("claude-code", "summary", ask(("user", "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\n- Do"))),
    ("codex", "summary", ask(("user", "hi"), ("user", "You are performing a CONTEXT CHECKPOINT COMPACTION. Create"))),
    ("pi", "summary", ask(("system", "You are a context summarization assistant. Your task"), ("user", "x"))),
    ("opencode", "title", ask(("system", "You are a title generator. You output ONLY a thread title."), ("user", "x"))),
    ("opencode", "summary", ask(("system", "You are a context summarization agent. You are given"), ("user", "x"))),
    ("qwen-code", "summary", ask(("user", "You are the component that summarizes a conversation"))),
    ("gemini-cli", "summary", ask(("user", "\nYou are a specialized system component responsible for distilling"),)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind", "request_"), SIDE_CALLS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_side_calls_are_told_by_their_kind(name: str, kind: str, request_: ModelRequest) -> None:
    auxiliary = harness.find(name).auxiliary
    assert auxiliary is not None
    assert auxiliary(request_) == kind
    plain = ask(("system", "You are an agent."), ("user", "Write a title generator."), tools=[{"type": "function"}])
    assert auxiliary(plain) is None


def shell(name: str, command: str) -> Call:
    """A call of the program's own shell tool."""
    call = harness.find(name).script[0]
    assert isinstance(call, Call)
    return replace(call, arguments={**call.arguments, "cmd" if name == "codex" else "command": command})


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", REAL)
def test_the_real_program_makes_a_file_and_every_call_is_captured(name: str) -> None:
    one = installed(name)
    episode = run(one, one.script, '- make a file\n/then "stop"')
    assert not episode.reason, episode.artifacts
    assert episode.artifacts["files"] == {PROOF[0]: PROOF[1]}
    assert episode.artifacts["exit_code"] == 0
    steps = episode.steps
    assert len(steps) == len(one.script) == 2
    for step in steps:
        ids, logprobs = episode.tree.response(step.node)
        assert len(ids) == len(logprobs) == step.response_length > 0
        assert all(logprob < 0 for logprob in logprobs)
    first, second = (list(episode.tree.prompt_ids(step.node)) for step in steps)
    assert second[: len(first)] == first
    assert episode.metrics["extended"] == 1
    assert episode.metrics["drift"] == 0
    assert episode.metrics["auxiliary"] == 0


def prompts_of(episode: Episode) -> list[list[int]]:
    return [list(episode.tree.prompt_ids(step.node)) for step in episode.steps]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["claude-code", "pi"])
def test_the_same_episode_asks_the_same_bit_for_bit_on_the_day_that_the_run_began(name: str) -> None:
    one = installed(name)
    first, second = (run(one, one.script, date="2026-01-31") for _ in range(2))
    assert len(prompts_of(first)) == 2
    assert prompts_of(first) == prompts_of(second)
    said = first.steps[0].messages[0].content
    assert ("Current date: 2026-01-31" in said) == (name == "pi")


OVERFLOW = [  # what a program says, and its exit code, when the window is full
    ("claude-code", 1, "Prompt is too long"),
    ("codex", 1, "ran out of room in the model's context window"),
    ("pi", 1, "maximum context length"),
    ("pi:responses", 1, "maximum context length"),
    ("pi:messages", 1, "prompt is too long"),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "code", "words"), OVERFLOW)
def test_a_full_window_ends_the_real_program_at_once(name: str, code: int, words: str) -> None:
    one = installed(name)
    episode = run(one, (shell(name, FLOOD), "Done."), max_context=8192, max_tokens=256)
    assert len(episode.steps) == 1
    assert episode.artifacts["exit_code"] == code
    assert words in episode.artifacts["stdout"] + episode.artifacts["stderr"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", REAL[2:])
def test_pi_in_its_full_form_sums_up_when_the_window_is_full_and_goes_on(name: str) -> None:
    episode = run(installed(name), (shell(name, FLOOD), "A summary.", "Done."), full=True, max_context=9_216)
    kinds = [step.auxiliary for step in episode.steps]
    assert "summary" in kinds, episode.artifacts
    assert kinds[0] == ""
    assert episode.artifacts["exit_code"] == 0
    assert episode.metrics["auxiliary"] == kinds.count("summary")
