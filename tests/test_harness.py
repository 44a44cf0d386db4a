"""harness.py: finding harness files, what a program is given and what is kept of it, how it ends."""

from __future__ import annotations

import asyncio
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from minirllm import flow, harness
from minirllm.config import Config
from minirllm.errors import ConfigError, TaskError, UserError
from minirllm.flow import AgentFlow, evaluator, load_task
from minirllm.harness import Context, Harness, Launch
from minirllm.rollouts import Job, Runner
from minirllm.server import Endpoint, Server
from minirllm.sessions import Sessions
from minirllm.types import Episode, Task, TerminationReason
from tests import shells
from tests.endpoint import until
from tests.fake_engine import RENDERER, FakeEngine
from tests.test_reaper import alive

FILE = """
from minirllm.harness import Harness, Launch

HARNESS = Harness("own", "7", "mine", "chat", lambda context: Launch(("true",)), script=("x",))

def configured(text):
    return Harness("own-" + text, "7", "", "chat", HARNESS.launch, ())
"""
CALL = f"""{shlex.quote(sys.executable)} -I -c '
import json, os, urllib.request
messages = [{{"role": "user", "content": os.environ["MINIRLLM_INSTRUCTION"]}}]
body = {{"model": os.environ["MINIRLLM_MODEL"], "messages": messages}}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {{"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}})
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])'
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Episodes of this test lie in a folder of their own."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("MINIRLLM_CACHE", str(tmp_path / "cache"))
    return folder


@evaluator
async def one(task: Task, episode: Episode) -> float:
    return 1.0


def scripted(script: str, **fields: object) -> Harness:
    """A harness that runs a shell script."""

    def launch(context: Context) -> Launch:
        return Launch(("bash", "-c", script), context.variables)

    return replace(Harness("own", "7", "mine", "chat", launch, ()), **fields)  # type: ignore[arg-type]


@asynccontextmanager
async def running(agent: AgentFlow, **options: object) -> AsyncIterator[Runner]:
    sessions = Sessions(FakeEngine(lambda prompt, seed: "hello"), RENDERER, "tiny")
    server = Server(Endpoint(sessions, model="tiny", serve_session=None, admin_key="admin", max_body=100_000))
    config = Config(**{"retries": 0, "episode_timeout": 60.0, **options})
    runner = Runner(sessions, await server.start(), agent, one, config)
    try:
        yield runner
    finally:
        await runner.close()
        await server.close()


async def run(own: Harness, task: Task | None = None, **options: object) -> Episode:
    async with running(harness.flow(own), **options) as runner:
        return await runner.run(Job(task or Task("t", "do it"), 3))


# ---- finding one ----


def test_by_name_path_and_attribute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_harness.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    assert harness.find("bash").name == "bash"
    assert harness.find("mini-swe-agent").name == "mini-swe-agent"
    assert harness.find(str(tmp_path / "own_harness.py")).name == "own"
    assert harness.find("own_harness:HARNESS") == harness.find("own_harness:HARNESS")
    assert "command" in flow.names("harnesses")
    assert not any(name.startswith("_") for name in flow.names("harnesses"))


def test_what_stands_behind_a_name_is_the_files_own_business(tmp_path: Path) -> None:
    assert harness.find("command:./a.sh {instruction}").launch(context()).argv == ("./a.sh", "say 'hi'")
    with pytest.raises(ConfigError, match=r"^Harness bash takes nothing behind its name, got 'x'\.$"):
        harness.find("bash:x")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("bahs", r"^There is no harness 'bahs' \(did you mean bash\?\): give one of .*bash, "),
        ("/nothing/x.py", r"^There is no harness file /nothing/x\.py\.$"),
        ("own.nothing:X", r"^Harness own\.nothing cannot be loaded: ModuleNotFoundError"),
        ("minirllm.harness:nothing", r"^Module minirllm\.harness has no 'nothing'"),
        ("minirllm.harness:find", r"^Harness minirllm\.harness:find must define HARNESS = .*, got function\.$"),
        ("command:", r"^command: needs a program behind the colon"),
        ("command:'", r"^command:' is no command line: No closing quotation\.$"),
    ],
)
def test_what_is_wrong_with_a_name_is_said_in_a_sentence(name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        harness.find(name)


def test_a_task_needs_an_agent_or_a_harness(tmp_path: Path) -> None:
    task = load_task("tasks/make_file.py")
    with pytest.raises(TaskError, match=r"make_file.* has no function decorated with @rollout; .*--harness bash\.$"):
        harness.agent(task, Config())
    assert harness.agent(task, Config(harness="react")).name == "react"
    own = load_task("tasks/smoke.py")
    assert harness.agent(own, Config()).name == "answer"
    replaced = harness.agent(own, Config(harness="react"))
    assert (replaced.name, replaced.facts) == ("react", {"harness": "react 1"})


def test_one_that_is_not_installed_is_not_run() -> None:
    with pytest.raises(UserError, match=r"^Harness own is not installed: run `minirllm harness install own`\.$"):
        harness.flow(scripted("", pip=("nothing==1",)))


# ---- what it is given ----


def context(**fields: object) -> Context:
    place = Path("/e")
    own = Context("say 'hi'", place / "work", place / "home", "http://x/sessions/s", "key")
    return replace(own, **fields)  # type: ignore[arg-type]


async def test_a_program_gets_its_own_folders_and_nothing_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_AUTH_TOKEN", "HTTP_PROXY", "https_proxy", "HF_TOKEN", "PYTHONPATH"):
        monkeypatch.setenv(name, "of-the-user")
    episode = await run(scripted(CALL + "env; pwd; ls -A $HOME . ; echo rest $(cat)"))
    out, where = episode.artifacts["stdout"], "/temporary/minirllm-"
    assert "of-the-user" not in out
    lines = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
    assert set(lines) - {"_", "PWD", "SHLVL", "OLDPWD"} == {
        "PATH", "HOME", "TMPDIR", "LANG", "TZ", "NO_PROXY", "no_proxy", "PYTHONHASHSEED", *context().variables
    }  # fmt: skip
    assert where in lines["HOME"]
    assert lines["HOME"].endswith("/home")
    assert f"{lines['HOME'][:-4]}work\n" in out
    assert lines["MINIRLLM_INSTRUCTION"] == "do it"
    assert out.endswith(".:\n\n" + f"{lines['HOME']}:\nrest\n")
    assert (episode.reward, episode.answer, episode.artifacts["exit_code"]) == (1.0, "hello", 0)
    assert not Path(lines["HOME"]).parent.exists()


async def test_the_tasks_files_are_there_and_those_it_leaves_are_kept() -> None:
    episode = await run(scripted(shells.LEAVING + CALL), shells.with_files())
    assert episode.artifacts["stdout"] == "given\nran\nhello\n"
    shells.check_left(episode)


async def test_files_in_its_home() -> None:
    episode = await run(scripted("", launch=shells.reading_its_home(CALL)))
    assert episode.artifacts["stdout"] == "set\nhello\n"


async def test_the_window_and_the_deadline_are_told() -> None:
    seen: list[Context] = []
    own = scripted(CALL)
    await run(replace(own, launch=lambda c: seen.append(c) or own.launch(c)), max_tokens=77)  # type: ignore[func-returns-value]
    assert (seen[0].window, seen[0].max_tokens, seen[0].model) == (4000, 256, "tiny")
    assert 50 < seen[0].seconds < 60
    assert seen[0].url_v1 == seen[0].url + "/v1"
    assert seen[0].key not in repr(seen[0])


# ---- how it ends ----


async def test_what_it_printed_is_kept_to_its_tail() -> None:
    shells.check_printed(await run(scripted(CALL + shells.PRINTING)))


async def test_a_program_that_never_called_says_how_it_ended() -> None:
    episode = await run(scripted("echo cannot start >&2; exit 2"))
    assert episode.termination_reason is TerminationReason.NO_CALLS
    assert episode.reason.endswith("; own ended with exit code 2, saying 'cannot start'")


async def test_the_answer_may_be_what_it_printed() -> None:
    episode = await run(scripted(CALL + "echo; echo mine", answer=lambda ended: ended.stdout.split()[-1]))
    assert episode.answer == "mine"


async def test_at_the_deadline_all_of_it_is_ended(temporary: Path) -> None:
    shells.check_ended(await run(scripted(CALL + shells.SLEEPING.format("93001")), episode_timeout=6.0), "93001")
    assert list(temporary.glob("*/*")) == []


async def test_cancelled_it_is_ended_too(temporary: Path) -> None:
    async with running(harness.flow(scripted("setsid sleep 93002 & sleep 93002"))) as runner:
        task = asyncio.ensure_future(runner.run(Job(Task("t", "do it"))))
        await until(lambda: len(alive("93002")) == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: alive("93002") == [] and list(temporary.glob("*/*")) == [])
