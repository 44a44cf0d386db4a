"""What a streamed answer adds up to."""

from __future__ import annotations

from collections.abc import Iterable

from minirllm.types import Delta, ToolCall


def calls_of(deltas: Iterable[Delta]) -> tuple[ToolCall, ...]:
    """The tool calls that these pieces make. Fails when a piece belongs to no call that was begun."""
    calls: list[ToolCall] = []
    for piece in (piece for delta in deltas for piece in delta.calls):
        if piece.id:
            assert piece.index == len(calls), "calls begin in their order"
            calls.append(ToolCall(piece.id, piece.name, piece.arguments))
        else:
            known = calls[piece.index]
            calls[piece.index] = ToolCall(known.id, known.name, known.arguments + piece.arguments)
    return tuple(calls)
