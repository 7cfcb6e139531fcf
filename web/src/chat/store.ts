import { computed, signal } from "@preact/signals";
import { explain } from "../api";
import { answer } from "./answer";
import { body } from "./request";
import { model, settings } from "./settings";
import * as storage from "./storage";
import { add, ancestry, emptyConversation, emptyNode, imported } from "./tree";
import type { Conversation, Node, ToolResult } from "./types";

const LONGEST_TITLE = 60;

/** The conversations, the newest first. They are changed in place, and `version` counts the changes. */
export const conversations = signal<Conversation[]>([]);
const current = signal("");
export const version = signal(0);
export const notice = signal("");

/** The controllers of running answers, by the id of their node. */
const running = signal(new Map<string, AbortController>());

const fresh = signal(emptyConversation(storage.recall<string>("system") ?? ""));

/** The shown conversation: one of the list, or a new one without messages. */
export const shown = computed<Conversation>(
  () => conversations.value.find(({ id }) => id === current.value) ?? fresh.value,
);

export function isRunning(node: Node): boolean {
  return running.value.has(node.id);
}

/** The node of the shown conversation whose answer is running; null if there is none. */
export const answering = computed<Node | null>(() => {
  for (const id of running.value.keys()) {
    const node = shown.value.nodes[id];
    if (node) return node;
  }
  return null;
});

let frame = 0;

/** Renders the changes, at most once per frame. */
function touch(): void {
  if (frame) return;
  const show = () => {
    cancelAnimationFrame(frame);
    clearTimeout(late);
    frame = 0;
    version.value += 1;
  };
  frame = requestAnimationFrame(show);
  // A tab in the background gets no animation frames.
  const late = setTimeout(show, 500);
}

async function keep(conversation: Conversation): Promise<void> {
  try {
    await storage.save(conversation);
  } catch (error) {
    notice.value = `This conversation is not kept: ${explain(error)}`;
  }
}

export async function restore(): Promise<void> {
  try {
    conversations.value = await storage.loadAll();
  } catch {
    notice.value = "This browser keeps no data for this page: conversations last until it is left.";
  }
}

export function begin(): void {
  fresh.value = emptyConversation(shown.value.system);
  current.value = "";
}

export function open(id: string): void {
  current.value = id;
}

export async function forget(id: string): Promise<void> {
  const gone = conversations.value.find((conversation) => conversation.id === id);
  for (const node of Object.keys(gone?.nodes ?? {})) running.value.get(node)?.abort();
  conversations.value = conversations.value.filter((conversation) => conversation.id !== id);
  if (current.value === id) begin();
  await storage.remove(id).catch(() => undefined);
}

export function setSystem(text: string): void {
  shown.value.system = text;
  storage.remember("system", text);
  version.value += 1;
  if (conversations.value.includes(shown.value)) void keep(shown.value);
}

/** Adds the shown conversation to the list if it is new; returns it. */
function adopt(): Conversation {
  const conversation = shown.value;
  if (!conversations.value.includes(conversation)) {
    conversations.value = [conversation, ...conversations.value];
    current.value = conversation.id;
  }
  return conversation;
}

/** Generates an answer to `parent` as a new branch. */
async function generate(conversation: Conversation, parent: Node): Promise<void> {
  const node = emptyNode("assistant", parent.id);
  node.model = model();
  let request: unknown;
  try {
    request = body(ancestry(conversation, parent.id), conversation.system, settings.value, node.model);
  } catch (error) {
    node.error = error instanceof Error ? error.message : String(error);
  }
  add(conversation, node);
  touch();
  void keep(conversation);
  if (request === undefined) return;
  const controller = new AbortController();
  running.value = new Map(running.value).set(node.id, controller);
  await answer(node, request, controller.signal, touch);
  const rest = new Map(running.value);
  rest.delete(node.id);
  running.value = rest;
  conversation.updated = Date.now();
  touch();
  if (conversations.value.includes(conversation)) await keep(conversation);
}

/** Sends the user's message as a new branch below `parent`; null: as the first message. */
export async function say(parent: string | null, content: string, images: string[]): Promise<void> {
  const conversation = adopt();
  const node = emptyNode("user", parent);
  node.content = content;
  node.images = images;
  add(conversation, node);
  if (!conversation.title) {
    const line = content.trim().slice(0, 500).replace(/\s+/g, " ");
    conversation.title = line.length > LONGEST_TITLE ? `${line.slice(0, LONGEST_TITLE)}…` : line || "Image";
  }
  await generate(conversation, node);
}

/** Sends the results of the tool calls of `node`. */
export async function giveResults(node: Node, results: ToolResult[]): Promise<void> {
  const conversation = shown.value;
  const made = emptyNode("tool", node.id);
  made.results = results;
  add(conversation, made);
  await generate(conversation, made);
}

/** Generates another answer to the message before `node`. */
export async function regenerate(node: Node): Promise<void> {
  const parent = node.parent === null ? undefined : shown.value.nodes[node.parent];
  if (parent) await generate(shown.value, parent);
}

export function stop(): void {
  const node = answering.value;
  if (node) running.value.get(node.id)?.abort();
}

/** Shows the branch `id` in place of `node`. */
export function show(node: Node, id: string): void {
  shown.value.shown[node.parent ?? ""] = id;
  version.value += 1;
  void keep(shown.value);
}

/** The request of an answer, with the present settings. */
export function requestOf(node: Node): Record<string, unknown> {
  return body(ancestry(shown.value, node.parent), shown.value.system, settings.value, node.model || model());
}

const FORMAT = "forebay-conversations";

/** All conversations as a file. */
export function exported(): Blob {
  const file = { format: FORMAT, version: 1, conversations: conversations.value };
  return new Blob([JSON.stringify(file)], { type: "application/json" });
}

/** Adds the conversations of a file that `exported` has written. */
export async function load(file: File): Promise<void> {
  let found: Conversation[];
  try {
    const content = JSON.parse(await file.text()) as { format?: unknown; conversations?: unknown };
    if (content.format !== FORMAT || !Array.isArray(content.conversations)) throw new SyntaxError();
    found = content.conversations.map(imported).filter((conversation) => conversation !== null);
  } catch {
    notice.value = `${file.name} has no conversations of this page.`;
    return;
  }
  conversations.value = [...found, ...conversations.value];
  for (const conversation of found) await keep(conversation);
  notice.value = `${found.length} ${found.length === 1 ? "conversation was" : "conversations were"} added.`;
}
