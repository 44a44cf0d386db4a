"""Who works at a Harbor task: the reference solution, nobody, or an agent program.

Owns: `oracle`, `nop`, `BUILTIN`, `program`. Does not know: grading, sandboxes' kinds.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from minirllm import harness
from minirllm.harbor.environment import connected, resolved
from minirllm.harbor.grading import script
from minirllm.harbor.trial import Agent, Order, Outcome
from minirllm.sandboxes import BASH
from minirllm.watchdog import Deadline

SKILLS = 'mkdir -p -- "$2" && cp -r -- "$1"/. "$2"'


async def oracle(order: Order) -> Outcome:
    """Runs the task's own solution. How it ends means nothing; its output is in /logs/agent/oracle.txt."""
    assert order.step.solution is not None, "checked before the run"
    await order.box.upload(order.step.solution, "/solution")
    await script(order.box, 'chmod +x "$1"', "/solution/solve.sh")
    env = resolved(order.task.solution_env, f"{order.task.name}: [solution.env]")
    command = (BASH, "-c", "/solution/solve.sh > /logs/agent/oracle.txt 2>&1")
    done = await order.box.execute(command, timeout=order.seconds, env=env, cwd=order.cwd, user=order.step.agent_user)
    await script(order.box, "rm -rf /solution")
    return Outcome(f"oracle {harness.ending(done, order.seconds)}")


async def nop(order: Order) -> Outcome:
    """Does nothing: what it scores, everybody scores."""
    return Outcome("nop did nothing")


def program(one: harness.Harness, full: bool) -> Agent:
    """Runs an agent program in the task's sandbox."""

    async def agent(order: Order) -> Outcome:
        deadline, environment = Deadline(order.seconds), order.task.environment
        context = replace(
            harness.context_of(one, order.step.instruction, order.model, full),
            work=Path(order.cwd),
            seconds=order.seconds,
            skills=bool(environment.skills),
            servers=connected(environment.servers, f"{order.task.name}: [[environment.mcp_servers]]"),
        )
        start = await asyncio.to_thread(harness.inside, one, context)
        if environment.skills:
            await script(order.box, SKILLS, environment.skills, str(context.home / one.skills))
        done = await start.run(order.box, deadline.remaining(), order.step.agent_user)
        return Outcome(f"{one.name} {harness.ending(done, order.seconds)}", harness.kept(done))

    return agent


BUILTIN: dict[str, Agent] = {"oracle": oracle, "nop": nop}
