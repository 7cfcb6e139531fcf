import type { JSX } from "preact";
import { whole } from "../ui/format";
import { engine, ticks, type Backend } from "./store";

const BREAKERS = { closed: "closed", open: "open: left out", half_open: "half open: tried" };

function Row({ backend }: { backend: Backend }): JSX.Element {
  const { now, url, rate } = backend;
  if (!now) {
    return (
      <tr>
        <th scope="row">{url}</th>
        <td colSpan={9}>not heard of yet</td>
      </tr>
    );
  }
  return (
    <tr data-ready={now.ready}>
      <th scope="row">{url}</th>
      <td>
        <span class={`state ${now.ready ? "ready" : "down"}`}>{now.ready ? "ready" : "not ready"}</span>
      </td>
      <td>
        <span class={`state breaker-${now.breaker}`}>{BREAKERS[now.breaker] ?? now.breaker}</span>
      </td>
      <td>{whole(now.in_flight)}</td>
      <td>{whole(now.running)}</td>
      <td>{whole(now.waiting)}</td>
      <td>{now.tokens === null ? "–" : whole(now.tokens)}</td>
      <td>{now.pages_free === null ? "–" : whole(now.pages_free)}</td>
      <td>
        {whole(now.sent)} <span class="unit">{rate.toFixed(1)}/s</span>
      </td>
      <td>{whole(now.failed)}</td>
    </tr>
  );
}

/** The state of a router's backends. */
export function Backends(): JSX.Element | null {
  void ticks.value;
  const state = engine.value;
  if (!state) return null;
  const heads = ["backend", "state", "breaker", "in flight", "running", "waiting", "tokens left", "free pages", "sent", "failed"];
  return (
    <section class="card wide" aria-labelledby="backends-title">
      <header>
        <h2 id="backends-title">Backends</h2>
        <span class="unit">{state.backends.filter(({ now }) => now?.ready).length} ready</span>
      </header>
      <div class="scroll" tabIndex={0} role="region" aria-label="Backends">
        <table class="numbers backends">
          <thead>
            <tr>
              {heads.map((name) => (
                <th key={name} scope="col">
                  {name}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {state.backends.map((backend) => (
              <Row key={backend.index} backend={backend} />
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}
