// Categories of memory: order and colors, the same as in nbdist/display/panel_html.py.

import type { Part } from "./protocol.ts";

/**
 * Luminance of 0.15 to 0.29, so that each color has a contrast of 3:1 against white and against the
 * dark themes' #212121. Neighbors differ in hue or lightness for color-blind users, with a gap between.
 */
export const COLOURS: Readonly<Record<string, string>> = {
  parameters: "#3987c8",
  master: "#2b6fb3",
  gradients: "#c2620a",
  optimizer: "#8a63d2",
  gathered: "#12938f",
  activations: "#4b8b2b",
  logits: "#a87b00",
  buffers: "#c4527f",
  temporaries: "#96683f",
  context: "#7c8694",
  other: "#6b7280",
};
const ORDER = Object.keys(COLOURS);

/** Return the color of a part; unknown parts have the color of "other". */
export function colour(part: string): string {
  return (Object.hasOwn(COLOURS, part) ? COLOURS[part] : undefined) ?? COLOURS.other!;
}

/** Sort parts in the common order and drop empty ones. */
export function ordered(parts: readonly Part[]): Part[] {
  const place = (part: string): number => {
    const found = ORDER.indexOf(part);
    return found < 0 ? ORDER.length : found;
  };
  return parts.filter((part) => part.bytes > 0).sort((a, b) => place(a.part) - place(b.part));
}
