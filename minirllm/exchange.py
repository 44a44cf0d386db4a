"""One model call over one HTTP exchange, in plain ASGI: read the body, run the call, send the answer as it comes.

Owns: body limits and JSON checks, streaming and keep-alive events, noticing that the client left, telling the session
that the answer was delivered. Does not know: routes, keys, what a body means.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from minirllm.dialects import Dialect
from minirllm.dialects.fields import finite, no_constant
from minirllm.dialects.openai import AnswerStream
from minirllm.errors import RequestError, SessionClosed, Stalled, TooLarge
from minirllm.recorded import AnySession
from minirllm.types import Delta, ModelReply, ModelRequest

MAX_DEPTH = 64  # of nested lists and objects
MAX_VALUES = 250_000  # in one body; a prompt may be a list of token ids
STALLED = 30.0  # seconds that a client may take to send a request, or to read what waits for it
LINGER = 2.0  # seconds that the rest of a refused body is read and dropped, so that the client gets to read the refusal
SHUTTING_DOWN = "The server is shutting down."
LONE_SURROGATE = re.compile("[\ud800-\udfff]")

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ClientGone(Exception):
    """The client closed the connection before its answer was sent."""


async def read_body(headers: Mapping[str, str], receive: Receive, max_body: int) -> bytes:
    """The body of a JSON request. Raises RequestError with 408, 413 or 415, ClientGone when it does not arrive."""
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise RequestError(
            f"Send JSON with the header 'Content-Type: application/json', not {kind[:100]!r}.", status=415
        )
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise RequestError("Send the body uncompressed, without Content-Encoding.", status=415)
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_body:
        raise TooLarge(f"The body has {length[:20]} bytes; at most {max_body} are accepted.")
    raw, more = bytearray(), True
    try:
        async with asyncio.timeout(STALLED):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                raw += message.get("body", b"")
                if len(raw) > max_body:
                    raise TooLarge(f"The body is larger than the {max_body} bytes that are accepted.")
                more = message.get("more_body", False)
    except TimeoutError:
        raise Stalled(f"The body did not arrive within {STALLED:.3g} s.") from None
    return bytes(raw)


def decode_json(raw: bytes) -> Any:
    """Strict JSON: UTF-8, no NaN, at most MAX_DEPTH deep and MAX_VALUES large. A lone surrogate becomes U+FFFD."""
    if not raw.strip():
        raise RequestError("The body is empty: send a JSON object.")
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=no_constant, parse_float=finite)
        _count(value, MAX_DEPTH, 0)
    except UnicodeDecodeError as error:
        raise RequestError(f"The body is not valid UTF-8 (byte {error.start}).") from None
    except RecursionError:
        raise RequestError(f"The body is nested more than {MAX_DEPTH} levels deep.") from None
    except ValueError as error:
        raise RequestError(f"The body is not valid JSON: {error}.") from None
    if b"\\ud" in raw.lower():
        return json.loads(LONE_SURROGATE.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
    return value


def _count(value: Any, depth: int, seen: int) -> int:
    """`seen` and the values in `value`. Raises RecursionError beyond `depth`, RequestError beyond MAX_VALUES."""
    if not isinstance(value, dict | list):
        return seen
    if depth == 0:
        raise RecursionError
    seen += len(value)
    if seen > MAX_VALUES:
        raise RequestError(f"The body holds more than {MAX_VALUES} values.")
    for child in value.values() if isinstance(value, dict) else value:
        seen = _count(child, depth - 1, seen)
    return seen


class Exchange:
    """The sending half of one HTTP request. Exactly one of `run`, `answer` and `fail` ends it."""

    def __init__(self, receive: Receive, send: Send, dialect: Dialect, keep_alive: float):
        self.receive, self.send, self.dialect, self.keep_alive = receive, send, dialect, keep_alive
        self.stream: AnswerStream | None = None  # once events have begun
        self.begun = False  # status and headers are out
        self.call: asyncio.Task[ModelReply] | None = None
        self.stopping = False
        self.session: AnySession | None = None  # once its key was shown

    def stop(self) -> None:
        """The server is shutting down: end the call; the client is told."""
        self.stopping = True
        if self.call is not None:
            self.call.cancel()

    async def answer(self, body: Mapping[str, Any]) -> None:
        """Send JSON that took no model call."""
        text = json.dumps(body, allow_nan=False).encode()
        await self._begin(200, "application/json", len(text))
        await self._body(text, last=True)

    async def run(self, session: AnySession, request: ModelRequest) -> None:
        """Make the call and send its answer. Raises what the call raises, and ClientGone."""
        if self.stopping:
            raise RequestError(SHUTTING_DOWN, status=503)
        news: asyncio.Queue[Delta | None] = asyncio.Queue()  # None: the call ended or the client left
        on_delta = news.put_nowait if request.stream else None
        self.call = call = asyncio.create_task(session.call(request, on_delta))
        gone = asyncio.create_task(self._gone())
        for task in (call, gone):
            task.add_done_callback(lambda _: news.put_nowait(None))
        try:
            if request.stream:
                stream = self.dialect.Stream(request, session.token_text, session.model)
                await self._events(stream, call, gone, news)
                body = "".join(stream.finish(_result(call, self.stopping)))
            else:
                await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not call.done():
                    raise ClientGone
                reply = _result(call, self.stopping)
                body = json.dumps(self.dialect.response(reply, request, session.token_text), allow_nan=False)
                await self._begin(200, "application/json", len(body))
            await self._body(body.encode())
            await self._body(b"")  # returns when the client has taken enough of what was sent before, or has left
            if gone.done():
                raise ClientGone
            await self._body(b"", last=True)
            session.delivered(call.result().id)
        finally:
            if call.done() and not call.cancelled() and call.exception() is None:
                session.lost(call.result().id)  # says nothing of a delivered one
            for task in (call, gone):
                task.cancel()
            await asyncio.gather(call, gone, return_exceptions=True)

    async def _events(
        self,
        stream: AnswerStream,
        call: asyncio.Task[ModelReply],
        gone: asyncio.Task[None],
        news: asyncio.Queue[Delta | None],
    ) -> None:
        """Send events until the call ends, the first when the prompt is accepted: a refusal has a status."""
        clock = asyncio.get_running_loop().time
        silent_until = clock() + self.keep_alive
        while not (call.done() and news.empty()):
            delta = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(silent_until):
                    delta = await news.get()
            if gone.done():
                raise ClientGone
            frames = []
            if delta is not None:
                if delta.reply_id:
                    stream.accepted(delta.reply_id, delta.prompt_ids)
                await self._start(stream)
                frames = stream.delta(delta)
            if not frames and clock() >= silent_until:  # also while a tool call is sampled, which is sent when whole
                frames = stream.keep_alive()
            if frames:
                await self._start(stream)
                await self._body("".join(frames).encode())
                silent_until = clock() + self.keep_alive
        _result(call, self.stopping)
        await self._start(stream)

    async def _start(self, stream: AnswerStream) -> None:
        if self.stream is None:
            self.stream = stream
            await self._begin(200, "text/event-stream; charset=utf-8")
            await self._body("".join(stream.start()).encode())

    async def fail(self, problem: RequestError) -> None:
        """Tell the client: an error response, or an error event when the answer has begun."""
        if self.stream is not None:
            await self._body("".join(self.stream.fail(problem)).encode(), last=True)
        elif not self.begun:  # else: half an answer is out, the connection is closed
            body = json.dumps(self.dialect.error(problem)).encode()
            refused = isinstance(problem, TooLarge | Stalled)
            await self._begin(problem.status, "application/json", len(body), close=refused)
            await self._body(body)
            if refused:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LINGER):
                        while (await self.receive()).get("more_body", False):
                            pass
            await self._body(b"", last=True)

    async def _gone(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def _begin(self, status: int, content_type: str, length: int | None = None, close: bool = False) -> None:
        headers = [(b"content-type", content_type.encode()), (b"cache-control", b"no-store")]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        if close:
            headers.append((b"connection", b"close"))
        self.begun = True
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def _body(self, body: bytes, last: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": not last})


def _result(call: asyncio.Task[ModelReply], stopping: bool) -> ModelReply:
    """The reply; a call that was cancelled from elsewhere becomes an error the client can read."""
    if call.cancelled():
        if stopping:
            raise RequestError(SHUTTING_DOWN, status=503)
        raise SessionClosed("The session was closed while this call was running.")
    return call.result()
