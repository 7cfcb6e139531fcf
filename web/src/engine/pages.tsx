import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { percent, whole } from "../ui/format";
import { engine, ticks, type Replica } from "./store";
import { useWidth } from "./timeline_view";

const MOST_CELLS = 960;
const CELL = 9;

interface Tier {
  name: string;
  held: number;
  cached: number;
  free: number;
}

function tiers({ now, facts }: Replica): Tier[] {
  if (!now) return [];
  const device = { name: "device", ...now.pages };
  if (!facts.host_pages && !now.host.size) return [device];
  const { size, held, cached } = now.host;
  return [device, { name: "host", held, cached, free: Math.max(0, size - held - cached) }];
}

/**
 * Divides `cells` among kinds of pages by the largest remainder. Each kind that has pages gets at least one cell.
 */
export function shares(counts: number[], cells: number): number[] {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (!total) return counts.map(() => 0);
  const exact = counts.map((count) => (count * cells) / total);
  const found = exact.map((value, index) => (counts[index]! > 0 ? Math.max(1, Math.floor(value)) : 0));
  let rest = cells - found.reduce((sum, count) => sum + count, 0);
  const order = exact.map((_, index) => index).sort((a, b) => exact[b]! - found[b]! - (exact[a]! - found[a]!));
  for (const index of order) {
    if (rest <= 0) break;
    if (counts[index]! > 0) {
      found[index]! += 1;
      rest -= 1;
    }
  }
  if (rest !== 0) {
    const largest = found.indexOf(Math.max(...found));
    found[largest]! += rest;
  }
  return found;
}

function TierMap({ tier }: { tier: Tier }): JSX.Element {
  const holder = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const width = useWidth(holder);
  const total = tier.held + tier.cached + tier.free;
  const bucket = Math.max(1, Math.ceil(total / MOST_CELLS));
  const cells = Math.ceil(total / bucket);
  const columns = Math.max(1, Math.floor(width / CELL));
  const rows = Math.max(1, Math.ceil(cells / columns));
  const count = ticks.value;
  useEffect(() => {
    const element = canvas.current;
    const context = element?.getContext("2d");
    if (!element || !context || !width) return;
    const ratio = window.devicePixelRatio || 1;
    element.width = Math.round(width * ratio);
    element.height = Math.round(rows * CELL * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const style = getComputedStyle(element);
    let cell = 0;
    shares([tier.held, tier.cached, tier.free], cells).forEach((number, kind) => {
      context.fillStyle = style.getPropertyValue(["--held", "--cached", "--free"][kind]!).trim();
      for (const end = cell + number; cell < end; cell += 1) {
        context.fillRect((cell % columns) * CELL, Math.floor(cell / columns) * CELL, CELL - 2, CELL - 2);
      }
    });
  }, [count, width, rows, columns]);
  return (
    <figure class="tier">
      <figcaption>
        <b>{tier.name}</b> {whole(total)} pages
        {bucket > 1 && <span class="unit"> (a cell is {whole(bucket)})</span>}
      </figcaption>
      <div class="holder" ref={holder}>
        <canvas
          ref={canvas}
          role="img"
          aria-label={`${tier.held} pages held, ${tier.cached} cached, ${tier.free} free`}
          style={{ width: `${width}px`, height: `${rows * CELL}px` }}
        />
      </div>
      <ul class="legend">
        {(["held", "cached", "free"] as const).map((kind) => (
          <li key={kind}>
            <i class={`swatch ${kind}`} />
            {kind} {whole(tier[kind])} <span class="unit">{percent(total ? tier[kind] / total : 0)}</span>
          </li>
        ))}
      </ul>
    </figure>
  );
}

/** The use of the pages of each tier. */
export function Pages(): JSX.Element | null {
  void ticks.value;
  const state = engine.value;
  if (!state) return null;
  return (
    <section class="card" aria-labelledby="pages-title">
      <header>
        <h2 id="pages-title">KV pages</h2>
        <span class="unit">{state.replicas[0] ? `${state.replicas[0].facts.page_size} tokens a page` : ""}</span>
      </header>
      {state.replicas.map((replica) => (
        <div key={replica.facts.index}>
          {state.replicas.length > 1 && <h3>Replica {replica.facts.index}</h3>}
          {tiers(replica).map((tier) => (
            <TierMap key={tier.name} tier={tier} />
          ))}
        </div>
      ))}
    </section>
  );
}
