"""Pydantic AI over the Messages API. Base URLs of this API end before /v1."""

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from stock import held_out, score, stock, train  # noqa: F401

from minirllm import rollout


@rollout
async def solve(task, config):
    provider = AnthropicProvider(base_url=config.base_url.removesuffix("/v1"), api_key=config.api_key)
    agent = Agent(AnthropicModel(config.model, provider=provider), tools=[stock])
    return (await agent.run(task.instruction)).output
