import { signal } from "@preact/signals";
import { events, type ServerEvent } from "./sse";

const KEY = "forebay.key";

function stored(): string {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

/** The API key. It is kept while the browser's tab is open, and is sent to this server only. */
export const apiKey = signal(stored());

export function setApiKey(key: string): void {
  apiKey.value = key.trim();
  try {
    if (apiKey.value) sessionStorage.setItem(KEY, apiKey.value);
    else sessionStorage.removeItem(KEY);
  } catch {
    // The browser allows no storage: the key lasts until the page is left.
  }
}

/** An error response. `status` is 0 if the server sent no response. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly param: string | null = null,
  ) {
    super(message);
  }
}

const MEANING: Record<number, string> = {
  400: "The server does not take this request",
  401: "The server wants an API key, or another one: set it under Settings",
  403: "The server does not let this key do that",
  404: "The server does not know this",
  413: "The request is larger than the server takes",
  422: "The server does not take this request",
  429: "The server has too much to do, or this key has used its share. Try again in a moment",
  500: "The server made a mistake",
  502: "No backend answered",
  503: "The server is not ready, or it is about to stop. Try again in a moment",
  504: "The server took too long",
};

/** An error in plain words: its meaning, followed by the server's message. */
export function explain(error: unknown): string {
  if (error instanceof ApiError) {
    if (error.status === 0) return error.message;
    const meaning = MEANING[error.status] ?? `The server answered with status ${error.status}`;
    const where = error.param && !error.message.includes(error.param) ? ` (${error.param})` : "";
    return error.message ? `${meaning}: ${error.message}${where}` : `${meaning}.`;
  }
  if (error instanceof TypeError) return "The server cannot be reached, or it closed the connection.";
  return error instanceof Error ? error.message : String(error);
}

/** The error in a response body in the format of OpenAI or of another API. */
export function errorOf(status: number, body: unknown): ApiError {
  const outer = (body ?? {}) as Record<string, unknown>;
  const inner = (typeof outer.error === "object" && outer.error ? outer.error : outer) as Record<string, unknown>;
  const message = inner.message ?? outer.detail ?? outer.error ?? "";
  const param = typeof inner.param === "string" ? inner.param : null;
  const code = typeof inner.code === "number" ? inner.code : status;
  return new ApiError(code, typeof message === "string" ? message : JSON.stringify(message), param);
}

/** Sends a request to this server, with the key if one is set. Throws `ApiError` unless the status is 2xx. */
export async function request(path: string, options: RequestInit = {}): Promise<Response> {
  const headers = new Headers(options.headers);
  if (apiKey.value) headers.set("Authorization", `Bearer ${apiKey.value}`);
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin" });
  if (response.ok) return response;
  const text = await response.text();
  let body: unknown;
  try {
    body = JSON.parse(text);
  } catch {
    body = { message: text.slice(0, 500) };
  }
  throw errorOf(response.status, body);
}

export async function getJson<T>(path: string, signal?: AbortSignal): Promise<T> {
  const response = await request(path, signal ? { signal } : {});
  return (await response.json()) as T;
}

export interface Stream {
  headers: Headers;
  events: AsyncGenerator<ServerEvent>;
}

/** Sends a request whose response is a stream of server-sent events. */
export async function stream(path: string, body: unknown, signal: AbortSignal): Promise<Stream> {
  const options: RequestInit = { signal, headers: { Accept: "text/event-stream" } };
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    options.headers = { ...options.headers, "Content-Type": "application/json" };
  }
  const response = await request(path, options);
  if (!response.body) throw new ApiError(0, "The server sent no stream.");
  return { headers: response.headers, events: events(response.body) };
}

/** A model of the list. Other engines, and servers of a single model, report neither state nor size. */
export interface ModelCard {
  id: string;
  state?: string;
  /** The size of the model's files in bytes. */
  size?: number;
}

/** The facts about the server and the chosen model that the page uses. */
export interface Server {
  models: ModelCard[];
  /** Whether the model accepts images, and tools; null if the server does not report it. */
  images: boolean | null;
  tools: boolean | null;
}

interface Info {
  facts?: { tower_layers?: number };
  config?: { chat?: { template_takes_tools?: boolean } };
}

const UNKNOWN: Server = { models: [], images: null, tools: null };

export const server = signal<Server>(UNKNOWN);
export const serverError = signal("");

/** Requests the list of models, whether loaded or not. */
export async function loadModels(): Promise<void> {
  try {
    const list = await getJson<{ data?: ModelCard[] }>("v1/models");
    server.value = { ...server.value, models: list.data ?? [] };
    serverError.value = "";
  } catch (error) {
    server.value = UNKNOWN;
    serverError.value = explain(error);
  }
}

/** Requests whether a model accepts images and tools. The server does not report it for an unloaded model. */
export async function loadFacts(model: string): Promise<void> {
  server.value = { ...server.value, images: null, tools: null };
  try {
    const info = await getJson<Info>(`server_info?model=${encodeURIComponent(model)}`);
    server.value = {
      ...server.value,
      images: info.facts?.tower_layers === undefined ? null : info.facts.tower_layers > 0,
      tools: info.config?.chat?.template_takes_tools ?? null,
    };
  } catch {
    // Another engine, or a key without access: the page offers all inputs, and the server's errors name a rejected one.
  }
}
