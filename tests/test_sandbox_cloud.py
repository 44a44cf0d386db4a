"""Sandboxes of providers: what is asked of them, with their own packages against fakes of their servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minirllm import harness
from minirllm.errors import ConfigError, SandboxError, TaskError, UserError
from minirllm.harbor import spec, trial
from minirllm.harbor.agents import nop, oracle
from minirllm.harbor.task import read
from minirllm.sandboxes import MIB, Limits, NoSnapshot, Sandbox, Spec, create, owner, remote, supervisor
from minirllm.sandboxes.pool import Pool
from minirllm.types import AgentConfig

LIMITS = Limits(memory=1500 * MIB, cpus=1.5, disk=32 * MIB, output=64 * 1024)
ME = owner.owner()
SPEC = Spec(limits=LIMITS, lifetime=90.0)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSES", (0.01, 0.01, 0.01))


@pytest.fixture(params=["daytona", "modal"])
def name(request: pytest.FixtureRequest) -> str:
    request.getfixturevalue(f"{request.param}_account")
    chosen: str = request.param
    return chosen


@pytest.fixture
def fake(request: pytest.FixtureRequest, name: str) -> Any:
    return request.getfixturevalue(f"{name}_account")


@pytest.fixture
async def box(name: str) -> AsyncIterator[Sandbox]:
    async with create(name, SPEC) as made:
        yield made


async def test_a_machine_has_no_network_an_end_and_its_owner(daytona_account: Any) -> None:
    async with create("daytona", SPEC):
        (asked,) = daytona_account.created
    sizes = {"cpu": 2, "memory": 2, "disk": 1}  # whole processors and GiB
    wanted = {"networkBlockAll": True, "autoDeleteInterval": 0, "ttlMinutes": 2, "autoStopInterval": 0, **sizes}
    assert {key: asked[key] for key in wanted} == wanted
    assert asked["labels"][owner.OWNER] == ME
    assert asked["buildInfo"]["dockerfileContent"] == "FROM python:3.12-slim\n"
    assert not daytona_account.machines


async def test_a_machine_of_modal_is_the_same(modal_account: Any) -> None:
    async with create("modal", SPEC):
        (asked,) = modal_account.created
    definition = asked.definition
    assert definition.network_access.network_access_type == definition.network_access.BLOCKED
    assert (definition.timeout_secs, definition.resources.memory_mb, definition.resources.milli_cpu) == (90, 1500, 1500)
    assert {tag.tag_name: tag.tag_value for tag in asked.tags}[owner.OWNER] == ME
    assert modal_account.dockerfiles[0][0] == "FROM python:3.12-slim"
    assert not modal_account.machines


async def test_a_dockerfile_is_built_there(name: str, fake: Any, tmp_path: Path) -> None:
    """Daytona takes the files that it copies from an object storage, which this fake has not."""
    (tmp_path / "given.txt").write_text("given")
    (tmp_path / "Dockerfile").write_text("FROM debian:12\nRUN true\n" + "COPY given.txt /\n" * (name == "modal"))
    async with create(name, replace(SPEC, build=tmp_path)):
        pass
    if name == "daytona":
        assert fake.created[0]["buildInfo"]["dockerfileContent"] == "FROM debian:12\nRUN true\n"
        (tmp_path / "Dockerfile").write_text("FROM debian:12\nCOPY given.txt /\n")
        with pytest.raises(SandboxError, match=r"The machine cannot be had at daytona: .*404"):
            await create(name, replace(SPEC, build=tmp_path)).__aenter__()
        assert "GET /api/object-storage/push-access" in fake.asked
    else:
        assert "FROM debian:12" in fake.dockerfiles[0]
        assert "MountGetOrCreate" in fake.asked


@pytest.mark.parametrize(
    "option",
    [{"forward": {8000: ("127.0.0.1", 1)}}, {"binds": {"/usr/share": "/given"}}, {"compose": Path("compose.yaml")}],
)
async def test_what_needs_this_machine_is_refused_by_its_name(name: str, option: dict[str, Any]) -> None:
    with pytest.raises(SandboxError, match=rf"{name} runs elsewhere, so there is no Spec\.{next(iter(option))}"):
        async with create(name, replace(SPEC, **option)):
            pass


def test_an_agent_program_is_refused_before_anything_starts(name: str) -> None:
    with pytest.raises(UserError, match=f"which {name} does not see: take docker or local"):
        harness.flow(harness.find("bash"), boxes=Pool(name))


async def test_a_harbor_task_is_tried_there(name: str, fake: Any) -> None:
    task = await asyncio.to_thread(read, Path(__file__).parent / "fixtures" / "harbor" / "plain")
    spec.check(task, name)
    boxes, model = Pool(name), AgentConfig("", "tiny", metadata={"timeout": 60.0})
    for agent, reward in ((oracle, 1.0), (nop, 0.0)):
        episode = await trial.run(task, agent, boxes, trial.recipe(task, boxes), model)
        assert episode.artifacts["harbor"]["reward"] == reward
    lifetime = fake.created[0]["ttlMinutes"] * 60 if name == "daytona" else fake.created[0].definition.timeout_secs
    assert task.seconds + spec.SLACK <= lifetime < task.seconds + spec.SLACK + 61


def test_a_harbor_task_with_services_is_refused(name: str, tmp_path: Path) -> None:
    for path, text in {
        "task.toml": "", "instruction.md": "Do it.", "tests/test.sh": "true",
        "environment/docker-compose.yaml": "services: {main: {image: x}, db: {image: y}}",
    }.items():  # fmt: skip
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    with pytest.raises(TaskError, match=f"none can run beside the sandbox {name}: take docker"):
        spec.check(read(tmp_path), name)


async def test_a_busy_provider_is_asked_again(name: str, fake: Any, box: Sandbox) -> None:
    if name == "daytona":
        fake.faults += [429, 503, 502]
    else:
        from grpclib import Status

        fake.faults["TaskExecStart"] += [Status.RESOURCE_EXHAUSTED, Status.UNAVAILABLE]
    assert (await box.run("echo done", timeout=10)).stdout == "done\n"


async def test_a_provider_that_stays_busy_is_one_sentence(
    daytona_account: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with create("daytona", SPEC) as box:
        daytona_account.faults += [503] * 8
        with pytest.raises(SandboxError, match=r"A command cannot be run at daytona: .*try later"):
            await box.run("true", timeout=10)
        daytona_account.faults[:] = [503] * 4
        with caplog.at_level(logging.WARNING):
            await box.close()
    assert "it ends within 90 s of its start" in caplog.text


async def test_a_wrong_key_says_what_to_set(daytona_account: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAYTONA_API_KEY", "wrong")
    with pytest.raises(SandboxError, match="set DAYTONA_API_KEY"):
        async with create("daytona", SPEC):
            pass
    monkeypatch.delenv("DAYTONA_API_KEY")
    with pytest.raises(SandboxError, match="set DAYTONA_API_KEY"):
        async with create("daytona", SPEC):
            pass


async def test_a_command_whose_answer_is_lost_is_not_run_again(daytona_account: Any) -> None:
    async with create("daytona", SPEC) as box:
        daytona_account.lost = 2
        done = await box.run("echo once >> file; cat file", timeout=10)
        assert (done.stdout, daytona_account.lost) == ("once\n", 0)


async def test_a_long_command_is_asked_after(name: str, box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(box), "patience", 1.0)
    done = await box.run("sleep 2.5; echo slept; exit 4", timeout=20)
    assert (done.stdout, done.exit_code) == ("slept\n", 4)


async def test_a_program_that_ends_all_others_ends_no_sandbox(box: Sandbox) -> None:
    assert (await box.run("kill -9 -1", timeout=10)).exit_code == 137
    assert (await box.run("echo alive", timeout=10)).stdout == "alive\n"


@pytest.mark.parametrize("said", ["a 0 0 0 1 2", "0 0 0 0 1 1\nA\nA", "\u00e9 0 0 0 0 0\nA\nA", "0 0"])
def test_a_report_that_a_program_wrote_is_none(said: str) -> None:
    assert supervisor.read(f"minirllm id {said}", "id") is None


async def test_daemons_end_with_their_command(box: Sandbox) -> None:
    daemons = "env -i sleep 4321 & setsid sleep 4321 & (nohup sleep 4321 > /dev/null &); sleep 0.2"
    assert (await box.run(daemons, timeout=10)).exit_code == 0
    assert (await box.run("pgrep -x sleep -a | grep -c 4321", timeout=10)).stdout == "0\n"


async def test_one_that_got_away_does_not_hold_the_outputs(box: Sandbox) -> None:
    """It has left its session, and hidden the variable by which it is known: it lives as long as the sandbox."""
    done = await asyncio.wait_for(box.run("echo said; env -i setsid sleep 4321 & true", timeout=60), 40)
    assert (done.stdout, done.exit_code, done.timed_out) == ("said\n", 0, False)


async def test_a_program_that_removes_our_folder_fails_by_itself(box: Sandbox) -> None:
    done = await box.run("rm -rf /tmp/.minirllm-*; exit 3", timeout=10)
    assert (done.exit_code, done.timed_out) == (137, False)
    assert (await box.run("ls -A /tmp", timeout=10)).stdout.count("\n") == 1  # its own folder


async def test_the_image_says_what_programs_see_and_the_provider_does_not(box: Sandbox) -> None:
    seen = (await box.run("env | cut -d = -f 1; echo $IMAGE_SAYS", timeout=10, env={"a.b": "c"})).stdout.split()
    assert {"PATH", "HOME", "IMAGE_SAYS", "a.b", "hello"} <= set(seen)
    assert not [key for key in seen if key.startswith(("DAYTONA_", "MODAL_"))]


async def test_machines_of_a_killed_process_are_removed(name: str, fake: Any) -> None:
    boot = ME.split(".")[0]
    left = [create(name, SPEC) for _ in range(3)]
    for box, label in zip(left, (f"{boot}.1.0", "another-machine.1.0", ME), strict=True):
        await box.start()
        if name == "daytona":
            fake.machines[box.machine][1]["labels"][owner.OWNER] = label
        else:
            next(tag for tag in fake.machines[box.machine][1].tags if tag.tag_name == owner.OWNER).tag_value = label
    remote._cleared.clear()
    async with create(name, SPEC):
        assert {box.machine in fake.machines for box in left[:1]} == {False}
        assert all(box.machine in fake.machines for box in left[1:])
    for box in left:
        await box.close()
    assert not fake.machines


async def test_a_start_that_is_cancelled_leaves_no_machine(name: str, fake: Any) -> None:
    fake.seconds = 1.0

    async def use() -> None:
        async with create(name, SPEC):
            await asyncio.sleep(100)

    running = asyncio.create_task(use())
    for _ in range(500):
        await asyncio.sleep(0.02)
        if fake.machines:
            break
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    fake.seconds = 0.0
    assert not fake.machines


async def test_a_snapshot_can_be_removed_and_is_then_not_there(name: str, box: Sandbox) -> None:
    kept = await box.snapshot()
    async with create(name, replace(SPEC, snapshot=kept)):
        pass
    for _ in range(2):
        await type(box).forget(kept)
    with pytest.raises(NoSnapshot, match=f"no {name} snapshot"):
        async with create(name, replace(SPEC, snapshot=kept)):
            pass
    assert type(box).place() != "", "snapshots are the account's"


@pytest.mark.parametrize("package", ["daytona", "docker", "modal"])
def test_a_package_that_is_not_installed_is_one_sentence(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ConfigError, match=rf"pip install 'minirllm\[{package}\]'"):
        create(package)
