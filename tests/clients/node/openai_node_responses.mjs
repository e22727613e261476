// OpenAI's own client for Node, on /v1/responses.
import OpenAI from "openai";
import { zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import * as probe from "./probe.mjs";
import { JSON_MODEL, MAX_TOKENS, QUESTION, Query, RESULT, TEXT_MODEL } from "./probe.mjs";

const client = new OpenAI({ baseURL: probe.BASE_URL, apiKey: probe.KEY, maxRetries: 0, timeout: 60_000 });
const text = { model: TEXT_MODEL, input: QUESTION, temperature: 0 };
const json = { model: JSON_MODEL, input: QUESTION, temperature: 0, max_output_tokens: MAX_TOKENS };
const tool = zodResponsesFunction({ name: "query", description: probe.DESCRIPTION, parameters: Query });
const forced = { ...json, tools: [tool], tool_choice: "required", parallel_tool_calls: false };
const callOf = (answer) => answer.output.find(({ type }) => type === "function_call");
const made = (answer) => ({ name: callOf(answer).name, arguments: callOf(answer).parsed_arguments });

await probe.run({
  async chat() {
    return (await client.responses.create(text)).output_text;
  },
  async stream() {
    const pieces = [];
    for await (const event of await client.responses.create({ ...text, stream: true })) {
      if (event.type === "response.output_text.delta") pieces.push(event.delta);
    }
    return pieces;
  },
  async call() {
    return made(await client.responses.parse(forced));
  },
  async stream_call() {
    return made(await client.responses.stream(forced).finalResponse());
  },
  async result() {
    const first = await client.responses.create(forced);
    const output = { type: "function_call_output", call_id: callOf(first).call_id, output: RESULT };
    const input = [{ role: "user", content: QUESTION }, ...first.output, output];
    return (await client.responses.create({ ...text, input, tools: [tool] })).output_text;
  },
  async parse() {
    return (await client.responses.parse({ ...json, text: { format: zodTextFormat(Query, "query") } })).output_parsed;
  },
  async stream_parse() {
    const asked = { ...json, text: { format: zodTextFormat(Query, "query") } };
    return (await client.responses.stream(asked).finalResponse()).output_parsed;
  },
  async unknown_model() {
    try {
      await client.responses.create({ ...text, model: "absent" });
    } catch (error) {
      probe.ensure(error instanceof OpenAI.NotFoundError, error);
      return error.message;
    }
    throw new Error("an absent model answered");
  },
});
