"""A program of this machine, run in a sandbox: what it must see of the machine to run there, its files in and out.

Owns: `spec` and `seen` (interpreters and folders, bound read-only at their own paths), `lay` and `gather` (files).
Does not know: which program, what it is for, whom it talks to.

A program outside /usr needs its own file; a Python environment needs its folder and that of the Python it was made
from; an interpreter needs the prefix it is installed in. Nothing else is shown, and never a whole home.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from minirllm.errors import SandboxError
from minirllm.sandboxes import BASH, WORK, Sandbox, Spec
from minirllm.sandboxes.place import Listed, within_limits, write_files

HOME = "/home/agent"
PYTHON = "/usr/bin/python3"
OWN = (Path("/usr"), Path("/bin"), Path("/sbin"), Path("/lib"), Path("/lib64"))  # of the sandbox itself
LIST = r"""cd "$1" && find . -xdev ! -type d -printf '%y %s %P\0' | head -c 1000000"""
PACK = r"""cd "$1" && tar --null --no-recursion -c -f - -T -"""
GIVE = f'mkdir -p {HOME} && chown -R -- "$1" {HOME}'  # its HOME to a user
SECONDS = 60.0  # to list, or to pack


def spec(programs: Iterable[str], folder: Path, bins: Iterable[Path], url: str) -> tuple[Spec, str]:
    """(what to start, PATH inside) for an installation in `folder`, whose programs lie in `bins`, that talks to `url`,
    an address of this machine. A name may say a version, as in ``node>=22``; a Python is the installation's own."""
    names = [re.split("[<>=]", name)[0] for name in programs if not name.startswith("python>")]
    binds = seen(names, [folder], os.pathsep.join([*map(str, bins), os.environ.get("PATH", os.defpath)]))
    bound = [place for each in binds if (place := Path(each) / "bin").is_dir()]
    path = ":".join([*map(str, [*bins, *bound]), "/usr/local/bin", "/usr/bin", "/bin"])
    port = urlsplit(url).port or 80
    return Spec(binds=binds, forward={port: ("127.0.0.1", port)}), path


def seen(programs: Iterable[str], folders: Iterable[Path], path: str) -> dict[str, str]:
    """What to bind, host path -> path inside, for `programs` (names on `path`, or paths) and installed `folders`."""
    wanted: list[Path] = [folder for folder in folders if folder.exists()]
    found = [Path(there) for name in programs if (there := shutil.which(name, path=path))]
    found += [python for folder in wanted if (python := folder / "bin" / "python").exists()]
    for program in found:
        wanted.append(program)
        environment = program.parent.parent
        if (environment / "pyvenv.cfg").exists():
            wanted.append(environment)
        real = program.resolve()
        wanted.append(_prefix(real) or real)
    outside = {place.absolute() for place in wanted if not any(place.is_relative_to(own) for own in OWN)}
    for place in outside:
        if place.is_relative_to(WORK):
            raise SandboxError(f"{place} lies below {WORK}, where programs work in a sandbox: put it elsewhere.")
    topmost = [place for place in sorted(outside) if not any(above in outside for above in place.parents)]
    return {str(place): str(place) for place in topmost}


def _prefix(real: Path) -> Path | None:
    """The folder that an interpreter is installed in, if `real` is one."""
    prefix = real.parent.parent
    signs = [*prefix.glob("lib/python3*/os.py"), *prefix.glob("lib/node_modules"), *prefix.glob("include/node")]
    home = prefix in (Path("/"), Path.home(), *Path.home().parents)
    return prefix if signs and real.parent.name == "bin" and not home else None


async def lay(box: Sandbox, work: Mapping[str, str], home: Mapping[str, str]) -> None:
    """Write texts into the work folder and HOME. Raises TaskError for a path that leads out."""
    for place, files in ((WORK, work), (HOME, home)):
        if files:
            folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="minirllm-lay-"))
            try:
                await asyncio.to_thread(write_files, folder, files)
                await box.upload(folder, place)
            finally:
                await asyncio.to_thread(shutil.rmtree, folder)


async def gather(box: Sandbox) -> tuple[dict[str, str], list[str]]:
    """The text files of the work folder and the paths left out, as `place.read_files` gives them."""
    listing = await box.execute((BASH, "-c", LIST, "_", WORK), timeout=SECONDS, cwd="/", output=2**20)
    listed = [_listed(row) for row in listing.raw_stdout.split(b"\0")[:-1]]
    chosen, left_out = within_limits(sorted(listed, key=Listed.order))
    names = b"".join(name.encode(errors="surrogateescape") + b"\0" for name in chosen)
    packed = await box.execute((BASH, "-c", PACK, "_", WORK), timeout=SECONDS, cwd="/", stdin=names, output=2**22)
    found = await asyncio.to_thread(_texts, packed.raw_stdout, set(chosen))
    return found, sorted([*left_out, *(name for name in chosen if name not in found)])


def _texts(packed: bytes, chosen: set[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    with contextlib.suppress(tarfile.TarError), tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isreg() else None
            with contextlib.suppress(UnicodeDecodeError):
                if content is not None and member.name in chosen:
                    found[member.name] = content.read().decode()
    return found


def _listed(row: bytes) -> Listed:
    kind, size, name = row.decode(errors="surrogateescape").split(" ", 2)
    return Listed(name, int(size), kind == "f")
