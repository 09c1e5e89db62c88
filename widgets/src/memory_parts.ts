// Parts of the memory: their order and colors.

import { MEMORY_COLORS, type MemoryPart } from "./protocol.ts";

const ORDER = Object.keys(MEMORY_COLORS);

/** Return the color of a part; unknown parts have the color of "other". */
export function colorOf(part: string): string {
  return (Object.hasOwn(MEMORY_COLORS, part) ? MEMORY_COLORS[part] : undefined) ?? MEMORY_COLORS.other!;
}

/** Sort parts in the common order and drop empty ones. */
export function sortParts(parts: readonly MemoryPart[]): MemoryPart[] {
  const position = (part: string): number => {
    const index = ORDER.indexOf(part);
    return index < 0 ? ORDER.length : index;
  };
  return parts.filter((part) => part.bytes > 0).sort((a, b) => position(a.part) - position(b.part));
}
