"""How models spell tool calls. Pick one by name from `SYNTAXES`, or as ``module:attr``.

Owns: the names. `calls` has what the syntaxes share, `json_calls` follows calls as they are written, `reader` takes an
assistant turn apart, `prompt` stands in for a chat template. Nothing here knows tokens, chat templates or HTTP.
"""

from __future__ import annotations

SYNTAXES: dict[str, str] = {  # the first that reads back what a chat template writes is taken
    "hermes": "minirllm.syntaxes.hermes:SYNTAX",
    "qwen3_xml": "minirllm.syntaxes.qwen3_xml:SYNTAX",
    "mistral": "minirllm.syntaxes.mistral:SYNTAX",
    "llama3_json": "minirllm.syntaxes.llama3_json:SYNTAX",
    "llama3_pythonic": "minirllm.syntaxes.llama3_pythonic:SYNTAX",
    "deepseek_v3": "minirllm.syntaxes.deepseek_v3:SYNTAX",
    "deepseek_v31": "minirllm.syntaxes.deepseek_v31:SYNTAX",
    "glm45": "minirllm.syntaxes.glm45:SYNTAX",
    "kimi_k2": "minirllm.syntaxes.kimi_k2:SYNTAX",
}
