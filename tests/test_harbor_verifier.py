"""Users, services and verifiers of Harbor tasks: who runs what, what is kept, what a verifier of its own sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minirllm import harness
from minirllm.config import Config
from minirllm.errors import TaskError
from minirllm.flow import load_task
from minirllm.harbor import trial
from minirllm.harbor.agents import nop, oracle
from minirllm.harbor.environment import connected
from minirllm.harbor.task import read
from tests.trials import does, maker, tried

SEPARATE = 'verifier.environment_mode = "separate"\n'
REWARD = "test $? = 0; echo $((1 - $?)) > /logs/verifier/reward.txt"


@pytest.fixture
def make(tmp_path: Path) -> Any:
    return maker(tmp_path)


async def test_a_verifier_of_its_own_sees_artifacts_and_nothing_else(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = SEPARATE + 'artifacts = ["out", {source = "/work/tree", exclude = ["*.pyc", "cache"], destination = "kept"}]'
    files = {
        "environment/given": "given\n",
        "tests/test.sh": f"cat out given run.log; ./out; find tree /opt /logs/artifacts; {REWARD}",
    }
    left = (
        "mkdir -p tree/cache tree/sub; echo a > tree/sub/a.txt; touch tree/b.pyc tree/cache/x; ln -s sub/a.txt tree/in;"
    )
    left += "ln -s /usr/bin tree/away; echo changed > given; echo x > run.log; touch /opt/x;"
    left += "echo log > /logs/artifacts/log;"
    left += (
        "printf '#!/bin/sh\\necho ran\\n' > out; chmod 755 out; rm -rf /tests; mkdir /tests; echo bad > /tests/test.sh"
    )
    seen: list[bool] = []
    real = trial.graded

    async def graded(task: Any, step: Any, *more: Any) -> Any:
        seen.append(boxes[0].running)
        return await real(task, step, *more)

    boxes: list[Any] = []

    async def agent(order: Any) -> Any:
        boxes.append(order.box)
        return await does(left)(order)

    monkeypatch.setattr(trial, "graded", graded)
    found = await tried(make(toml, files), agent)
    assert found["harbor"]["tests"].splitlines() == [
        "#!/bin/sh", "echo ran", "given", "cat: run.log: No such file or directory", "ran", "tree", "tree/sub",
        "tree/sub/a.txt", "tree/in", "/opt", "/logs/artifacts",
        "/logs/artifacts/log",
    ]  # fmt: skip
    assert seen == [False]  # the agent's sandbox is gone before the verifier's is there
    assert found["files"] == {
        "/logs/artifacts/log": "log\n",
        "/work/out": "#!/bin/sh\necho ran\n",
        "kept/sub/a.txt": "a\n",
    }
    assert [(each["source"], each["destination"], each["type"], each["status"]) for each in found["manifest"]] == [
        ("/logs/artifacts", "artifacts/logs/artifacts", "directory", "ok"),
        ("/work/out", "artifacts/work/out", "file", "ok"),
        ("/work/tree", "artifacts/kept", "directory", "ok"),
    ]


async def test_the_manifest_says_what_could_not_be_kept(make: Any) -> None:
    toml = 'artifacts = ["absent", "made", {source = "made/a"}, {source = "other", destination = "work/made/b"}]'
    found = await tried(make(toml), does("mkdir made; echo a > made/a; echo o > other; rm -rf /logs/artifacts"))
    assert [(each["source"], each["status"]) for each in found["manifest"]] == [
        ("/logs/artifacts", "failed"), ("/work/absent", "failed"), ("/work/made", "ok"), ("/work/made/a", "skipped"),
        ("/work/other", "skipped"),
    ]  # fmt: skip
    assert found["files"] == {"/work/made/a": "a\n"}
    assert found["harbor"]["reward"] == 1.0


async def test_hooks_collect_what_is_not_in_a_file_yet(make: Any) -> None:
    toml = 'artifacts = ["state"]\n[verifier]\nenvironment_mode = "separate"\n'
    toml += "collect = [{command = 'false'}, {command = 'cat secret > state', timeout_sec = 5}]"
    found = await tried(
        make(toml, {"tests/test.sh": f"cat state secret; grep -q mine state; {REWARD}"}), does("echo mine > secret")
    )
    assert found["harbor"]["tests"] == "mine\ncat: secret: No such file or directory\n"
    assert found["harbor"]["reward"] == 1.0


async def test_each_step_has_its_own_kind_of_verifier(make: Any) -> None:
    toml = 'artifacts = ["out"]\n[[steps]]\nname = "a"\nverifier.environment_mode = "separate"\n'
    toml += '[[steps]]\nname = "b"\n[[steps]]\nname = "c"\n[steps.verifier.environment]\nworkdir = "/elsewhere"\n'
    files = {f"steps/{name}/instruction.md": name for name in "abc"}
    test = f"pwd; cat out /work/out; ls more; test -e more; {REWARD}"
    found = await tried(make(toml, {**files, "tests/test.sh": test}), does("echo x >> out; touch more"))
    assert found["harbor"]["steps"] == [{"reward": 0.0}, {"reward": 1.0}, {"reward": 0.0}]
    lines = [line for line in found["harbor"]["tests"].splitlines() if "more" not in line and line]
    assert lines == [
        "/work",
        *["x"] * 2,
        "/work",
        *["x"] * 4,
        "/elsewhere",
        "cat: out: No such file or directory",
        *["x"] * 3,
    ]


def test_what_a_verifier_is_made_of(make: Any) -> None:
    def of(toml: str, files: dict[str, str] | None = None) -> Any:
        (step,) = read(make(toml, {"environment/x": "", **(files or {})}, name=f"t{len(made)}")).steps
        made.append(step)
        return step.verifier and (step.verifier.image, step.verifier.build, step.verifier.workdir, step.tests_inside)

    made: list[Any] = []
    assert of("") is None
    with pytest.raises(TaskError, match="environment_mode must be separate, or left out"):
        of("[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]\nworkdir = '/x'")
    assert of("environment.workdir = '/e'\n" + SEPARATE) == ("", None, "/e", False)
    assert of("environment.docker_image = 'e:1'\n" + SEPARATE) == ("e:1", None, "", False)
    assert of("[verifier.environment]\nworkdir = '/v'") == ("", None, "/v", False)
    assert of("[verifier.environment]\ndocker_image = 'v:1'") == ("v:1", None, "", True)
    own = of("environment.docker_image = 'e:1'\n" + SEPARATE, {"tests/Dockerfile": "FROM x"})
    assert (own[0], own[1].name, own[3]) == ("", "tests", True)


async def test_a_verifier_that_cannot_be_had_is_no_reward(make: Any) -> None:
    def agent_breaks(path: str) -> Any:
        return does(f"rm -rf {path}; mkdir -p {path}")

    toml = 'artifacts = ["/usr/share/zoneinfo"]\n' + SEPARATE  # which cannot be made in it
    found = (await tried(make(toml), nop))["harbor"]
    assert found["reward"] is None
    assert found["reason"].startswith("the verifier's sandbox failed: ")


# ---- with an engine ----


@pytest.mark.docker
async def test_agent_and_verifier_are_the_users_that_the_task_names(make: Any, docker_image: str) -> None:
    toml = f"""
        environment = {{docker_image = "{docker_image}", workdir = "/app"}}
        agent.user = "agent"
        verifier.user = "root"
        artifacts = ["/app/own"]
        [[steps]]
        name = "a"
        [[steps]]
        name = "b"
        agent.user = 0
        verifier.user = 1000
    """
    files = {
        "steps/a/instruction.md": "a", "steps/b/instruction.md": "b",
        "steps/a/workdir/setup.sh": "id -un > /tmp/setup",
        "tests/test.sh": f"id -u; cat /app/own /tmp/setup; umask 077; true; {REWARD}",
        "solution/solve.sh": "umask 077; id -u; touch /root/x; id -u > /app/own",
    }  # fmt: skip
    folder = make(toml, files)
    found = await tried(
        folder, does("umask 077; id -u > /tmp/own; touch /root/x && id -u > /app/own; id -u"), kind="docker"
    )
    assert found["ended"] == "a: said '1000\\n'; b: said '0\\n'"
    assert found["harbor"]["steps"] == [{"reward": 1.0}, {"reward": 1.0}]
    tests = "0\ncat: /app/own: No such file or directory\nagent\n", "1000\ncat: /app/own: Permission denied\nagent\n"
    assert found["harbor"]["tests"] == "\n".join(tests)
    assert found["files"] == {"b: /app/own": "0\n"}  # files come out whoever owns them
    assert (await tried(folder, oracle, kind="docker"))["harbor"]["reward"] == 1.0


@pytest.mark.docker
async def test_an_agent_that_replaces_programs_is_graded_all_the_same(make: Any, docker_image: str) -> None:
    toml = f'environment.docker_image = "{docker_image}"\nartifacts = ["/tmp/own"]\n' + SEPARATE
    lies = "echo x > /tmp/own; cd /usr/bin && rm stat && printf '#!/bin/bash\\necho many\\n' > stat && chmod 755 stat"
    found = await tried(make(toml), does(lies), kind="docker")
    assert [(each["source"], each["status"]) for each in found["manifest"]][1] == ("/tmp/own", "failed")
    assert found["harbor"]["reward"] == 1.0


@pytest.mark.docker
async def test_a_verifier_built_of_the_tests(make: Any, docker_image: str) -> None:
    toml = 'artifacts = ["/app"]\nverifier = {environment_mode = "separate", user = "agent"}\n'
    toml += f'environment.docker_image = "{docker_image}"'
    files = {
        "tests/Dockerfile": f"FROM {docker_image}\nCOPY . /tests/\nRUN echo baked > /baked\nWORKDIR /judge",
        "tests/expected": "wanted\n",
        "tests/test.sh": f"pwd; id -u; cat /baked; ls /tmp; cmp /app/out /tests/expected; {REWARD}",
        "solution/solve.sh": "mkdir /app; echo wanted > /app/out; touch /tmp/mess",
    }
    folder = make(toml, files)
    found = await tried(folder, oracle, kind="docker")
    assert (found["harbor"]["reward"], found["harbor"]["tests"]) == (1.0, "/judge\n1000\nbaked\n")
    assert (await tried(folder, nop, kind="docker"))["harbor"]["reward"] == 0.0
    (folder / "tests" / "Dockerfile").write_text("FROM local/absent:1")
    found = await tried(folder, oracle, kind="docker")
    assert found["harbor"]["reason"].startswith("the verifier's sandbox failed: ")


@pytest.mark.docker
async def test_services_beside_the_agent(make: Any, docker_image: str, tmp_path: Path) -> None:
    url = "import urllib.request as u; print(u.urlopen('http://{}').read().decode(), end='')"
    get, up = f'python3 -c "{url.format("db:8000/row")}"', f'python3 -c "{url.format("localhost:8000/row")}"'
    db = {
        "image": docker_image, "command": ["python3", "-m", "http.server", "8000", "--directory", "/srv/data"],
        "healthcheck": {"test": ["CMD-SHELL", up], "interval": "200ms", "retries": 100},
        "volumes": ["./data:/srv/data"],
    }  # fmt: skip
    main = {"depends_on": {"db": {"condition": "service_healthy"}}, "environment": ["NAMED=${KEY}"]}
    toml = f"""
        environment = {{env = {{KEY = "value"}}, workdir = "/app", healthcheck = {{command = '''{get}'''}}}}
        artifacts = ["/app/out", {{source = "/tmp/dump", service = "db", destination = "db/dump"}},
                     {{source = "/x", service = "no"}}]
        [verifier]
        environment_mode = "separate"
        collect = [{{command = "id -u > /tmp/dump; cat /srv/data/row >> /tmp/dump", service = "db", user = "agent"}}]
    """
    files = {
        "environment/Dockerfile": f"FROM {docker_image}\nRUN mkdir /app\nWORKDIR /app\n",
        "environment/docker-compose.yaml": json.dumps({"services": {"main": main, "db": db}}),
        "environment/data/row": "of the database\n",
        "solution/solve.sh": f"{get} > out; echo $NAMED $KEY >> out",
        "tests/Dockerfile": f"FROM {docker_image}\nCOPY . /tests/\n",
        "tests/test.sh": f"cat /app/out /tmp/dump; timeout 3 {get} && exit; grep -q database /app/out; {REWARD}",
    }
    folder = make(toml, files)
    solved = await tried(folder, oracle, kind="docker")
    assert solved["harbor"]["tests"].startswith("of the database\nvalue value\n1000\nof the database\nTraceback")
    assert solved["harbor"]["reward"] == 1.0
    assert solved["files"]["db/dump"] == "1000\nof the database\n"
    assert [each["status"] for each in solved["manifest"]] == ["empty", "ok", "ok", "failed"]
    assert (await tried(folder, nop, kind="docker"))["harbor"]["reward"] == 0.0


# ---- what an agent program is given ----


def test_servers_and_skills_are_given_or_refused_by_name(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = '[[environment.mcp_servers]]\nname = "calc"\ntransport = "stdio"\n'
    servers += 'command = "python3"\nargs = ["/app/calc.py"]\n'
    servers += '[[environment.mcp_servers]]\nname = "far"\ntransport = "streamable-http"\nurl = "http://db:8000/mcp"\n'
    servers += 'headers = {Authorization = "Bearer ${TOKEN}"}'
    monkeypatch.setenv("TOKEN", "t0ken")
    task = read(make(servers))
    assert connected(task.environment.servers, "") == {
        "calc": {"type": "stdio", "command": "python3", "args": ["/app/calc.py"]},
        "far": {"type": "http", "url": "http://db:8000/mcp", "headers": {"Authorization": "Bearer t0ken"}},
    }
    sse = '[[environment.mcp_servers]]\nname = "old"\nurl = "http://db/sse"'
    for toml, sentence in (
        (sse, r"has the MCP server old \(sse\), which bash cannot be given: take claude-code\."),
        (servers, r"has the MCP server calc \(stdio\), which bash cannot be given: take claude-code or codex"),
        ('environment.skills_dir = "/skills"', "has skills_dir, which bash cannot be given: take claude-code or codex"),
    ):
        module = load_task(make(toml))
        with pytest.raises(TaskError, match=sentence):
            harness.agent(module, Config(harness="bash", sandbox="local"))
        assert harness.agent(module, Config(harness="nop", sandbox="local")).silent
    monkeypatch.delenv("TOKEN")
    with pytest.raises(TaskError, match="no environment variable TOKEN"):
        harness.agent(load_task(make(servers)), Config(harness="nop", sandbox="local"))
