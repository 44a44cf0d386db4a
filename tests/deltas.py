"""What a streamed answer adds up to."""

from __future__ import annotations

from collections.abc import Iterable

from minirllm.types import Delta, Message, ToolCall


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


def check_calls(deltas: Iterable[Delta], message: Message) -> None:
    """The calls of the message were streamed piece by piece, and of other calls only such as broke."""
    streamed = calls_of(deltas)
    assert message.tool_calls == tuple(call for call in streamed if call in message.tool_calls)
    assert message.malformed or message.tool_calls == streamed
