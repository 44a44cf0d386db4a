"""Thousands of bad requests against a real server: never an error of its own, never a hang, no growth.

    python -m benchmarks.fuzz [--requests 20000] [--seed 0] [--out FILE]

Owns: the requests (the i-th is a function of seed, i and the session: near-valid bodies of every dialect with something
wrong in them, odd headers, paths and methods, broken HTTP), and the verdict. The server is a process of its own: the
tiny model says a fixed text, everything else is what `minirllm serve` runs. Reported with the counts: the server's
memory after each tenth of the requests, resident and in blocks of Python's objects. Exits with 1 when a request got a
status of 500 or above, no answer within `PATIENCE`, or an error that is not JSON, or when memory grew by more than
`GROWTH`.
"""

from __future__ import annotations

import argparse
import copy
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from benchmarks.fuzz_bodies import BODIES, HEADERS, JUNK, METHODS
from minirllm.dialects import DIALECTS, KEEPING
from minirllm.machine import machine

ADMIN = "fuzz-admin"
PATIENCE = 20.0  # seconds that an answer may take
GROWTH = 0.1  # blocks of Python's memory a request, in the second half: what is kept for good comes in the first
FRESH = 100  # requests that one session gets


@dataclass(frozen=True)
class Place:
    """Where a request may go, and with what keys."""

    url: str
    session: str
    key: str
    answer: str  # the id of one that is kept


@dataclass(frozen=True)
class Sent:
    """A request as bytes. `whole`: it is HTTP with nothing missing, so an answer must come."""

    line: str
    data: bytes
    whole: bool


def routes() -> list[str]:
    """Every route of every dialect, without path parameters."""
    known = [route for dialect in DIALECTS.values() for route in (*dialect.COUNT, *dialect.ROUTES)]
    return [route.replace("{model}", "tiny") for route in known]


def spots(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*at, key)
        yield from spots(inner, (*at, key))


def spoil(chance: random.Random, body: Any) -> Any:
    """`body` with one thing in it changed."""
    places = list(spots(body))
    if not places or chance.random() < 0.03:
        return copy.deepcopy(chance.choice(JUNK))
    *way, last = chance.choice(places)
    holder = body
    for key in way:
        holder = holder[key]
    match chance.randrange(7):
        case 0 if isinstance(holder, dict):
            del holder[last]
        case 1:
            holder[last] = [copy.deepcopy(holder[last])]
        case 2:
            holder[last] = copy.deepcopy(body)  # once more, inside itself
        case 3 if isinstance(holder, list):
            holder += copy.deepcopy(holder)
        case 4 if isinstance(holder, dict):
            holder[chance.choice([key for *_, key in places if isinstance(key, str)])] = copy.deepcopy(
                chance.choice(JUNK)
            )
        case _:
            holder[last] = copy.deepcopy(chance.choice(JUNK))
    return body


def fitting(route: str) -> list[dict[str, Any]]:
    """Bodies that are right for `route`."""
    return next((bodies for end, bodies in BODIES.items() if route.endswith(end)), [{}])


def encoded(body: Any, place: Place) -> bytes:
    """As JSON; ``@answer`` stands for the id of an answer that is kept."""
    return json.dumps(body).replace("@answer", place.answer).encode()


def body_of(chance: random.Random, route: str, place: Place) -> bytes:
    strange = chance.random() < 0.05
    body: Any = copy.deepcopy(chance.choice(chance.choice(list(BODIES.values())) if strange else fitting(route)))
    for _ in range(chance.choice([0, 1, 1, 1, 2, 3])):
        body = spoil(chance, body)
    data = encoded(body, place)
    match chance.randrange(20):
        case 0:
            return data[: chance.randrange(len(data) + 1)]
        case 1:
            at = chance.randrange(len(data) + 1)
            return data[:at] + chance.randbytes(chance.randrange(1, 4)) + data[at + 1 :]
        case 2:
            return chance.choice(
                [b"", b"[" * 2000, b"NaN", b"\xef\xbb\xbf" + data, data * 2, b'{"a":' * 70 + b"1" + b"}" * 70]
            )
    return data


def path_of(chance: random.Random, route: str, place: Place) -> str:
    """`route` below the session, or somewhere near."""
    session = quote(place.session, safe="")
    odd = ["", "none", "%00", "%ff", "..", "%2e%2e", "a%2Fb", "x" * 300, "%", session + "/", "/" + session]
    prefix = f"/sessions/{session if chance.random() < 0.9 else chance.choice(odd)}"
    if route.startswith(("/admin", "/health")):
        return route + ("" if chance.random() < 0.5 else f"/{chance.choice(odd)}")
    path = (prefix if chance.random() < 0.9 else "") + route
    match chance.randrange(30):
        case 0:
            return path + chance.choice(["/", "/x", "?beta=true", "?a=%00&a", "#x", "%2F", ":x"])
        case 1:
            return chance.choice([path.replace("/v1", "//v1"), path.upper(), path.replace("v1", "v2"), "*", "/", "//"])
    return path


def request(chance: random.Random, place: Place) -> Sent:
    """A request near to one that is right."""
    answer = place.answer if chance.random() < 0.7 else chance.choice(["resp_0", "", "%00", "x" * 300, "input_items"])
    kept = [(method, route.replace("{id}", answer)) for keeping in KEEPING.values() for method, route in keeping.KEPT]
    others = [("GET", "/v1/models"), ("GET", ""), ("GET", "/health"), *[("POST", "/admin/sessions")] * 2]
    method, route = chance.choice([*[("POST", route) for route in routes()] * 3, *kept, *others])
    method = method if chance.random() < 0.93 else chance.choice(METHODS)
    body = b"" if method == "GET" and chance.random() < 0.8 else body_of(chance, route, place)
    key = ADMIN if route.startswith("/admin") else place.key
    headers = {"host": "x", "connection": "close", "content-length": str(len(body)), "content-type": "application/json"}
    if chance.random() < 0.95:
        headers |= chance.choice([{"authorization": f"Bearer {key}"}, {"x-api-key": key}])
    told = dict(headers)
    if chance.random() < 0.1:
        name, value = chance.choice(HEADERS)
        headers[name] = value
    line = f"{method} {path_of(chance, route, place)} HTTP/1.1"
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    data = f"{line}\r\n{head}\r\n".encode("latin-1") + body
    whole = headers["content-length"] == told["content-length"] and "transfer-encoding" not in headers
    if chance.random() < 0.03:
        at = chance.randrange(len(data))
        data, whole = data[:at] + chance.randbytes(2) + data[at + chance.randrange(9) :], False
    return Sent(line, data, whole and method != "CONNECT" and "  " not in line)


def exchange(url: str, sent: Sent) -> tuple[int, bytes]:
    """(status, body) of the answer; (0, ...) when the connection was closed without one. Raises TimeoutError."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port), timeout=PATIENCE) as connection:
        try:
            connection.sendall(sent.data)
            if not sent.whole:
                connection.shutdown(socket.SHUT_WR)  # what is missing will not come
            answer = http.client.HTTPResponse(connection, method=sent.line.partition(" ")[0])
            answer.begin()
            return answer.status, answer.read()
        except (ConnectionError, http.client.HTTPException):
            return 0, b""


def wrong(sent: Sent, status: int, body: bytes) -> str:
    """What of the answer breaks the promise; empty when nothing does."""
    if status >= 500 or b"Internal error" in body:
        return f"status {status}: {body[:300]!r}"
    if status == 0:
        return "no answer" if sent.whole else ""
    if status >= 400 and sent.whole and not sent.line.startswith("HEAD"):
        try:
            return "" if "error" in json.loads(body) else f"status {status} without an error: {body[:300]!r}"
        except ValueError:
            return f"status {status}, not JSON: {body[:300]!r}"
    return ""


def ask(url: str, method: str, path: str, key: str, body: Any = None) -> tuple[int, Any]:
    """A proper request."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    with connection.getresponse() as answer:
        status, text = answer.status, answer.read()
    connection.close()
    return status, json.loads(text)


@dataclass
class Server:
    """A server in a process of its own."""

    url: str
    process: subprocess.Popen[str]

    def memory(self) -> tuple[float, int]:
        """(resident MiB, blocks that Python's objects take)."""
        assert self.process.stdin is not None, "a pipe was asked for"
        assert self.process.stdout is not None, "a pipe was asked for"
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        blocks = int(self.process.stdout.readline())
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1), blocks


@contextmanager
def serving() -> Iterator[Server]:
    command = [sys.executable, str(Path(__file__).with_name("fuzz_server.py")), ADMIN]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as child:
        assert child.stdout is not None, "a pipe was asked for"
        yield Server(child.stdout.readline().strip(), child)
        child.communicate()


def new_session(url: str) -> Place:
    """A session with a kept answer in it."""
    _, made = ask(url, "POST", "/admin/sessions", ADMIN, {})
    path = f"/sessions/{made['id']}/v1/responses"
    status, answer = ask(url, "POST", path, made["key"], {"input": "hi"})
    assert status == 200, answer
    return Place(url, made["id"], made["key"], answer["id"])


def run(requests: int, seed: int) -> dict[str, Any]:
    """Send them all, one after another."""
    problems: list[str] = []
    statuses: Counter[str] = Counter()
    memory: list[tuple[float, int]] = []
    began = time.monotonic()
    with serving() as server:
        url = server.url
        place = new_session(url)
        for i in range(requests):
            if i % FRESH == FRESH - 1:
                ask(url, "DELETE", f"/admin/sessions/{quote(place.session, safe='')}", ADMIN)
                place = new_session(url)
            sent = request(random.Random(f"{seed}:{i}"), place)
            try:
                status, body = exchange(url, sent)
                problem = wrong(sent, status, body)
            except TimeoutError:
                status, problem = 0, f"no answer within {PATIENCE:.3g} s"
            statuses[str(status)] += 1
            if problem:
                problems.append(f"request {i}, {sent.line[:200]}: {problem}; sent {sent.data[-600:]!r}")
            if status == 201:  # a session that was asked for in a way that is right
                ask(url, "DELETE", f"/admin/sessions/{quote(json.loads(body)['id'], safe='')}", ADMIN)
            if (i + 1) * 10 // requests > i * 10 // requests:
                memory.append(server.memory())
        hello = {"messages": [{"role": "user", "content": "hi"}]}
        place = new_session(url)
        last, _ = ask(url, "POST", f"/sessions/{quote(place.session, safe='')}/v1/chat/completions", place.key, hello)
    found = {
        "requests": requests,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "statuses": dict(sorted(statuses.items())),
        "rss_mib": [rss for rss, _ in memory],
        "blocks": [blocks for _, blocks in memory],
        "growth": round((memory[-1][1] - memory[len(memory) // 2 - 1][1]) / (requests / 2), 4),
        "good_request_afterwards": last,
        "problems": problems[:20],
        "problem_count": len(problems),
    }
    return {**found, "broken": broken(found)}


def broken(found: dict[str, Any]) -> list[str]:
    """The promises that were not kept."""
    said = []
    if found["problem_count"]:
        said.append(f"{found['problem_count']} requests were not answered as they should be")
    if found["good_request_afterwards"] != 200:
        said.append(f"afterwards a good request got {found['good_request_afterwards']}")
    if found["requests"] >= 5000 and found["growth"] > GROWTH:
        said.append(f"memory grew by {found['growth']:.3g} blocks a request")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = run(options.requests, options.seed)
    text = json.dumps({**found, "machine": machine()}, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    sys.exit(bool(found["broken"]))


if __name__ == "__main__":
    main()
