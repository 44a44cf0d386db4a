"""rollouts.py: what is tried again, as which attempt, with which seeds; what late calls to earlier sessions hear."""

from collections.abc import AsyncIterator

import httpx
import pytest

from minirllm import AgentConfig, Episode, Task
from minirllm.client import chat
from minirllm.errors import EngineError
from minirllm.evaluate import evaluate
from minirllm.rollouts import Job
from minirllm.types import TerminationReason
from tests.agent_server import TASK, USER, Place, ask, serving


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with serving() as it:
        yield it


@pytest.mark.parametrize("swallows", [True, False])
async def test_an_engine_that_failed_is_not_the_agents_fault(place: Place, swallows: bool) -> None:
    """It ends the work: no episode says that the agent failed, or answered nothing."""

    async def agent(task: Task, config: AgentConfig) -> str:
        try:
            return await ask(task, config)
        except httpx.HTTPError:
            if swallows:
                return ""
            raise

    place.engine.failure = EngineError("the device is gone")
    done: list[Episode] = []
    with pytest.raises(EngineError, match="the device is gone"):
        await place.runner(agent, retries=2).run_many([Job(TASK), Job(Task("b"))], done.append)
    assert done == []
    assert len({seed for _, _, seed in place.engine.calls}) == 2  # it was tried again, as the same attempt
    assert len(place.engine.calls) >= 3
    assert list(place.sessions) == []


@pytest.mark.parametrize("failures", [1, 2])
async def test_an_engine_that_fails_leaves_no_trace_in_the_samples(place: Place, failures: int) -> None:
    """The same attempt again, with the same seed: what is sampled does not depend on whether the engine failed."""

    async def agent(task: Task, config: AgentConfig) -> str:
        uids.append(config.session_uid)
        place.engine.failure = EngineError("one bad number") if len(uids) <= failures else None
        return await ask(task, config)

    uids: list[str] = []
    episode = await place.run(agent, retries=2)
    seeds = [seed for _, _, seed in place.engine.calls]
    assert (episode.reward, episode.attempt, episode.retried) == (1.0, 0, False)
    assert len(set(seeds)) == 1
    assert len(set(uids)) == failures + 1  # so that a late call to an earlier one hears that it has ended
    undisturbed = await place.run(ask)
    assert undisturbed.metadata["seed"] == episode.metadata["seed"]
    assert place.engine.calls[-1][2] == seeds[0]


async def test_a_failed_attempt_is_reported_and_the_next_one_can_be_the_first_to_make(place: Place) -> None:
    """A resumed run knows from the report which attempt is next: it makes no attempt twice."""

    async def agent(task: Task, config: AgentConfig) -> str:
        answer = await ask(task, config)
        if config.session_uid.endswith((":0", ":1")):
            raise RuntimeError("not yet")
        return answer

    failed: list[Episode] = []
    (episode,) = await place.runner(agent, retries=3).run_many([Job(TASK)], on_retry=failed.append)
    assert [(e.attempt, e.retried, e.reason) for e in failed] == [
        (n, True, f"agent failed: RuntimeError: not yet {e.reason.partition('not yet ')[2]}".rstrip())
        for n, e in enumerate(failed[:2])
    ]
    assert (episode.attempt, episode.retried, episode.reward) == (2, False, 1.0)
    (again,) = await place.runner(agent, retries=3).run_many([Job(TASK, attempt=2)])
    assert again.metadata["seed"] == episode.metadata["seed"]
    last = await place.runner(agent, retries=0).run(Job(TASK, attempt=1))
    assert (last.attempt, last.retried, last.termination_reason) == (1, False, TerminationReason.ERROR)


async def test_a_late_call_to_an_evaluation_before_hears_that_it_has_ended(place: Place) -> None:
    configs: list[AgentConfig] = []

    async def agent(task: Task, config: AgentConfig) -> str:
        configs.append(config)
        with pytest.raises(httpx.HTTPStatusError) as late:
            await chat(configs[0], USER)
        return str(late.value.response.status_code)

    async def first(task: Task, config: AgentConfig) -> str:
        configs.append(config)
        return await ask(task, config)

    before, after = place.runner(first), place.runner(agent)
    seeds = [(await evaluate(before, [TASK], step=0)).episodes[0].metadata["seed"]]
    (episode,) = (await evaluate(after, [TASK], step=2)).episodes
    assert episode.answer == "410"
    assert episode.metadata["seed"] == seeds[0]  # the same noise, so that the difference is not noise
