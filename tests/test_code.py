"""rewards/code.py: programs, calls and tests in a sandbox; how each kind of failure is told."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from minirllm.errors import GradingError, SandboxError
from minirllm.rewards.code import code, program, same
from minirllm.rewards.inside import decode, encode
from minirllm.sandboxes import MIB, create
from minirllm.types import EvalOutput

CALLS = {"function": "add", "calls": [[[1, 2], 3], [[20, 22], 42]]}
ASSERTS = {"tests": ["assert add(1, 2) == 3", "assert add(20, 22) == 42"]}
CHECK = {
    "function": "add",
    "tests": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(5, 5) == 10",
}
STDIO = {"stdio": [["1 2\n", "3\n"], ["20 22\n", "42\n"]]}
KINDS = {"calls": CALLS, "asserts": ASSERTS, "check": CHECK}
GOOD = "def add(a, b):\n    return a + b\n"


async def judge(answer: str, problem: dict[str, Any], **options: Any) -> EvalOutput:
    return await code(answer, problem, **{"timeout": 20.0, "memory": 96 * MIB, **options})


async def outcome(answer: str, problem: dict[str, Any], **options: Any) -> str:
    verdict = await judge(answer, problem, **options)
    assert verdict.is_correct == (verdict.reward == 1.0) == (verdict.metadata["outcome"] == "passed")
    return str(verdict.metadata["outcome"])


# ---- what passes, and what does not ----


@pytest.mark.parametrize("kind", KINDS)
async def test_a_right_function_passes(kind: str) -> None:
    assert await outcome(f"Here it is:\n```python\n{GOOD}```\nDone.", KINDS[kind]) == "passed"
    assert await outcome(GOOD, KINDS[kind]) == "passed"


WRONG = {
    "wrong": "def add(a, b):\n    return 3",
    "wrong: None": "def add(a, b): pass",
    "wrong: text": "def add(a, b): return str(a + b)",
    "error: it raises": "def add(a, b): raise ValueError(a)",
    "error: another name": "def plus(a, b): return a + b",
    "error: no code": "I do not know.",
    "error: nothing": "",
    "error: it ends": "def add(a, b): exit(0)",
    "error: not text": "def add(a, b): return '\ud800'\n\udfff",
    "error: too deep": "def add(a, b): return add(a, b)",
    "timeout": "def add(a, b):\n    while True: pass",
    "timeout: loading": "import time; time.sleep(60)",
    "timeout: asleep behind a closed pipe": (
        "import os, time\nfor n in range(3, 9):\n  try: os.close(n)\n  except OSError: 0\ntime.sleep(60)"
    ),
    "oom": "def add(a, b):\n    return len(bytearray(2**31))",
    "output": "def add(a, b):\n    while True: print('x' * 1000)",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("why", WRONG)
async def test_how_it_failed_is_told_apart(kind: str, why: str) -> None:
    options = {"timeout": 3.0} if why.startswith("timeout") else {}
    expected = why.partition(":")[0]
    if kind != "calls" and "closed pipe" in why:
        expected = "error"  # the tests hear at once that nobody is there
    verdict = await judge(WRONG[why], KINDS[kind], **options)
    assert (verdict.metadata["outcome"], verdict.reward) == (expected, 0.0), verdict
    assert verdict.reason.startswith(f"{expected}")


async def test_what_is_said_of_it() -> None:
    verdict = await judge("def add(a, b):\n    return 3", CALLS)
    assert verdict.reason == "wrong: call 2 gave 3"
    assert verdict.metadata == {"outcome": "wrong", "passed": 1, "total": 2, "detail": "call 2 gave 3"}
    assert [(signal.name, signal.value) for signal in verdict.signals] == [("passed", 0.5)]
    assert (await judge("def add(a, b):\n    return 3", CALLS, partial=True)).reward == 0.5
    verdict = await judge("def add(a, b):\n\n    raise KeyError(a)", ASSERTS)
    assert verdict.reason == "error: KeyError: '1 (line 3)'"
    verdict = await judge("def add(a, b): return 3", ASSERTS)
    assert verdict.reason == "wrong: AssertionError (line 1 of the tests)"
    assert verdict.metadata["passed"] == 1


@pytest.mark.parametrize(
    "hostile",
    [
        "class Own(Exception):\n  def __str__(self): raise SystemExit",
        "class Own(Exception):\n  def __str__(self): return None",
        "class Meta(type):\n  __name__ = property(lambda self: 1 / 0)\nclass Own(Exception, metaclass=Meta): pass",
    ],
)
async def test_an_error_that_cannot_be_told_costs_one_call(hostile: str) -> None:
    answer = f"{hostile}\ndef add(a, b):\n  if a == 1: raise Own\n  return a + b"
    verdict = await judge(answer, CALLS)
    assert (verdict.metadata["outcome"], verdict.metadata["passed"]) == ("error", 1), verdict


# ---- whole programs ----

SUM = "a, b = map(int, input().split())\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("print(a + b)", "passed"),
        ("if __name__ == '__main__': print(a + b, ' ', end='\\n\\n')", "passed"),
        ("print(3)", "wrong"),
        ("print(a + b); raise SystemExit(1)", "error"),
        ("print(a + b, flush=True); 1 / 0", "error"),
        ("import os; os._exit(0)", "wrong"),
        ("import sys; sys.exit()", "wrong"),
        ("while True: pass", "timeout"),
        ("bytearray(2**31)", "error"),  # a MemoryError, or the kernel's: see below
        ("while True: print('3' * 10000)", "output"),
    ],
)
async def test_programs(source: str, expected: str) -> None:
    if "bytearray" in source:
        assert await outcome(SUM + source, STDIO) in ("oom", "error")
    else:
        assert await outcome(SUM + source, STDIO, timeout=3.0 if expected == "timeout" else 20.0) == expected


# ---- what tests may be ----


async def test_unittest_pytest_style_imports_and_setup() -> None:
    tests = """
import unittest
from solution import add, Stack
import solution

class TestAdd(unittest.TestCase):
    def setUp(self): self.stack = Stack()
    def test_sum(self): self.assertEqual(add(one, 2), 3)
    def test_raises(self):
        with self.assertRaises(TypeError): add(1, None)
    def test_stack(self):
        self.stack.push([1]); self.assertEqual(self.stack.pop(), [1])
        self.assertRaises(IndexError, self.stack.pop)

def test_module(): assert solution.add(2, 2) == 4
def test_missing():
    try: from solution import absent
    except ImportError: return
    assert False
def helper(): assert False"""
    answer = (
        GOOD
        + "class Stack:\n  def __init__(self): self.items = []\n"
        + "  def push(self, x): self.items.append(x)\n  def pop(self): return self.items.pop()"
    )
    verdict = await judge(answer, {"tests": tests, "setup": "one = 1"})
    assert verdict.metadata == {"outcome": "passed", "passed": 5, "total": 5, "detail": ""}
    verdict = await judge(answer.replace("a + b", "a - b"), {"tests": tests, "setup": "one = 1"})
    assert (verdict.metadata["passed"], verdict.metadata["outcome"]) == (3, "wrong")


async def test_lists_are_changed_in_place_and_prints_do_not_matter() -> None:
    answer = "def add(items, more):\n    print('hello'); items.sort(); more['x'] = [1]"
    tests = "a, b = [3, 1], {}\nprint('{}')\nassert add(a, b) is None\nassert (a, b) == ([1, 3], {'x': [1]})"
    assert await outcome(answer, {"tests": tests}) == "passed"


async def test_a_function_named_like_a_builtin_is_taken_when_it_is_asked_for() -> None:
    answer = "def sum(a, b): return a + b\ndef len(x): return 7\nimport math\nPI = math.pi"
    tests = "assert sum(1, 2) == 3 and len([]) == 0 and PI == math.pi"
    assert await outcome(answer, {"function": "sum", "tests": tests}) == "passed"


async def test_a_prompt_is_put_before_an_answer_that_only_goes_on() -> None:
    problem = {**CHECK, "prompt": "def add(a, b):\n    '''Add.'''"}
    assert await outcome("    return a + b", problem) == "passed"
    assert await outcome(GOOD, problem) == "passed"
    assert await outcome("```python\n    return a - b\n```", problem) == "wrong"


async def test_methods_and_values_of_every_plain_kind() -> None:
    answer = (
        "class Solution:\n    def same(self, x): return x\n"
        "    def deep(self): return {(1, 2): {3.5, None}, 'b': b'\\xff', 'c': 2j}"
    )
    values = [
        None,
        True,
        -5,
        2**100,
        1.5,
        math.inf,
        math.nan,
        "ü\n",
        [1, [2]],
        (1, (2,)),
        {1, 2},
        {"a": [1]},
        b"\xff",
        3 - 2j,
    ]
    calls = [[[value], value] for value in values]
    assert await outcome(answer, {"function": "Solution.same", "calls": calls}) == "passed"
    deep = {(1, 2): {None, 3.5}, "b": b"\xff", "c": 2j}
    assert await outcome(answer, {"function": "Solution.deep", "calls": [[[], deep]]}) == "passed"


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        ({}, "has one of stdio, calls and tests, got none"),
        ({**CALLS, **ASSERTS}, "got calls, tests"),
        ({**CALLS, "inputs": []}, "has no inputs: it has calls"),
        ({"calls": [[[1], 2]]}, "names its function"),
        ({"function": "add", "calls": [[[print], 2]]}, "has builtin_function_or_method in it"),
        ({"tests": "assert ("}, "the tests cannot be compiled"),
        ({"tests": "assert add(1, 2)", "setup": "1 / 0"}, "at fault: ZeroDivisionError"),
        ({"tests": "assert add(lambda: 1, 2)"}, "give the candidate a function, which cannot be sent"),
    ],
)
async def test_what_is_wrong_with_a_problem_is_no_verdict_on_the_answer(problem: dict[str, Any], sentence: str) -> None:
    with pytest.raises(GradingError, match=sentence):
        await code(GOOD, problem)


async def test_a_sandbox_that_fails_is_no_verdict_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minirllm.sandboxes.local.PLACES", 0)
    with pytest.raises(SandboxError, match="There are 0 local sandboxes already"):
        await code(GOOD, CALLS)


# ---- parts ----


def test_the_code_in_an_answer() -> None:
    assert program("x = 1") == "x = 1"
    assert program("a\n```python\nx\n```\nb\n```\ny\n```\nc") == "y\n"
    assert program("```py\nx\n```\n```bash\nrm\n```") == "x\n"
    assert program("```python title=a\nx = '```'\ny\n") == "x = '```'\ny\n"


def test_values_compare_as_pythons_do() -> None:
    def equal(given: Any, expected: Any) -> bool:
        return same(encode(given, lambda _: ["held", 0]), encode(expected, lambda _: ["held", 0]))

    right = [
        (1, 1),
        (1, 1.0),
        (True, 1),
        ((1, 2), [1, 2]),
        (0.1 + 0.2, 0.3),
        ({1: 2, 3: 4}, {3: 4, 1: 2}),
        (math.nan,) * 2,
    ]
    assert [pair for pair in right if not equal(*pair)] == []
    wrong = [
        (1, 2),
        ([1, 2], (1, 2)),
        ("1", 1),
        (None, 0),
        ([1], [1, 2]),
        ([], {}),
        (object(), object()),
        (10**400, 1.5),
    ]
    wrong += [(2**60 + 1, 2**60), ({1: 2}, {1: 3}), (b"1", "1"), ([[1]], [1]), (0.31, 0.3), ({1}, [1]), ("x", "y")]
    assert [pair for pair in wrong if equal(*pair)] == []
    for forged in ([], ["list"], ["list", 5], ["dict", [1]], ["dict", [[1]]], ["held", 1], [[], []], "list"):
        assert not same(forged, encode([1], print))
        assert not same(forged, encode({1: 2}, print))
    assert decode(encode((1, {2: {3}}), print), print) == (1, {2: {3}})


async def test_many_at_once_are_each_judged_by_themselves() -> None:
    answers = [GOOD if n % 3 else "def add(a, b): return -7" for n in range(24)]
    verdicts = await asyncio.gather(*(judge(answer, ASSERTS if n % 2 else CALLS) for n, answer in enumerate(answers)))
    assert [verdict.reward for verdict in verdicts] == [float(n % 3 != 0) for n in range(24)]


async def test_without_a_sandbox_when_asked_for_by_name(caplog: pytest.LogCaptureFixture) -> None:
    assert await outcome(GOOD, ASSERTS, sandbox="local-unsafe") == "passed"
    assert "isolates nothing" in caplog.text
    assert create("local-unsafe")
