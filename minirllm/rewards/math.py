"""Mathematical answers, compared by meaning: 1/2, 0.5 and \\frac{1}{2} are the same.

Owns: which part of a text is the answer, and when two answers are equal (math-verify on sympy).
Does not know: deadlines. Some expressions take for ever (99**98**97): call this from a sync evaluator, which runs in a
process that is killed; math-verify's own time-outs need the main thread and are off.
"""

from __future__ import annotations

import logging

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from minirllm.rewards.exact import last_boxed, last_number, same_number

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns, per process, that its time-outs are off

MAX_LENGTH = 1000  # characters; no answer is longer
EXTRACTION = (LatexExtractionConfig(), ExprExtractionConfig())


def math(answer: str, expected: str, *, fallback: bool = False) -> float:
    """1.0 when the last ``\\boxed{}`` of `answer` equals `expected`. `fallback`: else its last number counts."""
    given = last_boxed(answer)
    if given is None and fallback:
        given = last_number(answer)
    return float(given is not None and equal(given, expected))


def equal(given: str, expected: str) -> bool:
    """Whether two LaTeX or plain expressions are equal. `expected` may hold its own ``\\boxed{}``."""
    boxed = last_boxed(expected)
    expected = (expected if boxed is None else boxed).strip()
    given = given.strip()
    if not given or len(given) > MAX_LENGTH:
        return False
    if given == expected or same_number(given, expected):
        return True
    gold, target = _parse(expected), _parse(given)
    return bool(gold and target and verify(gold, target, timeout_seconds=None))


def _parse(expression: str) -> list[object]:
    return parse(f"${expression}$", extraction_config=EXTRACTION, parsing_timeout=None)
