"""Bad requests to a real server, the short form of `make fuzz`; and that each broken promise is noticed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import fuzz


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with fuzz.serving() as server:
        yield server.url


@pytest.fixture
def place(server: str) -> fuzz.Place:
    return fuzz.new_session(server)


@given(chance=st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_breaks_the_server(place: fuzz.Place, chance: random.Random) -> None:
    sent = fuzz.request(chance, place)
    status, body = fuzz.exchange(place.url, sent)
    assert fuzz.wrong(sent, status, body) == ""


@pytest.mark.parametrize("route", fuzz.routes())
def test_bodies_are_right_before_they_are_spoiled(place: fuzz.Place, route: str) -> None:
    """Else all would be refused for the same reason."""
    path = f"/sessions/{place.session}{route}"
    for body in fuzz.fitting(route):
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {place.key}\r\n"
        data = fuzz.encoded(body, place)
        sent = fuzz.Sent("POST", f"{head}content-length: {len(data)}\r\n\r\n".encode() + data, True)
        status, answer = fuzz.exchange(place.url, sent)
        assert status == 200, answer


def test_a_request_can_be_made_again(place: fuzz.Place) -> None:
    first, again, other = (fuzz.request(random.Random(seed), place) for seed in ("0:1", "0:1", "0:2"))
    assert first == again != other


WHOLE = fuzz.Sent("POST /v1/x HTTP/1.1", b"", True)


@pytest.mark.parametrize(
    ("sent", "status", "body"),
    [
        (WHOLE, 500, b'{"error": {}}'),
        (WHOLE, 503, b'{"error": {}}'),
        (WHOLE, 200, b'data: {"error": {"message": "Internal error; see the log."}}'),
        (WHOLE, 0, b""),
        (WHOLE, 400, b"<html>"),
        (WHOLE, 400, b"{}"),
    ],
)
def test_what_is_wrong_is_noticed(sent: fuzz.Sent, status: int, body: bytes) -> None:
    assert fuzz.wrong(sent, status, body) != ""


def test_what_is_right_is_not(place: fuzz.Place) -> None:
    assert fuzz.wrong(WHOLE, 200, b"{}") == fuzz.wrong(WHOLE, 404, b'{"error": {}}') == ""
    assert fuzz.wrong(fuzz.Sent("POST", b"", False), 0, b"") == ""  # half a request may get no answer


def test_every_broken_promise_is_noticed() -> None:
    kept = {"problem_count": 0, "good_request_afterwards": 200, "requests": 10_000, "growth": 0.0}
    assert fuzz.broken(kept) == []
    for change in ({"problem_count": 1}, {"good_request_afterwards": 410}, {"growth": 0.2}):
        assert len(fuzz.broken({**kept, **change})) == 1


def test_the_long_form() -> None:
    """Its own loop and report, in small."""
    found = fuzz.run(150, seed=1)
    assert found["broken"] == []
    assert (sum(found["statuses"].values()), len(found["rss_mib"])) == (150, 10)
    assert {"200", "400"} <= set(found["statuses"])
