import { ApiError, errorOf, explain, stream } from "../api";
import type { Node, Stats, TokenLogprob } from "./types";

interface Delta {
  content?: string | null;
  reasoning_content?: string | null;
  reasoning?: string | null;
  tool_calls?: { index?: number; id?: string; function?: { name?: string; arguments?: string } }[];
}

interface Logprob {
  token: string;
  logprob: number;
  top_logprobs?: { token: string; logprob: number }[];
}

interface Chunk {
  choices?: { delta?: Delta; logprobs?: { content?: Logprob[] | null } | null; finish_reason?: string | null }[];
  usage?: {
    prompt_tokens?: number;
    completion_tokens?: number;
    prompt_tokens_details?: { cached_tokens?: number } | null;
    completion_tokens_details?: { reasoning_tokens?: number } | null;
  } | null;
  error?: unknown;
}

function noStats(): Stats {
  return {
    ttft: null,
    elapsed: 0,
    promptTokens: null,
    cachedTokens: null,
    tokens: null,
    reasoningTokens: null,
    finish: null,
    ignored: "",
  };
}

/** Adds one chunk to `node`. Returns true if the chunk contained a part of the answer. */
export function take(node: Node, stats: Stats, chunk: Chunk): boolean {
  if (chunk.error) throw errorOf(0, chunk);
  const { usage } = chunk;
  if (usage) {
    stats.promptTokens = usage.prompt_tokens ?? null;
    stats.tokens = usage.completion_tokens ?? null;
    stats.cachedTokens = usage.prompt_tokens_details?.cached_tokens ?? null;
    stats.reasoningTokens = usage.completion_tokens_details?.reasoning_tokens ?? null;
  }
  const choice = chunk.choices?.[0];
  if (!choice) return false;
  if (choice.finish_reason) stats.finish = choice.finish_reason;
  for (const { token, logprob, top_logprobs } of choice.logprobs?.content ?? []) {
    const top = (top_logprobs ?? []).map((other) => ({ token: other.token, logprob: other.logprob }));
    node.logprobs.push({ token, logprob, top } satisfies TokenLogprob);
  }
  const delta = choice.delta ?? {};
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
  node.reasoning += reasoning;
  node.content += delta.content ?? "";
  for (const part of delta.tool_calls ?? []) {
    const index = part.index ?? node.calls.length;
    while (node.calls.length <= index) node.calls.push({ id: "", name: "", arguments: "" });
    const call = node.calls[index]!;
    if (part.id) call.id = part.id;
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  return Boolean(reasoning || delta.content || delta.tool_calls?.length);
}

/**
 * Streams the answer to `body` into `node`, and calls `changed` after each chunk.
 *
 * Never throws: an error is stored in `node.error`. A stop by `signal` is no error.
 */
export async function answer(node: Node, body: unknown, signal: AbortSignal, changed: () => void): Promise<void> {
  const stats = noStats();
  node.stats = stats;
  const sent = performance.now();
  let first: number | null = null;
  let whole = false;
  try {
    const { headers, events } = await stream("v1/chat/completions", body, signal);
    stats.ignored = headers.get("x-forebay-ignored") ?? "";
    for await (const { data } of events) {
      if (data === "[DONE]") {
        whole = true;
        break;
      }
      if (take(node, stats, JSON.parse(data) as Chunk)) {
        const now = performance.now();
        if (first === null) {
          first = now;
          stats.ttft = now - sent;
        }
        stats.elapsed = now - first;
      }
      changed();
    }
    if (!whole && stats.finish === null) {
      throw new ApiError(0, "The connection ended before the answer did.");
    }
  } catch (error) {
    if (signal.aborted) stats.finish = "stopped";
    else node.error = describe(error);
  }
  changed();
}

function describe(error: unknown): string {
  if (error instanceof SyntaxError) return "The server sent something that is no JSON.";
  return explain(error);
}

