"""Where a Harbor task is worked at: the sandbox that it asks for, or why a kind of sandbox cannot be it.

Owns: `spec`, `check`, the folders that every trial has. Does not know: the order of things in a trial.
"""

from __future__ import annotations

from minirllm import sandboxes
from minirllm.errors import SandboxError, TaskError
from minirllm.harbor.environment import Environment, connected, resolved
from minirllm.harbor.task import MAIN, HarborTask
from minirllm.sandboxes import MIB, Limits, Spec

SLACK = 300.0  # seconds by which a sandbox elsewhere outlives what its task may take
FOLDERS = 'for p in /logs/{agent,verifier,artifacts}; do mkdir -p $p && chmod 777 $p; done; mkdir -p "$1"'


def check(task: HarborTask, kind: str) -> None:
    """Raises TaskError when sandbox `kind` cannot run the task, or a variable that it names is missing."""
    where = f"Task {task.name} ({task.folder})"
    for environment in task.environments:
        if environment.other:
            raise TaskError(f"{where} needs {environment.other}, which no sandbox here has.")
        if environment.made_of and not sandboxes.kind(kind).images:
            raise TaskError(f"{where} needs {environment.made_of}, and the sandbox {kind} has no images: take docker.")
        if environment.compose and not sandboxes.kind(kind).doors:
            raise TaskError(f"{where} needs services, and none can run beside the sandbox {kind}: take docker.")
    phases = [mode for step in task.steps for mode in step.networks]
    if "allowlist" in (*phases, *(environment.network for environment in task.environments)):
        raise TaskError(f"{where} needs hosts on the network (network_mode), and sandboxes here have none.")
    connected(task.environment.servers, f"{where}, [[environment.mcp_servers]]")
    for step in task.steps:
        for user in (step.agent_user, step.verifier_user, *(hook.user for hook in step.collect)):
            try:
                sandboxes.check_user(sandboxes.kind(kind), user)
            except SandboxError as error:
                raise TaskError(f"{where} names the user {user}. {error}") from None
        named = {hook.service for hook in step.collect} | {artifact.service for artifact in step.artifacts}
        named -= {MAIN}
        if named and task.environment.compose is None:
            raise TaskError(f"{where} names the service {min(named)}, and has no environment/docker-compose.yaml.")
        resolved(step.verifier_env, f"{where}, [verifier.env]")
    for environment in task.environments:
        resolved(environment.env, f"{where}, [environment.env]")


def spec(environment: Environment, where: str, seconds: float) -> Spec:
    """The sandbox that is asked for, by a task that may take so many seconds."""
    usual = Limits()
    limits = Limits(
        memory=int((environment.memory_mb or 0) * MIB) or usual.memory,
        disk=int((environment.storage_mb or 0) * MIB) or usual.disk,
        cpus=environment.cpus or usual.cpus,
    )
    return Spec(
        image=environment.image,
        build=environment.build,
        compose=environment.compose,
        build_seconds=environment.build_seconds,
        lifetime=seconds + SLACK,
        limits=limits,
        env=resolved(environment.env, where),
        root=True,
    )
