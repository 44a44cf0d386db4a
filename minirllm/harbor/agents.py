"""Who works at a Harbor task: the reference solution, nobody, or an agent program.

Owns: `oracle`, `nop`, `BUILTIN`, `program`. Does not know: grading, sandboxes' kinds.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from minirllm import harness
from minirllm.harbor.grading import script
from minirllm.harbor.task import resolved
from minirllm.harbor.trial import Agent, Ended, Order
from minirllm.sandboxes import BASH
from minirllm.watchdog import Deadline


async def oracle(order: Order) -> Ended:
    """Runs the task's own solution. How it ends means nothing; its output is in /logs/agent/oracle.txt."""
    assert order.step.solution is not None, "checked before the run"
    await order.box.upload(order.step.solution, "/solution")
    await script(order.box, 'chmod +x "$1"', "/solution/solve.sh")
    env = resolved(order.task.solution_env, f"{order.task.name}: [solution.env]")
    command = (BASH, "-c", "/solution/solve.sh > /logs/agent/oracle.txt 2>&1")
    done = await order.box.execute(command, timeout=order.seconds, env=env, cwd=order.cwd)
    await script(order.box, "rm -rf /solution")
    return Ended(f"oracle ended with exit code {done.exit_code}", done.timed_out)


async def nop(order: Order) -> Ended:
    """Does nothing: what it scores, everybody scores."""
    return Ended("nop did nothing")


def program(one: harness.Harness, full: bool) -> Agent:
    """Runs an agent program in the task's sandbox."""

    async def agent(order: Order) -> Ended:
        deadline = Deadline(order.seconds)
        context = replace(
            harness.context_of(one, order.step.instruction, order.model, full),
            work=Path(order.cwd),
            seconds=order.seconds,
        )
        ended = await harness.inside(one, context, order.box, deadline)
        kept = {} if ended is None else ended.artifacts()
        return Ended(f"{one.name} {harness.ending(ended)}", ended is None, kept)

    return agent


BUILTIN: dict[str, Agent] = {"oracle": oracle, "nop": nop}
