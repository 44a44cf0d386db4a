"""mini-swe-agent: a hundred-line coding agent with one tool, `bash`, that ends by a command of its own.

0.8k tokens of prompt. The model has to finish with ``echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT``; three answers in a
row without a call end it, with exit code 0. Its prompt names the machine's system and kernel, so runs repeat bit for
bit on machines of one kind. A turn with a format error is dropped from the history, which makes a branch.
"""

from __future__ import annotations

from minirllm.harness import SHELL, Call, Context, Harness, Launch

DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def launch(context: Context) -> Launch:
    answer = ("-c", "mini.yaml", "-c", f"model.model_kwargs.max_tokens={context.max_tokens}")
    argv = (
        context.program("mini"), "-m", f"openai/{context.model}", "-t", context.instruction, "-y", "--exit-immediately",
        "-o", str(context.home / "trajectory.json"), *answer,
    )  # fmt: skip
    env = {
        "OPENAI_API_BASE": context.url_v1,
        "OPENAI_API_KEY": context.key,
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it waits ten seconds for a list of prices
    }
    return Launch(argv, env)


HARNESS = Harness(
    name="mini-swe-agent",
    version="2.4.6",
    about="a minimal coding agent with one bash tool, by the authors of SWE-agent",
    dialect="chat",
    pip=("mini-swe-agent==2.4.6",),
    prompt="0.8k tokens",
    launch=launch,
    script=(Call("bash", {"command": SHELL}), Call("bash", {"command": DONE})),
)
