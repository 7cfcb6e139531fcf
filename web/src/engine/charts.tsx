import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { short } from "../ui/format";
import { engine, ticks, type History } from "./store";
import { useWidth } from "./timeline_view";

const TALL = 104;

type Column = Exclude<keyof History, "time">;

interface Line {
  column: Column;
  label: string;
  /** The name of a custom property of the style sheet. */
  colour: string;
  fill?: boolean;
}

interface Props {
  title: string;
  unit: string;
  lines: Line[];
  /** The smallest upper end of the axis. */
  least?: number;
  /** Whether some times have no value, and lines bridge them. */
  gaps?: boolean;
}

/** The labels of the time axis, in seconds before now. */
function ago(plot: uPlot, splits: number[]): string[] {
  const now = plot.data[0].at(-1) ?? 0;
  return splits.map((time) => (now - time < 0.05 ? "now" : `−${Number((now - time).toFixed(1))} s`));
}

/** Tick positions at whole steps before now, so that the labels stay in place while time passes. */
function back(_: uPlot, __: number, least: number, most: number, step: number): number[] {
  const count = Math.floor((most - least) / step);
  return Array.from({ length: count + 1 }, (_, index) => most - (count - index) * step);
}

function options(holder: HTMLElement, width: number, { lines, least = 1, gaps = false }: Props): uPlot.Options {
  const style = getComputedStyle(holder);
  const colour = (name: string) => style.getPropertyValue(name).trim();
  const axis = {
    stroke: colour("--text-soft"),
    font: "11px system-ui, sans-serif",
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { show: false },
  };
  return {
    width,
    height: TALL,
    padding: [8, 16, 0, 0],
    legend: { show: false },
    cursor: { y: false, points: { size: 5 }, sync: { key: "engine" } },
    scales: {
      x: { time: false },
      y: { range: (_, __, top) => [0, least === 100 ? 100 : Math.max(least, (top ?? 0) * 1.15)] },
    },
    axes: [
      { ...axis, splits: back, values: ago, size: 22, space: 70 },
      { ...axis, values: (_, splits) => splits.map(short), size: 38, space: 28 },
    ],
    series: [
      {},
      ...lines.map((line) => ({
        label: line.label,
        stroke: colour(line.colour),
        width: 1.5,
        spanGaps: gaps,
        points: { show: false },
        ...(line.fill ? { fill: `${colour(line.colour)}22` } : {}),
      })),
    ],
  };
}

const DARK = matchMedia("(prefers-color-scheme: dark)");

function value(column: (number | null)[]): string {
  const last = column.at(-1) ?? column.findLast((value) => value !== null);
  return last === null || last === undefined ? "–" : short(last);
}

function Chart(props: Props): JSX.Element | null {
  const holder = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const width = useWidth(holder);
  const count = ticks.value;
  const history = engine.value?.history;
  const data = () => [history!.time, ...props.lines.map(({ column }) => history![column])] as uPlot.AlignedData;
  useEffect(() => {
    const element = holder.current;
    if (!element || !width || !history) return;
    const make = () => {
      plot.current?.destroy();
      plot.current = new uPlot(options(element, width, props), data(), element);
    };
    make();
    DARK.addEventListener("change", make);
    return () => {
      DARK.removeEventListener("change", make);
      plot.current?.destroy();
      plot.current = null;
    };
  }, [width, history]);
  useEffect(() => {
    if (history) plot.current?.setData(data());
  }, [count]);
  if (!history) return null;
  const now = props.lines.map(({ label, column }) => `${label} ${value(history[column])}`).join(", ");
  return (
    <section class="card chart" aria-label={`${props.title}: ${now} ${props.unit}`}>
      <header>
        <h2>{props.title}</h2>
        <span class="now">
          {props.lines.map(({ label, column, colour }) => (
            <span key={label}>
              <i class={`swatch ${colour.slice(2)}`} />
              {label} <b>{value(history[column])}</b>
            </span>
          ))}
          <span class="unit">{props.unit}</span>
        </span>
      </header>
      <div class="holder" ref={holder} aria-hidden="true" />
    </section>
  );
}

const CHARTS: Props[] = [
  {
    title: "Decode",
    unit: "tokens/s",
    lines: [{ column: "generated", label: "generated", colour: "--decode", fill: true }],
  },
  {
    title: "Prefill",
    unit: "tokens/s",
    lines: [{ column: "prefilled", label: "computed", colour: "--prefill", fill: true }],
  },
  {
    title: "Prefix cache",
    unit: "% of prompts",
    least: 100,
    gaps: true,
    lines: [{ column: "hits", label: "hits", colour: "--cached", fill: true }],
  },
  {
    title: "Requests",
    unit: "",
    lines: [
      { column: "running", label: "running", colour: "--decode", fill: true },
      { column: "waiting", label: "waiting", colour: "--late" },
    ],
  },
  {
    title: "Gaps between steps",
    unit: "% of time",
    least: 5,
    lines: [{ column: "gaps", label: "gaps", colour: "--gap", fill: true }],
  },
  {
    title: "Plan latency",
    unit: "µs",
    lines: [
      { column: "planMost", label: "most", colour: "--late" },
      { column: "planMedian", label: "median", colour: "--ahead", fill: true },
    ],
  },
];

/** Charts of the last two minutes, over all replicas. */
export function Charts(): JSX.Element {
  return (
    <>
      {CHARTS.map((chart) => (
        <Chart key={chart.title} {...chart} />
      ))}
    </>
  );
}
