// Vercel's `ai`, with @ai-sdk/openai-compatible, or @ai-sdk/openai on chats (option `chat`) or on
// responses, its default (option `responses`).
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, embedMany, generateText, stepCountIs, streamText, tool } from "ai";
import * as probe from "./probe.mjs";
import { JSON_MODEL, MAX_TOKENS, QUESTION, Query, RESULT, TEXT_MODEL } from "./probe.mjs";

const settings = { baseURL: probe.BASE_URL, apiKey: probe.KEY };
const openai = createOpenAI(settings);
const compatible = createOpenAICompatible({
  ...settings,
  name: "loraserve",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const isCompatible = !probe.OPTIONS.has("chat") && !probe.OPTIONS.has("responses");
const model = isCompatible
  ? (name) => compatible.chatModel(name)
  : (name) => (probe.OPTIONS.has("chat") ? openai.chat(name) : openai(name));
const common = { prompt: QUESTION, temperature: 0, maxOutputTokens: MAX_TOKENS, maxRetries: 0 };
const text = { ...common, model: model(TEXT_MODEL) };
const json = { ...common, model: model(JSON_MODEL) };
const query = tool({ description: probe.DESCRIPTION, inputSchema: Query });
const callable = tool({ description: probe.DESCRIPTION, inputSchema: Query, execute: async () => RESULT });
const forced = { ...json, tools: { query }, toolChoice: "required" };
const made = ([call]) => ({ name: call.toolName, arguments: call.input });
const rethrow = ({ error }) => {
  throw error;
};
const looped = {
  ...json,
  tools: { query: callable },
  stopWhen: stepCountIs(3),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" }),
};
const steps = (all, last) => ({
  calls: all.flatMap(({ toolCalls }) => toolCalls.map(({ input }) => input)),
  results: all.flatMap(({ toolResults }) => toolResults.map(({ output }) => output)),
  text: last,
});

await probe.run({
  async chat() {
    const answer = await generateText(text);
    probe.ensure(answer.usage.outputTokens > 0, "no usage");
    return answer.text;
  },
  async stream() {
    const answer = streamText({ ...text, onError: rethrow });
    const pieces = [];
    for await (const piece of answer.textStream) pieces.push(piece);
    probe.ensure((await answer.usage).outputTokens > 0, "no usage");
    return pieces;
  },
  async call() {
    return made((await generateText(forced)).toolCalls);
  },
  async stream_call() {
    return made(await streamText({ ...forced, onError: rethrow }).toolCalls);
  },
  async result() {
    const first = await generateText(forced);
    const [{ toolCallId, toolName }] = first.toolCalls;
    const output = { type: "text", value: RESULT };
    const messages = [
      { role: "user", content: QUESTION },
      ...first.response.messages,
      { role: "tool", content: [{ type: "tool-result", toolCallId, toolName, output }] },
    ];
    return (await generateText({ ...text, prompt: undefined, messages, tools: { query } })).text;
  },
  async agent() {
    const answer = await generateText(looped);
    return steps(answer.steps, answer.text);
  },
  async stream_agent() {
    const answer = streamText({ ...looped, onError: rethrow });
    await answer.consumeStream();
    return steps(await answer.steps, await answer.text);
  },
  async parse() {
    return (await generateText({ ...json, output: Output.object({ schema: Query }) })).output;
  },
  async stream_parse() {
    const answer = streamText({ ...json, output: Output.object({ schema: Query }), onError: rethrow });
    let last;
    for await (const partial of answer.partialOutputStream) last = partial;
    return last;
  },
  async embeddings() {
    const embedder = isCompatible ? compatible.embeddingModel(TEXT_MODEL) : openai.embedding(TEXT_MODEL);
    return (await embedMany({ model: embedder, values: [QUESTION, "greet Anna"], maxRetries: 0 })).embeddings;
  },
  async completion() {
    const completer = isCompatible ? compatible.completionModel(TEXT_MODEL) : openai.completion(TEXT_MODEL);
    return (await generateText({ ...common, model: completer, maxOutputTokens: 48 })).text;
  },
  async unknown_model() {
    try {
      await generateText({ ...text, model: model("absent") });
    } catch (error) {
      probe.ensure(APICallError.isInstance(error) && error.statusCode === 404, error);
      return error.message;
    }
    throw new Error("an absent model answered");
  },
});
