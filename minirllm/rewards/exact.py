"""Exact answers: the same text, or the same number, found where models put them.

Owns: taking an answer out of a text (last \\boxed{}, last number, ``#### x``), comparing texts and numbers exactly.
Does not know: algebra (see `math`).
"""

from __future__ import annotations

import re
from fractions import Fraction

NUMBER = re.compile(r"(?<![\w.])[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+(?![\w.]*\d))?")
MAX_DIGITS = 100  # longer digit strings are no answer, and would only cost time


def exact(answer: str, expected: str) -> float:
    """1.0 when the texts are equal but for case, outer white space and one closing full stop."""
    return float(_plain(answer) == _plain(expected))


def number(answer: str, expected: str | int | float) -> float:
    """1.0 when the answer's `final_number` equals `expected`."""
    return float(same_number(final_number(answer), str(expected)))


def final_number(text: str) -> str | None:
    """The number a text ends up with: after its last ``####``, in its last ``\\boxed{}``, or the last one in it."""
    if "####" in text:
        found = NUMBER.search(text.rpartition("####")[2])
        return found.group() if found else None
    boxed = last_boxed(text)
    return last_number(text if boxed is None else boxed)


def last_number(text: str) -> str | None:
    """The last decimal number or fraction of integers; thousands separators and a dollar sign may be in it."""
    found = NUMBER.findall(text)
    return found[-1] if found else None


def last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{...}`` whose braces balance."""
    open_braces: list[re.Match[str]] = []
    last: tuple[int, int] | None = None
    for brace in re.finditer(r"\\boxed\s*\{|[{}]", text):
        if brace.group() != "}":
            open_braces.append(brace)
        elif open_braces:
            opening = open_braces.pop()
            if len(opening.group()) > 1 and (last is None or opening.end() > last[0]):
                last = opening.end(), brace.start()
    return None if last is None else text[slice(*last)].strip()


def same_number(a: str | None, b: str | None) -> bool:
    """Equal as exact rationals: 1,000 and 1000.0, 0.5 and 1/2."""
    left, right = to_fraction(a), to_fraction(b)
    return left is not None and left == right


def to_fraction(text: str | None) -> Fraction | None:
    """None unless the whole text is one number."""
    if text is None or len(text) > MAX_DIGITS or not NUMBER.fullmatch(text.strip()):
        return None
    try:
        return Fraction(re.sub(r"[$,\s+]", "", text))
    except (ValueError, ZeroDivisionError):
        return None


def _plain(text: str) -> str:
    return text.strip().removesuffix(".").rstrip().casefold()
