"""Attacks on the local sandbox: all contained, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from minirllm.errors import SandboxError
from minirllm.sandboxes import MIB, Limits, Result, Sandbox, Spec, create
from minirllm.sandboxes.cgroup import Cgroup
from minirllm.sandboxes.local import UID
from tests.endpoint import until

MARK = f"tests-{os.getpid()}"  # in the environment of all that these tests run
LIMITS = Limits(memory=96 * MIB, disk=16 * MIB, files=1000, processes=40, output=64 * 1024)
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="limits of a whole sandbox, and ports, need root")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIRLLM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
async def box() -> AsyncIterator[Sandbox]:
    async with create("local", Spec(limits=LIMITS, env={"MARK": MARK})) as sandbox:
        yield sandbox
    assert _owned() == []


def _owned() -> list[str]:
    """Command lines of processes of the sandboxes' user; other runs of these tests have theirs."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{pid}").st_uid == UID and MARK in Path(f"/proc/{pid}/environ").read_text():
                found.append(Path(f"/proc/{pid}/cmdline").read_text())
        except OSError:
            continue
    return found


async def python(box: Sandbox, code: str, timeout: float = 30) -> Result:
    return await box.execute(("/usr/bin/python3", "-I", "-c", code), timeout=timeout)


@root_only
async def test_what_runs_is_seen_by_these_tests(box: Sandbox) -> None:
    running = asyncio.ensure_future(box.run("sleep 60", timeout=60))
    await until(lambda: any("sleep" in line for line in _owned()))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert _owned() == []


@root_only
async def test_a_fork_bomb_stops_at_the_limit(box: Sandbox) -> None:
    code = """
import os, time
for n in range(500):
    try:
        if os.fork() == 0:
            os.setsid(); time.sleep(600)
    except BlockingIOError:
        break
print(n)"""
    done = await python(box, code)
    assert done.exit_code == 0
    assert 20 < int(done.stdout) < LIMITS.processes
    assert _owned() == []


@root_only
async def test_a_memory_bomb_is_ended_and_named(box: Sandbox) -> None:
    done = await python(box, "x = bytearray(400 << 20); print('survived')")
    assert (done.oom, done.exit_code, done.stdout) == (True, 137, "")
    many = "import os\nfor _ in range(3): os.fork()\nx = bytearray(30 << 20)\nimport time; time.sleep(3)"
    assert (await python(box, many)).oom
    assert not (await python(box, "print('fine')")).oom


@root_only
async def test_the_disk_is_bounded_in_bytes_and_files(box: Sandbox) -> None:
    filled = "for i in $(seq 20); do head -c 2000000 /dev/zero > f$i || break; done; du -sb . | cut -f1"
    done = await box.run(filled, timeout=30)
    assert int(done.stdout) <= LIMITS.disk
    assert "No space left" in done.stderr
    await box.run("rm -f f*", timeout=30)
    done = await python(box, "for n in range(5000):\n    open(f'n{n}', 'w')")
    assert "No space left" in done.stderr
    assert "No space left" in (await box.run("head -c 50000000 /dev/zero > /tmp/x", timeout=30)).stderr
    assert "No space left" in (await box.run("head -c 50000000 /dev/zero > /dev/shm/x", timeout=30)).stderr


@pytest.mark.parametrize(
    "path", ["/usr/x", "/usr/bin/bash", "/etc/x", "/etc/passwd", "/etc/ld.so.preload", "/bin/x", "/lib/x", "/dev/x",
             "/proc/sys/kernel/hostname", "/proc/1/oom_score_adj", "/sys/x"],
)  # fmt: skip
async def test_the_system_is_read_only(box: Sandbox, path: str) -> None:
    done = await box.run(f"echo x > {path}", timeout=10)
    assert done.exit_code == 1
    assert any(why in done.stderr for why in ("Read-only file system", "Permission denied", "No such file"))


async def test_nothing_of_the_machine_can_be_read(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MINIRLLM_SECRET", "s3cret-value")
    (tmp_path / "secret").write_text("s3cret-value")
    command = (
        f"env; cat {tmp_path}/secret /root/* /etc/shadow /proc/1/environ /proc/*/environ; ls -R /home /root /mnt /srv; "
        "ls /proc/1/root/ /proc/1/cwd/; cat /proc/1/cmdline; ls -d /proc/[0-9]*"
    )
    done = await box.run("bash", timeout=20, stdin=command.encode())  # a command line can be read, its input cannot
    assert "s3cret" not in done.stdout
    assert str(tmp_path) not in done.stdout
    assert "root:x" not in done.stdout
    assert len([line for line in done.stdout.splitlines() if line.startswith("/proc/")]) <= 4


async def test_no_network_but_its_own_loopback(box: Sandbox) -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "0.0.0.0", 0)
    port = server.sockets[0].getsockname()[1]
    own = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
    code = f"""
import socket
for host in {["127.0.0.1", "10.0.0.1", "192.0.2.1", *sorted(own)]!r}:
    try:
        socket.create_connection((host, {port}), 1); print('reached', host)
    except OSError as error:
        print(type(error).__name__)
print(sorted(name for _, name in socket.if_nameindex()))
try:
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW); print('raw')
except PermissionError: pass"""
    done = await python(box, code)
    server.close()
    assert "reached" not in done.stdout
    assert "raw" not in done.stdout
    assert done.stdout.splitlines()[-1] == "['lo']"


async def test_signals_reach_no_process_outside(box: Sandbox) -> None:
    victim = await asyncio.create_subprocess_exec("sleep", "60")
    code = f"""
import os
for pid in (os.getppid(), 1, {victim.pid}, {os.getpid()}):
    try: os.kill(pid, 9)
    except OSError: pass
os.kill(-1, 9)"""
    await python(box, code)
    assert victim.returncode is None
    victim.kill()
    await victim.wait()
    assert (await box.run("echo alive", timeout=10)).stdout == "alive\n"


async def test_a_daemon_does_not_outlive_its_command(box: Sandbox) -> None:
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        while True:
            open('/work/beat', 'a').write('x'); time.sleep(0.01)
    os._exit(0)
time.sleep(0.3)"""
    await python(box, code)
    assert _owned() == []
    first = await box.read("beat")
    assert len(first) > 1
    await asyncio.sleep(0.2)
    assert await box.read("beat") == first


SYSCALLS = {
    "unshare, a user namespace": "libc.unshare(0x10000000)",
    "clone with a user namespace": "libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)",
    "mount": "libc.mount(b'none', b'/work', b'tmpfs', 0, None)",
    "ptrace": "libc.ptrace(16, 1, 0, 0)",
    "become root": "libc.setuid(0)",
    "join a group": "libc.setgid(0)",
    "keyctl": "libc.syscall(250, 0, -3, 0, 0, 0)",
    "io_uring": "libc.syscall(425, 1, 0)",
    "bpf": "libc.syscall(321, 0, 0, 0)",
    "open by handle": "libc.syscall(304, 0, 0, 0)",
    "userfaultfd": "libc.syscall(323, 0)",
    "chroot": "libc.chroot(b'/work')",
    "pivot_root": "libc.syscall(155, b'/work', b'/work')",
    "read another process": "libc.syscall(310, 1, 0, 0, 0, 0, 0)",
    "perf": "libc.syscall(298, 0, 0, -1, -1, 0)",
    "set the clock": "libc.syscall(227, 0, 0)",
    "a device": "libc.mknod(b'/work/null', 0o20666, 0x103)",
}


@pytest.mark.parametrize("what", SYSCALLS)
async def test_calls_that_lead_out_are_refused(box: Sandbox, what: str) -> None:
    code = f"""
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
print({SYSCALLS[what]}, errno.errorcode.get(ctypes.get_errno()))"""
    assert (await python(box, code)).stdout == "-1 EPERM\n"


async def test_threads_work_although_clone3_does_not(box: Sandbox) -> None:
    code = """
import threading, subprocess
thread = threading.Thread(target=lambda: print('thread')); thread.start(); thread.join()
print(subprocess.run(['echo', 'child'], capture_output=True, text=True).stdout)"""
    assert (await python(box, code)).stdout == "thread\nchild\n\n"


async def test_no_terminal_and_no_descriptor_but_three(box: Sandbox) -> None:
    held = os.memfd_create("held")
    os.set_inheritable(held, True)
    done = await box.run("ls /proc/self/fd; cat /dev/tty", timeout=10)
    os.close(held)
    assert done.stdout.split() == ["0", "1", "2", "3"]  # 3 is the folder that ls reads
    assert "/dev/tty" in done.stderr


async def test_a_poisoned_system_does_not_reach_our_own_commands(box: Sandbox) -> None:
    """What an agent leaves behind (its own bash, cat, tar, startup files) is not what `read` and `run` use."""
    await box.run(
        "mkdir -p /usr/local/bin bin; printf '#!/bin/sh\\necho fake\\n' > bin/cat; chmod +x bin/cat; "
        "cp bin/cat bin/bash; rm -rf /bin; mv /bin /bin2; echo 'alias cat=false' > /home/agent/.bashrc; "
        "cp /home/agent/.bashrc /root/.profile; export PATH=/work/bin:$PATH; echo real > file",
        timeout=10,
    )
    assert await box.read("file") == b"real\n"
    assert (await box.run("cat file; command -v cat", timeout=10)).stdout == "real\n/usr/bin/cat\n"


async def test_a_link_leads_nowhere_outside(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("outside")
    await box.run(f"ln -s {tmp_path} door; ln -s /etc/shadow shadow", timeout=10)
    for path in ("door/outside", "shadow"):
        with pytest.raises(SandboxError):
            await box.read(path)
    with pytest.raises(SandboxError):
        await box.write("door/new", b"x")
    assert not (tmp_path / "new").exists()


@root_only
async def test_two_sandboxes_know_nothing_of_each_other(box: Sandbox) -> None:
    async with create("local", Spec(limits=LIMITS)) as other:
        await other.write("/tmp/own", b"x")
        sleeping = asyncio.create_task(other.run("sleep 2; echo slept", timeout=10))
        await box.run("ls /tmp; kill -9 -1", timeout=10)
        assert (await box.run("ls /tmp", timeout=10)).stdout == ""
        assert (await sleeping).stdout == "slept\n"


@root_only
async def test_a_port_inside_leads_to_one_address_outside() -> None:
    heard = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readline())
        writer.write(b"answer to " + heard[-1])
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    code = """
import socket
with socket.create_connection(('127.0.0.1', 8000), 5) as s:
    s.sendall(b'hello\\n'); print(s.makefile().read(), end='')
for port in ({}, 8001):
    try: socket.create_connection(('127.0.0.1', port), 1); print('reached')
    except OSError: pass"""
    async with create("local", Spec(limits=LIMITS, forward={8000: ("127.0.0.1", port)})) as box:
        for _ in range(2):  # each command has a network of its own
            done = await python(box, code.format(port))
            assert (done.stdout, done.stderr) == ("answer to hello\n", "")
    server.close()
    assert heard == [b"hello\n"] * 2


@root_only
def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    code = """
import asyncio, os
from minirllm.sandboxes import create
async def main():
    box = await create("local").__aenter__()
    await box.run("echo x > file", timeout=10)
    asyncio.create_task(box.run("sleep 600", timeout=1000))
    await asyncio.sleep(0.5)
    print(box.folder, flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(main())"""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    folder = Path(done.stdout.strip())
    assert folder.is_relative_to(tmp_path), done.stderr
    assert os.path.ismount(folder)
    ending = code.replace("os.kill(os.getpid(), 9)", "await box.close()")
    subprocess.run([sys.executable, "-c", ending], env=env, check=True, capture_output=True)
    assert not os.path.ismount(folder)
    assert not folder.exists()
    assert _owned() == []


def test_limits_in_the_one_tree_of_version_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and values as in the kernel's cgroup-v2.rst; the folder is no control group, so nothing is limited."""
    monkeypatch.setattr("minirllm.sandboxes.cgroup.MOUNT", tmp_path)
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids")
    group = Cgroup("one")
    group.make(memory=1000, processes=7, cpus=0.5)
    files = {str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*") if p.is_file()}
    assert files == {
        "cgroup.controllers": "cpu memory pids",
        "cgroup.subtree_control": "+memory +pids +cpu",
        "minirllm/cgroup.subtree_control": "+memory +pids +cpu",
        "minirllm/one/memory.max": "1000",
        "minirllm/one/cpu.max": "50000 100000",
        "minirllm/one/pids.max": "7",
    }
    assert group.enter(group.command())[-1] == str(tmp_path / "minirllm" / "one" / "command-1")
    (tmp_path / "minirllm" / "one" / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 3\noom_kill 2\n")
    assert group.oom_kills() == 2


def test_who_may_open_no_port_is_told_what_it_takes() -> None:
    rights = [] if os.geteuid() else ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    code = "import os; from minirllm.sandboxes.netns import listen; listen(os.getpid(), 80)"
    done = subprocess.run([*rights, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "SandboxError: A port into a sandbox needs root" in done.stderr


@root_only
async def test_a_port_that_cannot_be_is_said_in_a_sentence() -> None:
    async with create("local", Spec(limits=LIMITS, forward={70_000: ("127.0.0.1", 9)})) as box:
        with pytest.raises(SandboxError, match="Port 70000 cannot be opened"):
            await box.run("true", timeout=10)
