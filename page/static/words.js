// Numbers, durations and sizes as text.

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10) return `${value.toFixed(1)} ms`;
  if (value < 1000) return `${Math.round(value)} ms`;
  return seconds(value / 1000);
}

export function seconds(value) {
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${Math.round(value / 3600)} h`;
  return `${Math.round(value / 86400)} days`;
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (Math.abs(value) >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return value % 1 ? value.toFixed(1) : String(value);
}

export function bytes(value) {
  if (!value) return "–";
  const power = Math.min(4, Math.floor(Math.log2(value) / 10));
  return `${(value / 2 ** (10 * power)).toFixed(power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

export const percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(100 * share)} %`);
export const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
export const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
export const byName = (a, b) => compare(a.name, b.name);
