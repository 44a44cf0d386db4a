"""A real endpoint for agents, with an engine that says what it is told, and the simplest agent."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from minirllm import AgentConfig, Episode, Task, evaluator, harness, rollout
from minirllm.client import chat
from minirllm.config import Config, load
from minirllm.flow import TaskModule
from minirllm.rollouts import Job, Runner
from minirllm.server import Endpoint, Server
from minirllm.sessions import Sessions
from tests.fake_engine import RENDERER, FakeEngine

USER = [{"role": "user", "content": "hi"}]
TASK = Task("org/t:1", "hi", {"answer": "Hello"})


@dataclass
class Place:
    sessions: Sessions
    base: str
    engine: FakeEngine

    def runner(self, agent: Any, grade: Any = lambda task, episode: 1.0, **settings: Any) -> Runner:
        config = Config(**{"episode_timeout": 20.0, "retries": 0, **settings})
        return Runner(self.sessions, self.base, rollout(agent), evaluator(grade), config)

    async def run(self, agent: Any, grade: Any = lambda task, episode: 1.0, **settings: Any) -> Episode:
        return await self.runner(agent, grade, **settings).run(Job(TASK, 3, 5))


@asynccontextmanager
async def serving() -> AsyncIterator[Place]:
    engine = FakeEngine(lambda prompt, seed: "Hello")
    sessions = Sessions(engine, RENDERER, "tiny", max_calls=4)
    server = Server(Endpoint(sessions, model="tiny", serve_session=None, admin_key="admin", max_body=10_000))
    yield Place(sessions, await server.start(), engine)
    await server.close()


@asynccontextmanager
async def running(task: TaskModule, answer: Callable[[str, int], str], data: str = "") -> AsyncIterator[Runner]:
    """A runner of this task, whose model says `answer(prompt text, seed)`."""
    config = load(defaults={**task.defaults, "data": data, "retries": 0})
    agent = await asyncio.to_thread(harness.agent, task, config)
    sessions = Sessions(FakeEngine(answer), RENDERER, "tiny", max_calls=50)
    server = Server(Endpoint(sessions, model="tiny", serve_session=None, admin_key="admin", max_body=100_000))
    runner = Runner(sessions, await server.start(), agent, task.evaluator, config)
    try:
        yield runner
    finally:
        await runner.close()
        await server.close()


async def ask(task: Task, config: AgentConfig) -> str:
    return str((await chat(config, USER)).output)
