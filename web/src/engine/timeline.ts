import type { Replica } from "./store";
import type { Step } from "./types";

/** The colours of the timeline, read from the style sheet, so that they follow the colour scheme. */
export interface Palette {
  decode: string;
  prefill: string;
  gap: string;
  ahead: string;
  late: string;
  line: string;
  text: string;
  lane: string;
}

const NAMES: (keyof Palette)[] = ["decode", "prefill", "gap", "ahead", "late", "line", "text", "lane"];

export function palette(element: Element): Palette {
  const style = getComputedStyle(element);
  return Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()])) as unknown as Palette;
}

export const LEFT = 64;
const AXIS = 18;
const PLAN_LANE = 16;
const DEVICE_LANE = 34;
const SPACE = 14;
/** The smallest width of a step, in pixels, at which a line connects it to its plan. */
const ROOM_FOR_ARROWS = 10;

export function height(replicas: number): number {
  return AXIS + replicas * (PLAN_LANE + DEVICE_LANE + SPACE);
}

/** The time at which the device began a step: the time when its result was applied, less its duration. */
export function began(step: Step): number {
  return step.done - step.device;
}

/** The first step that ends at `time` or later. */
function firstAfter(steps: Step[], time: number): number {
  let low = 0;
  let high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle]!.done < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

export interface View {
  /** The times at the left and the right edge. */
  from: number;
  to: number;
  width: number;
}

function position(view: View, time: number): number {
  return LEFT + ((time - view.from) / (view.to - view.from)) * (view.width - LEFT);
}

/** The step at a point of the canvas. */
export function stepAt(replicas: Replica[], view: View, x: number, y: number): { replica: Replica; step: Step } | null {
  const lane = Math.floor((y - AXIS) / (PLAN_LANE + DEVICE_LANE + SPACE));
  const replica = replicas[lane];
  if (!replica || x < LEFT) return null;
  const time = view.from + ((x - LEFT) / (view.width - LEFT)) * (view.to - view.from);
  const step = replica.steps[firstAfter(replica.steps, time)];
  return step && Math.min(step.planned - step.plan, began(step) - step.gap) <= time ? { replica, step } : null;
}

function axis(context: CanvasRenderingContext2D, view: View, tall: number, colours: Palette): void {
  const seconds = (view.to - view.from) / 1e6;
  const gap = [0.1, 0.2, 0.5, 1, 2, 5, 10].find((value) => seconds / value <= Math.max(3, view.width / 120)) ?? 10;
  context.fillStyle = colours.text;
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  for (let back = 0; back < seconds; back += gap) {
    const x = Math.round(position(view, view.to - back * 1e6)) + 0.5;
    if (x < LEFT + 12) break;
    context.strokeStyle = colours.line;
    context.beginPath();
    context.moveTo(x, AXIS - 3);
    context.lineTo(x, tall);
    context.stroke();
    if (back > 0 && x > LEFT + 20) context.fillText(`−${Number(back.toFixed(1))} s`, x, 11);
  }
  context.textAlign = "right";
  context.fillText("now", view.width, 11);
}

function box(context: CanvasRenderingContext2D, colour: string, x: number, y: number, wide: number, tall: number): void {
  context.fillStyle = colour;
  context.fillRect(x, y, wide, tall);
}

function drawStep(context: CanvasRenderingContext2D, view: View, step: Step, top: number, colours: Palette): void {
  const clip = (x: number) => Math.min(view.width, Math.max(LEFT, x));
  const at = (time: number) => clip(position(view, time));
  // The planning: `ahead` while the device still had a step in flight, `late` if it had none.
  const plan = at(step.planned - step.plan);
  const colour = step.inFlight > 0 ? colours.ahead : colours.late;
  box(context, colour, plan, top + 3, Math.max(1, at(step.planned) - plan), PLAN_LANE - 6);

  const lane = top + PLAN_LANE;
  const from = at(began(step));
  const end = at(step.done);
  if (step.gap > 0) {
    const gap = at(began(step) - step.gap);
    // No minimum width: gaps of microseconds would look like an idle device in a zoomed-out view.
    box(context, colours.gap, gap, lane + DEVICE_LANE / 2 - 3, from - gap, 6);
  }
  if (end - from > ROOM_FOR_ARROWS) {
    // A line from the plan to its step.
    context.strokeStyle = colour;
    context.beginPath();
    context.moveTo(at(step.planned), top + PLAN_LANE - 3);
    context.lineTo(from, lane);
    context.stroke();
  }
  // Leave a pixel between neighbouring steps if they are wide enough.
  const wide = Math.max(0.75, end - from > 3 ? end - from - 1 : end - from);
  const rows = step.decode + step.prefill;
  const share = rows > 0 ? step.prefill / rows : 0;
  // A prefill of one row among many stays visible.
  const upper = step.prefill === 0 ? 0 : Math.max(8, share * DEVICE_LANE);
  const lower = step.decode === 0 ? 0 : Math.max(8, DEVICE_LANE - upper);
  if (step.prefill > 0) box(context, colours.prefill, from, lane, wide, DEVICE_LANE - lower);
  if (step.decode > 0) box(context, colours.decode, from, lane + DEVICE_LANE - lower, wide, lower);
  if (wide > 26 && rows > 0) {
    context.fillStyle = "#fff";
    context.textAlign = "left";
    context.textBaseline = "middle";
    if (lower >= 11) context.fillText(String(step.decode), from + 4, lane + DEVICE_LANE - lower / 2, wide - 6);
    if (step.prefill > 0 && DEVICE_LANE - lower >= 11) {
      context.fillText(String(step.prefill), from + 4, lane + (DEVICE_LANE - lower) / 2, wide - 6);
    }
  }
}

/** Draws the steps of all replicas between two times. */
export function draw(canvas: HTMLCanvasElement, replicas: Replica[], view: View, colours: Palette): void {
  const context = canvas.getContext("2d");
  if (!context) return;
  const ratio = window.devicePixelRatio || 1;
  const tall = height(replicas.length);
  canvas.width = Math.round(view.width * ratio);
  canvas.height = Math.round(tall * ratio);
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, view.width, tall);
  context.font = "11px system-ui, sans-serif";
  replicas.forEach((_, index) => {
    const top = AXIS + index * (PLAN_LANE + DEVICE_LANE + SPACE);
    box(context, colours.lane, LEFT, top + PLAN_LANE, view.width - LEFT, DEVICE_LANE);
  });
  axis(context, view, tall, colours);
  replicas.forEach((replica, index) => {
    const top = AXIS + index * (PLAN_LANE + DEVICE_LANE + SPACE);
    context.fillStyle = colours.text;
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillText("plan", 0, top + PLAN_LANE / 2);
    context.fillText(replicas.length > 1 ? `device ${replica.facts.index}` : "device", 0, top + PLAN_LANE + DEVICE_LANE / 2);
    for (let at = firstAfter(replica.steps, view.from); at < replica.steps.length; at += 1) {
      const step = replica.steps[at]!;
      if (step.planned - step.plan > view.to) break;
      drawStep(context, view, step, top, colours);
    }
  });
}
