import { signal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { serverError } from "../api";
import { IconButton } from "../ui/parts";
import { Composer } from "./composer";
import { Message } from "./message";
import { Panel } from "./panel";
import { model, settings } from "./settings";
import { Sidebar } from "./sidebar";
import { recall, remember } from "./storage";
import { answering, isRunning, notice, shown, version } from "./store";
import { branches, path } from "./tree";

const NEAR = 80;
const WIDE = matchMedia("(min-width: 1100px)");

/** Whether each side panel is open. On a narrow page they cover the messages, one at a time. */
const listOpen = signal(WIDE.matches && (recall<boolean>("list") ?? true));
const panelOpen = signal(WIDE.matches && (recall<boolean>("panel") ?? true));

function toggle(side: typeof listOpen): void {
  const other = side === listOpen ? panelOpen : listOpen;
  side.value = !side.value;
  if (!WIDE.matches && side.value) other.value = false;
  if (WIDE.matches) {
    remember("list", listOpen.value);
    remember("panel", panelOpen.value);
  }
}

function closeOnNarrow(): void {
  if (!WIDE.matches) listOpen.value = false;
}

function Messages(): JSX.Element {
  const log = useRef<HTMLDivElement>(null);
  const stuck = useRef(true);
  const seen = version.value;
  const conversation = shown.value;
  const nodes = path(conversation);
  useEffect(() => {
    const element = log.current!;
    const observer = new ResizeObserver(() => {
      if (stuck.current) element.scrollTop = element.scrollHeight;
    });
    observer.observe(element);
    observer.observe(element.firstElementChild!);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    stuck.current = true;
  }, [conversation, nodes.length]);
  const onScroll = () => {
    const element = log.current!;
    stuck.current = element.scrollHeight - element.scrollTop - element.clientHeight < NEAR;
  };
  return (
    <div class="log" ref={log} onScroll={onScroll} role="log" aria-live="off" aria-label="Messages" tabIndex={0}>
      <div>
        {nodes.length === 0 && (
          <div class="welcome">
            <h2>{model() || "No model yet"}</h2>
            <p>{serverError.value || "Ask something. The Engine tab shows what the server does with it."}</p>
          </div>
        )}
        {nodes.map((node) => {
          const beside = branches(conversation, node);
          const waiting = isRunning(node);
          const state = `${beside.length} ${conversation.shown[node.id] ?? ""} ${settings.value.logprobs}`;
          return (
            <Message
              key={node.id}
              node={node}
              branches={beside}
              waiting={waiting}
              stamp={waiting ? seen : state}
            />
          );
        })}
      </div>
    </div>
  );
}

export function Chat(): JSX.Element {
  void version.value;
  const last = path(shown.value).at(-1) ?? null;
  const answer = answering.value;
  return (
    <div class={`chat ${listOpen.value ? "with-list" : ""} ${panelOpen.value ? "with-panel" : ""}`}>
      {listOpen.value && (
        <nav class="side list-side" aria-label="Conversations">
          <Sidebar onChoice={closeOnNarrow} />
        </nav>
      )}
      <section class="middle" aria-label="Conversation">
        <div class="strip">
          <IconButton icon="menu" label="Conversations" pressed={listOpen.value} onClick={() => toggle(listOpen)} />
          <span class="title">{shown.value.title || "New conversation"}</span>
          <IconButton icon="tune" label="Settings" pressed={panelOpen.value} onClick={() => toggle(panelOpen)} />
        </div>
        <Messages />
        {notice.value && (
          <p class="notice" role="status">
            {notice.value}
            <IconButton icon="close" label="Dismiss" onClick={() => (notice.value = "")} />
          </p>
        )}
        <p class="hidden" role="status">
          {answer ? "The model answers." : last?.role === "assistant" ? "The answer is complete." : ""}
        </p>
        <Composer last={last?.id ?? null} />
      </section>
      {panelOpen.value && (
        <aside class="side panel" aria-label="Settings">
          <Panel />
        </aside>
      )}
    </div>
  );
}
