// Parts of the memory: their order and colors.

import { MEMORY_COLORS, type MemoryPart } from "./protocol.ts";

const ORDER = Object.keys(MEMORY_COLORS);

/** Return the color of a part; unknown parts have the color of "other". */
export function colour(part: string): string {
  return (Object.hasOwn(MEMORY_COLORS, part) ? MEMORY_COLORS[part] : undefined) ?? MEMORY_COLORS.other!;
}

/** Sort parts in the common order and drop empty ones. */
export function ordered(parts: readonly MemoryPart[]): MemoryPart[] {
  const place = (part: string): number => {
    const found = ORDER.indexOf(part);
    return found < 0 ? ORDER.length : found;
  };
  return parts.filter((part) => part.bytes > 0).sort((a, b) => place(a.part) - place(b.part));
}
