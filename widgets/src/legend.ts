// Legend of the colors and marks of bars.

import { h, KeyedList, setStyle } from "./dom.ts";
import { colorOf, sortParts } from "./memory_parts.ts";
import type { MemoryPart } from "./protocol.ts";

/** Marks drawn over the parts of a bar. */
const MARKS = {
  live: "in use now",
  peak: "peak",
  others: "other processes",
  limit: "free memory of a device",
} as const;
export type BarMark = keyof typeof MARKS;

interface Entry {
  /** Color of the swatch; null if it is a mark. */
  color: string | null;
  mark: BarMark | null;
  label: string;
}

export class Legend {
  readonly root = h("div", { class: "nbd-legend" });
  private readonly entries = new KeyedList<Entry, { root: HTMLElement }>(
    this.root,
    ({ label }) => label,
    (entry) => {
      const swatch = h("i", { class: "nbd-swatch" });
      if (entry.mark) swatch.classList.add(`nbd-is-${entry.mark}`);
      else setStyle(swatch, "background-color", entry.color ?? "");
      return { root: h("span", {}, swatch, entry.label) };
    },
    () => {},
  );

  /** Show every part that occurs in a bar, and the given marks. */
  show(bars: readonly (readonly MemoryPart[])[], marks: Partial<Record<BarMark, boolean>>): void {
    const seen = new Map(bars.flatMap((bar) => sortParts(bar)).map((part) => [part.part, part]));
    const parts = sortParts([...seen.values()]).map(({ part }) => ({ color: colorOf(part), mark: null, label: part }));
    const shownMarks = (Object.keys(MARKS) as BarMark[]).filter((mark) => marks[mark]);
    this.entries.show([...parts, ...shownMarks.map((mark) => ({ color: null, mark, label: MARKS[mark] }))]);
  }
}
