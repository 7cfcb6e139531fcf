import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { explain, getJson } from "../api";
import { micros, whole } from "../ui/format";
import { Dialog } from "../ui/parts";
import type { Life, LifeEvent } from "./types";

const AGAIN_MS = 500;

const SENTENCES: Record<string, string> = {
  received: "received",
  parsed: "parsed",
  templated: "prompt made by the chat template",
  tokenised: "tokenised",
  queued: "queued",
  admitted: "admitted: it has a slot",
  first_token: "first token",
  preempted: "preempted: back to the queue",
  replayed: "replayed after its hand's death",
  finished: "finished",
};

/** An event in words. An unknown event is shown unchanged. */
function sentence(event: LifeEvent): string {
  if (event.what === "prefill") return `prefill of ${whole(Number(event.tokens))} tokens`;
  if (event.what === "tokens") return `${whole(Number(event.count))} tokens`;
  return SENTENCES[event.what] ?? event.what;
}

const SAID = new Set(["prefill", "tokens"]);

function facts(event: LifeEvent): string {
  if (SAID.has(event.what)) return "";
  return Object.entries(event)
    .filter(([name]) => name !== "at_us" && name !== "what")
    .map(([name, value]) => `${name} ${String(value)}`)
    .join(", ");
}

function ended(life: Life | null): boolean {
  return life?.events.some(({ what }) => what === "finished") ?? false;
}

function Events({ events }: { events: LifeEvent[] }): JSX.Element {
  const first = events[0]?.at_us ?? 0;
  const total = Math.max(1, (events.at(-1)?.at_us ?? 0) - first);
  return (
    <ol class="life">
      {events.map((event, index) => {
        const since = event.at_us - first;
        return (
          <li key={index} class={`event ${SAID.has(event.what) || SENTENCES[event.what] ? event.what : "other"}`}>
            <span class="at">{micros(since)}</span>
            <span class="track" aria-hidden="true">
              <i style={{ left: `${(100 * since) / total}%` }} />
            </span>
            <span class="what">
              {sentence(event)} <span class="unit">{facts(event)}</span>
            </span>
          </li>
        );
      })}
    </ol>
  );
}

/** The events of a request, from its arrival to its last token. The list grows while the request runs. */
export function LifeDialog({ id, onClose }: { id: string; onClose: () => void }): JSX.Element {
  const [life, setLife] = useState<Life | null>(null);
  const [error, setError] = useState("");
  useEffect(() => {
    const controller = new AbortController();
    let timer = 0;
    const ask = async () => {
      try {
        const found = await getJson<Life>(`v1/live/requests/${encodeURIComponent(id)}`, controller.signal);
        setLife(found);
        if (!ended(found)) timer = window.setTimeout(() => void ask(), AGAIN_MS);
      } catch (reason) {
        if (!controller.signal.aborted) setError(explain(reason));
      }
    };
    void ask();
    return () => {
      controller.abort();
      clearTimeout(timer);
    };
  }, [id]);
  return (
    <Dialog label={`The life of request ${id}`} onClose={onClose}>
      {life && <Events events={life.events} />}
      {error && (
        <p class="error" role="alert">
          {error}
        </p>
      )}
      {!life && !error && <p class="note">Asking…</p>}
    </Dialog>
  );
}
