import type { JSX } from "preact";
import { percent, short, whole } from "../ui/format";
import { engine, ticks, type Replica } from "./store";

function Fact({ name, value, title }: { name: string; value: string; title?: string }): JSX.Element {
  return (
    <div title={title}>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}

function Card({ replica }: { replica: Replica }): JSX.Element {
  const { facts, now } = replica;
  const state = now?.state ?? "starting";
  return (
    <section class={`replica ${state}`} aria-label={`Replica ${facts.index}`} data-state={state}>
      <header>
        <h3>Replica {facts.index}</h3>
        <span class={`state ${state}`} role="status">
          {state}
        </span>
      </header>
      {now && (
        <dl>
          <Fact name="running" value={`${whole(now.running)} / ${whole(facts.max_running)}`} />
          <Fact name="waiting" value={whole(now.waiting)} />
          <Fact
            name="prefix hits"
            value={percent(now.prefix.queries ? now.prefix.hits / now.prefix.queries : NaN)}
            title={`${whole(now.prefix.hits)} of ${whole(now.prefix.queries)} prompt tokens were cached`}
          />
          <Fact
            name="step gaps"
            value={percent(now.device_us + now.gap_us ? now.gap_us / (now.device_us + now.gap_us) : NaN)}
            title="Since the start: the share of the device's time with work. A GPU's kernels may pause within a step too"
          />
          <Fact name="respawns" value={whole(now.respawns)} title="How often the hand was started again" />
          <Fact name="replayed" value={short(now.replayed)} title="Requests that were prefilled again after a death" />
          <Fact name="preemptions" value={short(now.preemptions)} />
          <Fact name="lookahead" value={String(facts.lookahead)} />
        </dl>
      )}
    </section>
  );
}

/** The state of each replica. */
export function Replicas(): JSX.Element | null {
  void ticks.value;
  const state = engine.value;
  if (!state) return null;
  return (
    <section class="card" aria-labelledby="replicas-title">
      <header>
        <h2 id="replicas-title">Replicas</h2>
      </header>
      {state.replicas.map((replica) => (
        <Card key={replica.facts.index} replica={replica} />
      ))}
    </section>
  );
}
