// One prompt for up to eight adapters and the base, side by side, out of one batch.
import { api, events } from "../lib/api.js";
import { number, seconds } from "../lib/format.js";
import { html, useEffect, useRef, useState } from "../lib/html.js";
import { call, command, curl, literal, python } from "../lib/recipe.js";
import { session } from "../lib/session.js";
import { Choice, Copy, Empty, Failure, Heading, Loading, useLoaded } from "../lib/ui.js";

const MAX_ADAPTERS = 8;
const PLACEHOLDER_SCHEMA = JSON.stringify(
  { type: "object", properties: { answer: { type: "string" } }, required: ["answer"] },
  null,
  2,
);

export function Playground({ me, tenant, query }) {
  const loaded = useLoaded(async () => {
    const [base, models] = await Promise.all([api.get("/api/v1/base"), api.get("/v1/models")]);
    return { base: base.id, takesMessages: base.has_chat_template, names: models.data.map((one) => one.id).filter((id) => id !== base.id) };
  }, []);
  if (loaded.error) return html`<${Heading} title="Playground" /><${Failure} error=${loaded.error} again=${() => loaded.reload()} />`;
  if (!loaded.value) return html`<${Heading} title="Playground" /><${Loading} what="models" />`;
  return html`<${Bench} ...${loaded.value} wanted=${query.get("model")} whose=${tenant ?? me.tenant} />`;
}

// Requests are what the API takes; the snippets show the same.
function requestOf(model, settings, turns) {
  const body = { model };
  const system = settings.system.trim();
  if (settings.mode === "chat") body.messages = system ? [{ role: "system", content: system }, ...turns] : turns;
  else body.prompt = settings.prompt;
  body.max_tokens = settings.maxTokens;
  body.temperature = settings.temperature;
  const format = settings.format;
  if (format === "object") body.response_format = { type: "json_object" };
  if (format === "schema") {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(settings.schema) } };
  }
  if (format === "regex") body.structured_outputs = { regex: settings.regex };
  return body;
}

function checked(settings, models) {
  if (!settings.prompt.trim()) throw new Error("Write a prompt first.");
  if (!models.length) throw new Error("Choose at least one model.");
  if (settings.format === "schema") {
    try {
      JSON.parse(settings.schema);
    } catch (error) {
      throw new Error(`The schema isn't JSON: ${error.message}`);
    }
  }
  if (settings.format === "regex" && !settings.regex) throw new Error("Write a regular expression, or choose free text.");
}

function Bench({ base, takesMessages, names, wanted, whose }) {
  const [chosen, setChosen] = useState(() => [base, ...(wanted ? [wanted] : names.slice(0, 3))]);
  const [sums, setSums] = useState([]);
  const [settings, setSettings] = useState({
    mode: takesMessages ? "chat" : "completion",
    system: "",
    prompt: "",
    maxTokens: 64,
    temperature: 0,
    format: "text",
    schema: PLACEHOLDER_SCHEMA,
    regex: "",
  });
  const [answers, setAnswers] = useState([]);
  const [error, setError] = useState(null);
  const [said, setSaid] = useState("");
  const [isRunning, setRunning] = useState(false);
  const ending = useRef(null);
  useEffect(() => () => ending.current?.abort(), []);
  const set = (change) => setSettings((before) => ({ ...before, ...change }));
  const models = [...chosen, ...sums.map(sumName).filter(Boolean)];
  const numAdapters = models.filter((model) => model !== base).length;

  const run = async () => {
    setError(null);
    try {
      checked(settings, models);
    } catch (problem) {
      setError(problem);
      return;
    }
    const isChat = settings.mode === "chat";
    const histories = new Map(isChat ? answers.map((one) => [one.model, one.turns]) : []);
    let current = models.map((model) => {
      const turns = [...(histories.get(model) ?? []), { role: "user", content: settings.prompt }];
      return { model, turns, text: "", state: "waiting", tokens: 0, timing: null, by: null, error: null };
    });
    setAnswers(current);
    setRunning(true);
    setSaid(`Asking ${models.length} models.`);
    const update = (index, change) => {
      current = current.map((one, at) => (at === index ? { ...one, ...change } : one));
    };
    // one drawing a frame, however many tokens come in it
    let isDrawn = true;
    const draw = () => {
      if (!isDrawn) return;
      isDrawn = false;
      requestAnimationFrame(() => {
        isDrawn = true;
        setAnswers(current);
      });
    };
    const began = performance.now();
    const abort = new AbortController();
    ending.current = abort;
    try {
      const stream = events("POST", "/api/v1/compare", {
        signal: abort.signal,
        json: {
          endpoint: isChat ? "/v1/chat/completions" : "/v1/completions",
          requests: current.map((one) => requestOf(one.model, settings, one.turns)),
        },
      });
      let isWhole = false;
      for await (const { name, data } of stream) {
        const index = data.index;
        const now = (performance.now() - began) / 1000;
        if (name === "start") update(index, { by: data.headers["x-loraserve-adapter"] ?? null, timing: data.headers["server-timing"] ?? null });
        else if (name === "chunk") {
          const choice = data.chunk.choices[0];
          const piece = choice?.text ?? choice?.delta?.content ?? "";
          const usage = data.chunk.usage;
          update(index, {
            state: "streaming",
            text: current[index].text + piece,
            ...(piece && { firstS: current[index].firstS ?? now, lastS: now }),
            ...(usage && { tokens: usage.completion_tokens, cached: usage.prompt_tokens_details?.cached_tokens }),
            ...(choice?.finish_reason && { reason: choice.finish_reason }),
          });
        } else if (name === "error") {
          if (index === undefined) throw new Error(data.error?.detail ?? "The comparison failed.");
          update(index, { state: "failed", error: data.error?.message ?? `The server answered with ${data.status}.` });
        } else if (name === "done") {
          const one = current[index];
          const isCut = one.state !== "failed" && !one.reason;
          update(index, isCut ? { state: "failed", error: "The answer ended before it was complete." } : { state: one.state === "failed" ? "failed" : "done" });
        } else if (name === "end") isWhole = true;
        draw();
      }
      if (!isWhole) throw new Error("The stream ended before all answers did.");
    } catch (problem) {
      const isStopped = abort.signal.aborted;
      if (!isStopped) setError(problem);
      current = current.map((one) =>
        one.state === "waiting" || one.state === "streaming"
          ? { ...one, state: isStopped ? "stopped" : "failed", error: isStopped ? null : problem.message }
          : one,
      );
    } finally {
      ending.current = null;
      current = current.map((one) => ({ ...one, turns: [...one.turns, ...(one.text ? [{ role: "assistant", content: one.text }] : [])] }));
      setAnswers(current);
      setRunning(false);
      const failed = current.filter((one) => one.state === "failed").length;
      setSaid(`${current.length - failed} of ${current.length} answers are complete.`);
      if (isChat) set({ prompt: "" });
    }
  };

  return html`
    <${Heading} title="Playground">One prompt, answered side by side out of one batch, as ${whose}.<//>
    <div class="play">
      <form class="card stack" onSubmit=${(event) => {
        event.preventDefault();
        void run();
      }}>
        <${Choice} label="Kind of request" value=${settings.mode} onChange=${(mode) => {
          set({ mode });
          setAnswers([]);
        }} options=${[["completion", "Completion"], ["chat", "Chat"]]} />
        ${settings.mode === "chat" &&
        html`<label><span>System message</span>
          <textarea rows="2" value=${settings.system} placeholder="None" onInput=${(event) => set({ system: event.currentTarget.value })}></textarea></label>`}
        <label>
          <span>${settings.mode === "chat" ? "Message" : "Prompt"}</span>
          <textarea rows="4" value=${settings.prompt} placeholder=${settings.mode === "chat" ? "What is the capital of France?" : "The capital of France is"}
            onInput=${(event) => set({ prompt: event.currentTarget.value })}
            onKeyDown=${(event) => {
              if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) void run();
            }}></textarea>
        </label>
        <div class="actions">
          ${/* two buttons: one that became the other would submit the form by the click that stops */ isRunning
            ? html`<button key="stop" type="button" onClick=${() => ending.current?.abort()}>Stop</button>`
            : html`<button key="ask" type="submit" class="primary">Ask ${models.length === 1 ? "one model" : `${models.length} models`}</button>`}
          ${settings.mode === "chat" && answers.length > 0 && !isRunning &&
          html`<button type="button" onClick=${() => setAnswers([])}>New conversation</button>`}
          <span class="muted small">or Ctrl + Enter</span>
        </div>
        <${Models} base=${base} names=${names} chosen=${chosen} setChosen=${setChosen} isFull=${numAdapters >= MAX_ADAPTERS} />
        <${Sums} names=${names} sums=${sums} setSums=${setSums} isFull=${numAdapters >= MAX_ADAPTERS} />
        <div class="fields">
          <label><span>Max tokens</span>
            <input type="number" min="1" max="100000" value=${settings.maxTokens}
              onInput=${(event) => set({ maxTokens: Number(event.currentTarget.value) || 1 })} /></label>
          <label><span>Temperature</span>
            <input type="number" min="0" max="2" step="0.1" value=${settings.temperature}
              onInput=${(event) => set({ temperature: Number(event.currentTarget.value) || 0 })} /></label>
        </div>
        <label><span>Response format</span>
          <select value=${settings.format} onChange=${(event) => set({ format: event.currentTarget.value })}>
            <option value="text">free text</option>
            <option value="object">any JSON object</option>
            <option value="schema">JSON of a schema</option>
            <option value="regex">a regular expression</option>
          </select></label>
        ${settings.format === "schema" &&
        html`<label><span>JSON schema</span>
          <textarea class="mono" rows="7" spellcheck=${false} value=${settings.schema} onInput=${(event) => set({ schema: event.currentTarget.value })}></textarea></label>`}
        ${settings.format === "regex" &&
        html`<label><span>Regular expression</span>
          <input class="mono" spellcheck=${false} value=${settings.regex} onInput=${(event) => set({ regex: event.currentTarget.value })} /></label>`}
      </form>
      <div class="stack">
        <p class="hidden" role="status" aria-live="polite">${said}</p>
        ${error && html`<${Failure} error=${error} />`}
        ${answers.length
          ? html`<div class="answers">${answers.map((one) => html`<${Answer} key=${one.model} one=${one} isChat=${settings.mode === "chat"} />`)}</div>`
          : html`<div class="card"><${Empty} title="No answers yet">Choose models, write a prompt, and ask.<//></div>`}
        <${Snippets} settings=${settings} model=${models.find((model) => model !== base) ?? base} />
      </div>
    </div>`;
}

function Models({ base, names, chosen, setChosen, isFull }) {
  const [wanted, setWanted] = useState("");
  const shown = [base, ...names].filter((name) => name === base || name.includes(wanted.trim().toLowerCase()));
  const toggle = (name) =>
    setChosen(chosen.includes(name) ? chosen.filter((one) => one !== name) : [...chosen, name]);
  return html`<fieldset class="stack">
    <legend>Models (the base and up to ${MAX_ADAPTERS} adapters)</legend>
    ${names.length > 12 &&
    html`<label><span class="hidden">Find an adapter</span>
      <input type="search" placeholder="Find an adapter" value=${wanted} onInput=${(event) => setWanted(event.currentTarget.value)} /></label>`}
    <div class="models" tabindex=${shown.length > 8 ? 0 : undefined} role="group" aria-label="Models">
      ${shown.slice(0, 200).map(
        (name) => html`<label class="inline" key=${name}>
          <input type="checkbox" checked=${chosen.includes(name)} onChange=${() => toggle(name)}
            disabled=${isFull && name !== base && !chosen.includes(name)} />
          <span>${name}${name === base ? " (base)" : ""}</span>
        </label>`,
      )}
      ${shown.length > 200 && html`<p class="muted small">and ${shown.length - 200} more: find them by name</p>`}
      ${!names.length && html`<p class="muted small">This tenant has no adapters. <a href="#/adapters">Upload one</a>.</p>`}
    </div>
  </fieldset>`;
}

// `a+0.5*b`, as a request names it.
function sumName(sum) {
  const terms = sum.filter((term) => term.name && term.weight > 0);
  return terms.map((term) => (term.weight === 1 ? term.name : `${term.weight}*${term.name}`)).join("+");
}

function Sums({ names, sums, setSums, isFull }) {
  if (names.length < 2) return null;
  const change = (at, index, value) =>
    setSums(sums.map((sum, i) => (i === at ? sum.map((term, j) => (j === index ? { ...term, ...value } : term)) : sum)));
  return html`<fieldset class="stack">
    <legend>Sums of adapters</legend>
    ${sums.map(
      (sum, at) => html`<div class="stack" key=${at}>
        ${sum.map(
          (term, index) => html`<div class="split" key=${index}>
            <select aria-label=${`Adapter ${index + 1} of sum ${at + 1}`} value=${term.name} onChange=${(event) => change(at, index, { name: event.currentTarget.value })}>
              ${names.slice(0, 500).map((name) => html`<option value=${name} selected=${name === term.name}>${name}</option>`)}
            </select>
            <input type="range" min="0" max="2" step="0.05" value=${term.weight} aria-label=${`Weight of ${term.name} in sum ${at + 1}`}
              onInput=${(event) => change(at, index, { weight: Number(event.currentTarget.value) })} />
            <span class="num">${term.weight.toFixed(2)}</span>
            <span></span>
          </div>`,
        )}
        <div class="spread"><code>${sumName(sum)}</code>
          <button type="button" class="quiet small" onClick=${() => setSums(sums.filter((_, i) => i !== at))}>Remove</button></div>
      </div>`,
    )}
    <div><button type="button" class="small" disabled=${isFull}
      onClick=${() => setSums([...sums, [{ name: names[0], weight: 1 }, { name: names[1], weight: 0.5 }]])}>Add a sum</button></div>
  </fieldset>`;
}

const STATES = { waiting: "waiting", streaming: "answering", done: "done", failed: "failed", stopped: "stopped" };

function Answer({ one, isChat }) {
  const rate = one.tokens > 1 && one.lastS > one.firstS ? (one.tokens - 1) / (one.lastS - one.firstS) : null;
  const before = isChat ? one.turns.slice(0, one.state === "waiting" || one.state === "streaming" ? undefined : one.text ? -1 : undefined) : [];
  return html`<article class="card" aria-label=${`Answer of ${one.model}`} aria-busy=${one.state === "waiting" || one.state === "streaming"}>
    <div class="spread">
      <h3>${one.model}</h3>
      <${StateChip} state=${one.state} />
    </div>
    ${before.map((turn) => html`<p class=${turn.role === "user" ? "turn-user small" : "answer-text"}>${turn.content}</p>`)}
    <p class=${one.state === "streaming" ? "answer-text caret" : "answer-text"}>${one.text}</p>
    ${one.error && html`<div class="note note-bad" role="alert"><p>${one.error}</p></div>`}
    <p class="answer-foot num">
      ${one.by && one.by !== one.model && html`<span>by ${one.by}</span>`}
      ${one.firstS && html`<span>first token ${seconds(one.firstS)}</span>`}
      ${one.tokens > 0 && html`<span>${number(one.tokens)} tokens${rate ? `, ${number(rate)} per second` : ""}</span>`}
      ${one.timing && html`<span>${timingInWords(one.timing)}</span>`}
    </p>
  </article>`;
}

function StateChip({ state }) {
  const kind = { done: "good", failed: "bad", streaming: "accent" }[state] ?? "plain";
  return html`<span class=${`chip chip-${kind}`}>${STATES[state]}</span>`;
}

function timingInWords(header) {
  return header
    .split(",")
    .map((part) => part.trim().match(/^(\w+);dur=([\d.]+)$/))
    .filter(Boolean)
    .map(([, name, ms]) => `${name} ${seconds(Number(ms) / 1000)}`)
    .join(", ");
}

function Snippets({ settings, model }) {
  const [kind, setKind] = useState("curl");
  let body;
  try {
    body = requestOf(model, settings, [{ role: "user", content: settings.prompt }]);
  } catch {
    body = null;
  }
  const text = body ? snippet(kind, body, settings.mode === "chat") : "The schema isn't JSON yet.";
  return html`<section class="card" aria-labelledby="snippets">
    <div class="spread">
      <h2 id="snippets">The same request elsewhere</h2>
      <div class="actions">
        <${Choice} label="Kind of snippet" value=${kind} onChange=${setKind} options=${[["curl", "curl"], ["python", "Python"], ["openai", "OpenAI"], ["cli", "CLI"]]} />
        <${Copy} text=${text} />
      </div>
    </div>
    <pre tabindex="0" aria-label="Snippet"><code>${text}</code></pre>
  </section>`;
}

// The request for each kind of client; of a conversation, its first turn.
function snippet(kind, body, isChat) {
  const name = isChat ? "chat.completions" : "completions";
  const text = isChat ? ".choices[0].message.content" : ".choices[0].text";
  if (kind === "curl") return curl("POST", isChat ? "/v1/chat/completions" : "/v1/completions", { json: body });
  if (kind === "cli") return run(body, isChat);
  if (kind === "python") return python(`answer = ${call(`client.${name}.create`, [], body)}\nprint(answer${text})`);
  const { structured_outputs: structured, ...known } = body;
  const fields = { ...known, ...(structured && { extra_body: { structured_outputs: structured } }) };
  const { tenant } = session.value;
  const acting = tenant ? `,\n    default_headers=${literal({ "X-Tenant": tenant })}` : "";
  const client = `client = OpenAI(\n    base_url=${literal(`${location.origin}/v1`)},\n    api_key=os.environ["LORASERVE_API_KEY"]${acting},\n)`;
  return `import os\n\nfrom openai import OpenAI\n\n${client}\nanswer = ${call(`client.${name}.create`, [], fields)}\nprint(answer${text})`;
}

function run({ model, messages, prompt, max_tokens: most, temperature, ...others }, isChat) {
  const system = messages?.find((one) => one.role === "system")?.content;
  const asked = isChat ? messages.at(-1).content : prompt;
  const fields = Object.entries(others).flatMap(([name, value]) => ["--field", `${name}=${JSON.stringify(value)}`]);
  return command(
    "run", isChat ? "--chat" : "--raw", "--max-tokens", most, "--temperature", temperature,
    system !== undefined && ["--system", system], fields, "--", model, asked,
  );
}
