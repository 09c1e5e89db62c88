// Parts of a step's time: one color and one pattern (panel.css) for each, and the bar.

import { cssPercent } from "./memory_bar.ts";
import { h, KeyedList, setAttribute, setStyle } from "./dom.ts";
import { seconds } from "./format.ts";
import { STEP_COLORS, type ProfiledRank, type StepPartTime } from "./protocol.ts";

/** Create the swatch or the segment of a part. */
export function colored<K extends "i" | "div">(tag: K, part: string, kind: string): HTMLElementTagNameMap[K] {
  const root = h(tag, { class: `nbd-time ${kind}` });
  const known = Object.hasOwn(STEP_COLORS, part);
  if (known) setAttribute(root, "data-part", part);
  setStyle(root, "background-color", (known ? STEP_COLORS[part] : null) ?? STEP_COLORS.idle!);
  return root;
}

/** "forward 80 ms, 38 %". */
export function describePart({ part, seconds: taken }: StepPartTime, step: number): string {
  return `${part} ${seconds(taken)}, ${formatShare(taken, step)}`;
}

export function formatShare(part: number, whole: number): string {
  const percentage = whole > 0 ? (100 * part) / whole : 0;
  return percentage > 0 && percentage < 0.5 ? "<1 %" : `${Math.round(percentage)} %`;
}

/** Describe all parts of a rank, for screen readers. */
export function describeRank({ rank, step_s, parts, figures }: ProfiledRank): string {
  const all = parts.filter((part) => part.seconds > 0).map((part) => describePart(part, step_s));
  return [`rank ${rank}: step ${seconds(step_s)}: ${all.join("; ")}`, figures].filter(Boolean).join(". ");
}

export class TimeBar {
  readonly root = h("div", { class: "nbd-stack" });
  private scale = 1;
  private step = 1;
  private readonly segments = new KeyedList<StepPartTime, { root: HTMLElement }>(
    this.root,
    ({ part }) => part,
    ({ part }) => ({ root: colored("div", part, "nbd-segment") }),
    ({ root }, span) => {
      setStyle(root, "width", cssPercent(span.seconds, this.scale));
      root.classList.toggle("nbd-thin", span.seconds < 0.01 * this.scale);
      root.title = describePart(span, this.step);
    },
  );

  show(parts: readonly StepPartTime[], step: number, scale: number): void {
    this.step = step;
    this.scale = scale;
    this.segments.show(parts);
  }

  /** Return the index of a segment, or -1. */
  indexOf(element: EventTarget | null): number {
    return [...this.root.children].indexOf(element as Element);
  }

  /** Highlight one segment, or none (-1). */
  mark(index: number): void {
    [...this.root.children].forEach((segment, at) => setAttribute(segment, "data-on", at === index));
  }
}
