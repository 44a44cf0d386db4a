"""What only the teacher is told: a model that knows the answer teaches itself without it.

Owns: `Hook`, and the one that a key of ``Task.metadata`` means. Does not know: tokens, who the teacher is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from minirllm import config
from minirllm.errors import ConfigError, TeacherError, Users
from minirllm.types import Message, Task

Hook = Callable[[Task, Sequence[Message]], list[Message]]  # (task, what the student read) -> what the teacher reads


def find(name: str) -> Hook:
    """The function at ``module:attr``, or the one that tells the value of a key. Raises ConfigError."""
    if ":" not in name:
        return lambda task, messages: tell(name, task, messages)
    hook: Any = config.find("privileged", name, {})
    if not callable(hook):
        raise ConfigError(f"privileged {name!r} is no function: give one of (task, messages) that returns messages.")

    def checked(task: Task, messages: Sequence[Message]) -> list[Message]:
        with Users(f"privileged {name}: "):
            told = hook(task, list(messages))
        if not (isinstance(told, list) and told and all(map(_is_text, told))):
            got = f"got {told!r:.80} for task {task.id!r}"
            raise TeacherError(f"{name} must return a list of Message objects with text, {got}")
        return told

    return checked


def _is_text(message: Any) -> bool:
    return isinstance(message, Message) and isinstance(message.content, str)


def tell(key: str, task: Task, messages: Sequence[Message]) -> list[Message]:
    """Ends the first message of the user with ``(key: value)``. Raises TeacherError for a task without that key."""
    if key not in task.metadata:
        known = ", ".join(map(str, task.metadata)) or "none"
        raise TeacherError(f"task {task.id!r} has no {key!r} in its metadata, but {known}: name one with --privileged")
    at = next((place for place, message in enumerate(messages) if message.role == "user"), None)
    if at is None:
        raise TeacherError(f"a call of task {task.id!r} has no message of the user to tell {key!r} in")
    said = replace(messages[at], content=f"{messages[at].content}\n\n({key}: {task.metadata[key]})")
    return [*messages[:at], said, *messages[at + 1 :]]
