"""Request bodies with something else somewhere in them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from tests.test_fields import JSON


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in it."""
    yield path
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(child, (*path, key))


def changed(body: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """The body with any JSON in up to three of its places."""
    inside = list(places(body))[1:]
    return st.lists(st.tuples(st.sampled_from(inside), JSON), min_size=1, max_size=3).map(lambda c: _put(body, c))


def _put(body: dict[str, Any], changes: list[tuple[tuple[Any, ...], Any]]) -> dict[str, Any]:
    body = copy.deepcopy(body)
    for path, value in changes:
        holder: Any = body
        for key in path[:-1]:
            holder = holder[key] if _has(holder, key) else {}
        if isinstance(holder, dict) or _has(holder, path[-1]):
            holder[path[-1]] = value
    return body


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else isinstance(holder, list) and key in range(len(holder))
