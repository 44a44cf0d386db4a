"""One chat completion of a provider, over HTTP: streamed, retried while that helps, ended when it hangs.

Owns: the HTTP client, the key's way to the provider, retries and their waits. Does not know: sessions, dialects.

A provider that is busy, failing or not to be reached is asked again, after the pause that it names or one that doubles;
not once a piece of the answer was passed on, and not when it has said nothing for long: that may have cost as much as
an answer. What it says in errors is repeated without the key.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from minirllm.errors import ProviderError, RequestError
from minirllm.providers import Provider, wire
from minirllm.providers.wire import Reading

logger = logging.getLogger(__name__)

ATTEMPTS = 6  # with FIRST_WAIT, half a minute in all
FIRST_WAIT = 1.0  # seconds
LONGEST_WAIT = 60.0  # seconds; a provider that asks for more is not waited for
SILENCE = 300.0  # seconds that a provider may send nothing
CONNECT = 15.0  # seconds
MAX_REFUSAL = 64 * 2**10  # bytes of an error that are read


class _Failed(Exception):
    """An attempt that failed, as `problem`; another may not, after `wait` seconds (None: a doubling pause)."""

    def __init__(self, problem: RequestError, wait: float | None = None):
        self.problem, self.wait = problem, wait


@dataclass
class Upstream:
    """A provider and the connections to it."""

    provider: Provider
    client: httpx.AsyncClient
    answered: bool = False  # at least once: then a 403 is about the request

    async def chat(
        self, body: Mapping[str, Any], reading: Callable[[], Reading], accepted: Callable[[], None], again: bool
    ) -> Reading:
        """The whole answer to `body`. `reading` makes what reads one attempt, `accepted` is called once the provider
        begins to answer; `again`: nobody hears the pieces, so a broken answer may be asked for anew.

        Raises RequestError with the status that the caller's client understands, ProviderError where no call will do.
        """
        renamed = {self.provider.renamed.get(name, name): value for name, value in body.items()}
        content = json.dumps(renamed, allow_nan=False).encode()
        for attempt in range(1, ATTEMPTS + 1):
            read = reading()
            try:
                await self._attempt(content, read, accepted)
                self.answered = True
                return read
            except _Failed as failed:
                wait = failed.wait or FIRST_WAIT * 2 ** (attempt - 1) * random.uniform(0.75, 1.25)
                if attempt == ATTEMPTS or wait > LONGEST_WAIT or (read.begun and not again):
                    raise failed.problem from None
                logger.warning("%s Asked again in %.2g s.", failed.problem.message, wait)
                await asyncio.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, content: bytes, read: Reading, accepted: Callable[[], None]) -> None:
        """One exchange. Raises _Failed where another may succeed."""
        name = self.provider.name
        try:
            async with self.client.stream("POST", f"{self.provider.base_url}/chat/completions", content=content) as got:
                if got.status_code != 200:
                    await self._refused(got)
                accepted()
                await self._read(got, read)
        except httpx.ReadTimeout:
            raise RequestError(f"{name} sent nothing for {self.client.timeout.read:.3g} s.", status=504) from None
        except httpx.RequestError as error:
            what = (
                "could not be reached" if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) else "broke off"
            )
            words = f"{name} {what} ({self._clean(str(error)) or type(error).__name__})."
            raise _Failed(RequestError(words, status=502)) from None

    async def _read(self, got: httpx.Response, read: Reading) -> None:
        """Every event of the answer, which must come to its end."""
        whole = "json" in got.headers.get("content-type", "")
        ended = False
        try:
            async for data in _whole(got) if whole else wire.events(got.aiter_bytes()):
                if data == "[DONE]":
                    ended = True
                    break
                value = json.loads(data)
                if error := value.get("error"):
                    self._failed_inside(error)
                read.event(value)
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            words = f"{self.provider.name} sent what is no chat completion ({self._clean(str(error))})."
            raise _Failed(RequestError(words, status=502)) from None
        if not (ended or read.finish):
            raise _Failed(RequestError(f"{self.provider.name} ended its answer in the middle.", status=502))

    def _failed_inside(self, error: Any) -> None:
        """An error in place of an event."""
        code = error.get("code") if isinstance(error, dict) else None
        status = code if isinstance(code, int) and 400 <= code < 600 else 502
        problem = wire.refusal(self.provider.name, status, self._clean(json.dumps({"error": error})))
        raise _Failed(problem) if status >= 500 or status in (408, 429) else problem

    async def _refused(self, got: httpx.Response) -> None:
        """Raises what a status other than 200 means."""
        raw, status = bytearray(), got.status_code
        async for chunk in got.aiter_bytes():
            raw += chunk
            if len(raw) > MAX_REFUSAL:
                break
        problem = wire.refusal(self.provider.name, status, self._clean(raw[:MAX_REFUSAL].decode(errors="replace")))
        if status == 403 and self.answered:
            problem = RequestError(problem.message, status=403)
        temporary = status in (408, 409, 425, 429) or (status >= 500 and status != 501)
        if temporary and not isinstance(problem, ProviderError):
            raise _Failed(problem, retry_after(got.headers))
        raise problem

    def _clean(self, text: str) -> str:
        """What a provider says, without the key, on one line."""
        text = text.replace(self.provider.key, "[key]") if self.provider.key else text
        return " ".join(text.split())


async def _whole(got: httpx.Response) -> AsyncIterator[str]:
    yield (await got.aread()).decode()


def retry_after(headers: Mapping[str, str]) -> float | None:
    """How many seconds a provider asks to wait, in any of the forms in use; None when it does not."""
    for header, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(header, "")
        try:
            return max(0.0, float(value) * unit)
        except ValueError:
            date = email.utils.parsedate_tz(value) if value else None
            if date is not None:
                return max(0.0, email.utils.mktime_tz(date) - time.time())
    return None


@asynccontextmanager
async def connected(provider: Provider) -> AsyncIterator[Upstream]:
    """The provider, reached through the proxy that the environment names, if it names one."""
    headers = {"Authorization": f"Bearer {provider.key}"} if provider.key else {}
    headers["Content-Type"] = "application/json"
    tls = await asyncio.to_thread(httpx.create_ssl_context)  # reads the certificate store
    async with httpx.AsyncClient(
        headers=headers,
        verify=tls,
        timeout=httpx.Timeout(SILENCE, connect=CONNECT, pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
    ) as client:
        yield Upstream(provider, client)
