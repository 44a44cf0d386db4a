"""OpenHands, as its software kit runs it: the terminal tool only, or in full its default agent without a browser.

5.5k tokens of prompt. It ends by its tool `finish`, or by an answer without a call. Errors of the endpoint that it does
not know are asked again after 8 and 16 seconds; with a full context it ends with exit code 1.
"""

from __future__ import annotations

import json

from minirllm.harness import SHELL, Call, Context, Harness, Launch

PROGRAM = """\
import json, os

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.preset.default import get_default_agent
from openhands.tools.terminal import TerminalTool

llm = LLM(**json.loads(os.environ["MINIRLLM_OPTIONS"]))
if os.environ["MINIRLLM_FULL"]:
    agent = get_default_agent(llm=llm, cli_mode=True)
else:
    agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name)])
conversation = Conversation(agent=agent, workspace=os.getcwd(), visualizer=None, max_iteration_per_run=100)
conversation.send_message(os.environ["MINIRLLM_INSTRUCTION"])
conversation.run()
"""


def launch(context: Context) -> Launch:
    options = {
        "usage_id": "agent",
        "model": f"openai/{context.model}",
        "base_url": context.url_v1,
        "api_key": context.key,
        "max_input_tokens": context.window,
        "max_output_tokens": context.max_tokens,
        "num_retries": 2,
    }
    env = {
        **context.variables,
        "MINIRLLM_OPTIONS": json.dumps(options),
        "MINIRLLM_FULL": "1" if context.full else "",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it waits for a list of prices
        "ALLOW_SHORT_CONTEXT_WINDOWS": "true",
        "OPENHANDS_SUPPRESS_BANNER": "1",
        "TMUX_TMPDIR": str(context.tmp),
    }
    program = context.home / "run.py"
    return Launch((context.program("python"), str(program)), env, {program.name: PROGRAM})


HARNESS = Harness(
    name="openhands",
    version="1.58.2",
    about="OpenHands' agent by its software kit, with a terminal",
    dialect="chat",
    pip=("openhands-sdk==1.58.2", "openhands-tools==1.58.2"),
    requires=("python>=3.12", "tmux"),
    prompt="5.5k tokens; full 8k",
    launch=launch,
    script=(Call("terminal", {"command": SHELL}), Call("finish", {"message": "Done."})),
)
