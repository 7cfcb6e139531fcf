/** Formats 1234567 as 1,234,567, whatever the browser's language. */
export function whole(value: number): string {
  return Math.round(value).toLocaleString("en-US");
}

/** Formats a count briefly: 980, 12.3k, 4.5M. */
export function short(value: number): string {
  if (value < 1000) return String(Math.round(value));
  if (value < 1e6) return `${(value / 1e3).toFixed(value < 99_950 ? 1 : 0)}k`;
  return `${(value / 1e6).toFixed(1)}M`;
}

/** Formats a size as 980 B, 93 MB, 1.5 GB. */
export function bytes(value: number): string {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const unit = Math.min(units.length - 1, Math.floor(Math.log10(Math.max(value, 1)) / 3));
  const scaled = value / 1000 ** unit;
  return `${scaled.toFixed(scaled < 9.95 && unit > 0 ? 1 : 0)} ${units[unit]}`;
}

/** Formats a time given in microseconds. */
export function micros(value: number): string {
  if (value < 1000) return `${Math.round(value)} µs`;
  if (value < 1e6) return `${(value / 1e3).toFixed(value < 1e4 ? 2 : 1)} ms`;
  return value < 6e7 ? `${(value / 1e6).toFixed(2)} s` : `${Math.round(value / 6e7)} min`;
}

/** Formats a share between 0 and 1 as a percentage. */
export function percent(share: number): string {
  if (!Number.isFinite(share)) return "–";
  const value = share * 100;
  return `${value.toFixed(value > 0 && value < 9.95 ? 1 : 0)} %`;
}
