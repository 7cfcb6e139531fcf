import { signal } from "@preact/signals";
import type { JSX } from "preact";
import { micros, whole } from "../ui/format";
import { LifeDialog } from "./life";
import { engine, ticks, type Engine, type Request } from "./store";

const MOST_ROWS = 64;
const opened = signal("");

const ORDER = { decode: 0, prefill: 1, queued: 2 };

/** Running requests before waiting ones, each group in order of arrival. */
function inOrder(state: Engine): Request[] {
  return [...state.requests.values()].sort((a, b) => ORDER[a.state] - ORDER[b.state] || a.since_us - b.since_us);
}

/** Text for screen readers only. */
function Heard({ children }: { children: string }): JSX.Element {
  return <span class="hidden">{children}</span>;
}

/** A bar of cached, computed and generated tokens, out of the most tokens that the request may have. */
function Bar({ request }: { request: Request }): JSX.Element {
  const { prompt, cached, computed, generated, max_tokens } = request;
  const total = prompt + Math.max(generated, max_tokens);
  const done = Math.min(prompt, computed);
  const parts: [string, number][] = [
    ["cached", Math.min(cached, done)],
    ["computed", Math.max(0, done - cached)],
    ["todo", prompt - done],
    ["generated", generated],
  ];
  return (
    <span class="meter" aria-hidden="true">
      {parts.map(([kind, tokens]) => (
        <i key={kind} class={kind} style={{ width: `${total ? (100 * tokens) / total : 0}%` }} />
      ))}
    </span>
  );
}

function Row({ request, now, replicas }: { request: Request; now: number; replicas: number }): JSX.Element {
  const state = request.ended ? "ended" : request.state;
  const { prompt, cached, computed, generated, max_tokens } = request;
  const most = max_tokens ? `/${whole(max_tokens)}` : "";
  return (
    <li class={`request ${state}`}>
      <button type="button" onClick={() => (opened.value = request.id)} title="Show its life">
        <span class="id">
          <Heard>Request </Heard>
          {request.id}
        </span>
        <span class={`state ${state}`}>{state}</span>
        {replicas > 1 && <span class="unit">r{request.replica}</span>}
        <Bar request={request} />
        <span class="counts">
          {whole(cached)} <Heard>cached</Heard> · {whole(computed)} <Heard>computed</Heard> · {whole(prompt + generated)}{" "}
          <Heard>in all</Heard>
        </span>
        <span class="counts out">
          {whole(generated)}
          {most} out
        </span>
        <span class="unit age">{request.ended ? "" : micros(Math.max(0, now - request.since_us))}</span>
      </button>
    </li>
  );
}

function Rows({ rows, state, label }: { rows: Request[]; state: Engine; label: string }): JSX.Element {
  return (
    <ul class="requests" aria-label={label}>
      {rows.map((request) => (
        <Row key={request.id} request={request} now={state.now} replicas={state.replicas.length} />
      ))}
    </ul>
  );
}

/** The running, waiting and recently ended requests. */
export function Requests(): JSX.Element | null {
  void ticks.value;
  const state = engine.value;
  if (!state) return null;
  const rows = inOrder(state);
  return (
    <section class="card" aria-labelledby="requests-title">
      <header>
        <h2 id="requests-title">Requests</h2>
        <ul class="legend">
          {["cached", "computed", "generated"].map((kind) => (
            <li key={kind}>
              <i class={`swatch ${kind}`} />
              {kind}
            </li>
          ))}
          <li>numbers: cached · computed · total</li>
        </ul>
      </header>
      {rows.length ? (
        <Rows rows={rows.slice(0, MOST_ROWS)} state={state} label="Running and queued requests" />
      ) : (
        <p class="note">No request runs or waits.</p>
      )}
      {rows.length > MOST_ROWS && <p class="note">and {whole(rows.length - MOST_ROWS)} more</p>}
      {state.ended.length > 0 && (
        <details>
          <summary>Ended lately ({state.ended.length})</summary>
          <Rows rows={state.ended} state={state} label="Requests that ended lately" />
        </details>
      )}
      {opened.value && <LifeDialog key={opened.value} id={opened.value} onClose={() => (opened.value = "")} />}
    </section>
  );
}
