"""rollouts.py: over a real endpoint and sessions, with an engine that says what it is told."""

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pytest

from minirllm import AgentConfig, Episode, EvalOutput, Step, Task, Trajectory
from minirllm.client import chat
from minirllm.rollouts import Job
from minirllm.types import Signal, TerminationReason
from tests.agent_server import TASK, USER, Place, ask, serving
from tests.fake_engine import RENDERER


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with serving() as it:
        yield it


async def test_a_string_answer_is_an_episode_with_all_calls(place: Place) -> None:
    def grade(task: Task, episode: Episode) -> EvalOutput:
        return EvalOutput(float(episode.answer == task.metadata["answer"]), True, [Signal("n", 2)], {"why": "equal"})

    episode = await place.run(ask, grade)
    assert (episode.reward, episode.is_correct, episode.reason) == (1.0, True, "")
    assert (episode.termination_reason, episode.signals) == (TerminationReason.ENV_DONE, {"n": 2.0})
    assert (episode.id, episode.task_id, episode.rollout_idx, episode.attempt) == ("org/t:1:3", "org/t:1", 3, 0)
    assert episode.metadata["seed"] == [0, "train", 5, "org/t:1", 3, 0]
    assert episode.metadata["evaluator"] == {"why": "equal"}
    (trajectory,) = episode.trajectories
    assert (trajectory.name, trajectory.reward, trajectory.output) == ("default", 1.0, "Hello")
    (step,) = trajectory.steps
    assert step.response is not None
    assert (step.response.content, step.response_length, step.weight_version) == ("Hello", 6, 7)
    ids, logprobs = episode.tree.response(step.node)
    assert (RENDERER.decode(ids[:-1]), len(logprobs)) == ("Hello", 6)
    assert (episode.metrics["turns"], episode.metrics["response_tokens"], episode.metrics["calls"]) == (1, 6, 1)
    assert episode.metrics["prompt_tokens"] == step.prompt_length
    assert len(list(place.sessions)) == 0


async def test_the_official_client_in_sync_and_async_agents(place: Place) -> None:
    def sync(task: Task, config: AgentConfig) -> Trajectory:
        with openai.OpenAI(base_url=config.base_url, api_key=config.api_key) as client:
            reply = client.chat.completions.create(model=config.model, messages=USER)  # type: ignore[arg-type]
        return Trajectory("solver", [Step(id=reply.id, action="say")], output=reply.choices[0].message.content)

    async def several(task: Task, config: AgentConfig) -> None:
        async with openai.AsyncOpenAI(base_url=config.base_url, api_key=config.api_key) as client:
            for _ in range(3):
                await client.chat.completions.create(model=config.model, messages=USER)  # type: ignore[arg-type]

    episode = await place.run(sync)
    assert episode.reason == ""
    assert episode.trajectories[0].name == "solver"
    assert (episode.trajectories[0].steps[0].action, episode.trajectories[0].steps[0].response_length) == ("say", 6)
    episode = await place.run(several)
    assert len(episode.trajectories[0].steps) == 3
    assert len({step.id for step in episode.trajectories[0].steps}) == 3


async def test_several_trajectories_take_the_calls_they_name(place: Place) -> None:
    async def roles(task: Task, config: AgentConfig) -> list[Trajectory]:
        calls = [await chat(config, [{"role": "user", "content": str(i)}]) for i in range(4)]
        judge = Trajectory("judge", [calls[3]], reward=0.25)
        return [Trajectory("solver", [Step(id=calls[2].id), Step(id=calls[0].id)]), judge]

    episode = await place.run(roles)
    solver, judge = episode.trajectories
    assert [step.messages[-1].content for step in solver.steps + judge.steps] == ["2", "0", "3"]
    assert (solver.reward, judge.reward) == (1.0, 0.25)
    assert episode.metrics["unclaimed_calls"] == 1


def labels(*steps: Step) -> list[Trajectory]:
    return [Trajectory("a", list(steps))]


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda ids: labels(Step(), Step(), Step()), "3 steps without ids for 2 model calls"),
        (lambda ids: [*labels(Step(id=ids[0])), Trajectory("b")], "trajectory 'b' has no steps"),
        (lambda ids: [*labels(Step(id=ids[0])), Trajectory("b", [Step()])], "trajectory 'b': No call"),
        (lambda ids: labels(Step(id="chatcmpl-0123456789abcdef")), "has the id 'chatcmpl-0123456789abcdef'"),
        (lambda ids: labels(Step(id=ids[0]), Step(id=ids[0])), "claimed by trajectory 'a' and again by 'a'"),
        (lambda ids: [3], "trajectories are Trajectory objects, got int"),
        (lambda ids: 3, "not int"),
    ],
)
async def test_steps_that_name_no_call_are_an_error(place: Place, build: Callable[..., Any], sentence: str) -> None:
    async def agent(task: Task, config: AgentConfig) -> Any:
        return build([(await chat(config, USER)).id for _ in range(2)])

    episode = await place.run(agent)
    assert (episode.termination_reason, episode.reward) == (TerminationReason.ERROR, None)
    assert sentence in episode.reason


async def test_labels_without_ids_lie_on_the_calls_of_a_single_trajectory(place: Place) -> None:
    async def agent(task: Task, config: AgentConfig) -> Trajectory:
        for _ in range(2):
            await chat(config, USER)
        return Trajectory(steps=[Step(action="x", metadata={"k": 1}), Step(action="y", done=True)])

    steps = (await place.run(agent)).trajectories[0].steps
    assert [(s.action, s.done, s.metadata, s.response_length) for s in steps] == [
        ("x", False, {"k": 1, "match": "conversation"}, 6),
        ("y", True, {"match": "conversation"}, 6),
    ]


async def test_an_agent_that_never_calls_is_an_error_that_says_so(place: Place) -> None:
    def silent(task: Task, config: AgentConfig) -> str:
        return "42"

    episode = await place.run(silent)
    assert (episode.termination_reason, episode.reward) == (TerminationReason.NO_CALLS, None)
    assert "never called the model" in episode.reason


async def test_an_agent_whose_calls_were_all_refused_is_not_said_to_have_made_none(place: Place) -> None:
    async def wordy(task: Task, config: AgentConfig) -> str:
        async with httpx.AsyncClient(base_url=config.base_url) as client:
            headers, body = {"authorization": f"Bearer {config.api_key}"}, {"messages": [{"role": "nobody"}]}
            assert (await client.post("/chat/completions", json=body, headers=headers)).status_code == 400
        return "42"

    episode = await place.run(wordy)
    assert (episode.termination_reason, episode.reward) == (TerminationReason.NO_CALLS, None)
    assert "the agent was refused every call (" in episode.reason
    assert "'nobody'" in episode.reason


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad\nthing"),
        SystemExit(2),
        StopIteration("StopIteration"),
        TimeoutError("mine"),
        asyncio.CancelledError("CancelledError"),
    ],
)
@pytest.mark.parametrize("is_async", [True, False])
async def test_whatever_an_agent_raises_becomes_a_reason(place: Place, error: BaseException, is_async: bool) -> None:
    def sync(task: Task, config: AgentConfig) -> None:
        raise error

    async def late(task: Task, config: AgentConfig) -> None:
        await chat(config, USER)
        raise error

    episode = await place.run(late if is_async else sync)
    assert (episode.termination_reason, episode.reward) == (TerminationReason.ERROR, None)
    assert str(error).split()[-1] in episode.reason
    file = "watchdog" if is_async and isinstance(error, StopIteration) else "test_rollouts"  # Python hides the line
    assert f"{file}.py line" in episode.reason
    assert "\n" not in episode.reason
    assert len(episode.trajectories[0].steps) == int(is_async)


async def test_an_interrupt_in_a_thread_is_the_agents_own(place: Place) -> None:
    def agent(task: Task, config: AgentConfig) -> None:
        raise KeyboardInterrupt("now")

    assert "KeyboardInterrupt: now" in (await place.run(agent)).reason


async def test_an_error_is_tried_again_with_another_session_key_and_seed(place: Place) -> None:
    seen: list[AgentConfig] = []

    async def flaky(task: Task, config: AgentConfig) -> str:
        seen.append(config)
        answer = await ask(task, config)
        if len(seen) < 3:
            raise ConnectionError("reset")
        return answer

    episode = await place.run(flaky, retries=2)
    assert (episode.reward, episode.attempt) == (1.0, 2)
    assert episode.metrics["retried_tokens"] == 2 * 6  # sampled, and in no tree
    assert len({c.base_url for c in seen}) == len({c.api_key for c in seen}) == 3
    assert len({seed for _, _, seed in place.engine.calls}) == 3
    seen.clear()
    assert (await place.run(flaky, retries=1)).attempt == 1


async def test_a_hanging_agent_ends_at_the_deadline_and_is_not_retried(place: Place) -> None:
    go_on, refused = threading.Event(), asyncio.Event()
    loop, late = asyncio.get_running_loop(), list[int]()

    def hang(task: Task, config: AgentConfig) -> None:
        with contextlib.suppress(SystemExit):  # by which it is told to end
            go_on.wait(20)
        key = {"Authorization": f"Bearer {config.api_key}"}
        reply = httpx.post(f"{config.base_url}/chat/completions", json={"model": "m", "messages": USER}, headers=key)
        late.append(reply.status_code)
        loop.call_soon_threadsafe(refused.set)

    episode = await place.run(hang, episode_timeout=0.3, retries=3)
    assert (episode.termination_reason, episode.attempt) == (TerminationReason.TIMEOUT, 0)
    assert episode.reason.startswith("agent did not end within 0.3 s (")
    go_on.set()
    await refused.wait()
    assert late == [410]


@pytest.mark.parametrize("where", ["agent", "evaluator"])
async def test_user_code_that_blocks_the_loop_is_named(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr("minirllm.watchdog.PATIENCE", 0.2)

    def spin() -> None:
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            pass

    async def agent(task: Task, config: AgentConfig) -> None:
        await chat(config, USER)
        if where == "agent":
            spin()

    async def grade(task: Task, episode: Episode) -> float:
        if where == "evaluator":
            spin()
        await asyncio.sleep(0.5)
        return 1.0

    (episode,) = await place.runner(agent, grade).run_many([Job(TASK)])
    assert episode.reward == 1.0
    (record,) = caplog.records  # said once, and nothing of the time that was spent waiting
    assert re.match(r"test_rollouts.py line \d+ has blocked everything for 0.2 s: ", record.getMessage())


async def test_an_agent_that_ignores_its_cancellation_is_left_behind(place: Place) -> None:
    async def stubborn(task: Task, config: AgentConfig) -> None:
        for _ in range(30):
            try:
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                continue

    episode = await place.run(stubborn, episode_timeout=0.05)
    assert episode.termination_reason is TerminationReason.TIMEOUT


@pytest.mark.parametrize(
    ("times", "why"), [(5, TerminationReason.MAX_TURNS_EXCEEDED), (1, TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED)]
)
async def test_an_episode_that_the_endpoint_stops_is_graded(place: Place, times: int, why: TerminationReason) -> None:
    async def greedy(task: Task, config: AgentConfig) -> None:
        for _ in range(times):
            await chat(config, USER)
        await chat(config, [{"role": "user", "content": "x" * 5000}])

    episode = await place.run(greedy, lambda task, episode: 0.0, retries=2)
    assert (episode.termination_reason, episode.reward, episode.attempt) == (why, 0.0, 0)
    assert len(episode.trajectories[0].steps) == min(times, 4)
    assert "HTTP 40" in episode.reason

    async def too_long(task: Task, config: AgentConfig) -> None:
        await chat(config, [{"role": "user", "content": "x" * 5000}])

    episode = await place.run(too_long)
    assert (episode.termination_reason, episode.reward) == (TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED, None)


async def test_training_samples_its_own_way_and_evaluation_as_asked(place: Place) -> None:
    async def cold(task: Task, config: AgentConfig) -> None:
        await chat(config, USER, temperature=0.2, top_p=0.5)

    async def plain(task: Task, config: AgentConfig) -> None:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {config.api_key}"}) as client:
            await client.post(f"{config.base_url}/chat/completions", json={"model": "m", "messages": USER})

    settings = {"temperature": 0.9, "eval_temperature": 0.7}
    await place.run(cold, **settings)
    await place.runner(cold, **settings).run(Job(TASK, validation=True))
    await place.runner(plain, **settings).run(Job(TASK, validation=True))
    assert [(p.temperature, p.top_p) for _, p, _ in place.engine.calls] == [(0.9, 1.0), (0.2, 0.5), (0.7, 1.0)]


async def test_seeds_differ_between_steps_in_training_and_not_in_evaluation(place: Place) -> None:
    runner = place.runner(ask)
    for step in (1, 2):
        for validation in (False, True):
            await runner.run(Job(TASK, 0, step, validation))
    train1, eval1, train2, eval2 = [seed for _, _, seed in place.engine.calls]
    assert len({train1, train2, eval1}) == 3
    assert eval1 == eval2


async def test_many_run_at_once_bounded_and_in_order(place: Place) -> None:
    running, most, ended = 0, 0, []

    async def agent(task: Task, config: AgentConfig) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05 if task.id == "0" else 0)
        answer = await ask(task, config)
        running -= 1
        return answer

    runner = place.runner(agent, concurrency=3)
    jobs = [Job(Task(str(i)), j) for i in range(4) for j in range(2)]
    episodes = await runner.run_many(jobs, lambda episode: ended.append(episode.id))
    assert [e.id for e in episodes] == [f"{i}:{j}" for i in range(4) for j in range(2)]
    assert sorted(ended) == sorted(e.id for e in episodes) != ended
    assert (most, runner.in_flight, len(list(place.sessions))) == (3, 0, 0)


async def test_an_error_of_the_listener_ends_the_rest(place: Place) -> None:
    def full(episode: Episode) -> None:
        raise OSError("disk full")

    async def agent(task: Task, config: AgentConfig) -> str:
        if task.id != "0":
            await asyncio.sleep(60)
        return await ask(task, config)

    runner = place.runner(agent)
    with pytest.raises(OSError, match="disk full"):
        await runner.run_many([Job(Task(str(i))) for i in range(5)], full)
    assert (runner.in_flight, len(list(place.sessions))) == (0, 0)


@pytest.mark.parametrize("task_id", ["a:b", "a/b", "../x", "ü %2F?#&", "x" * 500, " "])
async def test_any_task_id_can_be_called(place: Place, task_id: str) -> None:
    episode = await place.runner(ask).run(Job(Task(task_id)))
    assert (episode.reason, episode.task_id) == ("", task_id)
