// Marks of events in a chart, and symbols for values that cannot be drawn on its line.

import type { EventMarkView } from "./protocol.ts";

/** Vertical line of a chart: one mark, or several that would overlap. */
export interface MarkGroup {
  x: number;
  /** True if all marks are saves, which do not change the training. */
  saves: boolean;
  /** Label, shortened to the available space. */
  label: string;
  /** All events at this line. */
  description: string;
}

/** Sort the marks with a position from left to right and merge those within `minDistance`. */
export function groupMarks(marks: readonly EventMarkView[], place: (mark: EventMarkView) => number | null, minDistance: number): MarkGroup[] {
  const placed = marks.flatMap((mark) => {
    const x = place(mark);
    return x === null ? [] : [{ x, mark }];
  });
  placed.sort((a, b) => a.x - b.x);
  const groups: { x: number; marks: EventMarkView[] }[] = [];
  for (const { x, mark } of placed) {
    const last = groups.at(-1);
    if (last && x - last.x <= minDistance) last.marks.push(mark);
    else groups.push({ x, marks: [mark] });
  }
  return groups.map(({ x, marks: group }) => ({
    x,
    saves: group.every(({ kind }) => kind === "save"),
    label: shorten(group.map((mark) => (mark.kind === "load" ? `load ${mark.text}` : mark.text || mark.kind))),
    description: group.map(({ kind, text }) => `${kind} ${text}`.trim()).join(", "),
  }));
}

const MAX_LABEL_CHARS = 18;

/** "base, best", or "a-long-name… +1" if there is not enough space. */
function shorten(names: readonly string[]): string {
  const all = names.join(", ");
  if (all.length <= MAX_LABEL_CHARS) return all;
  const more = names.length > 1 ? ` +${names.length - 1}` : "";
  const first = names[0] ?? "";
  const maxChars = MAX_LABEL_CHARS - more.length;
  return `${first.length > maxChars ? `${first.slice(0, maxChars - 1)}…` : first}${more}`;
}

/** Name and symbol of a value that cannot be drawn on the line. */
export interface NonFiniteSymbol {
  name: string;
  symbol: "×" | "▲" | "▼";
}

/** As NON_FINITE_SYMBOLS in nbdist/display/number_formatting.py; a finite value has no logarithm. */
export function symbolFor(value: number): NonFiniteSymbol {
  if (Number.isNaN(value)) return { name: "NaN", symbol: "×" };
  if (value === Infinity) return { name: "inf", symbol: "▲" };
  return { name: value === -Infinity ? "-inf" : "0 or less", symbol: "▼" };
}

/** "× NaN  ▲ inf": legend of the symbols in a chart; empty if there are none. */
export function symbolLegend(values: Iterable<number>): string {
  const names = new Map<string, string>();
  for (const value of values) {
    const { name, symbol } = symbolFor(value);
    names.set(name, symbol);
  }
  return [...names].map(([name, symbol]) => `${symbol} ${name}`).join("  ");
}

/** Draw the symbol of a value: a cross at the bottom, or a triangle that points up or down. */
export function drawSymbol(path: CanvasPath, { symbol }: NonFiniteSymbol, x: number, top: number, bottom: number, size: number): void {
  if (symbol === "×") {
    const y = bottom - size;
    path.moveTo(x - size, y - size);
    path.lineTo(x + size, y + size);
    path.moveTo(x - size, y + size);
    path.lineTo(x + size, y - size);
    return;
  }
  const [tip, base] = symbol === "▲" ? [top, top + 2 * size] : [bottom, bottom - 2 * size];
  path.moveTo(x - size, base);
  path.lineTo(x + size, base);
  path.lineTo(x, tip);
  path.closePath();
}
