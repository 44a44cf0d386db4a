"""Services beside a container sandbox: reached by name, kept in, gone with it. With a real engine and its program."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import docker
import pytest

from minirllm.errors import ConfigError, SandboxError
from minirllm.sandboxes import MIB, Limits, Sandbox, Spec, create
from minirllm.sandboxes.docker import Docker
from minirllm.sandboxes.engine import _cleared
from minirllm.sandboxes.owner import OWNER

pytestmark = pytest.mark.docker
LIMITS = Limits(memory=128 * MIB, disk=16 * MIB, processes=64)
DB: dict[str, Any] = {
    "command": ["python3", "-m", "http.server", "8000", "--directory", "/srv/data"],
    "healthcheck": {"test": ["CMD", "python3", "-c", "import urllib.request as u; u.urlopen('http://localhost:8000')"],
                    "interval": "200ms", "timeout": "5s", "retries": 100},
    "volumes": ["./data:/srv/data", "kept:/srv/kept"],
}  # fmt: skip
HOLD = """
import asyncio, sys
from pathlib import Path
from minirllm.sandboxes import Spec, create
async def main():
    await create("docker", Spec(image=sys.argv[1], compose=Path(sys.argv[2]))).start()
    print("started", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.fixture
def file(tmp_path: Path, docker_image: str) -> Any:
    """A Compose file with `main` and a server `db`, changed as asked for."""

    def made(main: dict[str, Any] | None = None, db: dict[str, Any] | None = None, **top: Any) -> Path:
        services = {"main": main or {}, "db": {"image": docker_image, **DB, **(db or {})}}
        folder = tmp_path / "environment"
        (folder / "data").mkdir(parents=True, exist_ok=True)
        (folder / "data" / "row").write_text("of the database\n")
        (folder / "docker-compose.yaml").write_text(json.dumps({"services": services, "volumes": {"kept": {}}, **top}))
        return folder / "docker-compose.yaml"

    return made


def box(image: str, file: Path, **more: Any) -> Sandbox:
    return create("docker", Spec(image=image, compose=file, limits=LIMITS, **more))


def get(url: str, then: str = "print(r.read().decode(), end='')") -> str:
    return f'python3 -c "import urllib.request as u; r = u.urlopen({url!r}, timeout=5); {then}"'


def left() -> dict[str, list[Any]]:
    """What there is of anybody's on the engine."""
    client, filters = docker.from_env().api, {"label": OWNER}
    try:
        return {
            "containers": [each["Id"] for each in client.containers(all=True, filters=filters)],
            "networks": [each["Name"] for each in client.networks(filters=filters)],
            "volumes": [each["Name"] for each in client.volumes(filters=filters)["Volumes"] or []],
        }
    finally:
        client.close()


NOTHING: dict[str, list[Any]] = {"containers": [], "networks": [], "volumes": []}


async def test_a_service_is_reached_by_its_name_and_nothing_else_is(docker_image: str, file: Any) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"heard " + await reader.readline())
        writer.close()

    server = await asyncio.start_server(answer, "0.0.0.0", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, box(docker_image, file(), forward={80: ("127.0.0.1", port)}) as made:
        assert (await made.run(get("http://db:8000/row"), timeout=30)).stdout == "of the database\n"
        ask = "exec 3<>/dev/tcp/127.0.0.1/80 && echo hello >&3 && cat <&3"
        assert (await made.run(ask, timeout=10)).stdout == "heard hello\n"
        routes = await made.run("cat /proc/net/route; cat /proc/net/ipv6_route | grep -v ' lo$'", timeout=10)
        lines = routes.stdout.splitlines()[1:]
        assert [line.split()[1] == "00000000" for line in lines] == [False], routes.stdout  # no way out
        address = int.from_bytes(bytes.fromhex(lines[0].split()[1]), "little")
        tries = [f"{'.'.join(str(part) for part in (address + n).to_bytes(4, 'big'))}/{port}" for n in range(1, 4)]
        for place in (*tries, f"10.0.0.1/{port}", "1.1.1.1/80", "example.com/80"):
            assert (await made.run(f"timeout 3 bash -c '< /dev/tcp/{place}'", timeout=10)).exit_code != 0, place
        beside = await made.service("db")
        assert (await beside.run(ask, timeout=10)).exit_code != 0  # the port is in main only
        for place in tries:
            assert (await beside.run(f"timeout 3 bash -c '< /dev/tcp/{place}'", timeout=10)).exit_code != 0, place


async def test_services_are_held_to_the_rules_of_a_sandbox(docker_image: str, file: Any) -> None:
    rights = "grep -E '^(NoNewPrivs|Seccomp):' /proc/self/status | sort | cut -f 2"
    own = file({"environment": {"GIVEN": "${KEY} $$x"}, "volumes": ["kept:/kept"]}, {"mem_limit": "64m"})
    async with box(docker_image, own, env={"KEY": "value"}) as made:
        beside = await made.service("db")
        bomb = "python3 -c 'x = bytearray({})'"
        for each in (made, beside):
            assert (await each.run(rights, timeout=10)).stdout.split() == ["1", "2"]
            for attack in ("mount -t tmpfs x /mnt", "unshare -n true", "echo 1 > /proc/sys/vm/swappiness"):
                assert (await each.run(attack, timeout=10)).exit_code != 0, attack
            assert (await each.run(bomb.format("10**9"), timeout=60)).oom
        assert (await made.run(bomb.format("10**8"), timeout=60)).exit_code == 0
        assert (await beside.run(bomb.format("10**8"), timeout=60)).oom  # what it asked for itself
        forks = await made.run("for i in {1..100}; do sleep 50 & done", timeout=20)
        assert "Resource temporarily unavailable" in forks.stderr
        assert (await made.run("echo $GIVEN-$KEY", timeout=10)).stdout == "value $x-value\n"
        assert "Read-only" in (await beside.run("echo x > /srv/data/row", timeout=10)).stderr
        await beside.run("echo shared > /srv/kept/file; chmod 777 /srv/kept", timeout=10)
        assert (await made.run("cat /kept/file", timeout=10)).stdout == "shared\n"
        with pytest.raises(SandboxError, match="has no service absent"):
            await made.service("absent")
    async with create("docker", Spec(image=docker_image)) as alone:
        with pytest.raises(SandboxError, match="No service db runs beside this sandbox"):
            await alone.service("db")


async def test_all_of_it_ends_with_the_sandbox(docker_image: str, file: Any) -> None:
    async with box(docker_image, file()) as made:
        there = await asyncio.to_thread(left)
        assert [len(there[kind]) for kind in ("containers", "networks", "volumes")] == [2, 1, 1]
        await made.run("echo kept > file; kill -9 -1", timeout=20)
        await asyncio.sleep(0.5)
        again = await made.run(f"cat file; {get('http://db:8000/row')}", timeout=20)
        assert again.stdout == "kept\nof the database\n"
        beside = await made.service("db")
        await made.halt()
        assert await beside.read("/srv/data/row") == b"of the database\n"
    assert await asyncio.to_thread(left) == NOTHING
    with pytest.raises(SandboxError, match=r"cannot be used: .*db.* (exited|unhealthy)"):
        async with box(docker_image, file(db={"command": ["false"]})):
            pass
    assert await asyncio.to_thread(left) == NOTHING


async def test_a_start_that_is_cancelled_or_late_leaves_nothing(docker_image: str, file: Any) -> None:
    sick = file(db={"healthcheck": {"test": ["CMD", "false"], "interval": "1s", "retries": 100}})

    async def use() -> None:
        async with box(docker_image, sick, build_seconds=2.0):
            pass

    for seconds in (0.3, 2.0):
        starting = asyncio.create_task(use())
        await asyncio.sleep(seconds)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert await asyncio.to_thread(left) == NOTHING
    for _ in range(2):
        with pytest.raises(SandboxError, match=r"was not up within 2 s|application not healthy after 2s"):
            await use()
        assert await asyncio.to_thread(left) == NOTHING


async def test_a_start_that_fails_halfway_leaves_nothing(docker_image: str, file: Any) -> None:
    """One service is refused by the engine while it still makes the other."""
    for _ in range(4):
        with pytest.raises(SandboxError, match=r"cannot be used: .*CPUs"):
            async with box(docker_image, file(db={"cpus": -1})):
                pass
    await asyncio.sleep(0.5)
    assert await asyncio.to_thread(left) == NOTHING


async def test_what_a_killed_process_leaves_is_removed(docker_image: str, file: Any) -> None:
    def orphan() -> None:
        command = [sys.executable, "-c", HOLD, docker_image, str(file())]
        held = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert held.stdout is not None
        assert held.stdout.readline() == "started\n"
        held.kill()
        held.wait()
        held.stdout.close()

    await asyncio.to_thread(orphan)
    before = await asyncio.to_thread(left)
    assert [len(before[kind]) for kind in ("containers", "networks", "volumes")] == [2, 1, 1]
    _cleared.clear()
    async with create("docker", Spec(image=docker_image)) as alone:
        assert isinstance(alone, Docker)
        assert await asyncio.to_thread(left) == {"containers": [alone.container], "networks": [], "volumes": []}


async def test_images_of_services_are_built_and_main_can_be_a_snapshot(docker_image: str, file: Any) -> None:
    own = file(db={"image": "", "build": {"context": "db", "args": {"SAID": "built"}}})
    (own.parent / "db").mkdir()
    lines = f"FROM {docker_image}\nARG SAID\nRUN mkdir -p /srv/kept && echo $SAID > /said\n"
    (own.parent / "db" / "Dockerfile").write_text(lines)
    async with box(docker_image, own) as made:
        assert (await (await made.service("db")).run("cat /said", timeout=10)).stdout == "built\n"
        await made.write("/opt/file", b"of main")
        id = await made.snapshot()
    async with create("docker", Spec(snapshot=id, compose=own)) as again:
        assert await again.read("/opt/file") == b"of main"
        assert (await again.run(get("http://db:8000/row"), timeout=30)).stdout == "of the database\n"


@pytest.mark.parametrize(
    ("main", "db", "top", "sentence"),
    [
        ({}, {"privileged": True}, {}, "asks for privileged in service db, which a sandbox does not give"),
        ({"pid": "host"}, {}, {}, "asks for pid in service main"),
        ({}, {"devices": ["/dev/kvm:/dev/kvm"]}, {}, "asks for devices in service db"),
        ({}, {"network_mode": "host"}, {}, "asks for the network host in service db"),
        ({}, {"cap_add": ["SYS_ADMIN"]}, {}, "asks for the capability SYS_ADMIN in service db"),
        ({"volumes": ["/var/run/docker.sock:/x"]}, {}, {}, "shows service main /var/run/docker.sock, which is no file"),
        ({"volumes": ["../:/x"]}, {}, {}, "shows service main .*, which is no file beside it"),
        ({}, {"env_file": "/etc/passwd"}, {}, r"reads other files \(env_file\)"),
        ({}, {}, {"networks": {"default": {"external": True, "name": "host"}}}, "network default is none of its own"),
        ({}, {}, {"volumes": {"kept": {"driver_opts": {"type": "none", "o": "bind", "device": "/"}}}}, "volume kept"),
        ({}, {"secrets": ["key"]}, {"secrets": {"key": {"file": "/etc/shadow"}}}, "secrets key is no file beside it"),
        ({}, {"build": "/etc"}, {}, "builds service db of /etc, which does not lie beside it"),
        ({"image": 3}, {}, {}, "cannot be used"),
        ({}, {"image": "", "build": "./absent"}, {}, "absent is no folder: no image can be built of it"),
    ],
)  # fmt: skip
async def test_what_would_lead_out_is_refused(
    docker_image: str, file: Any, main: Any, db: Any, top: Any, sentence: str
) -> None:
    with pytest.raises(SandboxError, match=sentence):
        async with box(docker_image, file(main, db, **top)):
            pass
    assert await asyncio.to_thread(left) == NOTHING


@pytest.mark.parametrize(
    "text",
    [
        'services: {main: {"env\\x5ffile": /etc/passwd}}',
        "services:\n  main:\n    ? env_file # x\n    : /etc/passwd\n",
        "x-k: &a env_file\nservices:\n  main:\n    *a : /etc/passwd\n",
        "services: {}\n---\nservices: {main: {env_file: /etc/passwd}}\n",
        "[" * 5000, "\0", "services: [", "\ufeffservices: {main: {env_file: x}}",
    ],
)  # fmt: skip
async def test_no_writing_hides_that_it_reads_other_files(docker_image: str, file: Any, text: str) -> None:
    own = file()
    own.write_text(text)
    with pytest.raises(SandboxError, match=r"reads other files \(env_file\)|cannot be used: "):
        async with box(docker_image, own):
            pass


async def test_variables_are_those_of_the_sandbox_and_reach_nothing_else(
    docker_image: str, file: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_AUTH_CONFIG", "secret")
    hard = """it's $HOME "q" \\n \\\\ é
    `x` #"""
    own = file({"environment": {"HARD": "${HARD}", "AUTH": "${DOCKER_AUTH_CONFIG}", "BESIDE": "${BESIDE}"}})
    (own.parent / ".env").write_text("BESIDE=file\nHARD=no\n")
    config = tmp_path / "config" / "cli-plugins" / "docker-compose"
    config.parent.mkdir(parents=True)
    config.write_text("#!/bin/sh\ntouch ${0%/*}/ran\nexit 1\n")
    config.chmod(0o755)
    env = {"HARD": hard, "no.name": "x", "DOCKER_CONFIG": str(tmp_path / "config"), "LD_PRELOAD": "/absent.so"}
    async with box(docker_image, own, env=env) as made:
        done = await made.execute(("/usr/bin/printenv", "HARD", "AUTH", "BESIDE"), timeout=10)
    assert done.stdout == f"{hard}\n\nfile\n"
    assert not (config.parent / "ran").exists()


async def test_no_service_has_processes_without_a_limit(docker_image: str, file: Any) -> None:
    async with box(docker_image, file(db={"pids_limit": -1})) as made:
        forks = await (await made.service("db")).run("for i in {1..100}; do sleep 50 & done", timeout=20)
        assert "Resource temporarily unavailable" in forks.stderr


async def test_who_cannot_is_said(docker_image: str, file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="local has no images: take docker"):
        create("local", Spec(compose=file()))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="need the program `docker compose`: install the package docker-compose-"):
        async with box(docker_image, file()):
            pass
