"""How models spell tool calls: one small file per syntax, one line in `SYNTAXES`.

Owns: the names. `calls` has what the syntaxes share, `reader` takes an assistant turn apart. Nothing here knows tokens,
chat templates or HTTP.
"""

from __future__ import annotations

from minirllm.syntaxes import hermes, llama3_json, mistral, qwen3_xml
from minirllm.syntaxes.calls import ToolSyntax

SYNTAXES: dict[str, ToolSyntax] = {  # the first that reads back what a chat template writes is taken
    "hermes": hermes.SYNTAX,
    "qwen3_xml": qwen3_xml.SYNTAX,
    "mistral": mistral.SYNTAX,
    "llama3_json": llama3_json.SYNTAX,
}
