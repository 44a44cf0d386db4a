"""What runs inside the sandbox when code is graded; this file's text is sent there, so it imports nothing of ours.

Owns: values as JSON, and three roles. ``program`` runs a source as a whole program. ``candidate`` loads a source as a
module and does what it is asked, line by line. ``tests`` runs the text of asserts.py. Does not know: what is expected.
It imports little: each grading starts one of these.
"""

from __future__ import annotations

import functools
import json
import operator
import os
import sys
import types

TYPE_CHECKING = False  # loading typing would take as long as all the rest
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

MODULE = "solution"  # as which tests may import the candidate
OWN = "minirllm.rewards.inside"

# ---- values in JSON: scalars are themselves, everything else is [kind, content] ----


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """A plain value as JSON; `other` makes something of what is no plain value."""

    def inner(value: Any) -> Any:
        if value is None or isinstance(value, bool):
            return value
        for scalar in (int, float, str):
            if isinstance(value, scalar):
                return scalar(value)
        for kind, sequence in (("list", list), ("tuple", tuple)):
            if isinstance(value, sequence):
                return [kind, [inner(item) for item in value]]
        if isinstance(value, (set, frozenset)):
            return ["set", sorted((inner(item) for item in value), key=json.dumps)]
        if isinstance(value, dict):
            return ["dict", [[inner(key), inner(item)] for key, item in value.items()]]
        if isinstance(value, (bytes, bytearray)):
            return ["bytes", bytes(value).decode("latin-1")]
        if isinstance(value, complex):
            return ["complex", [value.real, value.imag]]
        return other(value)

    return inner(value)


def decode(tree: Any, other: Callable[[Any], Any]) -> Any:
    """What `encode` made JSON of."""

    def inner(tree: Any) -> Any:
        if not isinstance(tree, list):
            return tree
        kind, content = tree
        if kind in ("list", "tuple", "set"):
            return {"list": list, "tuple": tuple, "set": set}[kind](map(inner, content))
        if kind == "dict":
            return {inner(key): inner(item) for key, item in content}
        if kind == "bytes":
            return content.encode("latin-1")
        return complex(*content) if kind == "complex" else other(content)

    return inner(tree)


# ---- the candidate's side ----

ASKED: dict[str, Callable[..., Any]] = {
    "call": lambda function, args, named: function(*args, **named),
    "get": getattr,
    "item": operator.getitem,
    "len": len,
    "iter": iter,
    "next": next,
    "str": str,
    "repr": repr,
}


def candidate(source: str, requests: Iterable[bytes], replies: Any) -> None:
    """Load the source, then answer each request ``[number, what, values]`` in a line of its own."""
    module = types.ModuleType(MODULE)
    held: list[Any] = []

    def hold(value: Any) -> Any:
        held.append(value)
        return ["held", len(held) - 1]

    def load() -> dict[str, Any]:
        sys.modules[MODULE] = module
        exec(compile(source, "answer.py", "exec"), vars(module))
        return {name: isinstance(value, types.ModuleType) for name, value in vars(module).items()}

    def guarded(number: int, work: Callable[[], Any], changed: Any = None) -> bool:
        try:
            text, done = json.dumps([number, "ok", encode(work(), hold), encode(changed, hold)]), True
        except BaseException as error:
            text, done = _failed(number, error), False
        replies.write(text.encode() + b"\n")
        replies.flush()
        return done

    if not guarded(0, load):
        return
    for line in requests:
        number, what, values = json.loads(line)
        values = decode(values, held.__getitem__)
        if what == "global":
            guarded(number, functools.partial(_named, module, *values))
        elif what == "named":
            guarded(number, functools.partial(_call_named, module, *values))
        else:
            guarded(number, functools.partial(ASKED[what], *values), values[1] if what == "call" else None)


def _named(module: types.ModuleType, name: str) -> Any:
    """A global, or ``Class.method`` of a fresh instance."""
    head, _, method = name.partition(".")
    value = vars(module)[head]
    return getattr(value(), method) if method else value


def _call_named(module: types.ModuleType, name: str, args: list[Any]) -> Any:
    return _named(module, name)(*args)


def _failed(number: int, error: BaseException) -> str:
    """The reply that tells an error, whose class is the candidate's, too: asked for its name or text, it may raise."""
    try:
        return json.dumps([number, type(error).__name__, str(error)[:500], line_of(error)])
    except BaseException:
        return json.dumps([number, "RuntimeError", "", ""])


def line_of(error: BaseException, file: str = "answer.py") -> str:
    """The innermost line of `file` that the error came through, in brackets."""
    line, at = 0, error.__traceback__
    while at is not None:
        line = at.tb_lineno if at.tb_frame.f_code.co_filename == file else line
        at = at.tb_next
    return f" (line {line})" if line else ""


# ---- how it starts: standard input begins with a source or a job ----


def headed(value: Any) -> bytes:
    """JSON with its length in front."""
    text = json.dumps(value).encode()
    return b"%016d" % len(text) + text


def _head() -> Any:
    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count and (piece := os.read(0, count - len(data))):
            data += piece
        return data

    return json.loads(exactly(int(exactly(16))))


def main(role: str) -> None:
    """Be the program, the candidate or the tests. What any of them prints goes to standard error."""
    pipes = None
    if role == "tests":
        (asked, ask), (answer, answered) = os.pipe(), os.pipe()
        if os.fork():  # before a word was read: what is graded lives in a process that never knew it
            os.close(asked)
            os.close(answered)
            pipes = os.fdopen(ask, "wb"), os.fdopen(answer, "rb")
        else:
            os.dup2(asked, 0)
            os.dup2(answered, 1)
            os.closerange(3, 64)
            role = "candidate"
    given = _head()
    if role == "program":
        sys.argv = ["answer.py"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(given, "answer.py", "exec"), vars(sys.modules["__main__"]))
        return
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    if role == "candidate":
        candidate(given, requests, replies)
    else:
        requests.read()
        sys.modules[OWN] = sys.modules["__main__"]
        space: dict[str, Any] = {"__name__": "asserts"}
        exec(compile(given["asserts"], "asserts.py", "exec"), space)
        replies.write(json.dumps({"word": given["word"], **space["tests"](given, pipes)}).encode() + b"\n")
        replies.flush()
    os._exit(0)  # whatever threads there are


if __name__ == "__main__":
    main(sys.argv[1])
