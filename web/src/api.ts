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

/** The API key. It lives as long as the browser's tab and is sent to this server only. */
export const apiKey = signal(stored());

export function setApiKey(key: string): void {
  apiKey.value = key.trim();
  try {
    if (apiKey.value) sessionStorage.setItem(KEY, apiKey.value);
    else sessionStorage.removeItem(KEY);
  } catch {
    // A browser that keeps nothing: the key holds until the page is left.
  }
}

/** What the server said instead of an answer. `status` 0: it said nothing. */
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

/** An error in plain words: what it means, and then what the server says. */
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

/** The error in an object of OpenAI's shape, or of the shapes of others. */
export function errorOf(status: number, body: unknown): ApiError {
  const outer = (body ?? {}) as Record<string, unknown>;
  const inner = (typeof outer.error === "object" && outer.error ? outer.error : outer) as Record<string, unknown>;
  const message = inner.message ?? outer.detail ?? outer.error ?? "";
  const param = typeof inner.param === "string" ? inner.param : null;
  const code = typeof inner.code === "number" ? inner.code : status;
  return new ApiError(code, typeof message === "string" ? message : JSON.stringify(message), param);
}

/** A request to this server, with the key where there is one. Throws `ApiError` unless it is answered with 2xx. */
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

/** A request that is answered with server-sent events. */
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

/** A model of the list. Servers of one model, and those of others, say neither state nor size. */
export interface ModelCard {
  id: string;
  state?: string;
  /** Bytes of its files. */
  size?: number;
}

/** What the page has to know of the server, and of the chosen model. */
export interface Server {
  models: ModelCard[];
  /** Whether the model takes images, and tools; null where the server does not say. */
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

/** Asks for the models, loaded or not. */
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

/** Asks whether a model takes images and tools. A model that is not loaded does not say. */
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
    // Servers of others, and keys that may not ask: all is offered, and the server refuses by name.
  }
}
