"""smolagents: an agent that calls tools until it calls `final_answer`. It is not async, and need not be."""

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool
from stock import held_out, score, stock, train  # noqa: F401

from minirllm import rollout


@rollout
def solve(task, config):
    model = OpenAIModel(model_id=config.model, api_base=config.base_url, api_key=config.api_key)
    agent = ToolCallingAgent([tool(stock)], model, max_steps=4, verbosity_level=LogLevel.OFF)
    return str(agent.run(task.instruction))
