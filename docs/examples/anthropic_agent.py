"""The `anthropic` client and a loop. Base URLs of the Messages API end before /v1."""

from anthropic import AsyncAnthropic
from stock import held_out, score, stock, train  # noqa: F401

from minirllm import rollout

TOOL = {
    "name": "stock",
    "description": "How many of an item are in stock.",
    "input_schema": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
}


@rollout
async def solve(task, config):
    messages = [{"role": "user", "content": task.instruction}]
    async with AsyncAnthropic(base_url=config.base_url.removesuffix("/v1"), api_key=config.api_key) as client:
        while True:
            reply = await client.messages.create(model=config.model, messages=messages, tools=[TOOL], max_tokens=256)
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                return "".join(block.text for block in reply.content if block.type == "text")
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": stock(**call.input)} for call in calls
            ]
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
