// Memory bar: parts stacked on a scale, in bytes.

import { h, KeyedList, setStyle } from "./dom.ts";
import { bytes } from "./format.ts";
import { colorOf, sortParts } from "./memory_parts.ts";
import type { MemoryPart } from "./protocol.ts";

export class MemoryBar {
  readonly root = h("div", { class: "nbd-stack" });
  private scale = 1;
  private readonly segments = new KeyedList<MemoryPart, { root: HTMLElement }>(
    this.root,
    (part) => part.part,
    (part) => {
      const root = h("div", { class: "nbd-segment" });
      setStyle(root, "background-color", colorOf(part.part));
      return { root };
    },
    ({ root }, part) => {
      setStyle(root, "width", cssPercent(part.bytes, this.scale));
      root.classList.toggle("nbd-thin", part.bytes < 0.01 * this.scale);
      root.title = `${part.part} ${bytes(part.bytes)}`;
    },
  );

  show(parts: readonly MemoryPart[], scale: number): void {
    this.scale = scale;
    const total = parts.reduce((sum, part) => sum + part.bytes, 0);
    this.root.classList.toggle("nbd-over", total > 1.005 * scale);
    this.segments.show(sortParts(parts));
  }
}

/** A share of the scale as a CSS width, at most 100 %. */
export function cssPercent(value: number, scale: number): string {
  return scale > 0 ? `${Math.min(100, (100 * value) / scale).toFixed(2)}%` : "0%";
}

export function describeParts(parts: readonly MemoryPart[]): string {
  return sortParts(parts).map((part) => `${part.part} ${bytes(part.bytes)}`).join(", ");
}
