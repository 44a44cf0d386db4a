"""Trees go into every sandbox and come out, of any size, and write nowhere else; hostile archives, too."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from minirllm.errors import SandboxError
from minirllm.sandboxes import MIB, Limits, Sandbox, Spec, create
from minirllm.sandboxes.trees import MAX_HEADER, Packed, unpack, unpacking
from tests import test_sandboxes

box, own_cache = test_sandboxes.box, test_sandboxes.own_cache
LARGE = 200 * MIB
FLAT = 32 * MIB  # more than this is not held of it


async def test_trees_go_in_and_come_out(box: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "run.sh").write_text("echo hi\n")
    (source / "sub" / "run.sh").chmod(0o755)
    (source / "link").symlink_to("sub/run.sh")
    (source / "empty").mkdir()
    await box.upload(source, "tree")
    assert (await box.run("./tree/sub/run.sh && cat tree/link", timeout=10)).stdout == "hi\necho hi\n"
    await box.download("tree", tmp_path / "back")
    names = sorted(path.relative_to(tmp_path / "back").as_posix() for path in (tmp_path / "back").rglob("*"))
    assert names == ["empty", "link", "sub", "sub/run.sh"]
    assert (tmp_path / "back" / "sub" / "run.sh").read_text() == "echo hi\n"
    with pytest.raises(SandboxError, match="no folder"):
        await box.upload(tmp_path / "absent", "tree")


async def test_a_tree_that_comes_out_writes_nowhere_else(box: Sandbox, tmp_path: Path) -> None:
    await box.run(
        "mkdir -p t && cd t && ln -s / root && ln -s ../../../etc up && ln -s /etc/shadow file && mkfifo pipe "
        "&& echo fine > plain && ln plain hard",
        timeout=10,
    )
    await box.download("t", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"plain", "hard"}
    assert list(tmp_path.iterdir()) in ([tmp_path / "out"], [tmp_path / "cache", tmp_path / "out"], [
        tmp_path / "out", tmp_path / "cache",
    ])  # fmt: skip


@pytest.mark.parametrize("kind", [pytest.param("docker", marks=pytest.mark.docker), "local", "local-unsafe"])
async def test_memory_stays_flat_however_large_a_tree_is(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    image = request.getfixturevalue("docker_image") if kind == "docker" else ""
    (tmp_path / "source").mkdir()
    for name in ("one", "two"):
        with (tmp_path / "source" / name).open("wb") as file:
            file.truncate(LARGE // 2)
    limits = Limits(memory=128 * MIB, disk=LARGE + 16 * MIB)
    async with create(kind, Spec(limits=limits, image=image)) as box:
        before = _most(since=True)
        await box.upload(tmp_path / "source", "tree")
        await box.download("tree", tmp_path / "back")
        assert _most() - before < FLAT
    assert [(tmp_path / "back" / name).stat().st_size for name in ("one", "two")] == [LARGE // 2] * 2


def _most(since: bool = False) -> int:
    """The most memory that this process has had, or from now on will have had."""
    if since:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


async def test_a_tree_that_is_too_large_or_of_too_many_files_is_refused(box: Sandbox, tmp_path: Path) -> None:
    await box.run("mkdir many large; touch many/{1..40}; head -c 12M /dev/zero > large/file", timeout=20)
    box.spec = Spec(limits=Limits(files=20))
    with pytest.raises(SandboxError, match="more than 20 files"):
        await box.download("many", tmp_path / "many")
    box.spec = Spec(limits=Limits(disk=MIB))
    with pytest.raises(SandboxError, match="large in the sandbox: it is too large"):
        await box.download("large", tmp_path / "large")
    with pytest.raises(SandboxError, match="absent in the sandbox"):
        await box.download("absent", tmp_path / "absent")


async def test_a_tree_that_changes_while_it_is_read_is_said_to_have(box: Sandbox, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # which a tree may hold
    (tmp_path / "proc").symlink_to("/proc")
    await box.upload(tmp_path, "tree")
    assert (await box.run("test -p tree/pipe && readlink tree/proc", timeout=10)).stdout == "/proc\n"

    class Shrinking(Packed):
        async def __aiter__(self) -> Any:
            yield bytes(100)
            self.problem = "a file became shorter"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minirllm.sandboxes.Packed", Shrinking)
        with pytest.raises(SandboxError, match=r"cannot be uploaded: a file became shorter\."):
            await box.upload(tmp_path, "tree")


# ---- what another tar in the place of tar might send ----


def archive(*members: tuple[str, Any], format: int = tarfile.PAX_FORMAT) -> bytes:
    """Names with a text, or with the fields of another kind of member."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as out:
        for name, what in members:
            member = tarfile.TarInfo(name)
            for key, value in what.items() if isinstance(what, dict) else ():
                setattr(member, key, value)
            text = what if isinstance(what, bytes) else b""
            member.size = member.size or len(text)
            out.addfile(member, io.BytesIO(text))
    return buffer.getvalue()


def link(to: str, kind: bytes = tarfile.SYMTYPE) -> dict[str, Any]:
    return {"type": kind, "linkname": to}


def unpacked(data: bytes, folder: Path, files: int = 100) -> set[str]:
    unpack(io.BytesIO(data), folder / "in", files)
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_names_that_lead_out_are_left_out(tmp_path: Path) -> None:
    data = archive(("../out", b"x"), ("/abs", b"x"), ("a/../../out", b"x"), ("fine", b"x"), ("fine/below", b"x"))
    assert unpacked(data, tmp_path) == {"in", "in/abs", "in/fine"}


def test_links_that_lead_out_are_left_out_however_they_do(tmp_path: Path) -> None:
    """`d/d/../..` stays inside as a text, and does not where d is a link to the folder itself."""
    members = [
        ("up", link("..")), ("root", link("/")), ("d", link(".")), ("chain", link("d/d/../..")), ("s/t", b"x"),
        ("s/ok", link("../s/t")), ("s/out", link("../../x")), ("device", {"type": tarfile.CHRTYPE}),
        ("pipe", {"type": tarfile.FIFOTYPE}), ("hard", link("../../etc/passwd", tarfile.LNKTYPE)),
        ("moved", link("s/ok", tarfile.LNKTYPE)), ("again", link("s/t", tarfile.LNKTYPE)),
        ("absent", link("no/such", tarfile.LNKTYPE)),
    ]  # fmt: skip
    found = unpacked(archive(*members), tmp_path)
    assert found == {"in", "in/d", "in/s", "in/s/t", "in/s/ok", "in/again"}
    assert all(path.resolve().is_relative_to(tmp_path / "in") for path in (tmp_path / "in").rglob("*"))


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "aside").mkdir()
    (tmp_path / "in" / "there").symlink_to(tmp_path / "aside")  # not even through one of ours
    members = [("there/x", b"x"), ("s/t", b"old"), ("l", link("s")), ("l/x", b"x"), ("f", link("s/t")), ("f", b"new")]
    found = unpacked(archive(*members), tmp_path)
    assert found == {"in", "in/there", "aside", "in/s", "in/s/t", "in/l", "in/f"}
    assert ((tmp_path / "in" / "s" / "t").read_text(), (tmp_path / "in" / "f").read_text()) == ("old", "new")


def test_modes_give_nobody_more_rights(tmp_path: Path) -> None:
    unpacked(archive(("s", {"mode": 0o6777}), ("d", {"type": tarfile.DIRTYPE, "mode": 0o7000})), tmp_path)
    assert [oct((tmp_path / "in" / name).stat().st_mode & 0o7777) for name in "sd"] == ["0o755", "0o755"]


def _pax(size: int) -> bytes:
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, size
    return header.tobuf(tarfile.GNU_FORMAT) + bytes(min(size, 4 * MAX_HEADER))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "empty file"), (b"garbage" * 1000, "."), (archive(("a", b"x" * 2000))[:1000], "ends early"),
        (_pax(2**40), "too long"), (_pax(2**32), "too long"), (_pax(2 * MAX_HEADER), "too long"),
        (archive(*((str(n), b"") for n in range(101))), "more than 100 files"),
    ],
)  # fmt: skip
async def test_what_is_no_archive_of_ours_is_said_in_a_sentence(data: bytes, problem: str, tmp_path: Path) -> None:
    async def send() -> None:
        async with unpacking(tmp_path / "in", 100) as sink:
            for at in range(0, len(data), 4096):
                await sink(data[at : at + 4096])

    with pytest.raises(SandboxError, match=rf"A tree of the sandbox cannot be copied to .*{problem}"):
        await send()


def test_a_tree_that_is_too_deep_to_be_read_or_removed_is_refused(tmp_path: Path) -> None:
    for name in ("d/" * 1500 + "f", "d/" * 100 + "f"):
        with pytest.raises(tarfile.TarError, match="more than 100 folders in each other"):
            unpack(io.BytesIO(archive((name, b"x"))), tmp_path, 100)
    unpack(io.BytesIO(archive(("./" + "d/" * 99 + "f", b"x"))), tmp_path, 100)
    assert (tmp_path / ("d/" * 99) / "f").read_bytes() == b"x"


def test_a_sparse_file_that_says_it_is_huge_is_left_out(tmp_path: Path) -> None:
    pax = {"GNU.sparse.major": "0", "GNU.sparse.minor": "0", "GNU.sparse.size": str(2**45), "GNU.sparse.name": "huge"}
    pax |= {"GNU.sparse.numblocks": "1", "GNU.sparse.map": "0,1"}
    assert unpacked(archive(("huge", {"pax_headers": pax}), ("next", b"x")), tmp_path) == {"in", "in/next"}


async def test_a_transfer_that_is_cancelled_or_fails_leaves_no_thread(tmp_path: Path) -> None:
    async def send(pieces: Iterable[bytes]) -> None:
        async with unpacking(tmp_path / "in", 100) as sink:
            for piece in pieces:
                await sink(piece)
            await asyncio.sleep(60)

    sending = [asyncio.create_task(send([archive(("a", b"x" * 9000))[:5000]])) for _ in range(20)]
    await asyncio.sleep(0.2)
    for task in sending:
        task.cancel()
    ended = await asyncio.gather(*sending, return_exceptions=True)
    assert {type(one) for one in ended} == {asyncio.CancelledError}
    await asyncio.sleep(0.1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("unpack") and thread.is_alive()]


async def test_a_sandbox_that_does_not_stream_has_trees_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with create("local-unsafe") as box:
        monkeypatch.setattr(box, "streams", False)
        (tmp_path / "source").mkdir()
        (tmp_path / "source" / "file").write_bytes(b"x" * MIB)
        await box.upload(tmp_path / "source", "tree")
        await box.download("tree", tmp_path / "back")
    assert (tmp_path / "back" / "file").read_bytes() == b"x" * MIB
