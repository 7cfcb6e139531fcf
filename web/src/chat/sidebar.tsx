import type { JSX } from "preact";
import { useRef } from "preact/hooks";
import { download, Icon, IconButton } from "../ui/parts";
import { begin, conversations, exported, forget, load, open, shown, version } from "./store";

/** The conversations of this browser. `onChoice` is called after the user chose one. */
export function Sidebar({ onChoice }: { onChoice: () => void }): JSX.Element {
  const picker = useRef<HTMLInputElement>(null);
  void version.value;
  return (
    <>
      <button
        type="button"
        class="new"
        onClick={() => {
          begin();
          onChoice();
        }}
      >
        <Icon name="plus" /> New conversation
      </button>
      <ul class="list" aria-label="Conversations">
        {conversations.value.map((conversation) => (
          <li key={conversation.id} class={conversation === shown.value ? "chosen" : ""}>
            <button
              type="button"
              aria-current={conversation === shown.value}
              onClick={() => {
                open(conversation.id);
                onChoice();
              }}
            >
              {conversation.title || "Untitled"}
            </button>
            <IconButton
              icon="trash"
              label={`Delete ${conversation.title || "Untitled"}`}
              onClick={() => {
                if (confirm(`Delete "${conversation.title || "Untitled"}"? It is kept nowhere else.`)) {
                  void forget(conversation.id);
                }
              }}
            />
          </li>
        ))}
      </ul>
      <div class="row">
        <button
          type="button"
          class="quiet"
          disabled={!conversations.value.length}
          onClick={() => download(exported(), "forebay-conversations.json")}
        >
          <Icon name="download" /> Export
        </button>
        <button type="button" class="quiet" onClick={() => picker.current?.click()}>
          <Icon name="upload" /> Import
        </button>
        <input
          ref={picker}
          type="file"
          accept="application/json,.json"
          hidden
          aria-label="A file of conversations"
          onChange={(event) => {
            const file = event.currentTarget.files?.[0];
            event.currentTarget.value = "";
            if (file) void load(file);
          }}
        />
      </div>
      <p class="note">Conversations are kept in this browser only.</p>
    </>
  );
}
