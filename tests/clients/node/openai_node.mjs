// OpenAI's own client for Node, on chats.
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import * as probe from "./probe.mjs";
import { JSON_MODEL, MAX_TOKENS, MESSAGES, QUESTION, Query, RESULT, TEXT_MODEL } from "./probe.mjs";

const client = new OpenAI({ baseURL: probe.BASE_URL, apiKey: probe.KEY, maxRetries: 0, timeout: 60_000 });
const text = { model: TEXT_MODEL, messages: MESSAGES, temperature: 0 };
const json = { model: JSON_MODEL, messages: MESSAGES, temperature: 0, max_tokens: MAX_TOKENS };
const tool = zodFunction({ name: "query", description: probe.DESCRIPTION, parameters: Query });
const forced = { ...json, tools: [tool], tool_choice: "required", parallel_tool_calls: false };
const made = ({ function: called }) => ({ name: called.name, arguments: called.parsed_arguments });

await probe.run({
  async models() {
    const ids = [];
    for await (const model of client.models.list()) ids.push(model.id);
    return ids;
  },
  async chat() {
    return (await client.chat.completions.create(text)).choices[0].message.content;
  },
  async stream() {
    const pieces = [];
    for await (const chunk of await client.chat.completions.create({ ...text, stream: true })) {
      pieces.push(chunk.choices[0].delta.content ?? "");
    }
    return pieces;
  },
  async call() {
    return made((await client.chat.completions.parse(forced)).choices[0].message.tool_calls[0]);
  },
  async stream_call() {
    const whole = await client.chat.completions.stream(forced).finalChatCompletion();
    return made(whole.choices[0].message.tool_calls[0]);
  },
  async result() {
    const first = (await client.chat.completions.create(forced)).choices[0].message;
    const output = { role: "tool", tool_call_id: first.tool_calls[0].id, content: RESULT };
    const second = { ...text, messages: [...MESSAGES, first, output], tools: [tool] };
    return (await client.chat.completions.create(second)).choices[0].message.content;
  },
  async agent() {
    const calls = [];
    const called = zodFunction({
      name: "query",
      description: probe.DESCRIPTION,
      parameters: Query,
      function: (input) => {
        calls.push(input);
        return RESULT;
      },
    });
    const required = { type: "function", function: { name: "query" } };
    // with a named function it ends after the call: the second step is a run of its own
    const first = client.chat.completions.runTools({ ...json, tools: [called], tool_choice: required });
    await first.done();
    const messages = first.messages;
    const second = client.chat.completions.runTools({ ...json, messages, tools: [called] });
    return {
      calls,
      results: messages.filter(({ role }) => role === "tool").map(({ content }) => content),
      text: await second.finalContent(),
    };
  },
  async parse() {
    const asked = { ...json, response_format: zodResponseFormat(Query, "query") };
    return (await client.chat.completions.parse(asked)).choices[0].message.parsed;
  },
  async stream_parse() {
    const asked = { ...json, response_format: zodResponseFormat(Query, "query") };
    return (await client.chat.completions.stream(asked).finalChatCompletion()).choices[0].message.parsed;
  },
  async embeddings() {
    const answer = await client.embeddings.create({ model: TEXT_MODEL, input: [QUESTION, "greet Anna"] });
    return answer.data.map(({ embedding }) => embedding);
  },
  async logprobs() {
    const answer = await client.chat.completions.create({ ...text, logprobs: true, top_logprobs: 2 });
    return answer.choices[0].logprobs.content.map(({ token, logprob }) => [token, logprob]);
  },
  async completion() {
    const asked = { model: TEXT_MODEL, prompt: QUESTION, max_tokens: 48, temperature: 0 };
    return (await client.completions.create(asked)).choices[0].text;
  },
  async unknown_model() {
    try {
      await client.chat.completions.create({ ...text, model: "absent" });
    } catch (error) {
      probe.ensure(error instanceof OpenAI.NotFoundError, error);
      return error.message;
    }
    throw new Error("an absent model answered");
  },
});
