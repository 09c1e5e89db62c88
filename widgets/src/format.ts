// Number formats, as in nbdist/display/number_formatting.py.

const MIB = 2 ** 20;
const GIB = 2 ** 30;
/** Placeholder for unknown values. */
export const NOTHING = "–";

/** "31.2 GiB"; "512 MiB" or "3.5 MiB" below one GiB. */
export function bytes(value: number | null): string {
  if (value === null) return NOTHING;
  if (value >= GIB) return `${grouped(value / GIB, 1)} GiB`;
  if (value > 0 && value < MIB) return "<1 MiB";
  return `${(value / MIB).toFixed(value > 0 && value < 9.95 * MIB ? 1 : 0)} MiB`;
}

/** "31.2 / 80.0 GiB": the unit is shown once if both are equal. */
export function bytesOf(value: number | null, whole: number | null): string {
  if (whole === null) return bytes(value);
  const [first = "", unit] = bytes(value).split(" ");
  const [second, same] = bytes(whole).split(" ");
  return unit === same ? `${first} / ${second} ${same}` : `${bytes(value)} / ${bytes(whole)}`;
}

/** A part of a step: "1.24 s", "212 ms", "0.4 ms". */
export function seconds(value: number): string {
  if (value >= 1) return `${value.toFixed(2)} s`;
  const milli = 1000 * value;
  return `${milli.toFixed(milli > 0 && milli < 9.95 ? 1 : 0)} ms`;
}

/** "00:42", "1:02:03". */
export function duration(seconds: number): string {
  const whole = Math.max(0, Math.floor(seconds));
  const two = (value: number): string => String(value).padStart(2, "0");
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return h ? `${h}:${two(m)}:${two(s)}` : `${two(m)}:${two(s)}`;
}

/** How long ago, in one unit: "now", "42 s", "5 min", "3 h", "2 d". */
export function age(seconds: number): string {
  if (seconds < 2) return "now";
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return seconds < 86_400 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86_400)} d`;
}

/** "12.3k", "1.25M"; small numbers with four digits at most. */
export function short(value: number | null): string {
  if (value === null || !Number.isFinite(value)) return NOTHING;
  const size = Math.abs(value);
  if (size >= 1e12) return value.toExponential(2);
  if (size >= 1e9) return `${trimmed(value / 1e9)}G`;
  if (size >= 1e6) return `${trimmed(value / 1e6)}M`;
  if (size >= 1e4) return `${trimmed(value / 1e3)}k`;
  if (size >= 1e-3 || size === 0) return String(Number(value.toPrecision(4)));
  return value.toExponential(2);
}

/** Format axis ticks with enough digits to distinguish them: large values may differ by little. */
export function ticks(values: readonly (number | null)[]): string[] {
  const plain = values.map((value) => (value === null ? "" : short(value)));
  const many = values.filter((value) => value !== null).length;
  if (new Set(plain.filter(Boolean)).size === many) return plain;
  return values.map((value) => (value === null ? "" : String(Number(value.toPrecision(8)))));
}

/** Tokens per second, with the same digits for each magnitude: "840", "12.3k", "1.2M". */
export function speed(perSecond: number): string {
  if (perSecond >= 1e6) return `${(perSecond / 1e6).toFixed(1)}M`;
  return perSecond >= 1e3 ? `${(perSecond / 1e3).toFixed(1)}k` : perSecond.toFixed(0);
}

/** Format a value of a series with enough digits for comparison. */
export function value(number: number | null): string {
  if (number === null || !Number.isFinite(number)) return NOTHING;
  const size = Math.abs(number);
  if (size >= 1e5 || (size > 0 && size < 1e-3)) return size >= 1e5 ? short(number) : number.toExponential(2);
  return grouped(number, size >= 1000 ? 0 : size >= 100 ? 1 : size >= 1 ? 3 : 4);
}

/** "1,200". */
export function count(number: number): string {
  return grouped(number, 0);
}

/** Bytes per second in GB/s, without the unit: "1.2", "112". */
export function gigabytes(perSecond: number | null): string {
  if (perSecond === null) return NOTHING;
  const giga = perSecond / 1e9;
  return giga >= 99.95 ? String(Math.round(giga)) : giga > 0 && giga < 0.05 ? "<0.1" : giga.toFixed(1);
}

/** "rank 3", "ranks 0-3", "ranks 0, 2". */
export function ranks(numbers: readonly number[]): string {
  const sorted = [...numbers].sort((a, b) => a - b);
  const first = sorted[0];
  const last = sorted.at(-1);
  if (first === undefined || last === undefined) return "no rank";
  if (sorted.length === 1) return `rank ${first}`;
  const dense = last - first === sorted.length - 1 && sorted.length > 2;
  return `ranks ${dense ? `${first}-${last}` : sorted.join(", ")}`;
}

function grouped(number: number, digits: number): string {
  const options = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return number.toLocaleString("en-US", options);
}

function trimmed(number: number): string {
  return String(Number(number.toPrecision(3)));
}
