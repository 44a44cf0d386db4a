"""Harbor task directories: what is read, what is refused, and that the reference solution scores 1 and idleness 0."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minirllm import flow, harness
from minirllm.config import Config
from minirllm.errors import SandboxError, TaskError, UserError
from minirllm.harbor import spec
from minirllm.harbor.agents import nop, oracle
from minirllm.harbor.grading import Graded, _json, _text, combined, missed, scalar
from minirllm.harbor.task import read
from minirllm.types import Episode
from tests.trials import FIXTURES, does, maker, tried


@pytest.fixture
def make(tmp_path: Path) -> Any:
    return maker(tmp_path)


# ---- trials ----


@pytest.mark.parametrize("name", ["plain", "several", "json", "slow"])
async def test_the_oracle_scores_one_and_nobody_scores_nothing(name: str) -> None:
    assert (await tried(name, oracle))["harbor"]["reward"] == 1.0
    assert (await tried(name, nop))["harbor"]["reward"] == 0.0


async def test_artifacts_and_what_the_tests_printed_are_kept() -> None:
    kept = await tried("plain", oracle)
    assert kept["files"] == {"/work/greeting.txt": "hello world\n"}
    assert [(entry["destination"], entry["type"], entry["status"]) for entry in kept["manifest"]] == [
        ("artifacts/logs/artifacts", "directory", "empty"), ("artifacts/work/greeting.txt", "file", "ok"),
    ]  # fmt: skip
    assert kept["harbor"]["tests"] == "graded in /work\n"
    assert kept["ended"] == "oracle ended with exit code 3"


async def test_steps_are_done_in_one_place_and_a_missed_one_is_the_last() -> None:
    kept = await tried("several", oracle)
    assert kept["harbor"]["steps"] == [{"reward": 1.0}, {"reward": 1.0}]
    assert kept["files"] == {"second: /work/sum.txt": "40\n"}
    assert (await tried("several", nop))["harbor"]["steps"] == [{"reward": 0.0}]
    half = await tried("several", does("test -e sorted.txt || sort -n numbers.txt > sorted.txt"))
    assert (half["harbor"]["steps"], half["harbor"]["reward"]) == ([{"reward": 1.0}, {"reward": 0.0}], 0.5)


async def test_json_wins_over_text() -> None:
    assert (await tried("json", oracle))["harbor"]["rewards"] == {"reward": 1.0, "lines": 3.0}


async def test_an_agent_out_of_time_is_graded_and_what_it_left_running_is_gone() -> None:
    kept = await tried("slow", oracle)
    assert kept["harbor"]["reward"] == 1.0
    assert kept["ended"] == "oracle did not end within 1 s"


async def test_tests_that_say_nothing_are_no_reward() -> None:
    found = (await tried("broken", oracle))["harbor"]
    assert (found["reward"], found["reason"]) == (None, "the tests wrote neither reward.json nor reward.txt")
    assert found["tests"] == "no reward today\n"


async def test_what_an_agent_puts_in_the_way_of_tests_is_gone() -> None:
    forge = (
        "rm -rf /logs/verifier /tests; mkdir -p /logs/verifier /tests/deep; echo 1 > /logs/verifier/reward.txt;"
        "echo '{\"reward\": 1}' > /logs/verifier/reward.json; chmod 000 /tests/deep /logs/verifier; ls /solution"
    )
    assert (await tried("plain", does(forge)))["harbor"]["rewards"] == {"reward": 0.0}
    assert (await tried("broken", does(forge)))["harbor"]["reward"] is None
    linked = "rm -rf /logs/verifier /tests; mkdir /work/mine; ln -s /work/mine /logs/verifier; ln -s /work/mine /tests"
    assert (await tried("plain", does(linked)))["harbor"]["rewards"] == {"reward": 0.0}


async def test_an_agent_sees_neither_tests_nor_solution() -> None:
    seen = await tried("several", does("ls /tests /solution 2> /dev/null; sort -n numbers.txt > sorted.txt"))
    assert seen["ended"] == "first: said ''; second: said ''"


async def test_tests_out_of_time_are_no_reward(make: Any) -> None:
    task = make("[verifier]\ntimeout_sec = 0.5", {"tests/test.sh": "echo begun; sleep 60"})
    found = (await tried(task, nop))["harbor"]
    assert (found["reward"], found["reason"]) == (None, "the tests did not end within 0.5 s")
    assert found["tests"] == "begun\n"


async def test_time_is_kept_back_for_grading(make: Any) -> None:
    found = await tried(make("[verifier]\ntimeout_sec = 600"), does("sleep 60"), seconds=5)
    assert found["harbor"]["reward"] == 1.0
    assert found["ended"] == "was out of time"


async def test_a_health_check_that_fails_is_no_attempt(make: Any) -> None:
    toml = '[environment]\nhealthcheck = {command = "echo n >> tries; false", interval_sec = 0.01, retries = 3}'
    with pytest.raises(SandboxError, match="health check failed"):
        await tried(make(toml), nop)
    late = 'n=$(cat n 2> /dev/null); echo x$n > n; test "$n" = xxxx'
    toml = (
        f"[environment.healthcheck]\ncommand = '{late}'\ninterval_sec = 0.01\nretries = 1\n"
        "start_period_sec = 20\nstart_interval_sec = 0.01"
    )
    assert (await tried(make(toml, name="late"), nop))["harbor"]["reward"] == 1.0


async def test_variables_of_this_process_where_they_are_asked_for(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = 'environment.env = {A = "${GIVEN}", B = "${GONE:-usual}", C = "x${GIVEN}"}\nverifier.env = {D = "${GIVEN}"}'
    tests = 'echo "$A,$B,$C,$D"; echo 1 > /logs/verifier/reward.txt'
    task = await asyncio.to_thread(read, make(toml, {"tests/test.sh": tests}))
    with pytest.raises(TaskError, match=r"\[verifier.env\]: D is \$\{GIVEN\}, and there is no .* GIVEN"):
        spec.check(task, "local")
    monkeypatch.setenv("GIVEN", "here")
    found = await tried(task, does("echo $A,$B,$C,$D"))
    assert found["ended"] == "said 'here,usual,x${GIVEN},\\n'"
    assert found["harbor"]["tests"] == "here,usual,x${GIVEN},here\n"


async def test_a_working_folder_of_the_tasks_own(make: Any) -> None:
    task = make('environment.workdir = "/app/src"', {"environment/deep/given": "x", "tests/test.sh": "pwd; ls"})
    found = await tried(task, does("pwd; ls"))
    assert (found["ended"], found["harbor"]["tests"]) == ("said '/app/src\\ndeep\\n'", "/app/src\ndeep\n")


@pytest.mark.docker
async def test_tasks_with_images_run_in_docker(make: Any, docker_image: str) -> None:
    dockerfile = f"FROM {docker_image}\nCOPY given /app/\nRUN echo built > /built\nENV OWN=image\nWORKDIR /app\n"
    files = {
        "environment/Dockerfile": dockerfile,
        "environment/given": "given\n",
        "tests/test.sh": 'cat /built given; if test "$(cat made)" = image; then echo 1; else echo 0; fi '
        "> /logs/verifier/reward.txt",
        "solution/solve.sh": "echo $OWN > made; setsid sleep 1000 & exit 1",
    }
    folder = make("agent.timeout_sec = 20\nenvironment.memory_mb = 256", files)
    assert (await asyncio.to_thread(flow.load_task, folder)).defaults["sandbox"] == "docker"
    solved = await tried(folder, oracle, kind="docker")
    assert (solved["harbor"]["reward"], solved["harbor"]["tests"]) == (1.0, "built\ngiven\n")
    assert (await tried(folder, nop, kind="docker"))["harbor"]["reward"] == 0.0
    prebuilt = make(f'environment.docker_image = "{docker_image}"', name="prebuilt")
    assert (await tried(prebuilt, does("pwd"), kind="docker"))["ended"] == "said '/work\\n'"


@pytest.mark.docker
@pytest.mark.parametrize("name", ["plain", "several", "json", "slow"])
async def test_the_same_tasks_run_in_docker(name: str, docker_image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minirllm.sandboxes.docker.IMAGE", docker_image)
    assert (await tried(name, oracle, kind="docker"))["harbor"]["reward"] == 1.0
    assert (await tried(name, nop, kind="docker"))["harbor"]["reward"] == 0.0


# ---- rewards ----


@pytest.mark.parametrize(("text", "value"), [("1", 1.0), (" -0.5\n", -0.5), ("1e-3", 0.001)])
def test_a_text_reward_is_a_number(text: str, value: float) -> None:
    assert _text(text) == {"reward": value}


@pytest.mark.parametrize("text", ["", "nan", "inf", "1 2", "one", "1,5"])
def test_other_texts_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"reward.txt must hold one finite number"):
        _text(text)


@pytest.mark.parametrize(
    "text", ["", "{}", "1", "[1]", '{"a": "1"}', '{"a": true}', '{"a": NaN}', '{"a": {"b": 1}}', f'{{"a": {10**400}}}']
)
def test_a_json_reward_is_a_flat_object_of_numbers(text: str) -> None:
    with pytest.raises(ValueError, match=r"reward.json must be a flat object of finite numbers"):
        _json(text)
    assert _json('{"a": 1, "b": -0.5}') == {"a": 1.0, "b": -0.5}


def test_rewards_of_steps() -> None:
    a, b = Graded({"reward": 1.0, "style": 0.5}), Graded({"reward": 0.0})
    assert combined([a, b], final=False).rewards == {"reward": 0.5, "style": 0.25}
    assert combined([a, b], final=True).rewards == {"reward": 0.0}
    failed = Graded(None, "why")
    assert combined([a, failed], final=True) == failed == combined([failed], final=False)
    assert scalar(a) == (1.0, "")
    assert scalar(Graded({"style": 0.5})) == (0.5, "")
    assert scalar(Graded({"x": 1.0, "y": 0.0})) == (None, "none of the rewards x, y is called reward")
    assert scalar(failed) == (None, "why")


def test_least_rewards_of_a_step(make: Any) -> None:
    steps = '[[steps]]\nname = "a"\nmin_reward = {style = 0.5, reward = 1}\n[[steps]]\nname = "b"'
    a, b = read(make(steps, {f"steps/{name}/instruction.md": name for name in "ab"})).steps
    assert [missed(a, r) for r in ({"style": 0.5, "reward": 1.0}, {"style": 0.4, "reward": 1.0}, {"reward": 1.0})] == [
        False, True, True,
    ]  # fmt: skip
    assert not missed(b, {"reward": -5.0})


# ---- what is read ----


def test_a_task_as_it_is_written() -> None:
    task = read(FIXTURES / "plain")
    (step,) = task.steps
    assert (task.name, task.environment.network, task.environment.memory_mb) == ("minirllm/plain", "no-network", 256.0)
    assert step.instruction.startswith("Write the word")
    assert (step.agent_seconds, step.verifier_seconds, dict(step.verifier_env)) == (60.0, 30.0, {"WANTED": "hello"})
    assert task.seconds == 150.0
    limits = spec.spec(task.environment, "", 60.0).limits
    assert (limits.memory, limits.disk, limits.cpus) == (256 * 2**20, 64 * 2**20, 1.0)


def test_the_oldest_schema_is_read() -> None:
    task = read(FIXTURES / "json")
    assert (task.name, task.environment.network, task.environment.memory_mb) == ("json", "no-network", 256.0)


def test_steps_fall_back_on_the_task(make: Any) -> None:
    toml = """
        agent = {timeout_sec = 5, user = 1000}
        verifier = {timeout_sec = 7, env = {A = "1", B = "1"}}
        multi_step_reward_strategy = "final"
        steps = [{name = "a", verifier = {timeout_sec = 8, env = {B = "2"}}}, {name = "b", agent = {timeout_sec = 6}}]
    """
    task = read(make(toml, {f"steps/{name}/instruction.md": name for name in "ab"}))
    a, b = task.steps
    assert (a.agent_seconds, b.agent_seconds, a.verifier_seconds, b.verifier_seconds) == (5.0, 6.0, 8.0, 7.0)
    assert (a.agent_user, dict(a.verifier_env), task.final) == ("1000", {"A": "1", "B": "2"}, True)


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("schema_version = '2.0'", "schema '2.0' is not one of 1.0, 1.1, 1.2, 1.3, 1.4"),
        ("agent.timeout_sec = 'long'", r"\[agent\]: timeout_sec must be a number from 0 to 1e\+09, got 'long'"),
        ("agent.timeout_sec = 1e308", r"\[agent\]: timeout_sec must be a number from 0 to 1e\+09, got 1e\+308"),
        ("environment.cpus = 1e30", r"\[environment\]: cpus must be a number from 0 to 1e\+09"),
        ("environment.cpus = nan", r"\[environment\]: cpus must be a number from 0"),
        (f"environment.memory = '{'9' * 400}G'", r"\[environment\]: memory must be at most 1e\+09 MiB"),
        ("environment.workdir = 'app'", r"\[environment\]: workdir must be an absolute path, got 'app'"),
        ("verifier.timeout_sec = -1", "timeout_sec must be a number from 0 to"),
        ("environment.env = {A = 1}", "env must be a table of texts"),
        ("environment.memory = '2 apples'", "memory must be a size such as"),
        ("environment.network_mode = 'open'", "network_mode must be public, no-network or allowlist"),
        ("agent = 3", "agent must be a table, got 3"),
        ("artifacts = ['../../etc']", r"source must be a path without \.\."),
        ("artifacts = 'a'", "artifacts must be a list of paths and tables"),
        ("steps = [{name = 'a/b'}]", "name must be a name of letters"),
        ("steps = [{name = 'a'}, {name = 'A'}]", "name must be a name .* no other step has"),
        ("multi_step_reward_strategy = 'best'", "must be mean or final"),
        ("agent = {network_mode = 'open'}", r"\[agent\]: network_mode must be public, no-network or allowlist"),
        ("agent.allowed_hosts = ['x.org']", "allowed_hosts must be given with network_mode"),
        ("artifacts = [{source = '/a', destination = '/b'}]", r"destination must be a relative path without \.\."),
        ("artifacts = [{source = 'a', service = 'db'}]", "source must be an absolute path, as it is one of a service"),
        ("verifier.environment_mode = 'own'", "environment_mode must be shared or separate"),
        ("verifier.collect = [{service = 'db'}]", r"\[\[collect\]\] 1: command must be a command"),
        ("environment.mcp_servers = [{name = 'a'}]", r"\[\[mcp_servers\]\] 1: url must be given for .* sse"),
        (
            "environment.mcp_servers = [{name = 'a', transport = 'x'}]",
            "transport must be sse, streamable-http or stdio",
        ),
        ("environment.healthcheck = {}", r"\[healthcheck\]: command must be a command"),
        ("x = ", "task.toml cannot be read"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(make: Any, toml: str, sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        read(make(toml))


def test_unknown_keys_are_nobodys_business(make: Any) -> None:
    read(make("new = 1\n[agent]\nnew = 1\n[later]\nx = 1"))


def test_links_that_lead_out_are_refused(make: Any) -> None:
    folder = make()
    (folder / "tests" / "inside").symlink_to("../instruction.md")
    read(folder)
    (folder / "tests" / "out").symlink_to("/etc/passwd")
    with pytest.raises(TaskError, match="link that leads out of the task"):
        read(folder)


@pytest.mark.parametrize(
    ("toml", "files", "sentence"),
    [
        ("environment.docker_image = 'x:1'", {}, "needs the image x:1, and the sandbox local has no images"),
        ("", {"environment/Dockerfile": "FROM x"}, "needs environment/Dockerfile, and the sandbox local"),
        ("", {"environment/docker-compose.yaml": ""}, "needs environment/docker-compose.yaml, and the sandbox local"),
        ("verifier.environment_mode = 'separate'", {"tests/Dockerfile": "FROM x"}, "needs tests/Dockerfile, and the"),
        ("verifier.environment.docker_image = 'x:1'", {}, "needs the image x:1, and the sandbox local"),
        ("agent.user = 'root'", {}, "names the user root. The sandbox local runs commands as agent or 60001 only"),
        ("verifier.user = 0", {}, "names the user 0. The sandbox local runs"),
        ("verifier.collect = [{command = 'true', user = 'db'}]", {}, "names the user db. The sandbox local runs"),
        ("environment.network_mode = 'allowlist'", {}, "needs hosts on the network"),
        ("agent.network_mode = 'allowlist'", {}, "needs hosts on the network"),
        ("verifier.environment.network_mode = 'allowlist'", {}, "needs hosts on the network"),
        ("artifacts = [{source = '/x', service = 'db'}]", {}, "names the service db, and has no environment/docker-c"),
        ("environment.gpus = 1", {}, "needs gpus, which no sandbox here has"),
    ],
)
def test_what_a_sandbox_cannot_do_is_refused_in_a_sentence(make: Any, toml: str, files: Any, sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        spec.check(read(make(toml, files)), "local")


# ---- as a dataset ----


def test_a_folder_of_tasks_is_a_dataset(make: Any, tmp_path: Path) -> None:
    module = flow.load_task(FIXTURES)
    tasks = module.held_out(Config())
    assert [task.id for task in tasks] == ["broken", "json", "minirllm/plain", "several", "slow"]
    assert tasks == module.train(Config())
    assert (tasks[2].task_dir, tasks[2].instruction[:14]) == (FIXTURES / "plain", "Write the word")
    assert [task.id for task in flow.load_task(str(FIXTURES / "json")).train(Config())] == ["json"]
    assert module.defaults == {"sandbox": "local", "episode_timeout": 720.0}
    for name in ("train/a", "train/b", "held_out/c"):
        make(name=f"set/{name}")
    split = flow.load_task(tmp_path / "set")
    assert [[task.id for task in made(Config())] for made in (split.train, split.held_out)] == [["a", "b"], ["c"]]
    make("[task]\nname = 'b'", name="set/train/a")
    with pytest.raises(TaskError, match="same id 'b'"):
        flow.load_task(tmp_path / "set").train(Config())
    with pytest.raises(TaskError, match=r"neither it nor a folder in it has a task\.toml"):
        flow.load_task(tmp_path)


def test_its_revision_is_of_every_file(make: Any) -> None:
    folder = make()
    first = flow.load_task(folder).data_revision
    assert flow.load_task(folder).data_revision == first
    (folder / "tests" / "more").write_text("")
    assert flow.load_task(folder).data_revision != first


def test_who_may_act(make: Any) -> None:
    module = flow.load_task(make())
    for name, sentence in (("", "has no agent of its own: choose one"), ("orakle", "There is no harness 'orakle'")):
        with pytest.raises(UserError, match=sentence):
            harness.agent(module, Config(harness=name, sandbox="local"))
    with pytest.raises(TaskError, match=r"has no solution/solve\.sh"):
        harness.agent(module, Config(harness="oracle", sandbox="local"))
    assert harness.agent(module, Config(harness="nop", sandbox="local")).facts == {"harness": "nop", "sandbox": "local"}


async def test_the_evaluator_reads_the_trials_verdict() -> None:
    grader = (await asyncio.to_thread(flow.load_task, FIXTURES / "json")).evaluator
    found = {"reward": 1.0, "reason": "", "rewards": {"reward": 1.0, "lines": 3.0}}
    output = await grader(None, Episode(artifacts={"harbor": found}))
    assert (output.reward, output.is_correct, [s.name for s in output.signals]) == (1.0, True, ["reward", "lines"])
    output = await grader(None, Episode(artifacts={"harbor": {"reward": None, "reason": "why", "rewards": {}}}))
    assert (output.reward, output.is_correct, output.reason) == (None, False, "why")


@pytest.mark.slow
def test_the_command_line_evaluates_a_folder(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES, tmp_path / "set")

    def evaluated(who: str) -> str:
        command = [sys.executable, "-m", "minirllm.cli", "eval", str(tmp_path / "set"), "--harness", who]
        command += ["--sandbox", "local", "--model", "tiny", "--output", str(tmp_path / who)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=100)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = evaluated("oracle")
    assert "mean reward 1.000" in said
    assert "5 tasks x 1, 4 graded, 1 grading_error" in said
