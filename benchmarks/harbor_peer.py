"""Task directories as Harbor reads them and as minirllm does, field by field.

    python benchmarks/harbor_peer.py --harbor-python PATH --out benchmarks/baselines/harbor_peer.json

Owns: the cases, our reading in a plain form, the differences. Harbor's side is benchmarks/peers/harbor_tasks.py, run by
a Python that has Harbor. tests/test_harbor_peer.py compares with what is stored.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from minirllm.errors import UserError
from minirllm.harbor.task import MAIN, HarborTask, Step, read

ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "tests" / "fixtures" / "harbor"
TWO = '[[steps]]\nname = "one"\n{0}\n[[steps]]\nname = "two"\n{1}\n'
CASES = {
    "empty": "",
    "version 1.0": 'version = "1.0"\n[agent]\ntimeout_sec = 120.0\n[verifier]\ntimeout_sec = 60\n[environment]\n'
                   'build_timeout_sec = 30\ncpus = 2\nmemory = "2G"\nstorage = "10G"',
    "schema 1.1": 'schema_version = "1.1"',
    "schema 1.4 with everything": """
schema_version = "1.4"
source = "somewhere"
artifacts = ["/app/out", {source = "/p", destination = "rel", exclude = ["*.pyc"]}, {source = "/q", service = "db"}]
[task]
name = "org/name.x"
version = "3"
description = "d"
keywords = ["a"]
authors = [{name = "n", email = "e@x.y"}]
[metadata]
anything = {goes = [1, 2]}
[agent]
timeout_sec = 12.5
user = 1000
[verifier]
timeout_sec = 7
user = "root"
env = {A = "${HOME}", B = "${NONE:-x}"}
[environment]
docker_image = "img:1"
cpus = 1.5
memory_mb = 512
storage_mb = 1024
workdir = "/app"
env = {C = "d"}
network_mode = "no-network"
healthcheck = {command = "a", interval_sec = 1.5, retries = 2, start_period_sec = 3, timeout_sec = 4}
[solution]
env = {D = "e"}""",
    "network allowed": "[environment]\nallow_internet = true",
    "network not allowed": "[environment]\nallow_internet = false",
    "network said twice": '[environment]\nallow_internet = false\nnetwork_mode = "public"',
    "sizes": '[environment]\nmemory = "512M"\nstorage = "1.5G"',
    "sizes in small letters": '[environment]\nmemory = " 2g "\nstorage = "2048k"',
    "sizes of odd units": '[environment]\nmemory = "2T"',
    "sizes with bytes": '[environment]\nmemory = "2GB"',
    "sizes without a unit": '[environment]\nmemory = "2048"',
    "sizes that agree": '[environment]\nmemory = "2G"\nmemory_mb = 2048',
    "sizes that do not agree": '[environment]\nmemory = "2G"\nmemory_mb = 1024',
    "cpus as text": '[environment]\ncpus = "2"',
    "cpus that are whole": "[environment]\ncpus = 2.0",
    "a limit of zero": "[agent]\ntimeout_sec = 0",
    "a limit below zero": "[agent]\ntimeout_sec = -1",
    "a limit as text": '[agent]\ntimeout_sec = "60"',
    "unknown keys": "[agent]\nfuture = 1\n[future]\nx = 2",
    "unknown schema": 'schema_version = "9.9"',
    "a name without an organisation": '[task]\nname = "plain"',
    "a task without a name": '[task]\ndescription = "d"',
    "no TOML": "[agent",
    "wrong strategy": 'multi_step_reward_strategy = "best"',
    "wrong network": '[environment]\nnetwork_mode = "some"',
    "hosts without a list": '[environment]\nallowed_hosts = ["example.com"]',
    "an allow-list": '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["example.com", "10.0.0.0/8"]',
    "windows": '[environment]\nos = "windows"',
    "linux in capitals": '[environment]\nos = "Linux"',
    "env that is no text": "[environment]\nenv = {A = 1}",
    "a health check without a command": "[environment]\nhealthcheck = {retries = 1}",
    "an artifact that leads out": 'artifacts = ["../x"]',
    "an artifact's destination that leads out": 'artifacts = [{source = "/x", destination = "../x"}]',
    "an artifact of a sidecar, not absolute": 'artifacts = [{source = "x", service = "db"}]',
    "an artifact of main": 'artifacts = [{source = "/x", service = "main"}]',
    "a verifier apart": '[verifier]\nenvironment_mode = "separate"',
    "a verifier with an environment": '[verifier.environment]\ndocker_image = "v:1"',
    "a shared verifier with an environment":
        '[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1',
    "a wrong mode": '[verifier]\nenvironment_mode = "apart"',
    "steps": TWO.format("", ""),
    "steps whose last counts": 'multi_step_reward_strategy = "final"\n' + TWO.format("", ""),
    "steps with their own": '[agent]\ntimeout_sec = 5\nuser = "a"\n[verifier]\nuser = "b"\nenv = {A = "1", B = "2"}\n'
        + TWO.format(
            'min_reward = 0.5\nagent = {timeout_sec = 9, user = "c"}\nartifacts = ["/one"]',
            'min_reward = {style = 1}\nverifier = {timeout_sec = 3, user = 7, env = {B = "3"}}\n'
            'healthcheck = {command = "x"}',
        ),
    "steps below a verifier's limit":
        "[verifier]\ntimeout_sec = 30\n" + TWO.format("", "verifier = {timeout_sec = 20}"),
    "steps of which one is shared": '[verifier]\nenvironment_mode = "separate"\n'
        + TWO.format("", 'verifier = {environment_mode = "shared"}'),
    "steps of which one is apart": TWO.format("", 'verifier = {environment = {cpus = 1}}'),
    "steps of one name": TWO.replace("two", "ONE").format("", ""),
    "a step that leads out": TWO.replace("two", "../two").format("", ""),
    "mcp": '[[environment.mcp_servers]]\nname = "m"\ntransport = "http"\nurl = "http://m:1/mcp"',
    "mcp without a url": '[[environment.mcp_servers]]\nname = "m"',
    "collecting": '[[verifier.collect]]\ncommand = "true"\nservice = "db"',
}  # fmt: skip
INSTRUCTIONS = {
    "a canary": "<!-- x canary 1 -->\n# Canary 2\n\n\nDo it.\n",
    "a canary that is not at the top": "Do it.\n<!-- canary -->\n",
    "a comment that is none": "# Title\n\nDo it.\n",
    "empty lines first": "\n\nDo it.\n",
    "carriage returns": "# canary\r\n\r\nDo it.\r\n",
    "a canary that is not closed": "<!-- canary\n-->\nDo it.\n",
}


def lay(folder: Path) -> dict[str, Path]:
    """The cases as task directories: name -> path."""
    found = {}
    for number, (name, toml) in enumerate(CASES.items()):
        found[name] = _task(folder / f"case{number}", toml, "Do it.\n")
    for number, (name, text) in enumerate(INSTRUCTIONS.items()):
        found[f"instruction: {name}"] = _task(folder / f"instruction{number}", "", text)
    found |= {f"fixture: {path.parent.name}": path.parent for path in sorted(FIXTURES.glob("*/task.toml"))}
    return found


def _task(place: Path, toml: str, instruction: str) -> Path:
    files = {"task.toml": toml, "tests/test.sh": "true\n", "environment/Dockerfile": "FROM x\n"}
    if "[[steps]]" in toml:
        files |= {f"steps/{name}/{part}": text for name in ("one", "two", "ONE")
                  for part, text in {"instruction.md": f"{name}\n", "tests/test.sh": "true\n"}.items()}  # fmt: skip
    else:
        files["instruction.md"] = instruction
    for path, text in files.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(text.encode())
    return place


def ours(path: Path) -> dict[str, Any]:
    """How minirllm reads a task directory."""
    try:
        task = read(path)
    except UserError as error:
        return {"refused": str(error).replace(str(path), "TASK")[:300]}
    environment = task.environment
    plain = {
        key: getattr(environment, key) for key in ("image", "workdir", "cpus", "memory_mb", "storage_mb", "network")
    }
    return {
        "name": "" if task.name == path.name else task.name,
        "steps": [_step(task, step) for step in task.steps],
        **plain,
        "env": dict(environment.env),
        "build_seconds": environment.build_seconds,
        "health": _health(task.health),
        "solution_env": dict(task.solution_env),
        "final": task.final,
    }


def _health(check: Any) -> list[Any] | None:
    return None if check is None else list(dataclasses.astuple(check))


def _step(task: HarborTask, step: Step) -> dict[str, Any]:
    keys = ("name", "instruction", "agent_seconds", "agent_user", "verifier_seconds", "verifier_user")
    return {
        **{key: getattr(step, key) for key in keys},
        "verifier_env": dict(step.verifier_env),
        "separate": step.verifier is not None,
        "min_reward": dict(step.min_reward),
        "health": _health(step.health),
        "artifacts": [[item.source, list(item.exclude)] for item in step.artifacts if item.service == MAIN],
    }


def differences(harbor: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
    """Field -> [Harbor's, ours]; a refusal is one, however it is worded."""
    if "refused" in harbor or "refused" in mine:
        sides = [side.get("refused", "read") for side in (harbor, mine)]
        return {} if "read" not in sides else {"refused": sides}
    found = {}
    for key in harbor:
        if key == "steps":
            for one, other in zip(harbor[key], mine[key], strict=True):
                found |= {
                    f"{one['name'] or 'task'}.{part}": [one[part], other[part]]
                    for part in one
                    if one[part] != other[part]
                }
        elif harbor[key] != mine[key]:
            found[key] = [harbor[key], mine[key]]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--harbor-python", required=True, help="a Python that has Harbor")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = lay(Path(folder))
        where = subprocess.check_output(
            [options.harbor_python, "-c", "import harbor; print(harbor.__path__[0])"], text=True
        )
        templates = sorted(path.parent for path in Path(where.strip()).rglob("task.toml"))
        cases |= {f"harbor's {path.parent.name}/{path.name}": path for path in templates}
        script = ROOT / "benchmarks" / "peers" / "harbor_tasks.py"
        said = subprocess.check_output([options.harbor_python, script, *map(str, cases.values())], text=True)
        read_there = json.loads(said)
        found = {name: {"harbor": read_there[str(path)], "differs": differences(read_there[str(path)], ours(path))}
                 for name, path in cases.items()}  # fmt: skip
    version = [options.harbor_python, "-c", "import importlib.metadata as m; print(m.version('harbor'))"]
    told = {"harbor": subprocess.check_output(version, text=True).strip(), "cases": found}
    differ = {name: case["differs"] for name, case in found.items() if case["differs"]}
    print(f"{len(found)} task directories, {len(differ)} read differently")
    for name, how in differ.items():
        print(f"{name}: {json.dumps(how)}")
    if options.out:
        options.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
