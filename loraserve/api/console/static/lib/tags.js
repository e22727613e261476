// Tags as people write them: a line of NAME=VALUE each.
export function tagsOf(text) {
  const lines = text.split("\n").map((line) => line.trim()).filter(Boolean);
  const bad = lines.find((line) => !line.includes("="));
  if (bad) throw new Error(`Tags are lines of NAME=VALUE; this isn't one: ${bad}`);
  return Object.fromEntries(lines.map((line) => [line.slice(0, line.indexOf("=")).trim(), line.slice(line.indexOf("=") + 1).trim()]));
}
