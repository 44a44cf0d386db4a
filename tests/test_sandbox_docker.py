"""What only containers have: images, builds, an engine. And what they hold back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import docker
import pytest

from minirllm.errors import ConfigError, SandboxError
from minirllm.sandboxes import MIB, Limits, Spec, create
from minirllm.sandboxes.docker import Docker
from minirllm.sandboxes.engine import SNAPSHOT, _cleared
from minirllm.sandboxes.owner import OWNER

pytestmark = pytest.mark.docker
LIMITS = Limits(memory=128 * MIB, disk=16 * MIB, processes=32)
HOLD = """
import asyncio, sys
from minirllm.sandboxes import Spec, create
async def main():
    await create("docker", Spec(image=sys.argv[1])).start()
    print("started", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.fixture
async def box(docker_image: str) -> AsyncIterator[Docker]:
    async with create("docker", Spec(image=docker_image, limits=LIMITS)) as made:
        assert isinstance(made, Docker)
        yield made


async def test_memory_processes_and_files_are_limited(box: Docker) -> None:
    bomb = await box.run("python3 -c 'x = bytearray(10**9)'", timeout=60)
    assert (bomb.oom, bomb.exit_code, bomb.timed_out) == (True, 137, False)
    assert not (await box.run("true", timeout=10)).oom
    forks = await box.run("for i in {1..100}; do sleep 50 & done", timeout=20)
    assert "Resource temporarily unavailable" in forks.stderr
    assert (await box.run("ps -e | grep -c sleep", timeout=10)).stdout == "1\n"  # the container's first process
    assert (await box.run("head -c 17M /dev/zero > big", timeout=20)).exit_code != 0


async def test_there_is_no_network_no_capability_and_no_way_to_more(box: Docker) -> None:
    rights = "grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status | sort | cut -f 2"
    seen = await box.run(f"ls /sys/class/net; {rights}", timeout=10)
    assert seen.stdout.split() == ["lo", "0" * 16, "0" * 16, "1", "2"]
    for attack in ("mount -t tmpfs x /mnt", "chroot / true", "unshare -n true", "echo 1 > /proc/sys/vm/swappiness"):
        assert (await box.run(attack, timeout=10)).exit_code != 0, attack
    assert (await box.run("kill -9 1; sleep 0.2; echo alive", timeout=10)).stdout == "alive\n"


async def test_an_end_that_is_cancelled_is_an_end_all_the_same(docker_image: str) -> None:
    for seconds in (0.0, 0.05):
        one = Docker(Spec(image=docker_image, limits=LIMITS))
        await one.start()
        ending = asyncio.create_task(one.close())
        await asyncio.sleep(seconds)
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        assert (one.api, one.running) == (None, False)
        client = docker.from_env()
        assert client.containers.list(all=True, filters={"label": OWNER}) == []
        client.close()


async def test_users_are_apart_and_root_is_above_them_only_where_that_is_asked_for(docker_image: str) -> None:
    secret = "umask 077; mkdir /tmp/own && echo mine > /tmp/own/file; (setsid sleep 3456 > /dev/null 2>&1 &)"
    for root in (False, True):
        async with create("docker", Spec(image=docker_image, limits=LIMITS, root=root)) as box:
            assert (await box.run(secret, timeout=10, user="agent")).exit_code == 0
            assert (await box.run("ps -eo args | grep -c '[3]456'", timeout=10)).stdout == "0\n"
            assert (await box.run("cat /tmp/own/file; chown agent /etc/passwd", timeout=10)).exit_code == 1 - root
            for attack in ("cat /etc/shadow; test $? = 1", "touch /usr/x", "kill -9 1", "su root -c true"):
                refused = (await box.run(attack, timeout=10, user="agent")).exit_code
                assert (refused == 0) == attack.startswith("cat"), attack
            rights = await box.run("grep -E 'Cap(Eff|Amb|Inh)' /proc/self/status | cut -f 2", timeout=10, user="agent")
            assert rights.stdout.split() == ["0" * 16] * 3
            if root:
                assert await box.read("/tmp/own/file") == b"mine\n"
                await box.write("/tmp/own/other", b"x")
            else:
                with pytest.raises(SandboxError, match="Permission denied"):
                    await box.read("/tmp/own/file")


FORKED = "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(4321)"
DAEMON = f"(setsid python3 -c '{FORKED}' > /dev/null 2>&1 &)"


@pytest.mark.parametrize("here", [True, False])
async def test_daemons_end_with_their_command(box: Docker, here: bool) -> None:
    """Also where the engine is on another machine, and its control groups are out of reach."""
    assert box.pid
    box.pid = box.pid if here else 0
    for command, timeout in ((DAEMON + "; sleep 1; ps -eo args | grep -c '[4]321'", 20), (DAEMON + "; sleep 50", 1.0)):
        done = await box.run(command, timeout=timeout)
        assert (done.stdout, done.timed_out) in (("2\n", False), ("", True))  # bash, whose line it is, and the daemon
        assert (await box.run("ps -eo args | grep -c '[4]321'", timeout=10)).stdout == "0\n"


async def test_a_program_that_ends_everything_ends_no_sandbox(docker_image: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"heard")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, create("docker", Spec(image=docker_image, forward={80: ("127.0.0.1", port)})) as box:
        for _ in range(2):
            await box.run("echo kept >> file; kill -9 -1", timeout=20)
            await asyncio.sleep(0.5)  # the engine hears of it
            done = await box.run("cat file; cat < /dev/tcp/127.0.0.1/80", timeout=20)
            assert (done.stdout[-5:], done.exit_code) == ("heard", 0), done
        assert done.stdout == "kept\nkept\nheard"


async def test_other_commands_go_on_when_one_is_ended(box: Docker) -> None:
    slow = asyncio.create_task(box.run("sleep 2; echo slow", timeout=20))
    quick = await asyncio.gather(*(box.run("echo quick; sleep 100", timeout=0.5) for _ in range(3)))
    assert [done.stdout for done in quick] == ["quick\n"] * 3
    assert (await slow).stdout == "slow\n"


async def test_one_port_leads_out_where_that_is_asked_for(docker_image: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"heard " + await reader.readline())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    ask = "exec 3<>/dev/tcp/127.0.0.1/8000 && echo hello >&3 && cat <&3"
    async with server, create("docker", Spec(image=docker_image, forward={8000: ("127.0.0.1", port)})) as box:
        for _ in range(2):
            assert (await box.run(ask, timeout=10)).stdout == "heard hello\n"
        assert (await box.run(ask.replace("8000", str(port)), timeout=10)).exit_code != 0
        box.spec = Spec(image=docker_image)
        assert (await box.run(ask, timeout=10)).exit_code != 0
    async with create("docker", Spec(image=docker_image)) as box:
        assert (await box.run(ask, timeout=10)).exit_code != 0


async def test_a_dockerfile_is_built_once(docker_image: str, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(
        f"FROM {docker_image}\nCOPY given /opt/\nRUN date +%N > /opt/when\nENV OWN=1\nWORKDIR /home\nUSER agent"
    )
    (tmp_path / "given").write_text("given\n")
    seen = []
    for _ in range(2):
        async with create("docker", Spec(build=tmp_path)) as box:
            seen.append((await box.run("pwd; id -u; echo $OWN; cat /opt/given /opt/when", timeout=10)).stdout)
    assert seen[0] == seen[1]
    assert seen[0].startswith("/home\n1000\n1\ngiven\n")
    (tmp_path / "Dockerfile").write_text(f"FROM {docker_image}\nRUN echo said; exit 7")
    with pytest.raises(SandboxError, match=r"cannot be built: .*(returned a non-zero code:|exit status) 7"):
        async with create("docker", Spec(build=tmp_path)):
            pass
    with pytest.raises(ConfigError, match="local has no images: take docker"):
        create("local", Spec(build=tmp_path))


async def test_a_snapshot_has_files_and_no_secrets(docker_image: str) -> None:
    async with create("docker", Spec(image=docker_image, env={"SECRET": "s3"})) as box:
        await box.write("file", b"kept")
        id = await box.snapshot()
        assert isinstance(box, Docker)
        inspected = await asyncio.to_thread(box.api.inspect_image, id)
    assert (SNAPSHOT in inspected["Config"]["Labels"], "s3" in str(inspected)) == (True, False)
    async with create("docker", Spec(snapshot=id)) as box:
        assert await box.read("file") == b"kept"
    with pytest.raises(SandboxError, match="no docker snapshot"):  # an image, and none of ours
        async with create("docker", Spec(snapshot=docker_image)):
            pass


async def test_what_a_killed_process_leaves_is_removed(docker_image: str) -> None:
    def orphan() -> str:
        held = subprocess.Popen([sys.executable, "-c", HOLD, docker_image], stdout=subprocess.PIPE, text=True)
        assert held.stdout is not None
        assert held.stdout.readline() == "started\n"
        held.kill()
        held.wait()
        held.stdout.close()
        (found,) = ids()
        return found

    client = await asyncio.to_thread(docker.from_env)

    def ids() -> list[Any]:
        return [each["Id"] for each in client.api.containers(all=True, filters={"label": OWNER})]

    left = await asyncio.to_thread(orphan)
    _cleared.clear()
    async with create("docker", Spec(image=docker_image)) as box:
        assert isinstance(box, Docker)
        assert await asyncio.to_thread(ids) == [box.container] != [left]
    assert await asyncio.to_thread(ids) == []
    await asyncio.to_thread(client.close)


async def test_what_cannot_be_had_is_said_in_a_sentence(docker_image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxError, match="The image cannot be had"):
        async with create("docker", Spec(image="local/absent:1")):
            pass
    monkeypatch.setenv("DOCKER_HOST", "unix:///tmp/no/such.sock")
    with pytest.raises(SandboxError, match=r"No Docker engine answers at unix:///tmp/no/such\.sock"):
        async with create("docker", Spec(image=docker_image)):
            pass
