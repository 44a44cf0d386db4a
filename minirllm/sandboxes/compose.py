"""Services beside a container sandbox, as a Compose file describes them: databases, servers, what an agent talks to.

Owns: `Project`: what of the file is held to a sandbox's rules, its start by the program `docker compose`, its end. Does
not know: commands, files.

The sandbox is the service ``main``; the file is laid over ours, as Compose lays one over another. Services reach each
other by name, on networks that lead nowhere else: not to this machine either, whose end of the bridge has no address.
Each has the rights of a sandbox's root and limits of memory, processes and CPU; folders of the task that it is shown
are read-only. What would let a service out of this is refused by its name. Ports are not published.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from minirllm.errors import SandboxError
from minirllm.sandboxes import BASH, WORK, Spec, engine
from minirllm.sandboxes.owner import OWNER, owner

MAIN = "main"
PROJECT, SERVICE = "com.docker.compose.project", "com.docker.compose.service"  # labels that Compose gives
TOP = {"name", "services", "networks", "volumes", "configs", "secrets"}
KEPT = {
    "command", "configs", "depends_on", "entrypoint", "environment", "expose", "extra_hosts", "healthcheck", "hostname",
    "image", "init", "labels", "links", "network_mode", "networks", "platform", "read_only", "secrets", "shm_size",
    "stdin_open", "stop_grace_period", "stop_signal", "tmpfs", "tty", "user", "volumes", "working_dir",
}  # fmt: skip
READ = {"build", "cap_add", "cpus", "deploy", "mem_limit", "pids_limit"}
LEFT_OUT = {"attach", "cap_drop", "container_name", "develop", "logging", "mem_reservation", "mem_swappiness",
            "memswap_limit", "ports", "profiles", "pull_policy", "restart", "security_opt", "ulimits"}  # fmt: skip
OTHER_FILES = {"env_file", "extends", "include", "label_file"}
PASSED = ("DOCKER_CONFIG", "HOME", "PATH")  # of this process's variables, to the program that reads the file
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)  # of a variable in the file
LATE = 1.0  # seconds for which the engine may go on making what a program that failed had asked it for
NO_ADDRESS = {"com.docker.network.bridge.inhibit_ipv4": "true"}  # of this machine on a bridge


class Project:
    """The services of one sandbox, `main` among them. All of it blocks."""

    def __init__(self, api: Any, host: str, spec: Spec):
        assert spec.compose is not None
        self.api, self.host, self.spec, self.file = api, host, spec, spec.compose
        self.name = f"minirllm-{uuid.uuid4().hex[:16]}"
        self.starting = False

    def up(self, image: str, rights: list[str]) -> str:
        """Start all services, `main` of this image if given, and wait until they are well. Returns main's container."""
        if found := self._keys() & OTHER_FILES:
            raise self._refuse(f"reads other files ({', '.join(sorted(found))}): put their content into it")
        folder = Path(tempfile.mkdtemp(prefix="minirllm-compose-"))
        try:
            main: dict[str, Any] = {"command": [BASH, "-c", "exec sleep infinity"]}
            if image:
                main |= {"image": image, "working_dir": engine.folder(self.api, image) or WORK}
            base = {"services": {MAIN: main}}
            files = [folder / "base.json", self.file]
            files[0].write_text(json.dumps(base))
            own = {name: os.environ[name] for name in PASSED if name in os.environ}
            model = json.loads(self._compose(own, files, self._variables(folder), "config", "--format", "json"))
            (folder / "project.json").write_text(json.dumps(self._held(model, image, rights)))
            own |= {name: value for name, value in os.environ.items() if name.startswith("DOCKER_")}
            limit = str(max(1, int(self.spec.build_seconds)))
            up = ("up", "--detach", "--wait", "--wait-timeout", limit, "--quiet-pull")
            self.starting = True
            self._compose(own, [folder / "project.json"], [Path(os.devnull)], *up)
            self.starting = False
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._check_up()
        return self.container(MAIN)

    def _check_up(self) -> None:
        """Once its time is over, the program may say that all is well when it is not."""
        for each in self._containers([f"{PROJECT}={self.name}"]):
            with engine.told("A service cannot be looked at"):
                state = self.api.inspect_container(each["Id"])["State"]
            if not state["Running"] or state.get("Health", {}).get("Status", "healthy") != "healthy":
                raise self._refuse(f"was not up within {self.spec.build_seconds:.3g} s")

    def container(self, service: str) -> str:
        """The id of a service's container. Raises SandboxError when there is none."""
        if found := self._containers([f"{PROJECT}={self.name}", f"{SERVICE}={service}"]):
            return str(found[0]["Id"])
        raise self._refuse(f"has no service {service}")

    def _containers(self, labels: list[str]) -> list[dict[str, Any]]:
        with engine.told("The services cannot be listed"):
            return list(self.api.containers(all=True, filters={"label": labels}))

    def down(self) -> None:
        """Remove everything of it."""
        engine.remove_all(self.api, [f"{PROJECT}={self.name}"])
        if self.starting:
            time.sleep(LATE)
            engine.remove_all(self.api, [f"{PROJECT}={self.name}"])

    def _refuse(self, why: str) -> SandboxError:
        return SandboxError(f"{self.file} {why}.")

    def _keys(self) -> set[str]:
        """All keys of the file, however they are written."""
        keys, seen = set[str](), set[int]()
        try:
            nodes: list[Any] = [*yaml.compose_all(self.file.read_bytes(), yaml.SafeLoader)]
        except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
            raise self._refuse(f"cannot be used: {' '.join(str(error).split())}") from None
        while nodes:
            node = nodes.pop()
            if id(node) in seen:  # an alias leads back to its anchor
                continue
            seen.add(id(node))
            if isinstance(node, yaml.MappingNode):
                keys |= {str(key.value) for key, _ in node.value}
                nodes += [each for pair in node.value for each in pair]
            elif isinstance(node, yaml.SequenceNode):
                nodes += node.value
        return keys

    def _variables(self, folder: Path) -> list[Path]:
        """Files of the variables that the file may name: not those of the program, which some would lead astray."""
        limits = self.spec.limits
        given = {"CPUS": f"{limits.cpus:g}", "MEMORY": f"{limits.memory}b", "CONTEXT_DIR": str(self.file.parent)}
        given = {name: re.sub(r'([\\"$])', r"\\\1", value) for name, value in {**self.spec.env, **given}.items()}
        made, beside = folder / "variables", self.file.parent / ".env"
        made.write_text("".join(f'{name}="{value}"\n' for name, value in given.items() if NAME.fullmatch(name)))
        return [*([beside] if beside.is_file() and self._own(str(beside)) else []), made]

    def _compose(self, env: Mapping[str, str], files: Iterable[Path], variables: Iterable[Path], *words: str) -> str:
        """What `docker compose` says. Raises SandboxError."""
        command = [*program(os.environ.get("PATH", "")), "--project-name", self.name]
        command += ["--project-directory", str(self.file.parent), "--progress", "quiet"]
        for flag, paths in (("--file", files), ("--env-file", variables)):
            command += [part for path in paths for part in (flag, str(path))]
        try:
            done = subprocess.run(
                [*command, *words], env={**env, "DOCKER_HOST": self.host},
                stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
                timeout=self.spec.build_seconds + 10.0,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise self._refuse(f"was not up within {self.spec.build_seconds:.3g} s") from None
        if done.returncode:
            raise self._refuse(f"cannot be used: {' '.join(done.stderr.split())[-500:]}")
        return done.stdout

    # ---- the rules ----

    def _held(self, model: dict[str, Any], image: str, rights: list[str]) -> dict[str, Any]:
        """The model with every service, network and volume held to the rules. SandboxError for what cannot be."""
        if other := sorted(name for name in model if name not in TOP and not name.startswith("x-")):
            raise self._refuse(f"has {', '.join(other)}, which a sandbox does not give")
        services = {name: self._service(name, given, rights) for name, given in model["services"].items()}
        self._main(services[MAIN], image)
        mine = {OWNER: owner()}
        for name, volume in model.get("volumes", {}).items():
            if (volume or {}).get("driver_opts") or (volume or {}).get("external"):
                raise self._refuse(f"volume {name} is none of its own")
        for name, network in model.get("networks", {}).items():
            fixed = ((network or {}).get("ipam") or {}).get("config")
            if (network or {}).get("external") or (network or {}).get("driver", "bridge") != "bridge" or fixed:
                raise self._refuse(f"network {name} is none of its own, or has addresses of its own")
        for kind in ("configs", "secrets"):
            for name, entry in model.get(kind, {}).items():
                if "file" not in entry or not self._own(entry["file"]):
                    raise self._refuse(f"{kind} {name} is no file beside it")
        shut = {"internal": True, "driver": "bridge", "driver_opts": NO_ADDRESS, "labels": mine}
        return {
            "name": self.name,
            "services": services,
            "networks": dict.fromkeys(model.get("networks", {}), shut),
            "volumes": {name: {"labels": mine} for name in model.get("volumes", {})},
            **{kind: model[kind] for kind in ("configs", "secrets") if kind in model},
        }

    def _service(self, name: str, given: Mapping[str, Any], rights: list[str]) -> dict[str, Any]:
        given = {key: value for key, value in given.items() if value not in (None, [], {}, "", False)}
        if other := sorted(set(given) - KEPT - READ - LEFT_OUT):
            raise self._refuse(f"asks for {', '.join(other)} in service {name}, which a sandbox does not give")
        if other := sorted(set(given.get("cap_add", [])) - {*rights, *(f"CAP_{right}" for right in rights)}):
            raise self._refuse(f"asks for the capability {', '.join(other)} in service {name}")
        mode = given.get("network_mode", "none")
        if mode != "none" and not mode.startswith("service:"):
            raise self._refuse(f"asks for the network {mode} in service {name}")
        for volume in given.get("volumes", []):
            if volume["type"] == "bind" and not self._own(volume["source"]):
                raise self._refuse(f"shows service {name} {volume['source']}, which is no file beside it")
            volume |= {"read_only": True} if volume["type"] == "bind" else {}
        resources = given.get("deploy", {}).get("resources", {})
        if resources.get("reservations", {}).get("devices"):
            raise self._refuse(f"asks for devices in service {name}, which a sandbox does not give")
        limits, own = self.spec.limits, resources.get("limits", {})
        service = {key: value for key, value in given.items() if key in KEPT}
        if "build" in given:
            service["image"] = self._built(name, given["build"])
        memory = int(given.get("mem_limit") or own.get("memory") or limits.memory)
        processes = int(given.get("pids_limit") or own.get("pids") or 0)  # -1: as many as it likes
        return service | {
            "labels": {**dict(given.get("labels", {})), OWNER: owner()}, "init": True,
            "cap_drop": ["ALL"], "cap_add": rights, "security_opt": ["no-new-privileges"], "mem_limit": str(memory),
            "memswap_limit": str(memory), "pids_limit": processes if processes > 0 else limits.processes + 1,
            "cpus": float(given.get("cpus") or own.get("cpus") or limits.cpus), "restart": "no",
            "ulimits": {"core": 0, "fsize": limits.disk},
        }  # fmt: skip

    def _main(self, main: dict[str, Any], image: str) -> None:
        """What only the sandbox itself has."""
        limits = self.spec.limits
        if self.spec.snapshot is not None:
            main["image"] = image
        shown = [
            {"type": "bind", "source": source, "target": place, "read_only": True}
            for source, place in self.spec.binds.items()
        ]
        main |= {
            "hostname": "sandbox", "mem_limit": str(limits.memory), "memswap_limit": str(limits.memory),
            "pids_limit": limits.processes + 1, "cpus": limits.cpus, "volumes": [*main.get("volumes", []), *shown],
        }  # fmt: skip

    def _own(self, path: str) -> bool:
        """Does it lie beside the file, or below?"""
        return Path(path).resolve().is_relative_to(self.file.parent.resolve())

    def _built(self, service: str, build: Mapping[str, Any]) -> str:
        if other := sorted(set(build) - {"context", "dockerfile", "args", "target"}):
            raise self._refuse(f"builds service {service} with {', '.join(other)}, which is not supported")
        context = Path(build["context"])
        if not self._own(str(context)) or not self._own(str(context / build.get("dockerfile", "Dockerfile"))):
            raise self._refuse(f"builds service {service} of {context}, which does not lie beside it")
        with engine.told("The image cannot be had"):
            return engine.built(
                self.api, context, build.get("dockerfile", "Dockerfile"), build.get("args") or {}, build.get("target")
            )


@cache
def program(path: str) -> tuple[str, ...]:
    """The command `docker compose` on this PATH, in either of its two forms. Raises SandboxError when there is none."""
    for command in (("docker", "compose"), ("docker-compose",)):
        with suppress(OSError):
            if not subprocess.run([*command, "version"], capture_output=True, check=False, timeout=60).returncode:
                return command
    raise SandboxError(
        "Services beside a sandbox need the program `docker compose`: install the package docker-compose-plugin (or "
        "docker-compose)."
    )
