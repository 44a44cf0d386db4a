"""What agent programs from npm share: a short prompt, guarded instructions, a choice of dialects, side calls told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from minirllm.config import nearest
from minirllm.errors import ConfigError
from minirllm.types import ModelRequest

#: What a program is told in its lean form, where it lets its own prompt be replaced.
PROMPT = "You are a coding agent. Work on the task with the tools until it is done, then say so in a sentence."


def guarded(instruction: str) -> str:
    """The instruction, in a line of its own where the program would read it as an option, a file, or a command."""
    return f"\n{instruction}" if instruction.lstrip().startswith(("-", "@", "/", "!")) else instruction


def known(program: str, dialect: str, dialects: Iterable[str]) -> str:
    """`dialect`, if it is one of these. Raises ConfigError naming them."""
    there = list(dialects)
    if dialect not in there:
        near = nearest(dialect, there)
        raise ConfigError(f"{program} has no dialect {dialect!r}{near}: give {', '.join(there[:-1])} or {there[-1]}.")
    return dialect


def side_calls(beginnings: Mapping[str, str]) -> Callable[[ModelRequest], str | None]:
    """Tells a program's own calls by how their first message (the system's) or their last begins: kind -> words."""

    def auxiliary(request: ModelRequest) -> str | None:
        messages = request.messages or []
        ends = [message.content.lstrip() for message in (*messages[:1], *messages[-1:])]
        return next((kind for kind, words in beginnings.items() if any(end.startswith(words) for end in ends)), None)

    return auxiliary
