#!/usr/bin/env node
// An agent in JavaScript, without any package: node agent.mjs "How many lamps are in stock?"
// OPENAI_BASE_URL, OPENAI_API_KEY and MINIRLLM_MODEL say which model. The last line it prints is its answer.
import { readFileSync } from "node:fs";

const { OPENAI_BASE_URL, OPENAI_API_KEY, MINIRLLM_MODEL } = process.env;
const stock = JSON.parse(readFileSync(new URL("stock.json", import.meta.url)));
const parameters = { type: "object", properties: { item: { type: "string" } }, required: ["item"] };
const tools = [{ type: "function", function: { name: "stock", description: "How many of an item are in stock.", parameters } }];
const messages = [{ role: "user", content: process.argv[2] }];

for (;;) {
  const reply = await fetch(`${OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { authorization: `Bearer ${OPENAI_API_KEY}`, "content-type": "application/json" },
    body: JSON.stringify({ model: MINIRLLM_MODEL, messages, tools }),
  });
  if (!reply.ok) throw new Error(await reply.text());
  const { message } = (await reply.json()).choices[0];
  messages.push(message);
  if (!message.tool_calls) {
    console.log(message.content);
    break;
  }
  for (const call of message.tool_calls) {
    const { item } = JSON.parse(call.function.arguments);
    messages.push({ role: "tool", tool_call_id: call.id, content: String(stock[item] ?? 0) });
  }
}
