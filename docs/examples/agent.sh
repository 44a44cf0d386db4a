#!/usr/bin/env bash
# An agent in bash, with curl and jq: ./agent.sh "How many lamps are in stock?"
# OPENAI_BASE_URL, OPENAI_API_KEY and MINIRLLM_MODEL say which model. The last line it prints is its answer.
set -euo pipefail
stock=$(cat "$(dirname "$0")/stock.json")
tools='[{"type": "function", "function": {"name": "stock", "description": "How many of an item are in stock.",
  "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}}}]'
messages=$(jq -n --arg text "$1" '[{role: "user", content: $text}]')

while true; do
    body=$(jq -n --arg model "$MINIRLLM_MODEL" --argjson messages "$messages" --argjson tools "$tools" '$ARGS.named')
    reply=$(curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" --json "$body" \
        -H "authorization: Bearer $OPENAI_API_KEY")
    message=$(jq '.choices[0].message' <<<"$reply")
    results=$(jq --argjson stock "$stock" '[.tool_calls[]? | {role: "tool", tool_call_id: .id,
        content: ($stock[.function.arguments | fromjson | .item] // 0 | tostring)}]' <<<"$message")
    messages=$(jq --argjson message "$message" --argjson results "$results" '. + [$message] + $results' <<<"$messages")
    [ "$results" != "[]" ] || break
done
jq -r '.content' <<<"$message"
