// Parts of a step's time: one color and one pattern (panel.css) for each, and the bar.

import { percent } from "./bar.ts";
import { attribute, h, Keyed, style } from "./dom.ts";
import { seconds } from "./format.ts";
import { STEP_COLORS, type ProfiledRank, type StepPartTime } from "./protocol.ts";

/** Create the swatch or the segment of a part. */
export function painted<K extends "i" | "div">(tag: K, part: string, kind: string): HTMLElementTagNameMap[K] {
  const root = h(tag, { class: `nbd-time ${kind}` });
  const known = Object.hasOwn(STEP_COLORS, part);
  if (known) attribute(root, "data-part", part);
  style(root, "background-color", (known ? STEP_COLORS[part] : null) ?? STEP_COLORS.idle!);
  return root;
}

/** "forward 80 ms, 38 %". */
export function told({ part, seconds: taken }: StepPartTime, step: number): string {
  return `${part} ${seconds(taken)}, ${share(taken, step)}`;
}

export function share(part: number, whole: number): string {
  const found = whole > 0 ? (100 * part) / whole : 0;
  return found > 0 && found < 0.5 ? "<1 %" : `${Math.round(found)} %`;
}

/** Describe all parts of a rank, for screen readers. */
export function inWords({ rank, step_s, parts, figures }: ProfiledRank): string {
  const all = parts.filter((part) => part.seconds > 0).map((part) => told(part, step_s));
  return [`rank ${rank}: step ${seconds(step_s)}: ${all.join("; ")}`, figures].filter(Boolean).join(". ");
}

export class TimeBar {
  readonly root = h("div", { class: "nbd-stack" });
  private scale = 1;
  private step = 1;
  private readonly segments = new Keyed<StepPartTime, { root: HTMLElement }>(
    this.root,
    ({ part }) => part,
    ({ part }) => ({ root: painted("div", part, "nbd-segment") }),
    ({ root }, span) => {
      style(root, "width", percent(span.seconds, this.scale));
      root.classList.toggle("nbd-thin", span.seconds < 0.01 * this.scale);
      root.title = told(span, this.step);
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
    [...this.root.children].forEach((segment, at) => attribute(segment, "data-on", at === index));
  }
}
