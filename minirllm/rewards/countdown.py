"""Countdown: reach a target with + - * / and each given number exactly once.

Owns: reading an arithmetic expression and its exact value. Nothing is evaluated but the four operations on integers.
Does not know: prompts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from fractions import Fraction

MAX_LENGTH = 200  # characters; bounds the parser's depth too
ALLOWED = re.compile(r"[0-9+\-*/() ]+")


def countdown(answer: str, numbers: Sequence[int], target: int, *, partial: float = 0.0) -> float:
    """1.0 for an expression that uses exactly `numbers` and equals `target`; `partial` when only the numbers are right.

    The expression is the content of the last ``<answer>`` tag, else the last line that is not blank; ``= value`` at its
    end is ignored.
    """
    value, used = calculate(extract(answer))
    if value is None or sorted(used) != sorted(numbers):
        return 0.0
    return 1.0 if value == target else partial


def extract(answer: str) -> str:
    """The expression in an answer."""
    tags = re.findall(r"<answer>(.*?)</answer>", answer, re.DOTALL)
    lines = [line for line in answer.splitlines() if line.strip()]
    text = tags[-1] if tags else lines[-1] if lines else ""
    text = text.replace("×", "*").replace("÷", "/").replace("−", "-")  # noqa: RUF001  # how models also write them
    return re.sub(r"=\s*-?\d+\s*\.?\s*$", "", text).strip().removesuffix(".").strip()


def calculate(expression: str) -> tuple[Fraction | None, list[int]]:
    """(exact value, the integers in it); (None, []) for anything but + - * / and brackets on integers, or 1 / 0."""
    if len(expression) > MAX_LENGTH or not ALLOWED.fullmatch(expression):
        return None, []
    try:
        tree = ast.parse(expression, mode="eval")
        used: list[int] = []
        return _value(tree.body, used), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None, []


def _value(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp):
        raise ValueError(f"{type(node).__name__} is not allowed")
    left, right = _value(node.left, used), _value(node.right, used)
    match node.op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
    raise ValueError(f"{type(node.op).__name__} is not allowed")
