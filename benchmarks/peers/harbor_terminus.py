"""`harbor run` with Terminus-2 at our endpoint: the token ids and log-probabilities that Harbor keeps are ours.

    python benchmarks/peers/harbor_terminus.py --harbor PATH/bin/harbor --out benchmarks/baselines/harbor_terminus.json

Owns: that run and its comparison. Needs root on Debian, as tests/engine.py does, whose engine it starts. Terminus-2
runs in Harbor's process and types into a terminal (tmux) of the task's container; its model is ours, at a session's
address.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from minirllm import AgentConfig, Config, Episode, Task, evaluator, rollout
from minirllm.machine import machine

ROOT = Path(__file__).parents[2]
TMUX = "libevent-core-2.1-7 libutempter0 ncurses-base tmux"
IMAGE = "local/tmux:1"
DEFAULTS = {"eval_tasks": 1, "concurrency": 1}
FOLDER = "MINIRLLM_TERMINUS"  # variables that tell the task, which is this file, what to use
PROGRAM = "MINIRLLM_HARBOR"


@rollout
async def terminus(task: Task, config: AgentConfig) -> Episode:
    """One trial of Harbor's, whose model is the session's."""
    folder = Path(os.environ[FOLDER])
    options = {
        "api_base": config.base_url, "collect_rollout_details": "true", "record_terminal_session": "false",
        "enable_summarize": "false", "max_turns": "2",
        "model_info": json.dumps({"max_input_tokens": 6000, "max_output_tokens": 16}),
    }  # fmt: skip
    argv = [os.environ[PROGRAM], "run", "-p", str(folder / "task"), "-a", "terminus-2", "-m", f"openai/{config.model}"]
    argv += ["-e", "docker", "-o", str(folder / "jobs"), "-n", "1", "-y"]
    for key, value in options.items():
        argv += ["--ak", f"{key}={value}"]
    env = {
        **os.environ,
        "OPENAI_API_KEY": config.api_key,
        "HARBOR_TELEMETRY": "0",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    process = await asyncio.create_subprocess_exec(*argv, env=env, stdout=-1, stderr=-2, cwd=folder)
    said, _ = await process.communicate()
    results = list((folder / "jobs").glob("*/*/result.json"))
    assert results, said.decode()[-3000:]
    return Episode(artifacts={"harbor": json.loads(results[0].read_text())})


@evaluator
async def kept(task: Task, episode: Episode) -> float:
    """Both sides, written where `main` finds them."""
    tree = episode.tree
    assert tree is not None, "a policy of ours has one"
    steps = episode.steps
    ours = [[tree.prompt_ids(step.node), *tree.response(step.node)] for step in steps if step.node is not None]
    both = {"ours": ours, "harbor": episode.artifacts["harbor"]}
    await asyncio.to_thread((Path(os.environ[FOLDER]) / "both.json").write_text, json.dumps(both, default=float))
    return 0.0


def train(config: Config) -> list[Task]:
    return held_out(config)


def held_out(config: Config) -> list[Task]:
    return [Task("terminus", "terminus")]


def image(engine: Any, folder: Path) -> None:
    """The tests' image with tmux."""
    place = folder / "image"
    place.mkdir()
    subprocess.run(
        ["apt-get", "-o", "APT::Sandbox::User=root", "-qq", "download", *TMUX.split()], check=True, cwd=place
    )
    unpack = (
        "mkdir tree; for d in *.deb; do dpkg-deb --fsys-tarfile $d | tar -x -C tree; done; mv tree/lib/* tree/usr/lib/"
    )
    subprocess.run(["bash", "-c", unpack], check=True, cwd=place)
    (place / "Dockerfile").write_text(f"FROM {engine.IMAGE}\nCOPY tree/usr /usr\nCOPY tree/etc /etc\nWORKDIR /app\n")
    subprocess.run(["docker", "build", "-q", "-t", IMAGE, "."], check=True, cwd=place, stdout=subprocess.DEVNULL)


def task(folder: Path) -> None:
    """Anything to do will do."""
    for path, text in {
        "task.toml": f'schema_version = "1.4"\n[environment]\ndocker_image = "{IMAGE}"\n[agent]\ntimeout_sec = 1500\n',
        "instruction.md": "Write the word done into /app/done.txt.\n",
        "tests/test.sh": "cat /app/done.txt | grep -cx done > /logs/verifier/reward.txt\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def compared(ours: list[Any], result: dict[str, Any]) -> dict[str, Any]:
    """Which turns that Harbor kept are calls of the session, bit for bit; it keeps no call whose answer was cut."""
    details = result["agent_result"]["rollout_details"][0]
    names = ("prompt_token_ids", "completion_token_ids", "logprobs")
    turns = [list(turn) for turn in zip(*(details[name] for name in names), strict=True)]
    return {
        "calls": len(ours),
        "turns": len(turns),
        "equal": sum(turn in ours for turn in turns),
        "tokens_read": sum(len(turn[0]) for turn in turns),
        "tokens_sampled": sum(len(turn[1]) for turn in turns),
    }


def main() -> None:
    from tests import engine

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--harbor", required=True, help="Harbor's program")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, engine.running() as url:
        folder = Path(name)
        os.environ |= {**engine.variables(), "DOCKER_HOST": url, "DOCKER_BUILDKIT": "0", FOLDER: name}
        os.environ |= {PROGRAM: str(Path(options.harbor).absolute()), "PYTHONPATH": str(ROOT)}
        image(engine, folder)
        task(folder / "task")
        command = [
            sys.executable,
            "-m",
            "minirllm.cli",
            "eval",
            __file__,
            "--model",
            options.model,
            "--max-tokens",
            "64",
        ]
        command += [
            "--runs-dir",
            name,
            "--set",
            "episode_timeout=1800",
            "--set",
            "max_context=6144",
            "--concurrency",
            "1",
        ]
        subprocess.run(command, check=True)
        both = json.loads((folder / "both.json").read_text())
        said = {"model": options.model, **compared(both["ours"], both["harbor"])}
    print(json.dumps(said))
    if options.out:
        options.out.write_text(json.dumps({"machine": machine(), "harbor": "0.26.0", **said}, indent=1) + "\n")
    sys.exit(said["equal"] != said["turns"] or not said["turns"])


if __name__ == "__main__":
    main()
