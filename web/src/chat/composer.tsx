import { signal } from "@preact/signals";
import type { JSX } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import { server } from "../api";
import { Icon, IconButton } from "../ui/parts";
import { model } from "./settings";
import { answering, notice, say, stop } from "./store";

const LARGEST_IMAGE = 20 * 1024 * 1024;
const MOST_HEIGHT = 240;

function dataUrl(file: File): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(reader.error ?? new Error("The file cannot be read."));
    reader.readAsDataURL(file);
  });
}

/** Reads those files that are images, as data URLs. */
async function readImages(files: Iterable<File>): Promise<string[]> {
  const found: string[] = [];
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    if (file.size > LARGEST_IMAGE) notice.value = `${file.name} is larger than 20 MiB.`;
    else found.push(await dataUrl(file));
  }
  return found;
}

/** The text that is not sent yet. It is kept while the other tab is shown. */
const draft = signal("");
const attached = signal<string[]>([]);

/** The input box. `last` is the id of the message that the new one follows. */
export function Composer({ last }: { last: string | null }): JSX.Element {
  const text = draft.value;
  const images = attached.value;
  const area = useRef<HTMLTextAreaElement>(null);
  const picker = useRef<HTMLInputElement>(null);
  const busy = answering.value !== null;
  const takesImages = server.value.images !== false;

  useLayoutEffect(() => {
    const element = area.current;
    if (!element) return;
    element.style.height = "auto";
    element.style.height = `${Math.min(element.scrollHeight, MOST_HEIGHT)}px`;
  }, [text]);
  const attach = async (files: Iterable<File>) => {
    const more = await readImages(files);
    attached.value = [...attached.value, ...more];
  };
  const send = () => {
    if (busy || (!text.trim() && !images.length)) return;
    void say(last, text, images);
    draft.value = "";
    attached.value = [];
  };
  const onKeyDown = (event: KeyboardEvent) => {
    // While an input method composes a character, Enter only confirms it.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    } else if (event.key === "Escape" && busy) {
      stop();
    }
  };
  const onPaste = (event: ClipboardEvent) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!takesImages || !files.length) return;
    event.preventDefault();
    void attach(files);
  };

  return (
    <form
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
      onDragOver={(event) => takesImages && event.preventDefault()}
      onDrop={(event) => {
        if (!takesImages) return;
        event.preventDefault();
        void attach(event.dataTransfer?.files ?? []);
      }}
    >
      {images.length > 0 && (
        <ul class="attached">
          {images.map((url, index) => (
            <li key={index}>
              <img src={url} alt={`Attached image ${index + 1}`} />
              <IconButton
                icon="close"
                label={`Remove image ${index + 1}`}
                onClick={() => (attached.value = images.filter((_, other) => other !== index))}
              />
            </li>
          ))}
        </ul>
      )}
      <textarea
        ref={area}
        aria-label="Message"
        rows={1}
        placeholder={`Message ${model() || "the model"}`}
        value={text}
        onInput={(event) => (draft.value = event.currentTarget.value)}
        onKeyDown={onKeyDown}
        onPaste={onPaste}
      />
      <div class="bar">
        {takesImages && (
          <>
            <input
              ref={picker}
              type="file"
              accept="image/*"
              multiple
              hidden
              aria-label="Images"
              onChange={(event) => {
                void attach(event.currentTarget.files ?? []);
                event.currentTarget.value = "";
              }}
            />
            <IconButton icon="image" label="Attach images" onClick={() => picker.current?.click()} />
          </>
        )}
        <span class="hint">Enter sends, Shift+Enter begins a line</span>
        {busy ? (
          <button type="button" class="primary round" aria-label="Stop" title="Stop (Esc)" onClick={stop}>
            <Icon name="stop" />
          </button>
        ) : (
          <button type="submit" class="primary round" aria-label="Send" title="Send" disabled={!text.trim() && !images.length}>
            <Icon name="send" />
          </button>
        )}
      </div>
    </form>
  );
}
