import { signal } from "@preact/signals";
import { loadFacts, loadModels, server } from "../api";
import { recall, remember } from "./storage";
import type { Sampling, Settings } from "./types";

const EXAMPLE_TOOLS = `[
  {
    "type": "function",
    "function": {
      "name": "get_weather",
      "description": "The weather of a city today.",
      "parameters": {
        "type": "object",
        "properties": { "city": { "type": "string" } },
        "required": ["city"]
      }
    }
  }
]`;

const EXAMPLE_SCHEMA = `{
  "type": "object",
  "properties": {
    "answer": { "type": "string" },
    "confidence": { "type": "number", "minimum": 0, "maximum": 1 }
  },
  "required": ["answer", "confidence"],
  "additionalProperties": false
}`;

export const NO_SAMPLING: Sampling = {
  temperature: "",
  top_p: "",
  top_k: "",
  min_p: "",
  max_tokens: "",
  seed: "",
  presence_penalty: "",
  frequency_penalty: "",
  repetition_penalty: "",
  stop: "",
};

const DEFAULTS: Settings = {
  model: "",
  sampling: NO_SAMPLING,
  tools: EXAMPLE_TOOLS,
  toolChoice: "auto",
  schema: EXAMPLE_SCHEMA,
  useTools: false,
  useSchema: false,
  logprobs: false,
};

const kept = recall<Partial<Settings>>("settings");

export const settings = signal<Settings>({
  ...DEFAULTS,
  ...kept,
  sampling: { ...NO_SAMPLING, ...kept?.sampling },
});

export function change(part: Partial<Settings>): void {
  settings.value = { ...settings.value, ...part };
  remember("settings", settings.value);
}

/** The model of requests: the chosen one if it is served, else the first. */
export function model(): string {
  const chosen = settings.value.model;
  const names = server.value.models.map((card) => card.id);
  return names.includes(chosen) ? chosen : (names[0] ?? chosen);
}

/** Requests the list of models, and the inputs that the model of requests accepts. */
export async function loadServer(): Promise<void> {
  await loadModels();
  if (server.value.models.length) await loadFacts(model());
}

/** The error in a text that has to be a JSON array or object; "" if it is valid. */
export function jsonError(text: string, kind: "array" | "object"): string {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch (error) {
    return `This is no JSON: ${error instanceof Error ? error.message : String(error)}`;
  }
  if (kind === "array") return Array.isArray(value) ? "" : "This has to be a list of tools.";
  return typeof value === "object" && value !== null && !Array.isArray(value) ? "" : "This has to be an object.";
}
