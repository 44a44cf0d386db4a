"""What hostile programs try in a container, as its user and as a root with rights: none gets out, nothing is left.

What every sandbox withstands (floods, links of other names) is in test_sandboxes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from minirllm.sandboxes import MIB, Limits, Spec, create
from minirllm.sandboxes.docker import Docker

pytestmark = pytest.mark.docker
LIMITS = Limits(memory=128 * MIB, disk=16 * MIB, processes=48, output=64 * 1024)
SYSTEM_CALL = """python3 -c 'import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
sys.exit(libc.syscall({}, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() in (1, 38))'"""  # EPERM, ENOSYS
REFUSED = {
    "a mount": "mount -t tmpfs x /mnt",
    "a mount of what is there": "mount --bind / /mnt",
    "a namespace of users": "unshare -Ur true",
    "a namespace of networks": "unshare -n true",
    "another root": "chroot / true",
    "a device": "mknod /tmp/disk b 8 0 && head -c 1 /tmp/disk",
    "memory of the machine": "head -c 1 /dev/mem || head -c 1 /proc/kcore",
    "settings of the kernel": "echo 1 > /proc/sys/vm/swappiness",
    "a program of the kernel's": "echo '|/tmp/x' > /proc/sys/kernel/core_pattern",
    "a restart": "echo b > /proc/sysrq-trigger",
    "a larger limit": "cd /sys/fs/cgroup; test -d memory && cd memory; echo 999999999 > $(ls memory.max memory.limit*)",
    "a control group of its own": "cd /sys/fs/cgroup; test -d pids && cd pids; mkdir x",
    "the clock": "date -s 2000-01-01",
    "packets as they are": "python3 -c 'import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)'",
    "a network": "timeout 3 bash -c '< /dev/tcp/1.1.1.1/80'",
    "an interface": "ls /sys/class/net | grep -v lo",
    "names": "getent hosts example.com",
    "the engine": "test -e /var/run/docker.sock",
    "files of the machine": "cat /proc/1/root{marker}",
    "variables of the machine": "cat /proc/*/environ | tr '\\0' '\\n' | grep OF_THE_MACHINE",
    "programs of the machine": "ps -eo args | grep -v grep | grep -q -e dockerd -e pytest",
}


@pytest.fixture(params=[False, True], ids=["plain", "root"])
async def box(docker_image: str, request: pytest.FixtureRequest) -> AsyncIterator[Docker]:
    async with create("docker", Spec(image=docker_image, limits=LIMITS, root=request.param)) as made:
        assert isinstance(made, Docker)
        yield made


async def test_nothing_of_the_machine_is_had(box: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_MACHINE", "1")
    (tmp_path / "marker").write_text("secret")
    for name, attack in REFUSED.items():
        done = await box.run(attack.replace("{marker}", str(tmp_path / "marker")), timeout=20)
        assert done.exit_code != 0, (name, done)
    for call in (101 + 64, 246, 250, 298, 304, 321, 425):  # mount, kexec, keyctl, perf, handles, bpf, io_uring
        done = await box.run(SYSTEM_CALL.format(call), timeout=20)
        assert done.exit_code == 1, (call, done)


@pytest.mark.parametrize(
    ("attack", "timeout", "how"),
    [
        (":(){ :|:& }; :; sleep 100", 3.0, "timed_out"),
        ("python3 -c 'x = bytearray(10**9)'", 60.0, "oom"),
        ("head -c 500M /dev/zero > /dev/shm/x", 60.0, "exit_code"),
        ("head -c 500M /dev/zero > big", 60.0, "exit_code"),
        ("trap '' TERM XCPU INT HUP; while :; do :; done", 1.0, "timed_out"),
        ("exec >&- 2>&-; sleep 100", 1.0, "timed_out"),
        ("for i in {1..9}; do (setsid python3 -c 'import os, time; os.fork() and os._exit(0); os.setsid(); "
         "time.sleep(999)' > /dev/null 2>&1 &); done; sleep 1", 60.0, ""),
        ("kill -9 -1", 60.0, ""),
        ("yes", 60.0, "flooded"),
        ("yes >&2 & yes", 60.0, "flooded"),
    ],
)  # fmt: skip
async def test_whatever_it_does_ends_with_its_command(box: Docker, attack: str, timeout: float, how: str) -> None:
    await box.write("/opt/kept", b"kept")
    done = await box.run(attack, timeout=timeout)
    assert not how or getattr(done, how), done
    assert await box.read("/opt/kept") == b"kept"
    left = await box.run("ls -d /proc/[0-9]* | wc -l", timeout=20)
    assert int(left.stdout) <= 5  # init, sleep, and this line's own: bash, ls, wc


async def test_links_lead_nowhere_when_files_come_out(box: Docker, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "secret").write_text("of the machine")
    await box.run(
        f"mkdir t && cd t && ln -s {tmp_path} there && ln -s / root && ln -s ../../.. up && ln -s {tmp_path}/secret s "
        "&& mkfifo pipe && echo fine > plain && ln -s plain near",
        timeout=20,
    )
    await box.download("t", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["near", "plain"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "secret"]
    await box.run("rm -rf t; ln -s /etc t", timeout=20)
    await box.download("t", tmp_path / "etc")  # the container's
    assert (tmp_path / "etc" / "passwd").read_text() != Path("/etc/passwd").read_text()


async def test_nobody_becomes_root(box: Docker) -> None:
    """A program with root's mark has no more rights than who starts it."""
    await box.run("cp /usr/bin/id /tmp/id && chmod 4755 /tmp/id", timeout=20)
    done = await box.run("/tmp/id -u; su root -c id; grep CapEff /proc/self/status", timeout=20, user="agent")
    assert done.stdout.split() == ["1000", "CapEff:", "0" * 16]
