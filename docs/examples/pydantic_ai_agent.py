"""Pydantic AI with a typed answer, which it asks for as a call of a tool of its own."""

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from stock import held_out, score, stock, train  # noqa: F401

from minirllm import rollout


class Stock(BaseModel):
    item: str
    count: int


@rollout
async def solve(task, config):
    provider = OpenAIProvider(base_url=config.base_url, api_key=config.api_key)
    agent = Agent(OpenAIChatModel(config.model, provider=provider), tools=[stock], output_type=Stock)
    return str((await agent.run(task.instruction)).output.count)
