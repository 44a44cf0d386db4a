"""What tests of all dialects share: bodies with something else somewhere in them, refusals, a small vocabulary."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import strategies as st

from minirllm.errors import RequestError
from minirllm.types import ModelRequest
from tests.test_fields import JSON


def text_of(token_id: int) -> str:
    """The text of a token, one of them a part of a character."""
    return {1: "He", 2: "llo", 3: "\ufffd", 9: ""}.get(token_id, f"<{token_id}>")


def refusing(parse: Callable[..., ModelRequest]) -> Callable[..., RequestError]:
    """What `parse` says to fields that it refuses."""

    def refused(**fields: Any) -> RequestError:
        with pytest.raises(RequestError) as caught:
            parse(**fields)
        assert caught.value.status == 400
        return caught.value

    return refused


def names_each(refused: Callable[..., RequestError], wrong: Mapping[str, list[Any]]) -> Callable[[str, Any], None]:
    """A test: each of the values of these fields is refused in a sentence that names the field."""

    @pytest.mark.parametrize(
        ("field", "value"), [(field, value) for field, values in wrong.items() for value in values]
    )
    def test(field: str, value: Any) -> None:
        problem = refused(**{field: value})
        assert problem.param == field
        assert field in problem.message
        assert problem.message.endswith(".")

    return test


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
