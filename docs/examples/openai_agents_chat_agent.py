"""OpenAI Agents SDK over chat completions. Its tracing, which calls api.openai.com, is off."""

from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool
from stock import held_out, score, stock, train  # noqa: F401

from minirllm import rollout


@rollout
async def solve(task, config):
    provider = OpenAIProvider(base_url=config.base_url, api_key=config.api_key, use_responses=False)
    agent = Agent("clerk", instructions="Look it up.", tools=[function_tool(stock)], model=config.model)
    run = RunConfig(model_provider=provider, tracing_disabled=True)
    return (await Runner.run(agent, task.instruction, run_config=run)).final_output
