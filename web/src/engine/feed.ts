import { signal } from "@preact/signals";
import { ApiError, explain, stream } from "../api";
import { began, ticked } from "./store";
import type { Start, Tick } from "./types";

export type FeedState =
  | { kind: "off" }
  | { kind: "connecting" }
  | { kind: "live" }
  /** The server has no feed, or requires a key for it. A retry is useless. */
  | { kind: "refused"; status: number; message: string }
  | { kind: "lost"; message: string };

export const feed = signal<FeedState>({ kind: "off" });

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 10_000;
/** The feed sends four events per second. After this time without an event the connection is dead. */
const SILENCE_MS = 10_000;
const FINAL = new Set([401, 403, 404, 405, 501]);

let wanted: AbortController | null = null;

function sleep(milliseconds: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}

/** Reads one connection until it fails, and then throws. Calls `live` once the feed has begun. */
async function read(outer: AbortSignal, live: () => void): Promise<never> {
  const inner = new AbortController();
  const leave = () => inner.abort();
  outer.addEventListener("abort", leave);
  let silence = setTimeout(leave, SILENCE_MS);
  try {
    const { events } = await stream("v1/live", undefined, inner.signal);
    for await (const { event, data } of events) {
      clearTimeout(silence);
      silence = setTimeout(leave, SILENCE_MS);
      if (event === "start") {
        began(JSON.parse(data) as Start);
        feed.value = { kind: "live" };
        live();
      } else if (event === "tick") {
        ticked(JSON.parse(data) as Tick);
      }
    }
    throw new ApiError(0, "The server has ended the feed.");
  } catch (error) {
    throw inner.signal.aborted && !outer.aborted ? new ApiError(0, "The feed has become silent.") : error;
  } finally {
    clearTimeout(silence);
    outer.removeEventListener("abort", leave);
  }
}

async function follow(signal: AbortSignal): Promise<void> {
  let wait = FIRST_WAIT_MS;
  while (!signal.aborted) {
    try {
      await read(signal, () => (wait = FIRST_WAIT_MS));
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && FINAL.has(error.status)) {
        feed.value = { kind: "refused", status: error.status, message: explain(error) };
        return;
      }
      feed.value = { kind: "lost", message: explain(error) };
    }
    await sleep(wait, signal);
    wait = Math.min(LONGEST_WAIT_MS, wait * 2);
  }
}

/** Connects to the feed with the present key, in place of any earlier connection. */
export function connect(): void {
  wanted?.abort();
  wanted = new AbortController();
  if (feed.value.kind !== "live") feed.value = { kind: "connecting" };
  void follow(wanted.signal);
}
