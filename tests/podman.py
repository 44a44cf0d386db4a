"""podman in the place of Docker's engine, as its socket speaks Docker's API: Debian's programs in the user's cache.

`running()` starts its service for a block, with its own data, as engine.running() does. MINIRLLM_ENGINE=podman
asks for it.

podman gives each process the highest limits there are of open files and processes, which only a process with the right
to raise limits can do; where this one has not, runc is told to leave them as they are.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests import engine

PACKAGES = """podman conmon catatonit runc golang-github-containers-common golang-github-containers-image libgpgme11
libassuan0 libdevmapper1.02.1 libsubid4 libseccomp2 libglib2.0-0 libprotobuf-c1 libyajl2"""
INSTALL = """
set -euo pipefail
mkdir -p $1/debs
cd $1/debs
apt-get -qq update
apt-get -o APT::Sandbox::User=root -qq download PACKAGES
for d in *.deb; do dpkg-deb -x $d $1/tree; done
rm -rf $1/debs $1/tree/usr/share
"""
CONF = """[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
conmon_path = ["{tree}/usr/bin/conmon"]
helper_binaries_dir = ["{tree}/usr/libexec/podman"]
init_path = "{tree}/usr/libexec/podman/catatonit"
[engine.runtimes]
runc = ["{home}/runc"]
"""
STORAGE = '[storage]\ndriver = "overlay"\ngraphroot = "{home}/data"\nrunroot = "{home}/run"\n'
POLICY = '{"default": [{"type": "insecureAcceptAnything"}]}'
OWN_ETC = 'mount -t overlay etc -o lowerdir="$1":/etc /etc && shift && exec "$@"'  # it reads its policy there only
RUNC = """#!/usr/bin/python3
import json, os, sys
for flag, value in zip(sys.argv, sys.argv[1:]):
    path = {{"--bundle": value + "/config.json", "--process": value}}.get(flag)
    if path and os.path.exists(path):
        with open(path) as file:
            spec = json.load(file)
        process = spec.get("process", spec)
        limits = process.get("rlimits") or []
        process["rlimits"] = [one for one in limits if one["type"] not in ("RLIMIT_NOFILE", "RLIMIT_NPROC")]
        with open(path, "w") as file:
            json.dump(spec, file)
os.execv("{tree}/usr/sbin/runc", ["runc", *sys.argv[1:]])
"""


def _tree() -> Path:
    """Where its programs are."""
    return engine.filled("podman-1", INSTALL.replace("PACKAGES", " ".join(PACKAGES.split()))) / "tree"


@contextlib.contextmanager
def running() -> Iterator[str]:
    """The URL of a fresh service with `engine.IMAGE`. Raises NoEngine."""
    if os.geteuid() or not shutil.which("apt-get"):
        raise engine.NoEngine("podman needs root, and Debian to be had from")
    tree, home = _tree(), Path(tempfile.mkdtemp(prefix="minirllm-podman-"))
    url = f"unix://{home}/podman.sock"
    (home / "etc" / "containers").mkdir(parents=True)
    (home / "etc" / "containers" / "policy.json").write_text(POLICY)
    for name, text in (("containers.conf", CONF), ("storage.conf", STORAGE), ("runc", RUNC)):
        (home / name).write_text(text.format(home=home, tree=tree))
    (home / "runc").chmod(0o755)
    env = {
        "PATH": f"{tree}/usr/bin:{tree}/usr/sbin:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": f"{tree}/usr/lib/x86_64-linux-gnu:{tree}/lib/x86_64-linux-gnu",
        "HOME": str(home),
        "CONTAINERS_CONF": str(home / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(home / "storage.conf"),
    }
    command = ["setpriv", "--pdeathsig", "TERM", "unshare", "--mount", "bash", "-c", OWN_ETC, "_", home / "etc"]
    command += [f"{tree}/usr/bin/podman", "system", "service", "-t", "0", url]
    try:
        with engine.serving(command, env, {"PATH": os.environ["PATH"], "DOCKER_HOST": url}, home):
            yield url
    finally:
        for place in Path("/proc").glob("[0-9]*/cmdline"):  # each exec leaves one of its programs for five minutes
            with contextlib.suppress(OSError):
                if str(home).encode() in place.read_bytes():
                    os.kill(int(place.parent.name), signal.SIGKILL)
        shutil.rmtree(home, ignore_errors=True)
