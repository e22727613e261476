// Anthropic's own client for Node, on /v1/messages.
import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";
import * as probe from "./probe.mjs";
import { JSON_MODEL, MAX_TOKENS, MESSAGES, QUESTION, Query, RESULT, TEXT_MODEL } from "./probe.mjs";

const client = new Anthropic({ baseURL: probe.URL, apiKey: probe.KEY, maxRetries: 0, timeout: 60_000 });
const text = { model: TEXT_MODEL, messages: MESSAGES, temperature: 0, max_tokens: MAX_TOKENS };
const json = { ...text, model: JSON_MODEL };
const tool = { name: "query", description: probe.DESCRIPTION, input_schema: z.toJSONSchema(Query) };
const forced = { ...json, tools: [tool], tool_choice: { type: "any", disable_parallel_tool_use: true } };
const callOf = (answer) => answer.content.find(({ type }) => type === "tool_use");
const made = (answer) => ({ name: callOf(answer).name, arguments: callOf(answer).input });

await probe.run({
  async models() {
    const ids = [];
    for await (const model of client.models.list()) ids.push(model.id);
    return ids;
  },
  async chat() {
    return (await client.messages.create(text)).content[0].text;
  },
  async stream() {
    const pieces = [];
    await client.messages.stream(text).on("text", (piece) => pieces.push(piece)).finalMessage();
    return pieces;
  },
  async call() {
    return made(await client.messages.create(forced));
  },
  async stream_call() {
    return made(await client.messages.stream(forced).finalMessage());
  },
  async result() {
    const first = await client.messages.create(forced);
    const output = { type: "tool_result", tool_use_id: callOf(first).id, content: RESULT };
    const messages = [
      ...MESSAGES,
      { role: "assistant", content: first.content },
      { role: "user", content: [output, { type: "text", text: QUESTION }] },
    ];
    return (await client.messages.create({ ...text, messages, tools: [tool] })).content[0].text;
  },
  async parse() {
    const asked = { ...json, output_config: { format: zodOutputFormat(Query) } };
    return (await client.messages.parse(asked)).parsed_output;
  },
  async count_tokens() {
    return (await client.messages.countTokens({ model: TEXT_MODEL, messages: MESSAGES })).input_tokens;
  },
  async unknown_model() {
    try {
      await client.messages.create({ ...text, model: "absent" });
    } catch (error) {
      probe.ensure(error instanceof Anthropic.NotFoundError, error);
      return error.message;
    }
    throw new Error("an absent model answered");
  },
});
