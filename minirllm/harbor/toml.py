"""Reading a TOML table key by key.

Owns: `Table`: values of the type that is asked for, or one sentence that names file and key. Does not know: tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minirllm.errors import TaskError

MOST = 1e9  # of seconds or MiB, say: more is a mistake
KINDS: dict[Any, str] = {str: "a text", bool: "true or false", dict: "a table", list: "a list"}


class Table:
    """Unknown keys are nobody's business: files of newer schemas have some."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def wrong(self, key: str, must: str) -> TaskError:
        return TaskError(f"{self.where}: {key} must be {must}, got {self.values.get(key)!r}.")

    def _of(self, key: str, kind: Any, default: Any) -> Any:
        value = self.values.get(key, default)
        if value is not default and not isinstance(value, kind):
            raise self.wrong(key, KINDS[kind])
        return value

    def text(self, key: str, default: str = "") -> str:
        found: str = self._of(key, str, default)
        return found

    def flag(self, key: str) -> bool | None:
        found: bool | None = self._of(key, bool, None)
        return found

    def number(self, key: str) -> float | None:
        """A number that is not negative, and of a size that can be meant; None where there is none."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:  # nor is it nan
            raise self.wrong(key, f"a number from 0 to {MOST:g}")
        return float(value)

    def user(self, key: str = "user") -> str | None:
        """A user's name or number."""
        value = self.values.get(key)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, "a user's name or number")
        return str(value)

    def texts(self, key: str) -> tuple[str, ...]:
        found = self._of(key, list, ())
        if not all(isinstance(item, str) for item in found):
            raise self.wrong(key, "a list of texts")
        return tuple(found)

    def strings(self, key: str) -> dict[str, str]:
        """A table of texts, of environment variables say."""
        found = self._of(key, dict, {})
        if not all(isinstance(value, str) for value in found.values()):
            raise self.wrong(key, "a table of texts")
        return dict(found)

    def table(self, key: str) -> Table:
        """The table below; an empty one where there is none."""
        return Table(self._of(key, dict, {}), f"{self.where}, [{key}]")

    def tables(self, key: str) -> list[Table]:
        found = self._of(key, list, ())
        if not all(isinstance(item, dict) for item in found):
            raise self.wrong(key, "a list of tables")
        return [Table(item, f"{self.where}, [[{key}]] {number}") for number, item in enumerate(found, 1)]
