import type { Conversation, Node } from "./types";

let counter = 0;

/** An id that no other message or conversation of this browser has. */
export function freshId(): string {
  counter += 1;
  return `${Date.now().toString(36)}-${counter.toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
}

export function emptyConversation(system: string): Conversation {
  const now = Date.now();
  return { id: freshId(), title: "", created: now, updated: now, system, nodes: {}, children: {}, shown: {} };
}

export function emptyNode(role: Node["role"], parent: string | null): Node {
  return {
    id: freshId(),
    parent,
    role,
    content: "",
    images: [],
    reasoning: "",
    calls: [],
    results: [],
    logprobs: [],
    stats: null,
    error: "",
    model: "",
  };
}

/** Adds a node as the last branch of its parent, and shows it. */
export function add(conversation: Conversation, node: Node): void {
  const parent = node.parent ?? "";
  conversation.nodes[node.id] = node;
  (conversation.children[parent] ??= []).push(node.id);
  conversation.shown[parent] = node.id;
  conversation.updated = Date.now();
}

/** The ids of a node and its siblings. */
export function branches(conversation: Conversation, node: Node): string[] {
  return conversation.children[node.parent ?? ""] ?? [];
}

/** The shown messages, from the first to the last. */
export function path(conversation: Conversation): Node[] {
  const found: Node[] = [];
  for (let parent = ""; ; ) {
    const children = conversation.children[parent];
    const next = conversation.shown[parent] ?? children?.at(-1);
    const node = next === undefined ? undefined : conversation.nodes[next];
    if (!node) return found;
    found.push(node);
    parent = node.id;
  }
}

/** The messages from the first one to `id`, both included. */
export function ancestry(conversation: Conversation, id: string | null): Node[] {
  const found: Node[] = [];
  for (let node = id === null ? undefined : conversation.nodes[id]; node; ) {
    found.push(node);
    node = node.parent === null ? undefined : conversation.nodes[node.parent];
  }
  return found.reverse();
}

type Shape = Record<string, unknown>;

function strings(value: unknown): string[] {
  return Array.isArray(value) ? value.filter((item) => typeof item === "string") : [];
}

function text(value: unknown): string {
  return typeof value === "string" ? value : "";
}

function objects(value: unknown): Shape[] {
  return Array.isArray(value) ? value.filter((item) => typeof item === "object" && item !== null) : [];
}

/**
 * A conversation from a file, whose content may be anything. Null if it is invalid.
 *
 * Nodes that no path reaches are dropped, so the result has no cycles.
 */
export function imported(value: unknown): Conversation | null {
  if (typeof value !== "object" || value === null) return null;
  const file = value as Shape;
  if (typeof file.nodes !== "object" || file.nodes === null) return null;
  if (typeof file.children !== "object" || file.children === null) return null;
  const nodes = new Map(Object.entries(file.nodes as Shape));
  const children = new Map(Object.entries(file.children as Shape));
  const made = emptyConversation(text(file.system));
  made.title = text(file.title);
  if (typeof file.created === "number") made.created = file.created;
  const queue: [string, string | null][] = [["", null]];
  for (let next = queue.shift(); next; next = queue.shift()) {
    const [old, parent] = next;
    for (const id of strings(children.get(old))) {
      const node = nodes.get(id);
      // Each node is used once.
      if (!nodes.delete(id) || typeof node !== "object" || node === null) continue;
      const copy = readNode(node as Shape, parent);
      if (!copy) continue;
      add(made, copy);
      queue.push([id, copy.id]);
    }
  }
  return made;
}

function readNode(node: Shape, parent: string | null): Node | null {
  const role = node.role;
  if (role !== "user" && role !== "assistant" && role !== "tool") return null;
  const made = emptyNode(role, parent);
  made.content = text(node.content);
  made.images = strings(node.images).filter((url) => url.startsWith("data:image/"));
  made.reasoning = text(node.reasoning);
  made.calls = objects(node.calls).map((call) => ({
    id: text(call.id),
    name: text(call.name),
    arguments: text(call.arguments),
  }));
  made.results = objects(node.results).map((result) => ({ id: text(result.id), content: text(result.content) }));
  made.error = text(node.error);
  made.model = text(node.model);
  return made;
}
