import { jsonError } from "./settings";
import type { Node, Sampling, Settings } from "./types";

type Json = Record<string, unknown>;

const WHOLE = new Set<keyof Sampling>(["top_k", "max_tokens", "seed"]);

/** The messages of a node in the form of the chat API. A node of tool results becomes several messages. */
function messages(node: Node): Json[] {
  if (node.role === "tool") {
    return node.results.map(({ id, content }) => ({ role: "tool", tool_call_id: id, content }));
  }
  if (node.role === "user") {
    if (!node.images.length) return [{ role: "user", content: node.content }];
    const images = node.images.map((url) => ({ type: "image_url", image_url: { url } }));
    return [{ role: "user", content: [...images, { type: "text", text: node.content }] }];
  }
  // An answer that failed or was stopped before its first token is left out.
  if (!node.content && !node.calls.length) return [];
  const message: Json = { role: "assistant", content: node.content || null };
  if (node.reasoning) message.reasoning_content = node.reasoning;
  if (node.calls.length) {
    message.tool_calls = node.calls.map(({ id, name, arguments: text }) => ({
      id,
      type: "function",
      function: { name, arguments: text },
    }));
  }
  return [message];
}

function sampling(values: Sampling): Json {
  const found: Json = {};
  for (const [name, text] of Object.entries(values) as [keyof Sampling, string][]) {
    if (name === "stop") {
      const stops = text.split("\n").filter((line) => line !== "");
      if (stops.length) found.stop = stops;
    } else if (text.trim() !== "") {
      const value = Number(text);
      if (!Number.isFinite(value)) throw new Error(`${name} is no number: ${text}`);
      if (WHOLE.has(name) && !Number.isInteger(value)) throw new Error(`${name} has to be a whole number: ${text}`);
      found[name] = value;
    }
  }
  return found;
}

/** The body of the request that continues `path`. Throws if a setting is invalid. */
export function body(path: Node[], system: string, settings: Settings, model: string): Json {
  const made: Json = { model, messages: path.flatMap(messages) };
  if (system.trim()) (made.messages as Json[]).unshift({ role: "system", content: system });
  Object.assign(made, sampling(settings.sampling));
  if (settings.useTools) {
    const wrong = jsonError(settings.tools, "array");
    if (wrong) throw new Error(`Tools: ${wrong}`);
    made.tools = JSON.parse(settings.tools);
    if (settings.toolChoice !== "auto") made.tool_choice = settings.toolChoice;
  }
  if (settings.useSchema) {
    const wrong = jsonError(settings.schema, "object");
    if (wrong) throw new Error(`Schema: ${wrong}`);
    const schema: unknown = JSON.parse(settings.schema);
    made.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
  }
  if (settings.logprobs) {
    made.logprobs = true;
    made.top_logprobs = 5;
  }
  made.stream = true;
  made.stream_options = { include_usage: true };
  return made;
}

/** The same request as a curl command. The key is a shell variable, because copied text may be shared. */
export function asCurl(request: Json, withKey: boolean): string {
  const quoted = JSON.stringify(request, null, 2).replaceAll("'", `'\\''`);
  const lines = [`curl -N ${location.origin}/v1/chat/completions`, `-H 'Content-Type: application/json'`];
  if (withKey) lines.push(`-H "Authorization: Bearer $FOREBAY_API_KEY"`);
  return [...lines, `-d '${quoted}'`].join(" \\\n  ");
}

const CLIENT_KNOWS = new Set([
  "model",
  "messages",
  "temperature",
  "top_p",
  "max_tokens",
  "seed",
  "presence_penalty",
  "frequency_penalty",
  "stop",
  "tools",
  "tool_choice",
  "response_format",
  "logprobs",
  "top_logprobs",
  "stream",
  "stream_options",
]);

/** A JSON value as a Python literal. */
export function python(value: unknown, indent: string): string {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  // Python reads JSON's escapes too.
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const items = Array.isArray(value)
    ? value.map((item) => `${inner}${python(item, inner)},\n`)
    : Object.entries(value).map(([name, item]) => `${inner}${JSON.stringify(name)}: ${python(item, inner)},\n`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return items.length ? `${open}\n${items.join("")}${indent}${close}` : `${open}${close}`;
}

/** The same request for OpenAI's Python client. Fields that it has no argument for go into `extra_body`. */
export function asPython(request: Json, withKey: boolean): string {
  const known: string[] = [];
  const extra: Json = {};
  for (const [name, value] of Object.entries(request)) {
    if (CLIENT_KNOWS.has(name)) known.push(`    ${name}=${python(value, "    ")},\n`);
    else extra[name] = value;
  }
  if (Object.keys(extra).length) known.push(`    extra_body=${python(extra, "    ")},\n`);
  const key = withKey ? `os.environ["FOREBAY_API_KEY"]` : `"none"`;
  return `${withKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(`${location.origin}/v1`)}, api_key=${key})
stream = client.chat.completions.create(
${known.join("")})
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
`;
}
