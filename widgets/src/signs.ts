// Marks of events in a chart, and signs for values that cannot be drawn on its line.

import type { EventMarkView } from "./protocol.ts";

/** Vertical line of a chart: one mark, or several that would overlap. */
export interface Upright {
  x: number;
  /** True if all marks are saves, which do not change the training. */
  saves: boolean;
  /** Label, shortened to the available space. */
  words: string;
  /** All events at this line. */
  told: string;
}

/** Sort the marks with a position from left to right and merge those within `reach`. */
export function uprights(marks: readonly EventMarkView[], place: (mark: EventMarkView) => number | null, reach: number): Upright[] {
  const placed = marks.flatMap((mark) => {
    const x = place(mark);
    return x === null ? [] : [{ x, mark }];
  });
  placed.sort((a, b) => a.x - b.x);
  const groups: { x: number; marks: EventMarkView[] }[] = [];
  for (const { x, mark } of placed) {
    const last = groups.at(-1);
    if (last && x - last.x <= reach) last.marks.push(mark);
    else groups.push({ x, marks: [mark] });
  }
  return groups.map(({ x, marks: there }) => ({
    x,
    saves: there.every(({ kind }) => kind === "save"),
    words: inShort(there.map((mark) => (mark.kind === "load" ? `load ${mark.text}` : mark.text || mark.kind))),
    told: there.map(({ kind, text }) => `${kind} ${text}`.trim()).join(", "),
  }));
}

const ROOM = 18;

/** "base, best", or "a-long-name… +1" if there is not enough space. */
function inShort(names: readonly string[]): string {
  const all = names.join(", ");
  if (all.length <= ROOM) return all;
  const more = names.length > 1 ? ` +${names.length - 1}` : "";
  const first = names[0] ?? "";
  const room = ROOM - more.length;
  return `${first.length > room ? `${first.slice(0, room - 1)}…` : first}${more}`;
}

/** Name and sign of a value that cannot be drawn on the line. */
export interface Odd {
  name: string;
  sign: "×" | "▲" | "▼";
}

/** As NON_FINITE_SYMBOLS in nbdist/display/number_formatting.py; a finite value has no logarithm. */
export function oddity(value: number): Odd {
  if (Number.isNaN(value)) return { name: "NaN", sign: "×" };
  if (value === Infinity) return { name: "inf", sign: "▲" };
  return { name: value === -Infinity ? "-inf" : "0 or less", sign: "▼" };
}

/** "× NaN  ▲ inf": legend of the signs in a chart; empty if there are none. */
export function keyOf(values: Iterable<number>): string {
  const names = new Map<string, string>();
  for (const value of values) {
    const { name, sign } = oddity(value);
    names.set(name, sign);
  }
  return [...names].map(([name, sign]) => `${sign} ${name}`).join("  ");
}

/** Draw the sign of a value: a cross at the bottom, or a triangle that points up or down. */
export function trace(path: CanvasPath, { sign }: Odd, x: number, top: number, bottom: number, size: number): void {
  if (sign === "×") {
    const y = bottom - size;
    path.moveTo(x - size, y - size);
    path.lineTo(x + size, y + size);
    path.moveTo(x - size, y + size);
    path.lineTo(x + size, y - size);
    return;
  }
  const [tip, base] = sign === "▲" ? [top, top + 2 * size] : [bottom, bottom - 2 * size];
  path.moveTo(x - size, base);
  path.lineTo(x + size, base);
  path.lineTo(x, tip);
  path.closePath();
}
