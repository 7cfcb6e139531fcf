// The events of /v1/live. Times are in microseconds of the server's monotonic clock.

/** number, planned_us, done_us, device_us, gap_us, decode_rows, prefill_rows, tokens, plan_us, in_flight */
export type StepColumns = [number, number, number, number, number, number, number, number, number, number];

export interface Step {
  number: number;
  /** The time at which the plan was sent. */
  planned: number;
  /** The time at which the result was applied. */
  done: number;
  /** The duration of the step on the device. */
  device: number;
  /** The time from the end of the previous step to the start of this one, if there was work. */
  gap: number;
  decode: number;
  prefill: number;
  /** The number of computed positions. */
  tokens: number;
  /** The duration of the planning. */
  plan: number;
  /** The number of steps in flight when this one was planned: 1 or more is lookahead. */
  inFlight: number;
}

export interface ReplicaFacts {
  index: number;
  slots: number;
  max_running: number;
  page_size: number;
  pages: number;
  host_pages: number;
  lookahead: number;
}

export interface Start {
  version: number;
  server: string;
  model?: string;
  router?: boolean;
  now_us: number;
  interval_ms: number;
  replicas?: ReplicaFacts[];
  backends?: { index: number; url: string }[];
}

export interface ReplicaTick {
  index: number;
  state: "starting" | "ready" | "restarting" | "down";
  respawns: number;
  running: number;
  waiting: number;
  pages: { free: number; cached: number; held: number };
  host: { size: number; held: number; cached: number };
  prefix: { queries: number; hits: number };
  preemptions: number;
  replayed: number;
  device_us: number;
  gap_us: number;
  lost: number;
  steps: StepColumns[];
}

export interface RequestRow {
  id: string;
  replica: number;
  state: "queued" | "prefill" | "decode";
  prompt: number;
  cached: number;
  computed: number;
  generated: number;
  max_tokens: number;
  since_us: number;
}

export interface BackendTick {
  index: number;
  ready: boolean;
  breaker: "closed" | "open" | "half_open";
  in_flight: number;
  waiting: number;
  running: number;
  /** Free pages, and tokens of remaining work, by the backend's last report. Null if it reports neither. */
  pages_free: number | null;
  tokens: number | null;
  sent: number;
  failed: number;
}

export interface Tick {
  now_us: number;
  replicas?: ReplicaTick[];
  requests?: RequestRow[];
  ended?: string[];
  backends?: BackendTick[];
}

export interface LifeEvent {
  at_us: number;
  what: string;
  [fact: string]: unknown;
}

export interface Life {
  id: string;
  replica: number;
  events: LifeEvent[];
}
