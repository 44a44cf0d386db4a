"""Agent programs at Harbor tasks: a real program in the sandbox, a scripted model behind the endpoint, graded there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minirllm import evaluate, flow, harness
from minirllm.config import Config
from minirllm.types import Episode

CONFIG = {
    "model": "tiny", "engine": "minirllm.tools.harness:CheckEngine", "max_context": 4096, "max_tokens": 256,
    "determinism": "off", "retries": 0, "episode_timeout": 90.0,
}  # fmt: skip


def task(folder: Path, toml: str = "", wanted: str = "made") -> str:
    for path, text in {
        "task.toml": f"agent.timeout_sec = 40\n{toml}",
        "instruction.md": "Make it.",
        "tests/test.sh": f'test "$(cat made.txt)" = {wanted}; echo $((1 - $?)) > /logs/verifier/reward.txt',
    }.items():
        (folder / "task" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "task" / path).write_text(text)
    return str(folder / "task")


def evaluated(path: str, **options: object) -> Episode:
    config = Config(**{**CONFIG, "harness": "bash", **options})
    return evaluate.run(flow.load_task(path), config).episodes[0]


def test_a_program_works_in_the_sandbox_and_is_graded_there(tmp_path: Path) -> None:
    episode = evaluated(task(tmp_path), sandbox="local")
    assert (episode.reward, episode.reason, episode.artifacts["exit_code"]) == (1.0, "", 0)
    assert [step.response_length > 0 for step in episode.trajectories[0].steps] == [True, True]
    assert evaluated(task(tmp_path, wanted="other"), sandbox="local").reward == 0.0


EQUIPPED = """
[environment]
skills_dir = "/work/skills"
[[environment.mcp_servers]]
name = "calc"
transport = "stdio"
command = "/usr/bin/python3"
args = ["/work/server.py"]
"""
SERVER = """
import json, sys
numbers = {name: {"type": "number"} for name in "ab"}
tool = {"name": "add", "description": "Adds", "inputSchema": {"type": "object", "properties": numbers}}
for line in sys.stdin:
    asked = json.loads(line)
    result = {"tools": [tool]} if asked["method"] == "tools/list" else {}
    if asked["method"] == "initialize":
        result = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "calc", "version": "1"}}
    if asked["method"] == "tools/call":
        total = str(sum(asked["params"]["arguments"].values()))
        open("/work/made.txt", "w").write(total)
        result = {"content": [{"type": "text", "text": total}]}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""
OWN = """
import json
from minirllm.harness import Harness, Launch
def launch(context):
    said = json.dumps([dict(context.servers), context.skills])
    line = 'printf %s "$0"; cat $HOME/.own/skills/greeting/SKILL.md; echo 42 > made.txt'
    return Launch(("/bin/bash", "-c", line, said))
HARNESS = Harness(name="own", version="1", about="", dialect="chat", launch=launch, script=(), skills=".own/skills",
                  servers=("stdio",))
"""
REAL = """
from dataclasses import replace
from minirllm.harness import Call, find
HARNESS = replace(find({name!r}), script=(Call({tool!r}, {{"a": 2, "b": 40}}), "Done."))
"""


def equipped(folder: Path, own: str) -> Episode:
    path = task(folder, EQUIPPED, wanted="42")
    for name, text in {"server.py": SERVER, "skills/greeting/SKILL.md": SKILL}.items():
        (Path(path) / "environment" / name).parent.mkdir(parents=True, exist_ok=True)
        (Path(path) / "environment" / name).write_text(text)
    (folder / "own.py").write_text(own)
    return evaluated(path, sandbox="local", harness=str(folder / "own.py"), max_context=65536)


SKILL = "---\nname: greeting\ndescription: How to greet a zebra\n---\nBow.\n"


def test_a_program_is_given_the_tasks_servers_and_skills(tmp_path: Path) -> None:
    episode = equipped(tmp_path, OWN)
    server = {"type": "stdio", "command": "/usr/bin/python3", "args": ["/work/server.py"]}
    assert episode.artifacts["stdout"] == json.dumps([{"calc": server}, True]) + SKILL
    assert episode.artifacts["harbor"]["reward"] == 1.0


@pytest.mark.parametrize(("name", "tool"), [("claude-code", "mcp__calc__add"), ("codex", "add")])
def test_real_programs_take_them(tmp_path: Path, name: str, tool: str) -> None:
    if not harness.find(name).installed:
        pytest.skip(f"{name} is not installed")
    episode = equipped(tmp_path, REAL.format(name=name, tool=tool))
    assert (episode.reward, episode.reason) == (1.0, ""), episode.artifacts
    assert "greet a zebra" in str(vars(episode.trajectories[0].steps[0]))


@pytest.mark.docker
def test_a_program_works_in_a_container(tmp_path: Path, docker_image: str) -> None:
    toml = f'environment = {{docker_image = "{docker_image}", workdir = "/app"}}'
    episode = evaluated(task(tmp_path, toml), sandbox="docker")
    assert (episode.reward, episode.reason, episode.artifacts["exit_code"]) == (1.0, "", 0)


@pytest.mark.docker
def test_a_program_works_as_a_user_beside_services(tmp_path: Path, docker_image: str) -> None:
    """The endpoint is reached from `main` whatever its networks."""
    toml = f'agent.user = "agent"\nenvironment = {{docker_image = "{docker_image}", workdir = "/tmp"}}'
    path = Path(task(tmp_path, toml))
    services = {"main": {}, "db": {"image": docker_image, "command": ["sleep", "infinity"]}}
    (path / "environment").mkdir()
    (path / "environment" / "docker-compose.yaml").write_text(json.dumps({"services": services}))
    test = f"{(path / 'tests' / 'test.sh').read_text()}; stat -c %U made.txt"
    (path / "tests" / "test.sh").write_text(test)
    episode = evaluated(str(path), sandbox="docker")
    assert (episode.reward, episode.reason, episode.artifacts["exit_code"]) == (1.0, "", 0)
    assert episode.artifacts["harbor"]["tests"].split() == ["agent"]
