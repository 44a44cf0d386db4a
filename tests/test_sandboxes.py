"""What every sandbox does, whatever it isolates with; and the little that only one of them has."""

from __future__ import annotations

import asyncio
import os
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from minirllm.errors import ConfigError, SandboxError
from minirllm.sandboxes import MIB, SANDBOXES, Limits, Sandbox, Spec, create

LIMITS = Limits(memory=128 * MIB, disk=32 * MIB, processes=64, output=64 * 1024)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIRLLM_CACHE", str(tmp_path / "cache"))


KINDS = [pytest.param(name, marks=pytest.mark.docker) if name == "docker" else name for name in sorted(SANDBOXES)]
NEEDS = {"docker": "docker_image", "daytona": "daytona_account", "modal": "modal_account"}


@pytest.fixture(params=KINDS)
async def box(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    given = request.getfixturevalue(NEEDS[request.param]) if request.param in NEEDS else ""
    image = given if request.param == "docker" else ""
    async with create(request.param, Spec(limits=LIMITS, image=image, env={"OWN": "of the sandbox"})) as sandbox:
        yield sandbox


@pytest.fixture(params=["local", "local-unsafe"])
async def own(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """One whose commands are started by us, not by a daemon."""
    async with create(request.param, Spec(limits=LIMITS)) as sandbox:
        yield sandbox


async def test_a_command_gives_both_outputs_and_its_exit_code(box: Sandbox) -> None:
    done = await box.run("echo out; echo err >&2; exit 3", timeout=10)
    assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "err\n", 3)
    assert (done.timed_out, done.oom, done.flooded) == (False, False, False)
    assert (await box.run("kill -9 $$", timeout=10)).exit_code == 128 + 9
    assert (await box.run("printf '\\xff'", timeout=10)).stdout == "\ufffd"


async def test_input_environment_and_folder(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of this process")
    done = await box.run("cat; echo $OWN, $MORE, -$SECRET-; pwd", timeout=10, stdin=b"fed\n", env={"MORE": "more {0}"})
    assert done.stdout == f"fed\nof the sandbox, more {{0}}, --\n{box.work}\n"
    assert (await box.run("pwd", timeout=10, cwd="/usr")).stdout == "/usr\n"
    with pytest.raises(SandboxError):
        await box.run("true", timeout=10, cwd="/no/such/folder")
    assert (await box.execute(("/usr/bin/printf", "%s|", "a b", "$OWN", ""), timeout=10)).stdout == "a b|$OWN||"


async def test_a_command_runs_as_the_user_that_is_asked_for(box: Sandbox) -> None:
    known = type(box).users()
    own = (await box.run("id -u", timeout=10)).stdout
    for name in ("agent", "1000", "0") if known is None else known:
        uid = (await box.run("id -u", timeout=10, user=name)).stdout
        assert uid == ({"agent": "1000\n"}.get(name, f"{name}\n") if known is None else own)
    with pytest.raises(SandboxError, match=r"unable to find user|runs commands as .* only, not as 'absent'"):
        await box.run("true", timeout=10, user="absent")
    assert (await box.run("id -u", timeout=10)).stdout == own


async def test_input_that_nobody_reads_is_no_error(box: Sandbox) -> None:
    assert (await box.run("exit 0", timeout=10, stdin=b"x" * 300_000)).exit_code == 0


@pytest.mark.parametrize(
    "command",
    ["sleep 100", "trap '' TERM XCPU INT; while :; do :; done", "exec >&- 2>&-; sleep 100", "sleep 100 & wait"],
)
async def test_whatever_does_not_end_is_ended(box: Sandbox, command: str) -> None:
    done = await box.run(f"echo begun; {command}", timeout=0.7)
    assert done.timed_out
    assert done.stdout == "begun\n"
    assert done.exit_code == 137


async def test_a_flood_is_cut_off(box: Sandbox) -> None:
    done = await box.run("yes; echo never", timeout=60)
    assert (done.flooded, done.timed_out, len(done.raw_stdout)) == (True, False, LIMITS.output)
    assert (await box.run("yes >&2", timeout=60)).flooded


async def test_the_last_of_a_flood_is_kept_when_that_is_asked_for(box: Sandbox) -> None:
    argv = ("/usr/bin/bash", "-c", "seq 200000; seq 300000 >&2; exit 3")
    done = await box.execute(argv, timeout=60, output=1000, tail=True)
    assert (done.flooded, done.exit_code, len(done.raw_stdout), len(done.raw_stderr)) == (False, 3, 1000, 1000)
    assert done.stdout.endswith("199999\n200000\n")


async def test_a_flood_of_one_that_got_away_is_cut_off(own: Sandbox) -> None:
    """It still holds the outputs, and nobody reads them."""
    done = await own.run("setsid yes & sleep 100", timeout=60, stdin=b"x" * 2_000_000)
    assert (done.flooded, done.timed_out, done.exit_code) == (True, False, 137)


async def test_files_stay_and_processes_do_not(box: Sandbox) -> None:
    """`local-unsafe` sees all processes of the machine, and one that was just killed for a moment longer."""
    await box.run("echo kept > file; nohup sleep 300.5 > /dev/null 2>&1 & disown", timeout=10)
    gone = "for i in $(seq 50); do ps -eo args | grep -q '[s]leep 300.5' || exit 0; sleep 0.1; done; exit 1"
    done = await box.run(f"cat file; {gone}", timeout=20)
    assert (done.stdout, done.exit_code) == ("kept\n", 0)


@pytest.mark.parametrize("path", ["file", "made/for it/$(id) 'quoted' {0}", "-rf", "ünï"])
async def test_files_of_any_name_and_bytes(box: Sandbox, path: str) -> None:
    data = bytes(range(256)) * 300
    await box.write(path, data)
    assert await box.read(path) == data
    await box.write(path, b"#!/bin/sh\necho run", mode=0o755)
    name = path if "/" in path else f"./{path}"
    assert (await box.execute((f"{box.work}/{name}",), timeout=10)).stdout == "run\n"


async def test_what_cannot_be_read_or_written_is_said_in_a_sentence(box: Sandbox) -> None:
    with pytest.raises(SandboxError, match=r"absent in the sandbox: .*No such file"):
        await box.read("absent")
    await box.write("file", b"")
    with pytest.raises(SandboxError, match="file/below in the sandbox"):
        await box.write("file/below", b"")
    for path in ("", "a\0b"):
        with pytest.raises(SandboxError, match="at least one character and no NUL"):
            await box.read(path)


async def test_a_snapshot_is_the_files_as_they_were(box: Sandbox) -> None:
    await box.run("echo one > file; mkdir -p deep/er; ln -s file link; chmod 700 deep", timeout=10)
    id = await box.snapshot()
    await box.run("echo two > file; rm -r deep", timeout=10)
    name = next(name for name, place in SANDBOXES.items() if place.endswith(f":{type(box).__name__}"))
    for _ in range(2):  # what the first one does, the second one does not see
        async with create(name, Spec(snapshot=id, limits=LIMITS)) as again:
            seen = await again.run("cat link; stat -c %a deep; ls -d deep/er", timeout=10)
            assert seen.stdout == "one\n700\ndeep/er\n"
            await again.run("echo three > file; rm -r deep; echo new > new", timeout=10)
            assert (await again.run("cat file; ls", timeout=10)).stdout == "three\nfile\nlink\nnew\n"
            second = await again.snapshot()
    async with create(name, Spec(snapshot=second, limits=LIMITS)) as later:
        assert (await later.run("cat file; ls", timeout=10)).stdout == "three\nfile\nlink\nnew\n"
    for wrong in ("absent", "../cache", ""):
        with pytest.raises(SandboxError, match=f"no {name} snapshot"):
            async with create(name, Spec(snapshot=wrong)):
                pass


@pytest.mark.parametrize("name", [kind for kind in KINDS if kind not in ("local-unsafe", "daytona", "modal")])
async def test_a_share_of_a_processor_is_all_that_is_given(name: str, request: pytest.FixtureRequest) -> None:
    if name == "local" and os.geteuid():
        pytest.skip("limits of a whole sandbox need root")
    image = request.getfixturevalue("docker_image") if name == "docker" else ""
    code = "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass\nprint(time.process_time())"
    async with create(name, Spec(limits=Limits(cpus=0.2), image=image)) as box:
        done = await box.execute(("/usr/bin/python3", "-I", "-c", code), timeout=60)
    assert 0 < float(done.stdout) < 1.2, done


async def test_commands_run_side_by_side_and_end_apart(box: Sandbox) -> None:
    slow = asyncio.create_task(box.run("sleep 1; echo slow", timeout=10))
    quick = await box.run("echo quick; sleep 100", timeout=0.3)
    assert (quick.stdout, quick.timed_out) == ("quick\n", True)
    assert (await slow).stdout == "slow\n"


async def test_a_cancelled_command_is_gone(box: Sandbox) -> None:
    running = asyncio.create_task(box.run("sleep 12345", timeout=100))
    await asyncio.sleep(0.5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not any(b"sleep\x0012345" in line for line in _commands())


def _commands() -> list[bytes]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes())
        except OSError:
            continue
    return found


async def test_a_program_that_removes_its_folder_fails_by_itself(own: Sandbox) -> None:
    """No SandboxError: whoever could have one raised, could choose not to be graded."""
    box = own
    await box.run('cd / && rm -rf "$W"', timeout=10, env={"W": box.work})
    for _ in range(2):
        done = await box.run("echo never", timeout=10)
        assert (done.exit_code, done.stdout, done.timed_out) == (125, "", False)
        assert "o such f" in done.stderr
    assert (await box.run("echo here", timeout=10, cwd="/usr")).stdout == "here\n"


@pytest.mark.parametrize(
    ("argv", "env"),
    [
        ((), {}), (("",), {}), (("a=b", "ls"), {}), (("true", "\ud800"), {}), (("true", "a\0b"), {}),
        (("true",), {"": "x"}), (("true",), {"A=B": "x"}), (("true",), {"A": "\udfff"}), (("true",), {"A": "a\0--b"}),
        (("true", "x" * 3_000_000), {}),
    ],
)  # fmt: skip
async def test_what_no_system_can_start_is_said_in_a_sentence(
    box: Sandbox, argv: tuple[str, ...], env: dict[str, str]
) -> None:
    with pytest.raises(SandboxError):
        await box.execute(argv, timeout=10, env=env)
    box.spec = Spec(env=env)  # the sandbox's own variables reach every command, too
    with pytest.raises(SandboxError):
        await box.execute(argv, timeout=10)


async def test_a_program_whose_name_looks_like_an_option_is_a_program(own: Sandbox) -> None:
    await own.write("--help", b"#!/bin/sh\necho run", mode=0o755)
    done = await own.execute(("--help",), timeout=10, env={"PATH": f"{own.work}:/usr/bin:/bin"})
    assert (done.exit_code, done.stdout) == (0, "run\n")


async def test_a_snapshot_that_failed_leaves_nothing(own: Sandbox, tmp_path: Path) -> None:
    box = own
    running = asyncio.create_task(
        box.run("while :; do for i in $(seq 300); do echo > f$i; done; rm -f f*; done", timeout=60)
    )
    await asyncio.sleep(0.5)
    kept = []
    for _ in range(60):
        try:
            kept.append(await box.snapshot())
        except SandboxError:
            break
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert sorted(path.name for path in (tmp_path / "cache" / "snapshots").glob("*/*")) == sorted(kept)


@pytest.mark.parametrize("name", ["local", "local-unsafe"])
async def test_a_start_that_is_cancelled_leaves_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def use() -> None:
        async with create(name, Spec(limits=LIMITS)):
            await asyncio.sleep(100)

    async with create(name, Spec(limits=LIMITS)):  # what is done once in a process is done
        pass
    for _ in range(6):
        tasks = [asyncio.create_task(use()) for _ in range(10)]
        for task in tasks:
            await asyncio.sleep(0.005)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    left = (*tmp_path.glob("minirllm-sandboxes-*/*"), *tmp_path.glob("minirllm-unsafe-*"))
    assert {path.suffix for path in left} <= {".lock"}


@pytest.mark.parametrize("limits", [{"disk": 0}, {"memory": -1}, {"cpus": 0.0}, {"processes": 0}, {"cpus": 0 * 1e999}])
def test_a_limit_that_means_no_limit_is_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(SandboxError, match=f"limit {next(iter(limits))} of a sandbox must be above 0"):
        Limits(**limits)


async def test_a_disk_without_room_for_the_sandbox_itself_is_said() -> None:
    if os.geteuid():
        pytest.skip("without root no limit of all files")
    with pytest.raises(SandboxError, match=r"own files cannot be made: No space left on device\."):
        async with create("local", Spec(limits=Limits(disk=10_000))):
            pass


async def test_a_closed_sandbox_runs_nothing(box: Sandbox) -> None:
    await box.close()
    await box.close()
    with pytest.raises(SandboxError, match="closed"):
        await box.run("true", timeout=10)


def test_unknown_sandboxes_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"no sandbox 'locla' \(did you mean local\?\)"):
        create("locla")


async def test_the_example_of_the_documentation_runs() -> None:
    text = (Path(__file__).parents[1] / "docs" / "sandboxes.md").read_text()
    head, body = text.split("```python\n")[1].split("```")[0].split("\n\n", 1)
    space: dict[str, Any] = {}
    exec(f"{head}\nasync def example():\n{textwrap.indent(body, '    ')}", space)
    await space["example"]()
