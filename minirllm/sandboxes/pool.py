"""The sandboxes of a run: each prepared as its recipe says, some of them started before they are asked for.

Owns: `Pool` (`of` a run): what is started ahead, that it is alive when it is handed out, that all of it ends. Does not
know: what is done in a sandbox, when a rollout begins.

Ahead of a schedule of rollouts the first `warm` that have none get a sandbox each; never more are started than rollouts
remain, and what is left in the end is closed. One that fails to start or is dead when it is asked for is no failure:
the rollout starts its own, as without a pool. So a warm start costs one command, the one that asks whether it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from minirllm.config import Config
from minirllm.errors import SandboxError
from minirllm.sandboxes import Sandbox, Spec, kind
from minirllm.sandboxes.kept import Recipe, Snapshots, prepared

logger = logging.getLogger(__name__)

ALIVE, LIVE_SECONDS = ("/usr/bin/true",), 20.0
SETUP_SECONDS = 600.0
Started = tuple[Sandbox, AsyncExitStack]  # and how it ends


class _Place:
    """One rollout to come, and the sandbox that is started for it, if one is."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.starting: asyncio.Task[Started] | None = None


class Pool:
    """Sandboxes of one kind, `warm` of them at most before they are asked for. `setup` is a line of bash that prepares
    each one, besides what its recipe says."""

    def __init__(self, kind: str, warm: int = 0, snapshots: Snapshots = "use", setup: str = ""):
        self.kind, self.warm, self.snapshots, self.setup = kind, warm, snapshots, setup
        self.started = 0  # ahead, so far
        self._places: list[_Place] = []  # of all schedules, in their order
        self._known: dict[str, Recipe] = {}  # so that a key is reckoned once
        self._told = False

    def recipe(
        self,
        spec: Spec,
        prepare: Callable[[Sandbox], Awaitable[None]] | None = None,
        made_of: tuple[str | Path, ...] = (),
        about: str = "",
    ) -> Recipe:
        """For sandboxes of this pool."""

        async def both(box: Sandbox) -> None:
            if prepare is not None:
                await prepare(box)
            done = await box.run(self.setup, timeout=SETUP_SECONDS)
            if done.exit_code:
                raise SandboxError(f"setup failed in the sandbox: {done.stderr.strip()[-300:] or done.exit_code}.")

        made = Recipe(self.kind, spec, prepare, made_of, about)
        if self.setup:
            made = Recipe(self.kind, spec, both, (*made_of, "setup", self.setup), about)
        if self._known.get(about) != made:
            self._known[about] = made
        return self._known[about]

    @contextlib.asynccontextmanager
    async def take(self, recipe: Recipe) -> AsyncIterator[Sandbox]:
        """A running sandbox, gone at the end of the block. Raises SandboxError."""
        async with AsyncExitStack() as held:
            warm = await self._warm(recipe, held)
            yield warm if warm is not None else await held.enter_async_context(prepared(recipe, self.snapshots))

    @contextlib.asynccontextmanager
    async def ahead(self, recipes: Callable[[], Sequence[Recipe]]) -> AsyncIterator[None]:
        """Inside, so many rollouts with these recipes are to come, in about this order. `recipes` may read files."""
        places = [_Place(recipe) for recipe in await asyncio.to_thread(recipes)] if self.warm else []
        self._places += places
        self._fill()
        try:
            yield
        finally:
            self._places = [place for place in self._places if place not in places]
            await asyncio.gather(*(_end(place.starting) for place in places if place.starting), return_exceptions=True)

    async def settled(self) -> None:
        """Wait until what is being started ahead has started, or failed to."""
        if starting := [place.starting for place in self._places if place.starting is not None]:
            await asyncio.wait(starting)

    def _fill(self) -> None:
        """Start for the next places, while fewer than `warm` are waiting."""
        waiting = sum(place.starting is not None for place in self._places)
        for place in self._places:
            if waiting >= self.warm:
                return
            if place.starting is None:
                place.starting = asyncio.ensure_future(self._begin(place.recipe))
                self.started += 1
                waiting += 1

    async def _begin(self, recipe: Recipe) -> Started:
        async with AsyncExitStack() as undo:
            box = await undo.enter_async_context(prepared(recipe, self.snapshots))
            return box, undo.pop_all()

    async def _warm(self, recipe: Recipe, held: AsyncExitStack) -> Sandbox | None:
        """One that was started for such a rollout and lives; None where there is none."""
        mine = [place for place in self._places if place.recipe == recipe]
        place = next((place for place in mine if place.starting is not None), mine[0] if mine else None)
        if place is None:
            return None
        self._places.remove(place)
        self._fill()
        starting, place.starting = place.starting, None
        if starting is None:
            return None
        own = await held.enter_async_context(AsyncExitStack())
        own.push_async_callback(_end, starting)
        try:
            box, _ = await asyncio.shield(starting)
            done = await box.execute(ALIVE, timeout=LIVE_SECONDS, cwd="/")
            if done.exit_code == 0:
                return box
            why = f"exit code {done.exit_code}"
        except SandboxError as error:
            why = str(error)
        await own.aclose()
        if not self._told:
            self._told = True
            logger.warning("a sandbox that was started ahead cannot be used, so another is started: %s", why)
        return None


def of(config: Config) -> Pool | None:
    """The pool of a run; None where it has no sandbox. Raises SandboxError where none can be started. May block."""
    if not config.sandbox:
        return None
    kind(config.sandbox).check()
    return Pool(config.sandbox, config.warm, config.snapshots, config.setup)


async def _end(starting: asyncio.Task[Started]) -> None:
    """End a sandbox that was started, or is being started."""
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError, SandboxError):
        _, held = await starting
        await held.aclose()
