import { signal } from "@preact/signals";
import { render, type JSX } from "preact";
import { useEffect } from "preact/hooks";
import { loadServer } from "./chat/settings";
import { restore } from "./chat/store";
import { Chat } from "./chat/view";
import { connect, feed } from "./engine/feed";
import { engine } from "./engine/store";
import { EngineView } from "./engine/view";

type Tab = "chat" | "engine";

function tabOf(hash: string): Tab {
  return hash === "#engine" ? "engine" : "chat";
}

const tab = signal<Tab>(tabOf(location.hash));
addEventListener("hashchange", () => (tab.value = tabOf(location.hash)));

const TABS: Tab[] = ["chat", "engine"];

function Tabs(): JSX.Element {
  const label = { chat: "Chat", engine: engine.value?.start.router ? "Backends" : "Engine" };
  const choose = (name: Tab) => {
    tab.value = name;
    history.replaceState(null, "", `#${name}`);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const next = TABS[1 - TABS.indexOf(tab.value)]!;
    choose(next);
    document.getElementById(`tab-${next}`)?.focus();
  };
  return (
    <div class="tabs" role="tablist" aria-label="Views" onKeyDown={onKeyDown}>
      {TABS.map((name) => (
        <button
          key={name}
          id={`tab-${name}`}
          type="button"
          role="tab"
          aria-selected={tab.value === name}
          aria-controls="view"
          tabIndex={tab.value === name ? 0 : -1}
          onClick={() => choose(name)}
        >
          {label[name]}
        </button>
      ))}
    </div>
  );
}

const SAID: Record<string, string> = {
  off: "",
  connecting: "connecting",
  live: "live",
  refused: "no feed",
  lost: "not connected",
};

function Page(): JSX.Element {
  useEffect(() => {
    void loadServer();
    void restore();
    connect();
  }, []);
  const model = engine.value?.start.model;
  useEffect(() => {
    document.title = model ? `${model} · Forebay` : "Forebay";
  }, [model]);
  return (
    <>
      <header class="top">
        <h1>
          <svg viewBox="0 0 32 32" aria-hidden="true">
            <path d="M7 10h11M7 16h18M7 22h14" />
          </svg>
          Forebay
        </h1>
        <Tabs />
        <span class={`feed ${feed.value.kind}`}>{SAID[feed.value.kind]}</span>
      </header>
      <main>
        <div id="view" role="tabpanel" aria-labelledby={`tab-${tab.value}`}>
          {tab.value === "chat" ? <Chat /> : <EngineView />}
        </div>
      </main>
    </>
  );
}

render(<Page />, document.getElementById("root")!);
