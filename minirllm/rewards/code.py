"""Python code, run in a sandbox and judged out here, or by tests that the code cannot reach.

Owns: what a problem is, the verdict, how many run at once. Does not know: how sandboxes isolate, what runs in them
(inside.py, asserts.py).

A problem is a mapping, so that it can stand in ``task.metadata``. One of:

- ``{"stdio": [[input, output], ...]}``: the answer is a whole program; its output must be equal but for white space at
  the ends of lines. Run once per case.
- ``{"function": "add", "calls": [[[1, 2], 3], ...]}``: arguments and result, or ``"Class.method"``. What is expected
  stays out here. ``tolerance`` is for floating-point numbers; a list is expected of lists and tuples alike.
- ``{"tests": "assert add(1, 2) == 3"}``, a text or a list of them: asserts, ``check(function)`` as in HumanEval (with
  ``function``), functions named ``test...``, unittest classes. ``setup`` is trusted code before them.

With any of them, ``prompt`` is put before the answer when the answer does not define ``function`` itself.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import secrets
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minirllm.errors import GradingError
from minirllm.rewards import inside
from minirllm.sandboxes import MIB, Limits, Result, Sandbox, Spec, create
from minirllm.types import EvalOutput, Signal

ASSERTS = Path(inside.__file__).with_name("asserts.py").read_text(encoding="utf-8")
PYTHON = ("/usr/bin/python3", "-I", "-c", Path(inside.__file__).read_text(encoding="utf-8"))
KEYS = {"stdio", "calls", "tests", "function", "setup", "prompt", "tolerance"}
TOLERANCE = 1e-9
AT_ONCE = 4 * (os.cpu_count() or 1)  # sandboxes of one event loop
OUTPUT, DISK, FILES, PROCESSES = MIB, 64 * MIB, 4096, 64
FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Judged:
    """How many of the cases passed, and how the first of the others ended: passed, wrong, error (it raised, exited, or
    cannot be loaded), timeout, oom (no memory left) or output (it printed too much)."""

    passed: int
    total: int
    outcome: str = "passed"
    detail: str = ""


async def code(
    answer: str,
    problem: Mapping[str, Any],
    *,
    sandbox: str = "local",
    timeout: float = 10.0,
    memory: int = 256 * MIB,
    partial: bool = False,
) -> EvalOutput:
    """1.0 when the code in `answer` passes everything, else 0.0, or with `partial` the share that it passes.

    `timeout` is in seconds for one run. ``metadata`` tells outcome, passed, total and detail. Raises GradingError when
    the problem is at fault, SandboxError when the sandbox is.
    """
    if unknown := set(problem) - KEYS:
        raise GradingError(f"a code problem has no {', '.join(sorted(unknown))}: it has {', '.join(sorted(KEYS))}")
    kinds = [kind for kind in ("stdio", "calls", "tests") if problem.get(kind)]
    if len(kinds) != 1:
        raise GradingError(f"a code problem has one of stdio, calls and tests, got {', '.join(kinds) or 'none'}")
    source = program(answer)
    if problem.get("prompt") and not re.search(rf"^(def|class) {problem.get('function', '')}\b", source, re.MULTILINE):
        source = f"{problem['prompt']}\n{source}"
    limits = Limits(memory=memory, processes=PROCESSES, disk=DISK, files=FILES, output=OUTPUT)
    slot = _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(AT_ONCE))
    async with slot, create(sandbox, Spec(limits=limits)) as box:
        judged = await {"stdio": _stdio, "calls": _calls, "tests": _tests}[kinds[0]](box, source, problem, timeout)
    share = judged.passed / judged.total
    reward = share if partial else float(judged.passed == judged.total)
    told = {name: getattr(judged, name) for name in ("outcome", "passed", "total", "detail")}
    reason = "" if judged.outcome == "passed" else f"{judged.outcome}: {judged.detail}".rstrip(": ")
    return EvalOutput(reward, judged.passed == judged.total, [Signal("passed", share)], told, reason)


def program(answer: str) -> str:
    """The code in a text: its last fenced block, in Python or unnamed; all of it where there is none."""
    blocks = [body for language, body in FENCE.findall(answer) if language.lower() in ("", "py", "python", "python3")]
    return blocks[-1] if blocks else answer


async def _stdio(box: Sandbox, source: str, problem: Mapping[str, Any], timeout: float) -> Judged:
    cases: Sequence[Sequence[str]] = problem["stdio"]
    passed, first = 0, ("passed", "")
    for number, (given, expected) in enumerate(cases, 1):
        done = await box.execute(
            (*PYTHON, "program"), timeout=timeout, stdin=inside.headed(source) + given.encode(), output=OUTPUT
        )
        problem_of = _stopped(done) or (("error", _last(done)) if done.exit_code else None)
        if problem_of is None and _lines(done.stdout) != _lines(expected):
            problem_of = "wrong", f"case {number} printed {done.stdout[:200]!r}"
        passed += problem_of is None
        first = first if first[0] != "passed" or problem_of is None else problem_of
        if problem_of and problem_of[0] in ("timeout", "oom", "output"):
            break  # the others would take as long
    return Judged(passed, len(cases), *first)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


async def _calls(box: Sandbox, source: str, problem: Mapping[str, Any], timeout: float) -> Judged:
    cases: Sequence[Sequence[Any]] = problem["calls"]
    name, near = problem.get("function", ""), float(problem.get("tolerance", TOLERANCE))
    if not name:
        raise GradingError("a code problem with calls names its function")
    try:
        asked = [inside.encode([name, list(args)], _unsendable) for args, _ in cases]
        wanted = [inside.encode(expected, _unsendable) for _, expected in cases]
    except RecursionError:
        raise GradingError("the arguments of a call are nested too deeply") from None
    lines = [json.dumps([number, "named", values]).encode() for number, values in enumerate(asked, 1)]
    stdin = inside.headed(source) + b"".join(line + b"\n" for line in lines)
    done = await box.execute((*PYTHON, "candidate"), timeout=timeout, stdin=stdin, output=OUTPUT)
    replies = await asyncio.to_thread(_replies, done.raw_stdout)
    passed, first = 0, None
    for number, expected in enumerate(wanted, 1):
        problem_of = _answered(replies.get(number) or replies.get(0), expected, near)
        passed += problem_of is None
        first = first or problem_of
    stopped = _stopped(done) if passed < len(cases) else None
    return Judged(passed, len(cases), *(stopped or first or ("passed", "")))


def _replies(output: bytes) -> dict[int, list[Any]]:
    """The first reply to each request, as far as they can be read: they are written by whoever is graded."""
    found: dict[int, list[Any]] = {}
    for line in output.split(b"\n"):
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(reply, list) and len(reply) == 4 and type(reply[0]) is int:
            found.setdefault(reply[0], reply)
    return found


def _answered(reply: list[Any] | None, expected: Any, near: float) -> tuple[str, str] | None:
    """None when it is what was expected."""
    if reply is None or (reply[0] == 0 and reply[1] == "ok"):
        return "error", "the program ended before it had answered"
    number, kind, content, more = reply
    if kind != "ok":
        return ("oom" if kind == "MemoryError" else "error"), f"{kind}: {content}{more}"[:500]
    try:
        if same(content, expected, near):
            return None
        return "wrong", f"call {number} gave {json.dumps(content)[:200]}"
    except RecursionError:
        return "wrong", f"call {number} gave something nested too deeply"


def same(given: Any, expected: Any, near: float = TOLERANCE) -> bool:
    """Whether two values, as `inside.encode` writes them, are equal as Python's are; numbers but for `near`."""
    if not isinstance(expected, list) or not isinstance(given, list):
        if isinstance(expected, list) or isinstance(given, list):
            return False
        if isinstance(given, int | float) and isinstance(expected, int | float):
            return given == expected or _close(given, expected, near)
        return bool(given == expected)
    if len(given) != 2:
        return False
    (kind, ours), (wanted, theirs) = given, expected
    if kind != wanted and (kind, wanted) != ("tuple", "list"):
        return False
    if kind not in ("list", "tuple", "set", "dict"):
        return bool(kind != "held" and ours == theirs)
    if not isinstance(ours, list) or len(ours) != len(theirs):
        return False
    if kind == "dict":
        if any(not isinstance(pair, list) or len(pair) != 2 for pair in ours):
            return False
        ours, theirs = ([item for pair in sorted(side, key=_key) for item in pair] for side in (ours, theirs))
    return all(same(one, other, near) for one, other in zip(ours, theirs, strict=True))


def _key(pair: list[Any]) -> str:
    return json.dumps(pair[0])


def _close(given: float, expected: float, near: float) -> bool:
    try:
        both_nan = math.isnan(given) and math.isnan(expected)
        integers = isinstance(given, int) and isinstance(expected, int)
        return both_nan or (not integers and math.isclose(given, expected, rel_tol=near, abs_tol=near))
    except OverflowError:  # an int that no float can hold
        return False


async def _tests(box: Sandbox, source: str, problem: Mapping[str, Any], timeout: float) -> Judged:
    tests = problem["tests"]
    word = secrets.token_hex(16)
    job = {
        "word": word,
        "asserts": ASSERTS,
        "source": source,
        "tests": [tests] if isinstance(tests, str) else list(tests),
        "setup": problem.get("setup", ""),
        "function": problem.get("function", ""),
    }
    done = await box.execute((*PYTHON, "tests"), timeout=timeout, stdin=inside.headed(job), output=OUTPUT)
    verdict = next((found for line in done.stdout.split("\n") if (found := _verdict(line, word))), None)
    stopped = _stopped(done)
    if verdict is None:
        return Judged(0, 1, *(stopped or ("error", "the tests did not come to their end: " + _last(done))))
    if "broken" in verdict:
        raise GradingError(f"the tests of this problem are at fault: {verdict['broken']}")
    judged = Judged(*(verdict[name] for name in ("passed", "total", "outcome", "detail")))
    if judged.outcome != "passed" and stopped:
        return Judged(judged.passed, judged.total, *stopped)
    return judged


def _verdict(line: str, word: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("word") == word else None


def _unsendable(value: Any) -> Any:
    raise GradingError(f"a call has {type(value).__name__} in it, which is no plain value")


def _stopped(done: Result) -> tuple[str, str] | None:
    """How it was ended, if it was."""
    if done.timed_out:
        return "timeout", "it did not end in time"
    if done.oom:
        return "oom", "it took more memory than it may"
    return ("output", "it printed more than it may") if done.flooded else None


def _last(done: Result) -> str:
    return done.stderr.strip().rpartition("\n")[2][:300] or f"exit code {done.exit_code}"
