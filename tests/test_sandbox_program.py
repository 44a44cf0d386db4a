"""Agent programs in a sandbox: what they see and reach, how they end, what is kept; as without one where it can be."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from minirllm import harness
from minirllm.cli import cli
from minirllm.config import Config
from minirllm.errors import ConfigError, SandboxError
from minirllm.flow import load_task
from minirllm.harness import Harness, Launch
from minirllm.rollouts import Job
from minirllm.sandboxes import MIB, Limits, Spec, create
from minirllm.sandboxes.pool import Pool
from minirllm.sandboxes.program import gather, seen, spec
from minirllm.types import Episode, Task, TerminationReason
from tests import shells
from tests.test_harness import CALL, running, scripted

CALLING = CALL.replace(shlex.quote(sys.executable), "/usr/bin/python3")
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="a port into the sandbox needs root")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIRLLM_CACHE", str(tmp_path / "cache"))


async def run(own: Harness, task: Task | None = None, **options: object) -> Episode:
    async with running(harness.flow(own, boxes=Pool("local")), **options) as runner:
        return await runner.run(Job(task or Task("t", "do it"), 3))


# ---- what it sees ----


@root_only
async def test_its_own_folders_and_nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-user")
    monkeypatch.setenv("HTTP_PROXY", "of-the-user")
    episode = await run(scripted(CALLING + "env; pwd; id -u; ls -A / /root $HOME $TMPDIR .; echo rest $(cat)"))
    out = episode.artifacts["stdout"]
    assert "of-the-user" not in out
    lines = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
    assert (lines["HOME"], lines["TMPDIR"], lines["MINIRLLM_INSTRUCTION"]) == ("/home/agent", "/tmp", "do it")
    assert "\n/work\n60001\n.:\n\n/:\n" in out
    assert out.endswith("\n\n/home/agent:\n\n/root:\n\n/tmp:\nrest\n")
    assert (episode.reward, episode.answer, episode.artifacts["exit_code"]) == (1.0, "hello", 0)


@root_only
async def test_only_the_sessions_own_endpoint_can_be_reached() -> None:
    """Another session is not opened by this one's key, nor are the admin's routes; no other port leads anywhere."""
    listener = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    script = f"""
import json, os, re, socket, urllib.error, urllib.request
own, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
root, body = own.partition("/sessions/")[0], json.dumps({{"messages": [{{"role": "user", "content": "x"}}]}}).encode()
def call(url, key, method="POST"):
    headers = {{"authorization": "Bearer " + key, "content-type": "application/json"}}
    request = urllib.request.Request(url, body if method == "POST" else None, headers, method=method)
    try: return urllib.request.urlopen(request).status
    except urllib.error.HTTPError as error: return error.code
print(call(own + "/chat/completions", key), call(root + "/sessions/other/v1/chat/completions", key),
      call(root + "/sessions/forged/v1/chat/completions", key), call(own + "/chat/completions", "wrong"),
      call(root + "/admin/sessions", key, "GET"), call(root + "/admin/sessions", key),
      call(root + "/v1/chat/completions", key))
for port in ({port}, 22, 80, 8000):
    for host in ("127.0.0.1", "10.0.0.1", "1.1.1.1"):
        try: socket.create_connection((host, port), 1); print("reached", host, port)
        except OSError: pass"""
    own = scripted(f"/usr/bin/python3 -c {shlex.quote(script)}")
    async with running(harness.flow(own, boxes=Pool("local"))) as runner:
        runner.sessions.create("other", seed_parts=("other",))
        episode = await runner.run(Job(Task("t", "do it")))
    listener.close()
    assert episode.artifacts["stderr"] == ""
    assert episode.artifacts["stdout"] == "200 401 404 401 401 401 404\n"
    assert len(episode.trajectories[0].steps) == 1


@root_only
async def test_what_is_bound_cannot_be_written_and_nothing_beside_it_is_seen(tmp_path: Path) -> None:
    shown, beside = tmp_path / "shown", tmp_path / "beside"
    for folder in (shown, beside):
        folder.mkdir()
        (folder / "file").write_text("original\n")
    (shown / "file").chmod(0o666)
    shown.chmod(0o777)
    (shown / "out").symlink_to(beside)
    tmp_path.chmod(0o755)
    binds = {str(shown): str(shown), str(shown / "file"): "/opt/deep/er/one"}
    async with create("local", Spec(binds=binds, limits=Limits(memory=128 * MIB, disk=16 * MIB))) as box:
        tries = (
            f"cd {shown}; cat file /opt/deep/er/one; echo x > file; echo x > new; rm file; mkdir d; chmod 700 .; "
            f"mv file f; ln file hard; touch file; echo x > /opt/deep/er/one; rm -rf {shown} /opt; cat out/file; "
            f"umount {shown}; mount -o remount,rw {shown}; ls -A {tmp_path}; ls -A /opt/deep/er; ls /root"
        )
        done = await box.run(tries, timeout=20)
        assert done.stdout == f"original\noriginal\n{shown.name}\none\n"
        again = await box.run("cat /opt/deep/er/one; rm -rf /opt/deep; ls -A /opt", timeout=20)
        assert again.stdout == "original\ndeep\n"
    assert [(path.read_text(), path.stat().st_mode & 0o777) for path in (shown / "file", beside / "file")] == [
        ("original\n", 0o666), ("original\n", 0o644),
    ]  # fmt: skip
    assert sorted(path.name for path in shown.iterdir()) == ["file", "out"]
    assert shown.stat().st_mode & 0o777 == 0o777


@root_only
async def test_an_agent_that_moves_the_place_of_a_bind_gains_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("bound\n")
    async with create("local", Spec(binds={str(tmp_path / "file"): "/srv/own/file"})) as box:
        await box.run("mv /srv /srv2; ln -s /etc /srv; ls /", timeout=20)
        with pytest.raises(SandboxError):  # the folder is a link now, into what is read-only
            await box.run("true", timeout=20)
    assert not Path("/etc/own").exists()
    with pytest.raises(SandboxError, match="binds nothing"):
        await create("local-unsafe", Spec(binds={"/a": "/b"})).start()


def test_interpreters_are_seen_with_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        path.chmod(0o755)
        return path

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    python = program(tmp_path / "home" / "pyenv" / "3.12" / "bin" / "python3.12")
    program(python.parent.parent / "lib" / "python3.12" / "os.py")
    own = tmp_path / "cache" / "agent-1"
    (own / "bin").mkdir(parents=True)
    (own / "bin" / "python").symlink_to(python)
    (own / "pyvenv.cfg").write_text("")
    node = program(tmp_path / "node" / "bin" / "node")
    (tmp_path / "node" / "lib" / "node_modules").mkdir(parents=True)
    script = program(tmp_path / "home" / "bin" / "agent.sh")
    program(tmp_path / "home" / "lib" / "python3.9" / "os.py")  # a home is no prefix
    path = f"{node.parent}:{script.parent}:/usr/bin"

    def of(*programs: str, folder: Path = own) -> set[str]:
        binds = seen(programs, [folder], path)
        assert all(outside == inside for outside, inside in binds.items())
        return {str(Path(place).relative_to(tmp_path)) for place in binds}

    venv = {"cache/agent-1", "home/pyenv/3.12"}
    assert of("bash", "/usr/bin/python3", "absent") == venv
    assert of(str(own / "bin" / "python")) == venv
    assert of("node", folder=tmp_path / "absent") == {"node"}
    assert of("agent.sh") == {*venv, "home/bin/agent.sh"}
    monkeypatch.setenv("PATH", path)
    made, inside = spec(["node>=22", "python>=3.12", "bash"], own, [own / "bin"], "http://127.0.0.1:81/sessions/s")
    assert {str(Path(place).relative_to(tmp_path)) for place in made.binds} == {*venv, "node"}
    assert made.forward == {81: ("127.0.0.1", 81)}
    assert inside.split(":")[0] == f"{own}/bin"
    assert set(inside.split(":")[1:]) == {
        f"{own}/bin", f"{python.parent}", f"{node.parent}", "/usr/local/bin", "/usr/bin", "/bin"
    }  # fmt: skip
    monkeypatch.setattr("shutil.which", lambda name, path: "/work/x")
    with pytest.raises(SandboxError, match=r"/work/x lies below /work, where programs work in a sandbox"):
        seen(["x"], [], path)


# ---- how it ends, and what is kept ----


@root_only
async def test_the_tasks_files_are_there_and_those_it_leaves_are_kept() -> None:
    episode = await run(scripted(shells.LEAVING + CALLING), shells.with_files())
    assert episode.artifacts["stdout"] == "given\nran\nhello\n"
    shells.check_left(episode)
    assert "shut/in" not in episode.artifacts["files"]


async def test_an_agents_files_come_out_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minirllm.sandboxes.place.MAX_FILES", 3)
    async with create("local", Spec(limits=Limits(memory=128 * MIB, disk=64 * MIB))) as box:
        script = "for n in $(seq 300); do echo $n > f$n; done; mkdir -p a; echo -n x > a/0; truncate -s 50M huge"
        assert (await box.run(script, timeout=60)).exit_code == 0
        found, left_out = await gather(box)
    assert found == {"f1": "1\n", "f10": "10\n", "f100": "100\n"}
    assert len(left_out) == 3


@root_only
async def test_what_it_printed_is_kept_to_its_tail() -> None:
    shells.check_printed(await run(scripted(CALLING + shells.PRINTING)))


@root_only
async def test_at_the_deadline_all_of_it_is_ended() -> None:
    script = CALLING + shells.SLEEPING.format("93101")
    shells.check_ended(await run(scripted(script), episode_timeout=6.0), "93101")


@root_only
async def test_files_in_its_home_and_a_program_that_cannot_be_started() -> None:
    episode = await run(scripted("", launch=shells.reading_its_home(CALLING)))
    assert episode.artifacts["stdout"] == "set\nhello\n"
    episode = await run(scripted("", launch=lambda context: Launch(("absent-program",))))
    assert episode.termination_reason is TerminationReason.NO_CALLS
    assert "own ended with exit code 127" in episode.reason


async def test_an_environment_made_from_this_python_runs(tmp_path: Path) -> None:
    home, base = tmp_path / "own", Path(sys.base_prefix) / "bin" / Path(sys.executable).resolve().name
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "python").symlink_to(base)
    (home / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    binds = await asyncio.to_thread(seen, [str(home / "bin" / "python")], [home], "/usr/bin")
    async with create("local", Spec(binds=binds)) as box:
        script = "import json, ssl, sys; print(sys.prefix, sys.version_info[:2])"
        done = await box.execute((str(home / "bin" / "python"), "-c", script), timeout=60)
    assert done.stdout == f"{home} {sys.version_info[:2]}\n", done.stderr


@pytest.mark.parametrize("option", [{"setup": "true"}, {"warm": 2}, {"snapshots": "make"}, {"harness_full": True}])
def test_options_of_a_program_and_its_sandbox_are_refused_without_one(option: dict[str, Any]) -> None:
    own, (name,) = load_task("tasks/smoke.py"), option
    with pytest.raises(ConfigError, match=f"{name} has no effect with (no sandbox|the task's own agent)"):
        harness.agent(own, Config(**option))
    if name != "harness_full":
        with pytest.raises(ConfigError, match=f"{name} has no effect with no sandbox"):
            harness.agent(own, Config(harness="bash", **option))
    harness.agent(own, Config(harness="bash", sandbox="local", **option))


def test_a_sandbox_is_for_an_agent_program() -> None:
    own = load_task("tasks/smoke.py")
    with pytest.raises(ConfigError, match="A sandbox is for an agent program: choose one, as in --harness bash"):
        harness.agent(own, Config(sandbox="local"))
    made = harness.agent(own, Config(sandbox="local", harness="bash"))
    assert made.facts == {"harness": "bash 1", "sandbox": "local"}


async def test_a_sandbox_that_cannot_do_it_says_so() -> None:
    async with running(harness.flow(scripted("true"), boxes=Pool("local-unsafe"))) as runner:
        episode = await runner.run(Job(Task("t", "do it")))
    assert episode.termination_reason is TerminationReason.ERROR
    assert "local-unsafe has this machine's network and files" in episode.reason


@root_only
@pytest.mark.slow
def test_an_agent_in_a_sandbox_is_trained_on_the_files_it_makes(tmp_path: Path) -> None:
    """Two steps of benchmarks/file_task.py: the shell runs what the model says, the reward is read off the file."""
    file = str(Path(__file__).parents[1] / "benchmarks" / "file_task.py")
    options = ("--steps", "2", "--set", "batch_size=2", "--set", "group_size=4", "--set", "eval_tasks=1")
    result = CliRunner().invoke(
        cli,
        ["train", file, "--harness", file, "--sandbox", "local", *options, "--runs-dir", str(tmp_path), "--run", "r"],
    )
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "reward_mean" in row]
    assert [(row["episodes"], row["ungraded"], row["calls"]) for row in rows] == [(8.0, 0.0, 8.0)] * 2
    assert any(row["grad_norm"] > 0 for row in rows)
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())
    assert manifest["harness"] == "echo 1"
    assert manifest["sandbox"] == "local"
