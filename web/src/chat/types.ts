/** A tool call, as the chat API returns it. */
export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

export interface ToolResult {
  id: string;
  content: string;
}

export interface TokenLogprob {
  token: string;
  logprob: number;
  top: { token: string; logprob: number }[];
}

/** Measurements of an answer. Times are in milliseconds. */
export interface Stats {
  ttft: number | null;
  /** The time from the first to the last chunk of the answer. */
  elapsed: number;
  promptTokens: number | null;
  cachedTokens: number | null;
  tokens: number | null;
  reasoningTokens: number | null;
  finish: string | null;
  /** Fields of the request that had no effect, as the server names them. */
  ignored: string;
}

export interface Node {
  id: string;
  parent: string | null;
  role: "user" | "assistant" | "tool";
  content: string;
  /** Data URLs. */
  images: string[];
  reasoning: string;
  calls: ToolCall[];
  /** For the role `tool`: the results of the parent's calls. */
  results: ToolResult[];
  logprobs: TokenLogprob[];
  stats: Stats | null;
  error: string;
  model: string;
}

/** A tree of messages: the children of a message are its branches. */
export interface Conversation {
  id: string;
  title: string;
  created: number;
  updated: number;
  system: string;
  nodes: Record<string, Node>;
  /** The children of a node in order of creation, by its id. The key "" has the nodes without a parent. */
  children: Record<string, string[]>;
  /** The id of the shown child, by the parent's id. */
  shown: Record<string, string>;
}

/** Sampling parameters as the user typed them. An empty one is not sent. */
export interface Sampling {
  temperature: string;
  top_p: string;
  top_k: string;
  min_p: string;
  max_tokens: string;
  seed: string;
  presence_penalty: string;
  frequency_penalty: string;
  repetition_penalty: string;
  stop: string;
}

export interface Settings {
  model: string;
  sampling: Sampling;
  tools: string;
  toolChoice: "auto" | "none" | "required";
  schema: string;
  useTools: boolean;
  useSchema: boolean;
  logprobs: boolean;
}
