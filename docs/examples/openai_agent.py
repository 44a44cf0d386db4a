"""The `openai` client and a loop."""

import json

from openai import AsyncOpenAI
from stock import held_out, score, stock, train  # noqa: F401

from minirllm import rollout

TOOL = {
    "type": "function",
    "function": {
        "name": "stock",
        "description": "How many of an item are in stock.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}


@rollout
async def solve(task, config):
    messages = [{"role": "user", "content": task.instruction}]
    async with AsyncOpenAI(base_url=config.base_url, api_key=config.api_key) as client:
        while True:
            reply = await client.chat.completions.create(model=config.model, messages=messages, tools=[TOOL])
            message = reply.choices[0].message
            if not message.tool_calls:
                return message.content
            messages.append(message)
            for call in message.tool_calls:
                result = stock(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
