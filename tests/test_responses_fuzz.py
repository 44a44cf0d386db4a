"""Any body, any answer: whatever stands anywhere in a request is understood or refused by name, and whatever a model
says, in whatever pieces, is told in events that agree with the whole answer."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from minirllm.dialects import responses
from minirllm.types import CallDelta, Delta, Message, ToolCall
from tests.bodies import changed
from tests.test_fields import outcome
from tests.test_responses import ID, parse, reply, text_of
from tests.test_responses_items import AGENTS, CALL, OUT, PATCH, RUN, THOUGHT, said
from tests.test_responses_stream import events

BODY = {
    "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "message", "role": "user", "content": "hi"},
        THOUGHT, said("I look."), CALL, OUT,
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "a"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "more"}]},
    ],
    "instructions": "be brief", "tools": [RUN, PATCH, AGENTS, {"type": "web_search"}], "include": ["x"],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "run"}]},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}, "verbosity": "low"},
    "reasoning": {"effort": "low"}, "metadata": {"a": "b"}, "temperature": 0.5, "top_p": 1, "max_output_tokens": 9,
    "top_logprobs": 2, "stream": True, "store": True, "previous_response_id": None, "parallel_tool_calls": True,
}  # fmt: skip


@settings(deadline=None)
@given(body=changed(BODY))
def test_any_change_to_a_body_is_understood_or_refused_in_a_sentence(body) -> None:
    request = outcome(responses, body)
    if isinstance(request, str):
        assert 10 < len(request) < 2000
    else:
        answer = responses.response(reply(Message("assistant", "x", (ToolCall("c", "patch", "{}"),))), request, text_of)
        assert answer["status"] == "completed"


TEXT = st.text(max_size=6)
ARGUMENTS = st.dictionaries(TEXT, TEXT, max_size=2).map(json.dumps)
NAMES = st.sampled_from(["run", "patch", "spawn", "agents__run", "other"])
PIECES = st.one_of(
    st.builds(Delta, st.just(0), text=TEXT, reasoning=st.sampled_from(["", "hm"])),
    st.tuples(NAMES, ARGUMENTS, st.integers(0, 6)),  # a call, and where it is cut in two
)


@settings(deadline=None)
@given(
    pieces=st.lists(PIECES, max_size=6), broken=st.none() | TEXT | ARGUMENTS, cut=st.booleans(), heard=st.integers(0, 6)
)
def test_any_answer_in_any_pieces_is_told_in_events_that_agree(pieces, broken, cut, heard) -> None:
    """`broken`: arguments of a call at the end that turned out to be none. `heard`: how many pieces came before the end
    told the rest."""
    deltas, calls, texts, thoughts = [], [], [], []
    for piece in pieces:
        if isinstance(piece, Delta):
            deltas.append([piece])
            texts.append(piece.text)
            thoughts.append(piece.reasoning)
        else:
            name, arguments, at = piece
            id = f"call_{ID}_{len(calls)}"
            first, rest = (
                CallDelta(len(calls), id, name, arguments[:at]),
                CallDelta(len(calls), arguments=arguments[at:]),
            )
            calls.append(ToolCall(id, name, arguments))
            deltas.append([Delta(0, calls=(first,)), Delta(0, calls=(rest,))])
    message = Message("assistant", "".join(texts), tuple(calls), reasoning="".join(thoughts))
    if broken is not None:
        deltas.append([Delta(0, calls=(CallDelta(len(calls), "none", "run", broken),))])
    answer = reply(message, finish="length" if cut else "stop")
    request = parse(tools=[RUN, PATCH, AGENTS])
    stream = responses.Stream(request, text_of, "tiny")
    stream.accepted(answer.id, answer.prompt_ids)
    frames = stream.start()
    for group in deltas[:heard]:
        for delta in group:
            frames += stream.delta(delta)
    found = events([*frames, *stream.finish(answer)])
    output = found[-1]["response"]["output"]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    added = [event for event in found if event["type"] == "response.output_item.added"]
    assert output == done
    assert [event["output_index"] for event in added] == list(range(len(output)))
    assert len({item["id"] for item in output}) == len(output)
    whole = responses.response(answer, request, text_of)["output"]
    for items in (output, whole):
        assert [item["call_id"] for item in items if "call_id" in item] == [call.id for call in calls]
        said = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
        assert "".join(said) == message.content
