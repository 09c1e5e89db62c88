// Parts of a step's time: one color and one pattern (panel.css) for each, and the bar.

import { percent } from "./bar.ts";
import { attribute, h, Keyed, style } from "./dom.ts";
import { seconds } from "./format.ts";
import type { ProfiledRank, Span } from "./protocol.ts";

/** Same as in nbdist/display/profile.py; of medium luminance, like the colors of memory. */
export const COLOURS: Readonly<Record<string, string>> = {
  data: "#986f00",
  copies: "#9b6c41",
  forward: "#337ab6",
  backward: "#875fd1",
  optimizer: "#478429",
  communication: "#b85d0a",
  waiting: "#c24c7b",
  offload: "#108380",
  python: "#2f78c2",
  idle: "#6c7785",
};

/** Create the swatch or the segment of a part. */
export function painted<K extends "i" | "div">(tag: K, part: string, kind: string): HTMLElementTagNameMap[K] {
  const root = h(tag, { class: `nbd-time ${kind}` });
  const known = Object.hasOwn(COLOURS, part);
  if (known) attribute(root, "data-part", part);
  style(root, "background-color", (known ? COLOURS[part] : null) ?? COLOURS.idle!);
  return root;
}

/** "forward 80 ms, 38 %". */
export function told({ part, seconds: taken }: Span, step: number): string {
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
  private readonly segments = new Keyed<Span, { root: HTMLElement }>(
    this.root,
    ({ part }) => part,
    ({ part }) => ({ root: painted("div", part, "nbd-segment") }),
    ({ root }, span) => {
      style(root, "width", percent(span.seconds, this.scale));
      root.classList.toggle("nbd-thin", span.seconds < 0.01 * this.scale);
      root.title = told(span, this.step);
    },
  );

  show(parts: readonly Span[], step: number, scale: number): void {
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
