"""Grading in the sandbox: tests go in, run, and leave a reward in a file.

Owns: `Graded`, the precedence of reward files, how several steps make one reward. Does not know: agents, episodes.

Nothing of the agent's is left when tests run: its processes have ended with their command, ``/tests`` and
``/logs/verifier`` are made anew. The exit code of the tests means nothing. What cannot be
graded has a reason and no reward. Not covered: tests that run the agent's files can be fooled by them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minirllm.errors import SandboxError
from minirllm.harbor.environment import resolved
from minirllm.harbor.task import HarborTask, Step
from minirllm.sandboxes import BASH, Sandbox

TAIL = 16_384  # bytes of what the tests printed
MAX_REWARD_FILE = 65_536
REMOVE = 'for p in "$@"; do chmod -R u+rwX -- "$p" 2> /dev/null; rm -rf -- "$p"; done'
FRESH = REMOVE + '; mkdir -p /logs/verifier && chmod 777 /logs/verifier; for p in "${@:2}"; do mkdir -m 755 "$p"; done'


@dataclass(frozen=True)
class Graded:
    """One grading: numbers by name, or why there are none; the end of what the tests printed."""

    rewards: Mapping[str, float] | None
    reason: str = ""
    printed: str = ""


async def grade(box: Sandbox, task: HarborTask, step: Step, cwd: str, seconds: float) -> Graded:
    """Run the step's tests, for `seconds` at most. They are uploaded, unless they are in the verifier's image."""
    places = ["/logs/verifier"] if step.tests_inside else ["/logs/verifier", "/tests"]
    try:
        await script(box, FRESH, *places)
        for folder in () if step.tests_inside else step.tests:
            await box.upload(folder, "/tests")
        await script(box, 'chmod +x "$1"', "/tests/test.sh")
        env = resolved(step.verifier_env, f"{task.name}: [verifier.env]")
        done = await box.execute(
            (BASH, "-c", "/tests/test.sh > /logs/verifier/test-stdout.txt 2>&1"), timeout=seconds, env=env, cwd=cwd,
            user=step.verifier_user,
        )  # fmt: skip
        printed = await _read(box, f"tail -c {TAIL} /logs/verifier/test-stdout.txt")
        if done.timed_out:
            return Graded(None, f"the tests did not end within {seconds:.3g} s", printed or "")
        try:
            rewards = await _rewards(box)
        except ValueError as error:
            return Graded(None, str(error), printed or "")
        await script(box, REMOVE, *places)  # the next step's agent learns nothing of them
        return Graded(rewards, "", printed or "")
    except SandboxError as error:
        return Graded(None, f"the tests could not be run: {error}")


async def script(box: Sandbox, text: str, *arguments: str) -> None:
    """A few lines of bash of ours, run by whoever can do most. Raises SandboxError when they fail."""
    done = await box.execute((BASH, "-c", text, "_", *arguments), timeout=60.0, cwd="/", user=box.superuser)
    if done.exit_code:
        raise SandboxError(f"a step of ours in the sandbox failed: {done.stderr.strip()[-300:] or done.exit_code}")


async def _read(box: Sandbox, command: str) -> str | None:
    """What a command prints; None when it fails."""
    done = await box.run(command, timeout=60.0, cwd="/", user=box.superuser)
    return None if done.exit_code else done.stdout


async def _rewards(box: Sandbox) -> dict[str, float]:
    """Of reward.json, else of reward.txt. Raises ValueError."""
    for name, reading in (("reward.json", _json), ("reward.txt", _text)):
        if await _read(box, f"test -e /logs/verifier/{name}") is not None:
            text = await _read(box, f"head -c {MAX_REWARD_FILE} /logs/verifier/{name}")
            if text is None:
                raise ValueError(f"{name} cannot be read")
            return reading(text)
    raise ValueError("the tests wrote neither reward.json nor reward.txt")


def _text(text: str) -> dict[str, float]:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"reward.txt must hold one finite number, got {text.strip()[:80]!r}")
    return {"reward": value}


def _json(text: str) -> dict[str, float]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    numbers = isinstance(values, dict) and all(type(value) in (int, float) for value in values.values())
    try:
        if numbers and values and all(math.isfinite(value) for value in values.values()):
            return {str(key): float(value) for key, value in values.items()}
    except OverflowError:  # an int that no float can hold
        pass
    raise ValueError(f"reward.json must be a flat object of finite numbers, got {text.strip()[:80]!r}")


def missed(step: Step, rewards: Mapping[str, float]) -> bool:
    """Is a reward below the step's least? Then no other step follows."""
    return any(rewards.get(key, -math.inf) < least for key, least in step.min_reward.items())


def combined(graded: Sequence[Graded], final: bool) -> Graded:
    """The grading of a task from those of its steps that ran: the last one's, or the mean, a name that is missing in
    one counting 0. One that could not be graded leaves the whole ungraded."""
    for each in graded:
        if each.rewards is None:
            return each
    rewards = [each.rewards or {} for each in graded]
    if final or len(rewards) == 1:
        return graded[-1]
    keys = {key: None for each in rewards for key in each}
    return Graded({key: sum(each.get(key, 0.0) for each in rewards) / len(rewards) for key in keys})


def scalar(graded: Graded) -> tuple[float | None, str]:
    """The number to learn from and to compare: ``reward``, else the only one there is; or why there is none."""
    if graded.rewards is None:
        return None, graded.reason
    if "reward" in graded.rewards or len(graded.rewards) == 1:
        return graded.rewards.get("reward", next(iter(graded.rewards.values()))), ""
    return None, f"none of the rewards {', '.join(graded.rewards)} is called reward"
