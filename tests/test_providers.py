"""Which provider a Config means, what is stored of providers, who gets to see a key; `minirllm model` and `eval`."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from minirllm import cli, flow, providers, train
from minirllm.config import Config
from minirllm.errors import ConfigError
from minirllm.providers import KNOWN, profiles
from minirllm.providers.setup import setup
from tests.upstream import HELLO, SECRET, says, scripted, status

PACKAGE = Path(cli.__file__).parents[1]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, and no key in the environment."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(providers, "_taken", {})
    for name in [providers.ANY_KEY, "UPSTREAM_KEY", *(known.key_env for known in KNOWN.values() if known.key_env)]:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def invoke(*args: str, stdin: str = "") -> Result:
    return CliRunner().invoke(cli.cli, args, input=stdin, prog_name="minirllm")


def model(*args: str, stdin: str = "") -> str:
    result = invoke("model", *args, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*args: str, stdin: str = "") -> str:
    result = invoke(*args, stdin=stdin)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    return result.stderr


# ---- which provider ----


def test_a_known_provider_needs_its_name_a_model_and_its_usual_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    found = providers.find(Config(provider="openai", model="gpt-x"))
    assert (found.name, found.base_url, found.model, found.key) == (
        "openai", "https://api.openai.com/v1", "gpt-x", SECRET)  # fmt: skip
    assert found.renamed == {"max_tokens": "max_completion_tokens"}
    same = providers.find(Config(base_url="https://api.openai.com/v1/", model="gpt-x"))
    assert same == found  # by its URL; the key is out of the environment by now, and still known
    assert SECRET not in repr(found)


def test_a_key_is_for_its_own_url_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    model("setup", "--provider", "openai", "--model", "m", "--key", "-", stdin="stored-key-0123456789\n")
    for options in (
        {"base_url": "https://evil.example/v1"},
        {"base_url": "https://evil.example/v1", "provider": "openai"},
    ):
        assert providers.find(Config(model="m", **options)).key == ""
    assert providers.find(Config(model="", base_url=KNOWN["openai"].base_url)).key == "stored-key-0123456789"


def test_nothing_that_is_started_from_here_inherits_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GROQ_API_KEY", "COPY_OF_IT"):
        monkeypatch.setenv(name, SECRET)
    assert providers.find(Config(provider="groq", model="m")).key == SECRET
    assert SECRET not in str(dict(os.environ))
    child = subprocess.run([sys.executable, "-c", "import os; print(os.environ)"], capture_output=True, text=True)
    assert child.returncode == 0
    assert SECRET not in child.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"provider": "opnai", "model": "m"}, "did you mean openai"),
        ({"provider": "active", "model": "m"}, "No provider is stored"),
        ({"provider": "openai", "model": ""}, "Which model of openai"),
        ({"provider": "openai", "model": "m"}, "no key for openai: set OPENAI_API_KEY"),
        ({"provider": "vllm", "model": "m", "key_env": "NOT_SET"}, "NOT_SET holds no key"),
        ({"base_url": "ftp://x/v1", "model": "m"}, "is like https://"),
        ({"base_url": "https://user:SENTINEL@x/v1", "model": "m"}, "no user or password"),
        ({"base_url": "https://[x/v1", "model": "m"}, "cannot be read"),
    ],
)
def test_what_is_missing_is_a_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        providers.find(Config(**options))
    assert "SENTINEL" not in str(caught.value)


@pytest.mark.parametrize("key", ["two words", "schl\u00fcssel", "a\x00b"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    with pytest.raises(ConfigError, match="copy it again") as caught:
        profiles.checked_key(key)
    assert key not in str(caught.value)


def test_the_table() -> None:
    for known in KNOWN.values():
        assert providers.checked_url(known.base_url) == known.base_url
        assert bool(known.key_env) == known.base_url.startswith("https://")


# ---- what is stored ----


def test_setup_show_swap(home: Path) -> None:
    said = model("setup", "--provider", "openai", "--model", "gpt-x", "--key", "-", stdin=f" {SECRET} \n")
    said += model("setup", "--base-url", "http://localhost:9/v1/", "--model", "q", "--name", "mine")
    said += model("setup", "--provider", "groq", "--model", "l", "--key-env", "MY_GROQ")
    file = home / ".minirllm" / "config.toml"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert [path.name for path in file.parent.iterdir()] == ["config.toml"]
    assert tomllib.loads(file.read_text())["profiles"]["openai"]["key"] == SECRET
    said += model("show")
    assert "* groq: l at https://api.groq.com/openai/v1, key from $MY_GROQ\n" in said
    assert f"  openai: gpt-x at https://api.openai.com/v1, key ...{SECRET[-4:]}\n" in said
    assert "  mine: q at http://localhost:9/v1, no key\n" in said
    said += model("swap", "openai") + model("swap", "--model", "gpt-y")
    assert "* openai: gpt-y at" in said
    assert SECRET not in said
    found = providers.find(Config(provider="active", model=""))
    assert (found.name, found.model, found.key) == ("openai", "gpt-y", SECRET)
    assert providers.find(Config(provider="openai", model="gpt-z")).model == "gpt-z"
    assert providers.find(Config(provider="mine", model="")).base_url == "http://localhost:9/v1"


def test_a_usual_variable_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPSEEK_API_KEY", SECRET)
    assert "key from $DEEPSEEK_API_KEY" in model("setup", "--provider", "deepseek", "--model", "m")
    assert SECRET not in profiles.path().read_text()


def test_at_a_terminal_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []
    answers = iter(["openrouter", "some/model", SECRET])

    def ask(question: str, default: str, secret: bool) -> str:
        asked.append((question, secret))
        return next(answers)

    said = setup({}, ask)
    assert asked == [("Provider", False), ("Model", False), ("Key (not shown; empty: none)", True)]
    assert "* openrouter: some/model at https://openrouter.ai/api/v1, key ..." in said
    assert SECRET not in said


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("setup",), "Give --provider"),
        (("setup", "--provider", "nobody", "--model", "m"), "give --base-url"),
        (("setup", "--provider", "vllm"), "Give --model"),
        (("setup", "--provider", "openai", "--model", "m"), "Give --key-env NAME, or --key -"),
        (("setup", "--provider", "openai", "--model", "m", "--key", "-"), "The key is empty"),
        (("setup", "--provider", "openai", "--model", "m", "--key", SECRET), "seen by everyone"),
        (("setup", "--provider", "openai", "--model", "m", "--key-env", SECRET), "not a key"),
        (("setup", "--provider", "vllm", "--model", "m", "--name", "active"), "not 'active'"),
        (("swap",), "Swap to what?"),
        (("swap", "none"), "There is no profile 'none'"),
    ],
)
def test_setup_refuses_in_a_sentence(args: tuple[str, ...], words: str) -> None:
    said = refused("model", *args)
    assert words in said
    assert SECRET not in said
    assert not profiles.path().exists()


def test_a_file_that_others_can_read_is_refused() -> None:
    model("setup", "--provider", "openai", "--model", "m", "--key", "-", stdin=SECRET)
    for mode, can in ((0o644, "read or change"), (0o620, "change")):
        profiles.path().chmod(mode)
        for args in (
            ("model", "show"),
            ("model", "swap", "--model", "x"),
            ("eval", "first_letter", "--provider", "openai"),
        ):
            said = refused(*args)
            assert f"Other users may {can} {profiles.path()}: run `chmod 600" in said
            assert SECRET not in said
    profiles.path().chmod(0o600)
    assert "openai" in model("show")


@pytest.mark.parametrize(
    "text",
    [f'active = "a"\nkey = {SECRET}', "\xff", 'profiles = "x"', "[profiles.a]\nkey = 3", "[profiles.a]\nkex = ''"],
)
def test_a_damaged_file_is_a_sentence_without_what_is_in_it(text: str) -> None:
    profiles.path().parent.mkdir()
    profiles.path().write_bytes(text.encode("latin-1"))
    profiles.path().chmod(0o600)
    said = refused("model", "show")
    assert str(profiles.path()) in said
    assert SECRET not in said


def test_bytes_that_are_no_text_are_refused_and_leave_nothing(home: Path) -> None:
    said = refused("model", "setup", "--base-url", "http://localhost:9/v1", "--model", "\udcff")
    assert "write it in UTF-8" in said
    assert list((home / ".minirllm").iterdir()) == []


def test_a_link_to_a_file_elsewhere_stays_one(home: Path) -> None:
    (home / "mine").mkdir()
    model("setup", "--provider", "vllm", "--model", "m")
    profiles.path().rename(home / "mine" / "providers.toml")
    profiles.path().symlink_to(home / "mine" / "providers.toml")
    model("swap", "--model", "other")
    assert profiles.path().is_symlink()
    assert "other" in (home / "mine" / "providers.toml").read_text()
    assert stat.S_IMODE(profiles.path().stat().st_mode) == 0o600


def test_changes_at_the_same_time_are_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them reads the file, and replaces it."""
    load = profiles.load

    def slow() -> profiles.Stored:
        stored = load()
        time.sleep(0.05)
        return stored

    monkeypatch.setattr(profiles, "load", slow)
    given = [{"base_url": "http://localhost:9/v1", "model": "m", "name": f"p{i}"} for i in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda one: setup(one, None), given))
    assert sorted(load().profiles) == sorted(one["name"] for one in given)


def test_a_home_that_cannot_be_written_is_a_sentence(home: Path) -> None:
    (home / ".minirllm").write_text("a file")
    said = refused("model", "setup", "--provider", "vllm", "--model", "m")
    assert f"{home}/.minirllm" in said


# ---- the same path ----

TASK = """
import os, subprocess, sys
from openai import AsyncOpenAI
from minirllm import Task, evaluator, rollout

DEFAULTS = {"model": "tiny", "max_tokens": 9}

@rollout
async def solve(task, config):
    seen = subprocess.run(["env"], capture_output=True, text=True).stdout + repr(config) + config.api_key
    async with AsyncOpenAI(base_url=config.base_url, api_key=config.api_key, max_retries=0) as client:
        reply = await client.chat.completions.create(model=config.model, messages=[{"role": "user", "content": "hi"}])
    return f"{reply.choices[0].message.content} {config.model} {'SENTINEL' in seen}"

@evaluator
def score(task, episode):
    return float(episode.answer.startswith("Hello") and "SENTINEL" not in str(dict(__import__("os").environ)))

def train(config):
    return [Task("a"), Task("b")]

held_out = train
"""


def command(*args: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), **variables}
    line = [sys.executable, "-c", WITHOUT_TORCH, *args]
    return subprocess.run(line, capture_output=True, text=True, cwd=cwd, env=environment, timeout=100)


WITHOUT_TORCH = """
import sys
from minirllm import cli
try:
    cli.cli(sys.argv[1:], prog_name="minirllm")
finally:
    print("torch" in sys.modules)
"""


async def test_an_evaluation_by_a_provider(home: Path) -> None:

    (home / "mine.py").write_text(TASK)
    args = ("eval", "mine.py", "--base-url", "URL", "--model", "m", "--key-env", "K", "--n", "2", "--output", "out")
    async with scripted(status(503), says(*HELLO)) as upper:
        args = tuple(upper.url if arg == "URL" else arg for arg in args)
        done = await asyncio.to_thread(command, *args, cwd=home, K=SECRET)
    assert done.returncode == 0, done.stderr
    summary = json.loads((home / "out" / "summary.json").read_text())
    assert (summary["tasks"], summary["graded"], summary["pass_at"]["1"]) == (2, 4, 1.0)
    answered = summary["answered_by"]
    assert (answered["model"], answered["base_url"]) == ("m", upper.url)
    assert answered["sampling"].startswith("the provider's")
    assert f"answered by m of {answered['provider']}, whose sampling it is" in done.stdout
    assert done.stdout.endswith("False\n")  # torch was not imported
    items = [json.loads(line) for line in (home / "out" / "items.jsonl").read_text().splitlines()]
    assert [item["answer"] for item in items] == ["Hello m False"] * 4
    assert {(item["metrics"]["prompt_tokens"], item["metrics"]["response_tokens"]) for item in items} == {(11, 7)}
    assert len({body["seed"] for body in upper.asked}) == 4  # each rollout has its own; a retried call keeps it
    assert {body["max_tokens"] for body in upper.asked} == {9}
    files = [path for path in (home / "out").rglob("*") if path.is_file()]
    everything = done.stdout + done.stderr + "".join(map(Path.read_text, files))
    assert "SENTINEL" not in everything


PROGRAM = """#!/bin/sh
env | grep -q SENTINEL && echo leaked && exit 1
printf '{"messages": [{"role": "user", "content": "hi"}]}' > body
curl -s "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \\
  -H 'Content-Type: application/json' -d @body | grep -o 'Hello'
"""


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_a_program_is_evaluated_with_a_provider(home: Path) -> None:
    (home / "mine.py").write_text(TASK)
    (home / "agent.sh").write_text(PROGRAM)
    (home / "agent.sh").chmod(0o755)
    async with scripted(says(*HELLO)) as upper:
        args = ("eval", "mine.py", "--base-url", upper.url, "--model", "m", "--key-env", "K", "--output", "out")
        done = await asyncio.to_thread(command, *args, "--harness", "command:./agent.sh", cwd=home, K=SECRET)
    assert done.returncode == 0, done.stderr
    items = [json.loads(line) for line in (home / "out" / "items.jsonl").read_text().splitlines()]
    assert [(item["answer"].strip(), item["reward"]) for item in items] == [("Hello", 1.0)] * 2


async def test_a_wrong_key_ends_an_evaluation_in_one_sentence(home: Path) -> None:

    (home / "mine.py").write_text(TASK)
    wrong = {"error": {"message": f"Incorrect API key provided: {SECRET}"}}
    async with scripted(status(401, wrong)) as upper:
        args = ("eval", "mine.py", "--base-url", upper.url, "--model", "m", "--key-env", "K")
        done = await asyncio.to_thread(command, *args, cwd=home, K=SECRET)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line]
    assert line.startswith("error: 127.0.0.1")
    assert "Incorrect API key provided: [key]. Its key is wrong: give another by `minirllm model setup`" in line
    assert "SENTINEL" not in done.stdout + done.stderr


def test_a_providers_model_is_not_trained(home: Path) -> None:
    (home / "mine.py").write_text(TASK)
    config = Config(base_url="http://localhost:9/v1", runs_dir=str(home / "runs"))
    with pytest.raises(ConfigError, match="cannot be trained"):
        train.run(flow.load_task(str(home / "mine.py")), config)
    assert not (home / "runs").exists()
    assert "cannot be trained" in refused("train", str(home / "mine.py"), "--set", "provider=openai")


def test_a_checkpoint_is_not_a_providers(home: Path) -> None:
    (home / "runs" / "r").mkdir(parents=True)
    (home / "mine.py").write_text(TASK)
    args = (
        "eval",
        str(home / "mine.py"),
        "--provider",
        "vllm",
        "--model",
        "m",
        "--checkpoint",
        str(home / "runs" / "r"),
    )
    assert "leave it out, or leave out the provider" in refused(*args)
