"""One conversation, whatever dialect each of its turns comes in, is one path of the token tree."""

from __future__ import annotations

from itertools import pairwise, permutations

import pytest

from tests.endpoint import Place, serving

SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}}
THOUGHTFUL = '<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{"name": "run", "arguments": {"cmd": "ls"}}\n</tool_call>'
# (role, text, what the model thought, call id): as an agent remembers it, in no dialect
Turn = tuple[str, str, str, str]


async def ask(place: Place, path: str, body: dict) -> dict:
    answer = await place.post(path, {"model": "m", "stream": False, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def chat(place: Place, turns: list[Turn]) -> Turn:
    messages: list[dict] = [{"role": "system", "content": "be brief"}]
    for role, text, thought, call in turns:
        if role == "tool":
            messages.append({"role": "tool", "tool_call_id": call, "content": text})
            continue
        function = {"name": "run", "arguments": '{"cmd":"ls"}'}
        calls = {"tool_calls": [{"id": call, "type": "function", "function": function}]} if call else {}
        messages.append({"role": role, "content": text, "reasoning_content": thought, **calls})
    function = {"name": "run", "parameters": SCHEMA, "strict": True}
    body = await ask(
        place, "chat/completions", {"messages": messages, "tools": [{"type": "function", "function": function}]}
    )
    said = body["choices"][0]["message"]
    call = said["tool_calls"][0]["id"] if "tool_calls" in said else ""
    return "assistant", said["content"] or "", said.get("reasoning_content", ""), call


async def responses(place: Place, turns: list[Turn]) -> Turn:
    items: list[dict] = []
    for role, text, thought, call in turns:
        if role == "tool":
            items.append({"type": "function_call_output", "call_id": call, "output": text})
            continue
        summary = [{"type": "summary_text", "text": thought}]
        items += [{"type": "reasoning", "id": "rs", "summary": summary}] if thought else []
        items.append({"role": role, "content": text})
        items += (
            [{"type": "function_call", "call_id": call, "name": "run", "arguments": '{"cmd":"ls"}'}] if call else []
        )
    tools = [{"type": "function", "name": "run", "parameters": SCHEMA, "strict": None, "description": None}]
    output = (await ask(place, "responses", {"instructions": "be brief", "input": items, "tools": tools}))["output"]
    found = {item["type"]: item for item in output}
    thought = found["reasoning"]["summary"][0]["text"] if "reasoning" in found else ""
    text = found["message"]["content"][0]["text"]
    return "assistant", text, thought, found["function_call"]["call_id"] if "function_call" in found else ""


async def messages(place: Place, turns: list[Turn]) -> Turn:
    sent: list[dict] = []
    for role, text, thought, call in turns:
        if role == "tool":
            sent.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call, "content": text}]})
            continue
        blocks: list[dict] = [{"type": "thinking", "thinking": thought, "signature": ""}] if thought else []
        blocks.append({"type": "text", "text": text, "cache_control": {"type": "ephemeral"}})
        blocks += [{"type": "tool_use", "id": call, "name": "run", "input": {"cmd": "ls"}}] if call else []
        sent.append({"role": role, "content": blocks})
    tools = [{"name": "run", "input_schema": SCHEMA}]
    body = {"max_tokens": 500, "system": [{"type": "text", "text": "be brief"}], "messages": sent, "tools": tools}
    found = {block["type"]: block for block in (await ask(place, "messages", body))["content"]}
    thought = found["thinking"]["thinking"] if "thinking" in found else ""
    return "assistant", found["text"]["text"], thought, found["tool_use"]["id"] if "tool_use" in found else ""


async def gemini(place: Place, turns: list[Turn]) -> Turn:
    contents: list[dict] = []
    for role, text, thought, call in turns:
        if role == "tool":
            result = {"id": call, "name": "run", "response": {"output": text}}
            contents.append({"role": "user", "parts": [{"functionResponse": result}]})
            continue
        parts: list[dict] = [{"text": thought, "thought": True}] if thought else []
        parts.append({"text": text})
        parts += [{"functionCall": {"id": call, "name": "run", "args": {"cmd": "ls"}}}] if call else []
        contents.append({"role": "model" if role == "assistant" else role, "parts": parts})
    parameters = {"type": "OBJECT", "properties": {"cmd": {"type": "STRING"}}}
    body = {
        "systemInstruction": {"parts": [{"text": "be brief"}]},
        "contents": contents,
        "tools": [{"functionDeclarations": [{"name": "run", "parameters": parameters}]}],
        "generationConfig": {"maxOutputTokens": 500, "thinkingConfig": {"includeThoughts": True}},
    }
    answer = await ask(place, "models/m:generateContent", body)
    parts = answer["candidates"][0]["content"]["parts"]
    thought = "".join(part["text"] for part in parts if "thought" in part)
    text = "".join(part["text"] for part in parts if "text" in part and "thought" not in part)
    calls = [part["functionCall"]["id"] for part in parts if "functionCall" in part]
    return "assistant", text, thought, calls[0] if calls else ""


@pytest.mark.parametrize(
    "order",
    list(permutations([chat, responses, messages, gemini], 3)),
    ids=lambda order: "-".join(one.__name__ for one in order),
)
async def test_a_conversation_may_change_its_dialect_at_every_turn(order) -> None:
    async with serving() as place:
        place.engine.texts = [THOUGHTFUL, "<think>\nok\n</think>\n\ndone", "bye"]
        turns: list[Turn] = [("user", "hi", "", "")]
        for dialect in order:
            said = await dialect(place, turns)
            turns += [said, ("tool", "files", "", said[3]) if said[3] else ("user", "more", "", "")]
        assert turns[1][:3] == ("assistant", "I look.", "hm")
        assert [turn[1] for turn in turns] == ["hi", "I look.", "files", "done", "more", "bye", "more"]
        counters, tree, steps = place.session.counters, place.session.tree, place.session.steps
        assert (counters["conversations"], counters["extended"], counters["branches"]) == (1, 2, 0)
        for before, after in pairwise(steps):
            so_far = tree.ids(before.node)
            assert tree.ids(after.node)[: len(so_far)] == so_far
