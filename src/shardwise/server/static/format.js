// Figures as people read them. Inside everything is bytes and seconds.
const scaled = (value, base, prefixes) => {
  let index = 0;
  while (Math.abs(value) >= base * 0.9995 && index < prefixes.length - 1) { value /= base; index += 1; }
  return [value, prefixes[index]];
};
const digits = (value) => (Math.abs(value) >= 99.95 || Number.isInteger(value) ? value.toFixed(0) : Math.abs(value) >= 9.995 ? value.toFixed(1) : value.toFixed(2));

export const bytes = (value) => {
  if (value == null) return "–";
  const [number, prefix] = scaled(value, 1024, ["", "Ki", "Mi", "Gi", "Ti"]);
  return `${digits(number)} ${prefix}B`;
};
export const rate = (value) => {
  if (value == null) return "–";
  const [number, prefix] = scaled(value, 1000, ["", "k", "M", "G"]);
  return `${digits(number)} ${prefix}B/s`;
};
export const seconds = (value) => {
  if (value == null) return "–";
  if (value >= 120) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (value >= 1) return `${digits(value)} s`;
  if (value >= 1e-3) return `${digits(value * 1e3)} ms`;
  return `${digits(value * 1e6)} µs`;
};
export const number = (value, fraction = 0) => (value == null ? "–" : value.toLocaleString("en", { maximumFractionDigits: fraction, minimumFractionDigits: fraction }));
export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
export const percent = (share) => `${Math.round(share * 100)} %`;
export const params = (value) => { const [n, p] = scaled(value, 1000, ["", "K", "M", "B", "T"]); return `${digits(n)}${p}`; };
