"""Runs in the sandbox, in a process of its own: test code, whose candidate is another process (see inside.py).

Owns: `Remote`, what stands in the tests for an object of the candidate; running test code of several kinds. Does not
know: what a verdict is worth. Its text is sent into the sandbox; inside.py runs it.

Only plain values cross, so the candidate's own ``==``, patched builtins or exits touch its own process only: asserts
compare values of this process. It cannot be looked into (it is not dumpable). Operators of the candidate's own classes
are therefore not available to tests: calls, attributes, items, length, iteration and text of them are.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import functools
import importlib
import json
import sys
import types

from minirllm.rewards.inside import MODULE, decode, encode, headed, line_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

PR_SET_DUMPABLE = 4  # <linux/prctl.h>


class Gone(Exception):
    """The candidate's process does not answer any more, or answers nonsense."""


class Remote:
    """Stands for an object of the candidate's process. It equals nothing but itself."""

    def __init__(self, link: Link, number: int):
        object.__setattr__(self, "_place", (link, number))

    def __call__(self, *args: Any, **named: Any) -> Any:
        return _ask(self, "call", list(args), named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _ask(self, "get", name)

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "item", key)

    def __len__(self) -> int:
        return int(_ask(self, "len"))

    def __iter__(self) -> Iterator[Any]:
        return _ask(self, "iter")

    def __next__(self) -> Any:
        return _ask(self, "next")

    def __str__(self) -> str:
        return str.__str__(_ask(self, "str"))

    def __repr__(self) -> str:
        return str.__str__(_ask(self, "repr"))


def _ask(remote: Remote, what: str, *values: Any) -> Any:
    link, _ = object.__getattribute__(remote, "_place")
    return link.ask(what, remote, *values)


class Link:
    """The connection to a candidate's process. `raised` is what the candidate raised last."""

    def __init__(self, pipes: tuple[Any, Any], source: str):
        self.requests, self.replies = pipes
        self.raised: BaseException | None = None
        self.number = 0
        self.requests.write(headed(source))
        self.names: dict[str, bool] = self._reply([])
        if not isinstance(self.names, dict):
            raise self._gone()

    def ask(self, what: str, *values: Any) -> Any:
        """What the candidate answers. Raises what it raised, if that is a builtin exception, else RuntimeError."""
        self.number += 1
        given = encode(list(values), self._own)
        try:
            self.requests.write(json.dumps([self.number, what, given]).encode() + b"\n")
        except OSError:
            raise self._gone() from None
        return self._reply(values[1] if what == "call" else [])

    def _reply(self, args: list[Any]) -> Any:
        try:
            self.requests.flush()
            number, kind, content, more = json.loads(self.replies.readline())
            if number != self.number:
                raise ValueError(number)
            if kind == "ok":
                value, after = decode(content, self._far), decode(more, self._far)
                for ours, theirs in zip(args, after if isinstance(after, list) else ()):  # noqa: B905  # Python 3.8
                    _become(ours, theirs)
                return value
        except (OSError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
            raise self._gone() from None
        self.raised = _made(str(kind), f"{content}{more}")
        raise self.raised

    def _gone(self) -> Gone:
        self.raised = Gone("the program ended, or spoiled its answers")
        return self.raised

    def _far(self, number: Any) -> Remote:
        return Remote(self, number)

    def _own(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return ["held", object.__getattribute__(value, "_place")[1]]
        raise Broken(f"the tests give the candidate a {type(value).__name__}, which cannot be sent to its process")


def _made(kind: str, text: str) -> Exception:
    """The builtin exception of this name, else a RuntimeError that tells it."""
    known = getattr(builtins, kind, None)
    if kind in ("StopIteration", "MemoryError"):
        return known()  # type: ignore[misc]
    try:
        assert issubclass(known, Exception)  # type: ignore[arg-type]
        return known(text)  # type: ignore[misc]
    except (TypeError, AssertionError):  # none, or one that takes more, such as UnicodeDecodeError
        return RuntimeError(f"{kind}: {text}")


def _become(ours: Any, theirs: Any) -> None:
    """A list, dict or set that was given becomes what the candidate made of it."""
    if isinstance(ours, list) and isinstance(theirs, list):
        ours[:] = theirs
    elif isinstance(ours, (dict, set)) and type(ours) is type(theirs):
        ours.clear()
        ours.update(theirs)


class Broken(Exception):
    """The tests themselves are at fault."""


class Tests:
    """The test code of one job: `tests` is a list of sources, `setup` precedes them, `function` is what they test."""

    def __init__(self, link: Link, tests: list[str], setup: str, function: str):
        self.link, self.function = link, function
        self.space: dict[str, Any] = {"__name__": "tests"}
        self.codes = [self._compiled(text) for text in [setup, *tests]]
        module = types.ModuleType(MODULE)
        module.__getattr__ = self._of_module  # type: ignore[method-assign]
        sys.modules[MODULE] = module
        nodes = [node for text in [setup, *tests] for node in ast.walk(ast.parse(text))]
        wanted = {node.id for node in nodes if isinstance(node, ast.Name)}
        for name in (wanted - set(dir(builtins))) | {function}:
            if name in link.names and not name.startswith("__"):
                self.space[name] = self._taken(name)

    def _compiled(self, text: str) -> types.CodeType:
        try:
            return compile(text, "tests.py", "exec")
        except (SyntaxError, ValueError) as error:
            raise Broken(f"the tests cannot be compiled: {error}") from None

    def _taken(self, name: str) -> Any:
        if self.link.names[name]:  # a module that the candidate imported: the tests take their own
            try:
                return importlib.import_module(name)
            except ImportError:
                pass
        return self.link.ask("global", name)

    def _of_module(self, name: str) -> Any:
        if name in self.link.names and not name.startswith("__"):
            return self.link.ask("global", name)
        raise AttributeError(f"the answer defines no {name}")

    def run(self) -> dict[str, Any]:
        """How many there were and passed, and why the first one did not."""
        setup, *codes = self.codes
        exec(setup, self.space)
        whole = [self._outcome(functools.partial(exec, code, self.space)) for code in codes]
        parts = [self._outcome(work) for work in self._found()]
        outcomes = [*filter(None, whole), *parts] if parts else whole
        first = next((one for one in outcomes if one), ("passed", ""))
        return {"total": len(outcomes), "passed": outcomes.count(None), "outcome": first[0], "detail": first[1]}

    def _found(self) -> list[Callable[[], Any]]:
        """What the tests only define: ``check(function)``, functions and classes of tests."""
        found: list[Callable[[], Any]] = []
        unittest = sys.modules.get("unittest")  # loading it takes longer than most tests
        for name, value in list(self.space.items()):
            if name == "check" and self.function and isinstance(value, types.FunctionType):
                found.append(functools.partial(value, self.space[self.function]))
            elif name.startswith("test") and isinstance(value, types.FunctionType):
                found.append(value)
            elif unittest and isinstance(value, type) and issubclass(value, unittest.TestCase):
                found += [case.debug for case in unittest.defaultTestLoader.loadTestsFromTestCase(value)]
        return found

    def _outcome(self, work: Callable[[], Any]) -> tuple[str, str] | None:
        """None when it passed."""
        try:
            work()
        except Broken:
            raise
        except BaseException as error:
            if error is self.link.raised or isinstance(error, NameError):
                return _raised(error)
            return "wrong", _told(error) + line_of(error, "tests.py").replace(")", " of the tests)")
        return None


def tests(job: dict[str, Any], pipes: tuple[Any, Any]) -> dict[str, Any]:
    """The verdict on a job."""

    def none(outcome: str, detail: str) -> dict[str, Any]:
        return {"total": 1, "passed": 0, "outcome": outcome, "detail": detail}

    if ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0):  # from now on nobody of this user can look into this process
        return {"broken": "the process of the tests cannot be closed to others"}
    try:
        link = Link(pipes, job["source"])
    except Exception as error:
        return none(*_raised(error))
    function = job["function"]
    if function and function not in link.names:
        return none("error", f"the answer defines no {function}")
    try:
        return Tests(link, job["tests"], job["setup"], function).run()
    except Exception as error:
        return none(*_raised(error)) if error is link.raised else {"broken": f"{type(error).__name__}: {error}"}


def _raised(error: BaseException) -> tuple[str, str]:
    return ("oom" if isinstance(error, MemoryError) else "error"), _told(error)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}".rstrip(": ")
