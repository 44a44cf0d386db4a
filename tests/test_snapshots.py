"""Snapshots by key: what the key depends on, that one is made once, begun with, and removed; and the command for it."""

from __future__ import annotations

import asyncio
import fcntl
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from minirllm import flow, harness
from minirllm.cli import cli
from minirllm.config import Config
from minirllm.errors import SandboxError
from minirllm.sandboxes import MIB, Limits, Sandbox, Spec, create, kept
from minirllm.sandboxes.kept import Recipe, prepared
from minirllm.sandboxes.pool import Pool
from minirllm.tools import snapshot

LIMITS = Limits(memory=128 * MIB, disk=32 * MIB)
FIXTURES = Path(__file__).parent / "fixtures" / "harbor"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIRLLM_CACHE", str(tmp_path / "cache"))


@pytest.fixture(params=["local", pytest.param("docker", marks=pytest.mark.docker)])
def spec(request: pytest.FixtureRequest) -> tuple[str, Spec]:
    image = request.getfixturevalue("docker_image") if request.param == "docker" else ""
    return request.param, Spec(limits=LIMITS, image=image)


class Counting:
    """A recipe whose preparation is counted and can be seen."""

    def __init__(self, kind: str = "local", spec: Spec | None = None, *made_of: str | Path):
        self.times = 0
        self.recipe = Recipe(kind, spec or Spec(limits=LIMITS), self.prepare, made_of, "a test")

    async def prepare(self, box: Sandbox) -> None:
        self.times += 1
        await asyncio.sleep(0.2)
        done = await box.run("echo prepared > /tmp/marker; mkdir -p deep && echo x > deep/file", timeout=20)
        assert done.exit_code == 0

    async def seen(self, how: kept.Snapshots = "make") -> str:
        async with prepared(self.recipe, how) as box:
            done = await box.run("cat /tmp/marker deep/file; ls; echo mine > own", timeout=20)
            return done.stdout


async def records() -> list[kept.Record]:
    return await asyncio.to_thread(kept.records)


async def expire(record: kept.Record) -> None:
    await asyncio.to_thread(replace(record, expires=time.time() - 1).write)


# ---- the key ----


def test_the_key_is_of_all_that_the_files_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = tmp_path / "context"
    context.mkdir()
    (context / "Dockerfile").write_text("FROM a\n")
    base = Recipe("docker", Spec(build=context, env={"A": "1"}), None, ("setup", "make", context))
    keys = {replace(base).key, replace(base, about="other words", spec=replace(base.spec, limits=LIMITS)).key}
    keys |= {replace(base, spec=replace(base.spec, forward={1: ("h", 2)}, binds={"/a": "/b"})).key}
    assert len(keys) == 1  # what is not in the files
    others = [
        replace(base, kind="local"), replace(base, made_of=("setup", "make all", context)), replace(base, made_of=()),
        replace(base, spec=replace(base.spec, image="a")), replace(base, spec=replace(base.spec, env={"A": "2"})),
    ]  # fmt: skip
    keys |= {other.key for other in others}
    (context / "Dockerfile").write_text("FROM b\n")
    keys.add(replace(base).key)
    (context / "Dockerfile").chmod(0o755)
    keys.add(replace(base).key)
    monkeypatch.setenv("DOCKER_HOST", "unix:///another.sock")
    keys.add(replace(base).key)
    assert len(keys) == 1 + len(others) + 3


def test_a_harness_counts_when_something_is_installed_for_it() -> None:
    plain = harness.find("bash")
    packed = replace(plain, pip=("agent==1",))
    pool = Pool("local", setup="true")
    keys = {
        harness.recipe(one, pool, Spec()).key
        for one in (plain, replace(plain, version="9"), packed, replace(packed, version="9"),
                    replace(packed, pip=("agent==2",)))
    }  # fmt: skip
    assert len(keys) == 4


# ---- made once, begun with ----


async def test_the_first_makes_it_and_later_ones_begin_with_it(spec: tuple[str, Spec]) -> None:
    counting = Counting(*spec)
    assert await counting.seen("use") == await counting.seen("off") == "prepared\nx\ndeep\n"
    assert (counting.times, await records()) == (2, [])
    assert [await counting.seen(how) for how in ("make", "make", "use")] == ["prepared\nx\ndeep\n"] * 3
    assert counting.times == 3
    (record,) = await records()
    assert (record.key, record.kind, record.about) == (counting.recipe.key, spec[0], "a test")
    assert 0 < record.bytes < MIB
    assert await asyncio.to_thread(lambda: record.used) >= record.created
    assert record.expires - record.created == pytest.approx(168 * 3600)
    assert await kept.discard(record.key)
    assert await records() == []
    with pytest.raises(SandboxError, match=r"no \w+ snapshot"):
        await create(spec[0], replace(spec[1], snapshot=record.id)).start()


async def test_many_that_need_it_at_once_make_it_once() -> None:
    counting = Counting()
    seen = await asyncio.gather(*(counting.seen() for _ in range(12)))
    assert (set(seen), counting.times, len(await records())) == ({"prepared\nx\ndeep\n"}, 1, 1)


async def test_a_preparation_that_fails_or_is_cancelled_keeps_nothing(tmp_path: Path) -> None:
    counting = Counting()
    making = asyncio.create_task(counting.seen())
    await asyncio.sleep(0.2)
    making.cancel()
    await asyncio.gather(making, return_exceptions=True)

    async def fails(box: Sandbox) -> None:
        raise SandboxError("setup failed")

    with pytest.raises(SandboxError, match="setup failed"):
        async with prepared(Recipe("local", prepare=fails), "make"):
            pass
    assert (await records(), list((tmp_path / "cache").glob("snapshots/local/*"))) == ([], [])
    assert await counting.seen() == "prepared\nx\ndeep\n"  # and nobody holds the lock


async def test_one_that_was_removed_behind_our_back_is_made_again(
    spec: tuple[str, Spec], caplog: pytest.LogCaptureFixture
) -> None:
    counting = Counting(*spec)
    await counting.seen()
    (record,) = await records()
    await type(create(*spec)).forget(record.id)
    assert await counting.seen("use") == "prepared\nx\ndeep\n"
    assert ("is gone" in caplog.text, await records()) == (True, [])
    await counting.seen()
    assert (counting.times, len(await records())) == (3, 1)


async def test_what_has_expired_goes_by_use_unless_it_is_in_use() -> None:
    counting = Counting()
    async with prepared(counting.recipe, "make"):
        (record,) = await records()
        await expire(record)
        await counting.seen()
        assert counting.times == 1
        assert not await kept.discard(record.key)
    await kept.sweep()
    assert await records() == []
    await counting.seen()
    (record,) = await records()
    await expire(record)
    await counting.seen()
    assert (counting.times, len(await records())) == (3, 1)
    assert (await records())[0].expires > time.time()


async def test_a_sandbox_that_can_keep_nothing_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def snapshot(self: Sandbox) -> str:
        raise SandboxError("The disk is full")

    monkeypatch.setattr("minirllm.sandboxes.local.Local.snapshot", snapshot)
    monkeypatch.setattr(kept, "_hopeless", set())
    counting = Counting()
    assert [await counting.seen() for _ in range(2)] == ["prepared\nx\ndeep\n"] * 2
    assert (caplog.text.count("The disk is full"), await records()) == (1, [])


async def test_one_without_files_of_its_own_has_none() -> None:
    async def prepare(box: Sandbox) -> None:
        await box.write("file", b"")

    async with prepared(Recipe("local-unsafe", prepare=prepare), "make") as box:
        assert await box.read("file") == b""
    assert await records() == []


async def test_setup_prepares_and_belongs_to_the_key() -> None:
    pool = Pool("local", setup="echo $OWN > made; mkdir deep", snapshots="make")
    for _ in range(2):
        async with pool.take(pool.recipe(Spec(limits=LIMITS, env={"OWN": "of the spec"}))) as box:
            assert (await box.run("cat made; ls", timeout=20)).stdout == "of the spec\ndeep\nmade\n"
    assert len(await records()) == 1
    failing = Pool("local", setup="echo why >&2; exit 3")
    with pytest.raises(SandboxError, match=r"setup failed in the sandbox: why\."):
        async with failing.take(failing.recipe(Spec(limits=LIMITS))):
            pass


# ---- the command ----


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli, ["snapshot", *arguments])
    assert done.exit_code == code, done.output
    return done.output


def test_the_command_makes_lists_renews_and_removes() -> None:
    made = run("create", str(FIXTURES / "plain"), "--sandbox", "local", "--ttl-hours", "1")
    key = made.split()[0]
    assert "task " in made
    assert "made in" in made
    assert "was there" in run("create", str(FIXTURES / "plain"), "--sandbox", "local", "--ttl-hours", "1")
    first = kept.records()[0].expires
    again = run("create", str(FIXTURES / "plain"), "--sandbox", "local", "--ttl-hours", "24")
    assert kept.records()[0].expires - first == pytest.approx(23 * 3600, abs=120)
    assert snapshot._date(kept.records()[0].expires) in again
    run("create", str(FIXTURES / "plain"), "--sandbox", "local", "--ttl-hours", "1")
    assert kept.records()[0].expires - first == pytest.approx(23 * 3600, abs=120)
    assert len(run("list").splitlines()) == 2
    fields = dict(line.split(": ", 1) for line in run("inspect", key[:6]).splitlines())
    assert (fields["kind"], fields["key"][:12], len(fields["id"])) == ("local", key, 32)
    before = kept.records()[0].expires
    run("renew", key, "--ttl-hours", "48")
    assert kept.records()[0].expires - before == pytest.approx(24 * 3600, abs=120)
    assert run("destroy", key).endswith("removed\n")
    assert run("list").split() == ["KEY", "SANDBOX", "OF", "SIZE", "CREATED", "USED", "EXPIRES"]


def test_what_the_command_cannot_do_is_said_in_a_sentence() -> None:
    assert "No snapshot begins with 'abc'" in run("inspect", "abc", code=2)
    assert "Say which snapshot to remove" in run("destroy", code=2)
    unsafe = run("create", str(FIXTURES / "plain"), "--sandbox", "local-unsafe", code=2)
    assert "has no files that are all its own" in unsafe
    task = str(Path(__file__).parent.parent / "tasks" / "first_letter.py")
    assert "choose one, as in --sandbox local" in run("create", task, code=2)
    assert "Nothing is prepared in this sandbox" in run("create", task, "--sandbox", "local", code=2)
    assert "harness bash" in run("create", task, "--sandbox", "local", "--set", "setup=touch made")
    assert "2 snapshots begin with ''" not in run("destroy", "--all")
    assert kept.records() == []


@pytest.mark.parametrize("hours", ["nan", "inf", "1e9", "0", "-1"])
def test_hours_are_those_that_a_date_can_be_told_of(hours: str) -> None:
    made = run("create", str(FIXTURES / "plain"), "--sandbox", "local", "--ttl-hours", hours, code=2)
    assert "not above 0 and at most 876000" in made
    assert kept.records() == []


def test_a_record_of_a_kind_that_is_no_more_is_in_nobodys_way() -> None:
    kept.Record("0" * 32, "gone.package:Box", "1", "", "of old", 0, 1.0, 2.0).write()
    assert "of old" in run("list")
    assert "made in" in run("create", str(FIXTURES / "plain"), "--sandbox", "local")
    run("renew", kept.records()[-1].key)


def test_what_cannot_be_removed_is_named_after_the_rest_is_gone() -> None:
    kept.Record("0" * 32, "gone.package:Box", "1", "", "of old", 0, 1.0, time.time() + 3600).write()
    kept.Record("1" * 32, "local", "1" * 32, "", "in use", 0, 2.0, time.time() + 3600).write()
    run("create", str(FIXTURES / "plain"), "--sandbox", "local")
    with kept._Lock("1" * 32) as lock:
        assert lock.now(fcntl.LOCK_SH)
        said = run("destroy", "--all", code=2)
    assert said.count("removed\n") == 1
    assert "Snapshot 000000000000 cannot be removed" in said
    assert "Snapshot 111111111111 is in use: end the run" in said
    assert [record.key[0] for record in kept.records()] == ["0", "1"]


def test_a_run_begins_with_what_the_command_made() -> None:
    task = flow.load_task(FIXTURES / "plain")
    run("create", str(FIXTURES / "plain"), "--sandbox", "local")
    (record,) = kept.records()
    config = Config(harness="oracle", sandbox="local", warm=1)
    agent = harness.agent(task, config)
    (key,) = {one.key for one in agent.recipes(task.held_out(config), "http://127.0.0.1:9/v1")}
    assert key == record.key
