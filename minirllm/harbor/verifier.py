"""A verifier with a sandbox of its own: of the agent's work it sees the artifacts, and nothing else.

Owns: `graded`. Does not know: agents, how artifacts were had, how rewards are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from minirllm import sandboxes
from minirllm.errors import SandboxError
from minirllm.harbor.artifacts import put_back
from minirllm.harbor.grading import Graded, grade, script
from minirllm.harbor.spec import FOLDERS, spec
from minirllm.harbor.task import HarborTask, Step
from minirllm.watchdog import Deadline


async def graded(
    task: HarborTask, step: Step, kind: str, folder: Path, manifest: Sequence[Mapping[str, Any]], deadline: Deadline
) -> Graded:
    """Run the step's tests in a fresh sandbox, in which the artifacts in `folder` lie where they were."""
    assert step.verifier is not None
    own = spec(
        step.verifier, f"{task.name}: [verifier.environment.env]", step.verifier_seconds + step.verifier.build_seconds
    )
    own = replace(own, build_seconds=min(own.build_seconds, deadline.remaining()))
    try:
        async with asyncio.timeout(deadline.remaining()), sandboxes.create(kind, own) as box:
            cwd = step.verifier.workdir or box.work
            await script(box, FOLDERS, cwd)
            if step.verifier.files is not None:
                await box.upload(step.verifier.files, cwd)
            await put_back(box, folder, manifest)
            return await grade(box, task, step, cwd, min(step.verifier_seconds, deadline.remaining()))
    except SandboxError as error:
        return Graded(None, f"the verifier's sandbox failed: {error}")
    except TimeoutError:
        return Graded(None, "the episode's time was over before the verifier's sandbox was there")
