"""``minirllm harness check``: whether an agent program still works.

Owns: the check, which is the real program against an engine that says what the harness's `script` says, on the tiny
model. Does not know: installation (install.py), how a program is run (minirllm/harness.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import sha256

from minirllm import harness, watchdog
from minirllm.config import Config
from minirllm.engines.scripted import ScriptedEngine
from minirllm.flow import AgentFlow, evaluator
from minirllm.harness import PROOF, Call, Harness, Turn
from minirllm.policy import Policy
from minirllm.rollouts import Job, Runner
from minirllm.sandboxes import pool
from minirllm.stack import serving
from minirllm.types import Episode, SampledToken, Task

WINDOW, ANSWER, TURNS = 131_072, 4096, 40  # of a check: tokens, tokens of one answer, calls before it gives up
SECONDS = 240.0
SCORED = 2048  # tokens of a prompt after which a reply is scored: all 50,000 of some would take minutes
INSTRUCTION = f"Create a file named {PROOF[0]} in the current folder. Its only line is: {PROOF[1].strip()}"


class CheckEngine(ScriptedEngine):
    """Says what the script of ``config.harness`` says, its last line for ever; side calls get their own replies."""

    def __init__(self, policy: Policy, config: Config):
        one = harness.find(config.harness)
        turns, self.said = list(map(written, one.script)), 0

        def reply(prompt: str) -> str:
            for piece, text in one.asides:
                if piece in prompt:
                    return text
            self.said += 1
            return turns[min(self.said, len(turns)) - 1]

        super().__init__(policy, config, reply)

    def _score(
        self, prompt: list[int], reply: list[int], temperature: float, top: int, weights: int | None
    ) -> list[SampledToken]:
        return super()._score(prompt[-SCORED:], reply, temperature, top, weights)


def written(turn: Turn) -> str:
    """A turn as the tiny model would write it: its template has calls in Hermes' form."""
    if isinstance(turn, str):
        return turn
    calls = (turn,) if isinstance(turn, Call) else turn
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments})}\n</tool_call>" for call in calls
    )


def _digest(ids: list[int]) -> str:
    return sha256(json.dumps(ids).encode()).hexdigest()[:16]


@dataclass
class Report:
    """What a check found."""

    name: str
    version: str
    passed: bool = False
    problem: str = ""
    calls: int = 0
    prompt_tokens: int = 0  # of the first call
    prompt_sha256: str = ""  # of its token ids: the same in another check if nothing in the prompt varies
    sampled_tokens: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    exit_code: int | None = None
    ended: str = ""  # the same in words, with the program's last

    def __str__(self) -> str:
        counted = ", ".join(f"{name} {count}" for name, count in self.counters.items() if count)
        return (
            f"{self.name} {self.version}: {'ok' if self.passed else 'FAILED: ' + self.problem}\n"
            f"  {self.calls} calls captured, {self.prompt_tokens} prompt tokens (bytes) in the first, "
            f"{self.sampled_tokens} sampled; {counted}; {self.seconds:.1f} s; {self.ended}"
        )


def check(name: str, full: bool = False, sandbox: str = "") -> Report:
    """Run the real program once on a tiny task, perhaps in a sandbox. Raises UserError when it is not installed."""
    one = harness.find(name)
    config = Config(
        model="tiny", harness=name, harness_full=full, sandbox=sandbox, engine=f"{__name__}:CheckEngine", retries=0,
        max_context=WINDOW, max_tokens=ANSWER, max_calls=TURNS, episode_timeout=SECONDS, determinism="off",
    )  # fmt: skip
    agent = harness.flow(one, full, pool.of(config))
    return judged(one, episode(config, agent, Task(f"check-{one.name}", INSTRUCTION)))


def episode(config: Config, agent: AgentFlow, task: Task) -> Episode:
    """One episode, graded by what was made, on a stack of its own."""

    async def work() -> Episode:
        async with serving(config) as stack:
            runner = Runner(stack.sessions, stack.base_url, agent, made, config)
            try:
                return await runner.run(Job(task))
            finally:
                await runner.close()

    return watchdog.run(work())


@evaluator
async def made(task: Task, episode: Episode) -> bool:
    """Whether the work folder has what the script makes."""
    return episode.artifacts["files"].get(PROOF[0]) == PROOF[1]


def judged(one: Harness, episode: Episode) -> Report:
    """The report on a finished check."""
    steps = episode.steps
    known = {"turns", "prompt_tokens", "response_tokens", "seconds", "retried_tokens", "calls"}
    report = Report(
        one.name,
        one.version,
        passed=bool(episode.reward),
        calls=len(steps),
        prompt_tokens=steps[0].prompt_length if steps else 0,
        prompt_sha256=_digest(episode.tree.prompt_ids(steps[0].node)) if steps and steps[0].node is not None else "",
        sampled_tokens=sum(step.response_length for step in steps),
        counters={name: int(count) for name, count in episode.metrics.items() if name not in known},
        seconds=episode.metrics["seconds"],
        exit_code=episode.artifacts.get("exit_code"),
        ended=str(episode.artifacts.get("ended", "")),
    )
    if not report.passed:
        there = ", ".join(episode.artifacts.get("files", {})) or "no file"
        report.problem = episode.reason or f"{PROOF[0]} does not say {PROOF[1].strip()!r}; the work folder has {there}"
        said = episode.artifacts.get("stdout", "") + episode.artifacts.get("stderr", "")
        report.problem += f"\n{said[-2000:]}" if said else ""
    if report.passed and len(one.script) > len(steps):
        report.passed, report.problem = False, f"it made {len(steps)} calls; its script has {len(one.script)}"
    return report
