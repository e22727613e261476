// What the scripts of all clients share: as python/probe.py.
//
//     node SCRIPT.mjs URL KEY [--OPTION…] FEATURE…
//
// prints one line of JSON per feature: {feature, answer}, or {feature, error} with the stack.
import { z } from "zod";

export const [URL, KEY] = process.argv.slice(2, 4);
const words = process.argv.slice(4);
export const OPTIONS = new Set(words.filter((word) => word.startsWith("--")).map((word) => word.slice(2)));
export const BASE_URL = `${URL}/v1`;
export const QUESTION = "list the tickets with age over 81";
export const MESSAGES = [{ role: "user", content: QUESTION }];
export const TEXT_MODEL = "sql";
export const JSON_MODEL = "json";
export const MAX_TOKENS = 120;
export const RESULT = '{"rows": 3}';
export const DESCRIPTION = "Rows of a table whose number lies on one side of another.";
export const Query = z.object({
  table: z.enum(["tickets", "users", "orders"]),
  field: z.enum(["age", "size"]),
  op: z.enum([">", "<", "="]),
  value: z.number().int().min(1).max(99),
});

export async function run(features) {
  for (const feature of words.filter((word) => !word.startsWith("--"))) {
    let line;
    try {
      line = { feature, answer: await features[feature]() };
    } catch (error) {
      line = { feature, error: `${error.stack}\n${error.cause ?? ""}` };
    }
    console.log(JSON.stringify(line));
  }
}

export function ensure(isTrue, message) {
  if (!isTrue) throw new Error(message);
}
