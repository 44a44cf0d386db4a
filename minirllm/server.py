"""The HTTP endpoint: routes, keys, errors, and a server that runs inside the current event loop.

Owns: the Starlette app and uvicorn. Does not know: tokens, templates, what a dialect's fields mean. Load is never
answered with 429: calls wait in the engine's queue while keep-alive events flow.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import resource
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote
from weakref import WeakKeyDictionary

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from minirllm.dialects import DIALECTS, KEEPING, KeepingDialect
from minirllm.dialects.kept import Kept
from minirllm.dialects.openai import error as openai_error
from minirllm.errors import EngineError, QuotaExceeded, RequestError, Stalled, Unauthorized, UserError
from minirllm.exchange import STALLED, ClientGone, Exchange, decode_json, read_body
from minirllm.recorded import AnySession
from minirllm.sessions import Sessions
from minirllm.types import ModelRequest

logger = logging.getLogger(__name__)

MAX_BODY = 16 * 2**20  # bytes
MAX_HEADERS = 64 * 2**10  # bytes
KEEP_ALIVE = 5.0  # seconds between events of a silent stream; the most impatient client's timer is 120 s
IDLE_CONNECTION = 75  # seconds; longer than most clients pool a connection, so that they close first
INTERNAL = "Internal error; see the server's log."
KEY_HEADERS = ("x-api-key", "x-goog-api-key")  # where Anthropic's and Google's clients put it
SPARE = 100  # calls of one session that may be open or refused besides its quota: mistakes, retries
SHUTDOWN = 1  # seconds that answers in flight get


@dataclass(eq=False)
class Endpoint:
    """The routes, and what they share."""

    sessions: Sessions
    model: str
    serve_session: Callable[[], AnySession] | None = None  # gives that of calls to ``/v1`` without one; None: refused
    admin_key: str = ""  # empty: the admin routes are off
    max_body: int = MAX_BODY  # bytes
    keep_alive: float = KEEP_ALIVE  # seconds
    exchanges: set[Exchange] = field(default_factory=set)  # the model calls in flight
    _kept: WeakKeyDictionary[AnySession, Kept] = field(default_factory=WeakKeyDictionary)

    def session(self, sid: str | None, headers: Mapping[str, str]) -> AnySession:
        """The open session a request belongs to, its key checked. Raises RequestError with 401, 404 or 410."""
        if sid is not None:
            session = self.sessions.get(sid)
        elif self.serve_session is not None:
            session = self.serve_session()
        else:
            base = "use the base URL /sessions/ID/v1 that the session was given"
            raise RequestError(f"This server serves sessions only: {base}.", status=404)
        check_key(headers, session.key)
        return session

    def admit(self, session: AnySession) -> None:
        """Raises QuotaExceeded, before its body is read, for a call of a session that has more calls open than it may
        make, or was refused as often: an agent that floods costs little."""
        calls = sum(exchange.session is session for exchange in self.exchanges)
        if max(calls, session.refused) >= session.max_calls + SPARE:
            session.refused += 1
            counts = f"{calls} open and {session.refused} refused calls"
            raise QuotaExceeded(f"Session {session.id!r} may make {session.max_calls} model calls and has {counts}.")

    def kept(self, session: AnySession) -> Kept:
        """The answers of the session that can be asked for again. They go when it goes."""
        return self._kept.setdefault(session, Kept(session.steps))

    def parse(self, name: str, body: Any, route: str, session: AnySession) -> ModelRequest:
        """The request that a body is in the dialect of this name."""
        keeping = KEEPING.get(name)
        return keeping.parse(body, route, self.kept(session)) if keeping else DIALECTS[name].parse(body, route)

    def recall(self, keeping: KeepingDialect, method: str, route: str) -> Callable[..., Any]:
        """The app of a route on kept answers."""

        async def app(request: Request) -> Response:
            session = self.session(request.path_params.get("sid"), request.headers)
            id, query = request.path_params["id"], request.query_params
            return JSONResponse(keeping.recall(method, route, id, query, self.kept(session)))

        return app

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "model": self.model})

    async def base(self, request: Request) -> Response:
        """Some clients probe their base URL by HEAD before the first call; nothing else is there."""
        if request.method != "HEAD":
            raise HTTPException(404)
        self.sessions.get(request.path_params["sid"])
        return Response()

    async def models(self, request: Request) -> Response:
        session = self.session(request.path_params.get("sid"), request.headers)
        card = {"id": session.model, "object": "model", "created": 0, "owned_by": "minirllm"}
        return JSONResponse({"object": "list", "data": [card]})

    def admin(self, request: Request) -> None:
        """Raises unless the request carries the admin key."""
        if not self.admin_key:
            raise RequestError("Admin routes are off: the server was started without an admin key.", status=404)
        check_key(request.headers, self.admin_key)

    async def list_sessions(self, request: Request) -> Response:
        self.admin(request)
        return JSONResponse({"object": "list", "data": [describe(session) for session in self.sessions]})

    async def create_session(self, request: Request) -> Response:
        """Optional body ``{"id": ...}``. Answers with the id, the key and the base URL for an agent."""
        self.admin(request)
        raw = await read_body(request.headers, request.receive, self.max_body)
        body = decode_json(raw) if raw.strip() else {}
        sid = body.get("id") if isinstance(body, dict) else body
        if sid is None:
            sid = secrets.token_urlsafe(12)
        if not isinstance(sid, str) or not 0 < len(sid) <= 200 or not sid.isprintable() or sid in (".", ".."):
            raise RequestError("id must be a string of 1 to 200 printable characters, and not . or .. alone.", "id")
        if sid in self.sessions:
            raise RequestError(f"There is already a session {sid!r}.", status=409)
        session = self.sessions.create(sid, seed_parts=("admin", sid))
        base_url = f"{str(request.base_url).rstrip('/')}/sessions/{quote(sid, safe='')}/v1"
        return JSONResponse({**describe(session), "key": session.key, "base_url": base_url}, 201)

    async def one_session(self, request: Request) -> Response:
        """GET describes, DELETE closes."""
        self.admin(request)
        sid = request.path_params["sid"]
        session = self.sessions.get(sid)
        if request.method == "DELETE":
            self.sessions.close(sid)
        return JSONResponse(describe(session))


def describe(session: AnySession) -> dict[str, Any]:
    """What an admin sees of a session; never its key."""
    return {
        "id": session.id,
        "object": "session",
        "model": session.model,
        "closed": session.closed,
        "counters": dict(session.counters),
    }


def check_key(headers: Mapping[str, str], key: str) -> None:
    """Raises Unauthorized unless a header carries the key: ``Authorization: Bearer KEY``, or one of KEY_HEADERS. An
    empty key means that none is needed."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    shown = [given.strip() if scheme.lower() == "bearer" else "", *(headers.get(name, "") for name in KEY_HEADERS)]
    right = [hmac.compare_digest(one.encode(), key.encode()) for one in shown]  # all of them: constant time
    if key and not any(right):
        raise Unauthorized(
            "The API key is missing or wrong: send 'Authorization: Bearer KEY' or 'x-api-key: KEY' with the key that "
            "came with this base URL."
        )


class ModelRoute:
    """The ASGI app of one route of a dialect."""

    def __init__(self, endpoint: Endpoint, name: str, route: str):
        self.endpoint, self.name, self.dialect, self.route = endpoint, name, DIALECTS[name], route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        exchange = Exchange(receive, send, self.dialect, self.endpoint.keep_alive)
        self.endpoint.exchanges.add(exchange)
        try:
            session = self.endpoint.session(scope["path_params"].get("sid"), headers)
            self.endpoint.admit(session)
            exchange.session = session
            body = await read_body(headers, receive, self.endpoint.max_body)
            request = self.endpoint.parse(self.name, decode_json(body), self.route, session)
            if counted := self.dialect.COUNT.get(self.route):
                await exchange.answer(counted(session.count(request)))
            else:
                await exchange.run(session, request)
        except ClientGone:
            logger.debug("client left: %s", scope["path"])
        except RequestError as problem:
            if exchange.session is not None:
                exchange.session.refused += 1
                exchange.session.refusal = str(problem)
            if isinstance(problem, Stalled):
                logger.warning("%s: %s", scope["path"], problem)
            await exchange.fail(problem)
        except UserError as problem:
            await exchange.fail(RequestError(str(problem)))
        except EngineError as problem:
            cause = problem if problem.__cause__ is not None else None
            logger.error("the engine cannot serve %s: %s", scope["path"], problem, exc_info=cause)
            await exchange.fail(RequestError("The engine cannot serve this call; see the server's log.", status=503))
        except Exception:
            logger.exception("internal error in %s", scope["path"])
            await exchange.fail(RequestError(INTERNAL, status=500))
        finally:
            self.endpoint.exchanges.discard(exchange)


async def _request_error(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, RequestError)
    return JSONResponse(openai_error(problem), problem.status)


async def _http_error(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    text = {
        404: f"There is no route {request.method} {request.url.path[:200]}.",
        405: f"{request.method} is not allowed here.",
    }
    shaped = RequestError(text.get(problem.status_code, problem.detail), status=problem.status_code)
    route = request.scope.get("endpoint")  # that of a route whose method this is not
    shape = route.dialect.error if isinstance(route, ModelRoute) else openai_error
    return JSONResponse(shape(shaped), problem.status_code, headers=problem.headers)


async def _client_gone(request: Request, problem: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it


async def _internal_error(request: Request, problem: Exception) -> Response:
    return JSONResponse(openai_error(RequestError(INTERNAL, status=500)), 500)


def build_app(endpoint: Endpoint) -> Starlette:
    """Its routes as an ASGI app."""
    one = "/sessions/{sid:path}"  # an id may hold ':' and '/', percent-encoded or not
    routes = [Route("/health", endpoint.health)]
    for name, dialect in DIALECTS.items():
        for route in (*dialect.COUNT, *dialect.ROUTES):
            app = ModelRoute(endpoint, name, route)
            routes += [Route(at + route, app, methods=["POST"]) for at in (one, "")]
    for keeping in KEEPING.values():
        for method, route in keeping.KEPT:
            recall = endpoint.recall(keeping, method, route)
            routes += [Route(at + route, recall, methods=[method]) for at in (one, "")]
    routes += [Route(f"{at}/v1/models", endpoint.models) for at in (one, "")]
    routes += [Route(at, endpoint.base, methods=["HEAD", "GET", "POST"]) for at in (f"{one}/v1", one)]
    routes += [
        Route("/admin/sessions", endpoint.list_sessions),
        Route("/admin/sessions", endpoint.create_session, methods=["POST"]),
        Route("/admin/sessions/{sid:path}", endpoint.one_session, methods=["GET", "DELETE"]),
    ]
    handlers: dict[Any, Any] = {
        RequestError: _request_error,
        HTTPException: _http_error,
        ClientGone: _client_gone,
        Exception: _internal_error,
    }
    return Starlette(routes=routes, exception_handlers=handlers)


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals belong to the program, not to its endpoint


class _Connection(H11Protocol):
    """When half of the files that the process may open are connections, one without a request gives way."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
            others = (c for c in self.connections if c is not self and isinstance(c, _Connection))
            next((c for c in others if c.cycle is None or c.cycle.response_complete), self).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Of one that was reset uvicorn keeps the timer, and so the connection and its last request, to the end."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def stalls(self) -> bool:
        """Does its client keep us waiting: for the rest of a request, or until it reads what we have sent?"""
        unsent = self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and self.timeout_keep_alive_task is None
        return unsent or self.transport.get_write_buffer_size() > 0


class Server:
    """Serves an endpoint inside the running event loop."""

    def __init__(self, endpoint: Endpoint):
        self.endpoint = endpoint
        self._uvicorn: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen (port 0: a free one); returns the base URL without ``/v1``. Raises UserError if the port is taken."""
        try:
            listener = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
            )
        except OSError as error:
            raise UserError(f"Cannot listen on {host}:{port}: {error.strerror}. Choose another host or port.") from None
        # accepted sockets inherit it; asyncio sets it only on those made for TCP by number. Without: 40 ms an answer
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port = listener.getsockname()[1]
        config = uvicorn.Config(
            build_app(self.endpoint),
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=2048,
            h11_max_incomplete_event_size=MAX_HEADERS,
            timeout_keep_alive=IDLE_CONNECTION,
            timeout_graceful_shutdown=SHUTDOWN,
        )
        self._uvicorn = _Uvicorn(config)
        self._task = asyncio.create_task(self._uvicorn.serve(sockets=[listener]))
        while not self._uvicorn.started:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.005)
        self._sweeper = asyncio.create_task(self._sweep(self._uvicorn.server_state.connections))
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def _sweep(self, connections: set[Any]) -> None:
        """Close connections whose clients keep us waiting for longer than STALLED: uvicorn would wait for ever."""
        since: WeakKeyDictionary[_Connection, float] = WeakKeyDictionary()
        while True:
            await asyncio.sleep(STALLED / 4)
            _close_stalled(connections, since)

    async def close(self) -> None:
        """End calls in flight (their clients get an error), then whatever hangs. May be called twice."""
        if self._uvicorn is None or self._task is None or self._sweeper is None:
            return
        self._sweeper.cancel()
        for exchange in list(self.endpoint.exchanges):
            exchange.stop()
        answering = self._uvicorn.server_state.tasks
        if answering:
            await asyncio.wait(answering, timeout=SHUTDOWN)
        for connection in list(self._uvicorn.server_state.connections):
            connection.transport.abort()
        self._uvicorn.should_exit = True
        await self._task
        self._uvicorn = None


def _close_stalled(connections: set[Any], since: WeakKeyDictionary[_Connection, float]) -> None:
    now = time.monotonic()
    for connection in list(connections):
        if not connection.stalls():
            since.pop(connection, None)
        elif now - since.setdefault(connection, now) >= STALLED:
            where = connection.scope["path"] if connection.scope else "no request yet"
            logger.warning("a client neither sent nor read for %.3g s (%s): closed", now - since[connection], where)
            connection.transport.abort()
