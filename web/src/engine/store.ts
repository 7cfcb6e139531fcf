import { signal } from "@preact/signals";
import type { BackendTick, ReplicaFacts, ReplicaTick, RequestRow, Start, Step, StepColumns, Tick } from "./types";

/** The number of steps kept per replica: the size of the server's ring buffer. */
const MOST_STEPS = 4096;
/** The number of points in the charts: two minutes at four per second. */
const MOST_POINTS = 480;
const MOST_ENDED = 24;

export interface Replica {
  facts: ReplicaFacts;
  /** Null until the first tick. */
  now: ReplicaTick | null;
  steps: Step[];
  lost: number;
}

/** A request of the list. `ended` is true once the server has reported its end. */
export interface Request extends RequestRow {
  ended: boolean;
}

export interface Backend {
  index: number;
  url: string;
  now: BackendTick | null;
  /** Requests per second since the previous tick. */
  rate: number;
}

/** The columns of the charts, over all replicas. `time` is in seconds of the server's clock. */
export interface History {
  time: number[];
  generated: (number | null)[];
  prefilled: (number | null)[];
  /** The percentage of prompt tokens of the last second that were cached; null if no prompt arrived. */
  hits: (number | null)[];
  running: number[];
  waiting: number[];
  gaps: (number | null)[];
  planMedian: (number | null)[];
  planMost: (number | null)[];
}

export interface Engine {
  start: Start;
  now: number;
  replicas: Replica[];
  requests: Map<string, Request>;
  ended: Request[];
  backends: Backend[];
  history: History;
  window: Growth[];
}

/** The state received from the feed. It is changed in place, and `ticks` counts the changes. */
export const engine = signal<Engine | null>(null);
export const ticks = signal(0);

function noHistory(): History {
  return { time: [], generated: [], prefilled: [], hits: [], running: [], waiting: [], gaps: [], planMedian: [], planMost: [] };
}

function isStart(value: Partial<Start>): value is Start {
  return typeof value.now_us === "number";
}

/** Handles the first event of a feed. Earlier data is kept unless it is of another server. */
export function began(start: Start): void {
  if (!isStart(start)) throw new Error("The feed begins with something else.");
  const before = engine.value;
  const same = before?.start.server === start.server && before.start.model === start.model && before.now <= start.now_us;
  const kept = (index: number) => (same ? before.replicas.find(({ facts }) => facts.index === index) : undefined);
  engine.value = {
    start,
    now: start.now_us,
    replicas: (start.replicas ?? []).map((facts) => ({ now: null, steps: [], lost: 0, ...kept(facts.index), facts })),
    requests: new Map(),
    ended: same ? before.ended : [],
    backends: (start.backends ?? []).map((backend) => ({ ...backend, now: null, rate: 0 })),
    history: same ? before.history : noHistory(),
    window: [],
  };
  ticks.value += 1;
}

function step(columns: StepColumns): Step {
  const [number, planned, done, device, gap, decode, prefill, tokens, plan, inFlight] = columns;
  return { number, planned, done, device, gap, decode, prefill, tokens, plan, inFlight };
}

function push<T>(column: T[], value: T, most: number): void {
  column.push(value);
  if (column.length > most) column.splice(0, column.length - most);
}

function median(sorted: number[]): number | null {
  return sorted.length ? sorted[sorted.length >> 1]! : null;
}

/** The growth of the counters of all replicas since the previous tick. */
interface Growth {
  seconds: number;
  decoded: number;
  prefilled: number;
  device: number;
  gaps: number;
  queries: number;
  hits: number;
}

/** The seconds over which rates and shares are averaged: from tick to tick they would jump. */
const WINDOW_S = 1;

function sum(window: Growth[]): Growth {
  const total = { seconds: 0, decoded: 0, prefilled: 0, device: 0, gaps: 0, queries: 0, hits: 0 };
  for (const growth of window) {
    for (const name of Object.keys(total) as (keyof Growth)[]) total[name] += growth[name];
  }
  return total;
}

function record(state: Engine, steps: Step[], growth: Growth): void {
  const { history, replicas, window } = state;
  window.push(growth);
  while (window.length > 1 && sum(window.slice(1)).seconds >= WINDOW_S) window.shift();
  const lately = sum(window);
  const plans = steps.map(({ plan }) => plan).sort((a, b) => a - b);
  const all = (value: (now: ReplicaTick) => number) =>
    replicas.reduce((total, { now }) => total + (now ? value(now) : 0), 0);
  const rate = (count: number) => (lately.seconds > 0 ? count / lately.seconds : null);
  const share = (part: number, rest: number) => (part + rest > 0 ? (100 * part) / (part + rest) : null);
  push(history.time, state.now / 1e6, MOST_POINTS);
  push(history.generated, rate(lately.decoded), MOST_POINTS);
  push(history.prefilled, rate(lately.prefilled), MOST_POINTS);
  push(history.hits, share(lately.hits, lately.queries - lately.hits), MOST_POINTS);
  push(history.running, all((now) => now.running), MOST_POINTS);
  push(history.waiting, all((now) => now.waiting), MOST_POINTS);
  push(history.gaps, share(lately.gaps, lately.device), MOST_POINTS);
  push(history.planMedian, median(plans), MOST_POINTS);
  push(history.planMost, plans.at(-1) ?? null, MOST_POINTS);
}

function readReplicas(state: Engine, tick: Tick, seconds: number): void {
  const fresh: Step[] = [];
  const grown: Growth = { seconds, decoded: 0, prefilled: 0, device: 0, gaps: 0, queries: 0, hits: 0 };
  for (const now of tick.replicas ?? []) {
    const replica = state.replicas.find(({ facts }) => facts.index === now.index);
    if (!replica) continue;
    const before = replica.now;
    // After a restart of a replica its counters are smaller than before.
    if (before && now.device_us >= before.device_us) {
      grown.device += now.device_us - before.device_us;
      grown.gaps += Math.max(0, now.gap_us - before.gap_us);
      grown.queries += Math.max(0, now.prefix.queries - before.prefix.queries);
      grown.hits += Math.max(0, now.prefix.hits - before.prefix.hits);
    }
    replica.now = now;
    replica.lost += now.lost;
    for (const columns of now.steps) {
      const made = step(columns);
      replica.steps.push(made);
      // The first tick contains steps from before the connection: they are not counted in rates.
      if (made.done < state.start.now_us) continue;
      fresh.push(made);
      grown.decoded += made.decode;
      grown.prefilled += Math.max(0, made.tokens - made.decode);
    }
    if (replica.steps.length > MOST_STEPS) replica.steps.splice(0, replica.steps.length - MOST_STEPS);
  }
  record(state, fresh, grown);
}

function readRequests(state: Engine, tick: Tick): void {
  for (const row of tick.requests ?? []) state.requests.set(row.id, { ...row, ended: false });
  for (const id of tick.ended ?? []) {
    const request = state.requests.get(id);
    state.requests.delete(id);
    if (request) state.ended.unshift({ ...request, ended: true });
  }
  state.ended.length = Math.min(state.ended.length, MOST_ENDED);
}

function readBackends(state: Engine, tick: Tick, seconds: number): void {
  for (const now of tick.backends ?? []) {
    let backend = state.backends.find(({ index }) => index === now.index);
    if (!backend) {
      backend = { index: now.index, url: `backend ${now.index}`, now: null, rate: 0 };
      state.backends.push(backend);
    }
    if (backend.now && seconds > 0) backend.rate = Math.max(0, now.sent - backend.now.sent) / seconds;
    backend.now = now;
  }
}

/** Applies the changes since the previous tick. */
export function ticked(tick: Tick): void {
  const state = engine.value;
  if (!state) return;
  const seconds = (tick.now_us - state.now) / 1e6;
  state.now = tick.now_us;
  if (state.start.router) readBackends(state, tick, seconds);
  else {
    readReplicas(state, tick, seconds);
    readRequests(state, tick);
  }
  ticks.value += 1;
}
