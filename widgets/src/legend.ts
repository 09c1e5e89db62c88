// Legend of the colors and marks of bars.

import { h, Keyed, style } from "./dom.ts";
import { colour, ordered } from "./parts.ts";
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
  colour: string | null;
  mark: BarMark | null;
  words: string;
}

export class Legend {
  readonly root = h("div", { class: "nbd-legend" });
  private readonly entries = new Keyed<Entry, { root: HTMLElement }>(
    this.root,
    ({ words }) => words,
    (entry) => {
      const swatch = h("i", { class: "nbd-swatch" });
      if (entry.mark) swatch.classList.add(`nbd-is-${entry.mark}`);
      else style(swatch, "background-color", entry.colour ?? "");
      return { root: h("span", {}, swatch, entry.words) };
    },
    () => {},
  );

  /** Show every part that occurs in a bar, and the given marks. */
  show(bars: readonly (readonly MemoryPart[])[], marks: Partial<Record<BarMark, boolean>>): void {
    const seen = new Map(bars.flatMap((bar) => ordered(bar)).map((part) => [part.part, part]));
    const parts = ordered([...seen.values()]).map(({ part }) => ({ colour: colour(part), mark: null, words: part }));
    const there = (Object.keys(MARKS) as BarMark[]).filter((mark) => marks[mark]);
    this.entries.show([...parts, ...there.map((mark) => ({ colour: null, mark, words: MARKS[mark] }))]);
  }
}
