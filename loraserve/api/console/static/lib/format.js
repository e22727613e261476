// Numbers and times as people read them.
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  let value = count;
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${UNITS[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return `${Math.round(value)} s`;
}

export function number(value, digits = 0) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Math.abs(value) < 10) return number(value, 1);
  return value.toLocaleString("en", { notation: value >= 100_000 ? "compact" : "standard", maximumFractionDigits: 0 });
}

export function percent(share, digits = 0) {
  return share === null || Number.isNaN(share) ? "–" : `${(share * 100).toFixed(digits)} %`;
}

export function clock(date) {
  return new Date(date).toLocaleTimeString("en-GB");
}

export function day(date) {
  return new Date(date).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
}

export function ago(value) {
  if (value === null || value === undefined) return "not since the server started";
  if (value < 1.5) return "just now";
  if (value < 90) return `${Math.round(value)} s ago`;
  if (value < 5400) return `${Math.round(value / 60)} min ago`;
  if (value < 129_600) return `${Math.round(value / 3600)} h ago`;
  return `${Math.round(value / 86_400)} days ago`;
}

export function plural(count, what) {
  return `${number(count)} ${what}${count === 1 ? "" : "s"}`;
}
