"""A sandbox that says how often it was started, how many there are, how many commands were run in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from minirllm.errors import SandboxError
from minirllm.sandboxes import Command, Result
from minirllm.sandboxes.pool import ALIVE
from minirllm.sandboxes.unsafe import Unsafe


class Counted(Unsafe):
    """See the module. `fails` and `dead` say of the first, the second, ... whether it starts and lives."""

    started = live = most = execs = 0
    fails: Callable[[int], bool] = staticmethod(lambda number: False)
    dead: Callable[[int], bool] = staticmethod(lambda number: False)

    counted = False

    async def start(self) -> None:
        Counted.started += 1
        self.number = Counted.started
        await asyncio.sleep(0.02)
        if Counted.fails(self.number):
            raise SandboxError("no machine is free")
        await super().start()
        self.counted = True
        Counted.live += 1
        Counted.most = max(Counted.most, Counted.live)

    async def close(self) -> None:
        Counted.live -= self.counted
        self.counted = False
        await super().close()

    async def carry_out(self, command: Command) -> Result:
        Counted.execs += 1
        if command.argv == ALIVE and Counted.dead(self.number):
            raise SandboxError("the machine is gone")
        return await super().carry_out(command)
