"""A Docker engine of the tests' own, without any image registry: Debian's programs in a folder of the user's cache.

`running()` starts one for a block, with its own data, and ends it; NoEngine says why there can be none here. Needs root
and Debian's package mirror, once (some 80 MB). `variables()` tells where its programs are. The image
`local/py:1` is bash, coreutils and Python, made of packages.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

IMAGE = "local/py:1"
PROGRAMS = "docker.io docker-cli docker-compose containerd"  # of Debian 13; they run on 12, but for runc
IPTABLES = "iptables libip4tc2 libip6tc2 libxtables12 libmnl0 libnfnetlink0 libnetfilter-conntrack3 libnftnl11"
PACKAGES = """libc6 libc-bin base-files bash dash coreutils libacl1 libattr1 libselinux1 libpcre2-8-0 libgmp10 libssl3
libtinfo6 grep sed findutils tar gzip diffutils procps libproc2-0 python3.11-minimal libpython3.11-minimal
libpython3.11-stdlib zlib1g libexpat1 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libncursesw6 libreadline8
libcrypt1 libgcc-s1 libstdc++6 libsystemd0 libcap2 libgcrypt20 libgpg-error0 liblz4-1 libzstd1 util-linux libblkid1
libmount1 libsmartcols1 libudev1 libaudit1 libcap-ng0 libpam0g mawk"""

INSTALL = r"""
set -euo pipefail
P=$1
mkdir -p $P/apt/lists/partial $P/apt/cache/archives/partial $P/debs $P/tree
MIRROR=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | sort -u | grep -v security | head -1)
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $MIRROR trixie main" > $P/apt/sources.list
A="-o Dir::Etc::sourcelist=$P/apt/sources.list -o Dir::Etc::sourceparts=- -o Dir::State::Lists=$P/apt/lists"
A="$A -o Dir::Cache=$P/apt/cache -o APT::Sandbox::User=root -o Acquire::Languages=none -qq"
apt-get $A update
cd $P/debs
apt-get $A download PROGRAMS
apt-get -qq update
apt-get -o APT::Sandbox::User=root -qq download runc tini IPTABLES
for d in *.deb; do dpkg-deb -x $d $P/tree; done
rm -rf $P/debs $P/apt $P/tree/usr/share
L=$(dirname $P/tree/usr/lib/*/xtables)
for name in iptables ip6tables; do  # by which the engine answers for the names of services
    printf '#!/bin/sh\nLD_LIBRARY_PATH=%s XTABLES_LIBDIR=%s/xtables exec %s %s "$@"\n' \
        $L $L $P/tree/usr/sbin/xtables-legacy-multi $name > $P/tree/usr/sbin/$name
    chmod 755 $P/tree/usr/sbin/$name
done
mkdir -p $P/config/cli-plugins
ln -sf $P/tree/usr/libexec/docker/cli-plugins/* $P/config/cli-plugins/

R=$P/rootfs
mkdir -p $P/debs $R/usr/bin $R/usr/sbin $R/usr/lib $R/usr/lib64
mkdir -p $R/tmp $R/etc $R/root $R/proc $R/sys $R/dev $R/var/tmp $R/home
for d in bin sbin lib lib64; do ln -s usr/$d $R/$d; done
chmod 1777 $R/tmp $R/var/tmp
cd $P/debs
apt-get -o APT::Sandbox::User=root -qq download PACKAGES
for d in *.deb; do dpkg-deb --fsys-tarfile $d | tar -x -C $R --keep-directory-symlink; done
ln -sf python3.11 $R/usr/bin/python3
ln -sf dash $R/usr/bin/sh
echo 'root:x:0:0:root:/root:/bin/bash' > $R/etc/passwd
echo 'agent:x:1000:1000:agent:/home/agent:/bin/bash' >> $R/etc/passwd
printf 'root:x:0:\nagent:x:1000:\n' > $R/etc/group
rm -rf $R/usr/share/doc $R/usr/share/locale $R/usr/share/man
tar -C $R -c -f $P/rootfs.tar .
rm -rf $P/debs $R
"""


class NoEngine(Exception):
    """Why there can be none."""


def filled(name: str, recipe: str) -> Path:
    """A folder of the cache that `recipe`, a script whose $1 it is, fills once. Raises NoEngine."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minirllm"
    base.mkdir(parents=True, exist_ok=True)
    folder = base / name
    with open(base / f"{name.rpartition('-')[0]}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ok").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            done = subprocess.run(["bash", "-c", recipe, "_", folder], capture_output=True, text=True, check=False)
            if done.returncode:
                raise NoEngine(f"its programs cannot be had: {done.stderr.strip()[-500:]}")
            (folder / "ok").touch()
    return folder


def prefix() -> Path:
    """The folder of programs and image."""
    recipe = INSTALL.replace("PROGRAMS", PROGRAMS).replace("PACKAGES", " ".join(PACKAGES.split()))
    return filled("docker-engine-3", recipe.replace("IPTABLES", IPTABLES))


def variables() -> dict[str, str]:
    """By which the programs `docker` and `docker compose` are found; those of the machine come first."""
    programs = prefix()
    return {"DOCKER_CONFIG": str(programs / "config"), "PATH": f"{os.environ['PATH']}:{programs}/tree/usr/bin"}


@contextlib.contextmanager
def running() -> Iterator[str]:
    """The URL of a fresh engine with `IMAGE`. Raises NoEngine."""
    if os.geteuid() or not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise NoEngine("it needs root on Debian")
    programs = prefix()
    home = Path(tempfile.mkdtemp(prefix="minirllm-engine-"))
    url = f"unix://{home}/docker.sock"
    env = {"PATH": f"{programs}/tree/usr/sbin:{programs}/tree/usr/bin:{os.environ['PATH']}", "DOCKER_HOST": url}
    command = ["setpriv", "--pdeathsig", "TERM", "dockerd", "--data-root", home / "data", "--exec-root", home / "exec"]
    command += ["-p", home / "pid", "-H", url, "--bridge=none", "--iptables=false", "--ip6tables=false"]
    command += ["--ip-forward=false", "--ip-masq=false", "--userland-proxy=false"]
    try:
        with serving(command, env, env, home):
            yield url
    finally:
        for line in Path("/proc/mounts").read_text().splitlines()[::-1]:
            if (place := line.split()[1]).startswith(f"{home}/"):
                subprocess.run(["umount", "--lazy", place], check=False, capture_output=True)
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def serving(command: list[Any], env: dict[str, str], client: dict[str, str], home: Path) -> Iterator[None]:
    """A program that answers as an engine does to who has the variables `client`, with `IMAGE`. Raises NoEngine."""
    with open(home / "log", "w") as log:
        service = subprocess.Popen(command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=home)
    try:
        for _ in range(120):
            if service.poll() is not None or docker(client, "version").returncode == 0:
                break
            time.sleep(0.25)
        path = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        rootfs = str(prefix() / "rootfs.tar")
        done = docker(client, "import", "-c", 'CMD ["/bin/bash"]', "-c", path, rootfs, IMAGE)
        if done.returncode:
            raise NoEngine(f"it does not start: {done.stderr.strip()} {(home / 'log').read_text()[-1000:]}")
        yield
    finally:
        if left := docker(client, "ps", "--all", "--quiet").stdout.split():
            docker(client, "rm", "--force", *left)
        docker(client, "network", "prune", "--force")  # their bridges are the machine's
        service.terminate()
        try:
            service.wait(30)
        except subprocess.TimeoutExpired:
            service.kill()
            service.wait()


def docker(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], env=env, capture_output=True, text=True, check=False, timeout=120)
