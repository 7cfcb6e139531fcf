import { signal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { micros, percent, whole } from "../ui/format";
import { IconButton } from "../ui/parts";
import { engine, ticks, type Engine } from "./store";
import { draw, height, palette, stepAt, type View } from "./timeline";
import type { Step } from "./types";

const SPANS = [0.25, 1, 5, 30];
const span = signal(5);
/** The time at the right edge while the timeline is paused; null while it follows the server. */
const frozen = signal<number | null>(null);

/** The current width of an element. */
export function useWidth(element: { current: HTMLElement | null }): number {
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const target = element.current;
    if (!target) return;
    const observer = new ResizeObserver(() => setWidth(target.clientWidth));
    observer.observe(target);
    setWidth(target.clientWidth);
    return () => observer.disconnect();
  }, []);
  return width;
}

function describe(step: Step, index: number): string[] {
  return [
    `step ${whole(step.number)}, replica ${index}`,
    `device ${micros(step.device)}, gap before ${micros(step.gap)}`,
    `${step.decode} decode and ${step.prefill} prefill rows, ${whole(step.tokens)} positions`,
    `planned in ${micros(step.plan)}, ${step.inFlight} in flight`,
    `from plan to result ${micros(step.done - step.planned)}`,
  ];
}

/** A summary of the steps since `view.from`, for screen readers. */
function summary(state: Engine, view: View): string {
  const steps = state.replicas.flatMap((replica) => replica.steps.filter((step) => step.done >= view.from));
  const busy = steps.reduce((total, step) => total + step.device, 0);
  const gaps = steps.reduce((total, step) => total + step.gap, 0);
  const ahead = steps.filter((step) => step.inFlight > 0).length;
  return (
    `Timeline: ${whole(steps.length)} steps in ${(view.to - view.from) / 1e6} seconds, device busy for ${micros(busy)}, ` +
    `${micros(gaps)} of gaps, ${percent(steps.length ? ahead / steps.length : 0)} planned ahead.`
  );
}

function Last({ state }: { state: Engine }): JSX.Element {
  const rows = state.replicas.flatMap(({ facts, steps }) => steps.slice(-12).map((step) => ({ facts, step })));
  return (
    <details>
      <summary>The last steps as a table</summary>
      <div class="scroll" tabIndex={0} role="region" aria-label="The last steps">
        <table class="numbers">
          <thead>
            <tr>
              {["step", "replica", "device", "gap", "decode", "prefill", "positions", "plan", "in flight"].map((name) => (
                <th key={name} scope="col">
                  {name}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.map(({ facts, step }) => (
              <tr key={`${facts.index}-${step.number}`}>
                <td>{step.number}</td>
                <td>{facts.index}</td>
                <td>{micros(step.device)}</td>
                <td>{micros(step.gap)}</td>
                <td>{step.decode}</td>
                <td>{step.prefill}</td>
                <td>{step.tokens}</td>
                <td>{micros(step.plan)}</td>
                <td>{step.inFlight}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </details>
  );
}

const LEGEND: [string, string][] = [
  ["decode", "decode rows"],
  ["prefill", "prefill rows"],
  ["gap", "gap: work waits, and no step runs"],
  ["ahead", "planned ahead"],
  ["late", "planned while idle"],
];

/** The timeline of the brain's plans and the device's steps. */
export function Timeline(): JSX.Element | null {
  const holder = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const [pointer, point] = useState<{ x: number; y: number } | null>(null);
  const width = useWidth(holder);
  const count = ticks.value;
  const state = engine.value;
  const to = frozen.value ?? state?.now ?? 0;
  const view: View = { from: to - span.value * 1e6, to, width };
  useEffect(() => {
    if (canvas.current && state && width) draw(canvas.current, state.replicas, view, palette(canvas.current));
  }, [count, width, span.value, frozen.value]);
  if (!state) return null;
  const hovered = pointer && stepAt(state.replicas, view, pointer.x, pointer.y);
  const drawn = state.replicas.reduce((total, { steps }) => total + (steps.at(-1)?.number ?? 0), 0);
  const lost = state.replicas.reduce((total, replica) => total + replica.lost, 0);
  const move = (seconds: number) => (frozen.value = Math.min(state.now, to + seconds * 1e6));
  return (
    <section class="card wide timeline" aria-labelledby="timeline-title" data-step={drawn}>
      <header>
        <h2 id="timeline-title">Steps</h2>
        <span class="controls">
          <span role="group" aria-label="Seconds shown" class="segments">
            {SPANS.map((seconds) => (
              <button
                key={seconds}
                type="button"
                aria-pressed={span.value === seconds}
                onClick={() => (span.value = seconds)}
              >
                {seconds} s
              </button>
            ))}
          </span>
          {frozen.value !== null && (
            <>
              <IconButton icon="left" label="Earlier" onClick={() => move(-span.value / 2)} />
              <IconButton icon="right" label="Later" onClick={() => move(span.value / 2)} />
            </>
          )}
          <IconButton
            icon={frozen.value === null ? "pause" : "play"}
            label={frozen.value === null ? "Hold the timeline" : "Follow the server"}
            onClick={() => (frozen.value = frozen.value === null ? state.now : null)}
          />
        </span>
      </header>
      <div class="holder" ref={holder}>
        <canvas
          ref={canvas}
          role="img"
          aria-label={summary(state, view)}
          style={{ width: `${width}px`, height: `${height(state.replicas.length)}px` }}
          onPointerMove={(event) => point({ x: event.offsetX, y: event.offsetY })}
          onPointerLeave={() => point(null)}
        />
        {hovered && pointer && (
          <div
            class="tip"
            style={{
              left: `${Math.max(0, Math.min(pointer.x + 12, width - 270))}px`,
              top: `${pointer.y + 14}px`,
            }}
          >
            {describe(hovered.step, hovered.replica.facts.index).map((line) => (
              <div key={line}>{line}</div>
            ))}
          </div>
        )}
      </div>
      <ul class="legend">
        {LEGEND.map(([kind, label]) => (
          <li key={kind}>
            <i class={`swatch ${kind}`} />
            {label}
          </li>
        ))}
        {lost > 0 && <li>{whole(lost)} steps came too fast to be shown</li>}
      </ul>
      <Last state={state} />
    </section>
  );
}
