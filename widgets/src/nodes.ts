// What is on nodes of a cluster, below the headings of these.

/** A heading, or one of the items below it, with its place among all items. */
export type Placed<T> = { heading: string } | { heading: null; item: T; index: number };

/** Items in their order, a node's name before its first; none on the notebook's own machine. */
export function byNode<T extends { node: string }>(items: readonly T[]): Placed<T>[] {
  return items.flatMap((item, index): Placed<T>[] => {
    const placed = { heading: null, item, index };
    return item.node === (items[index - 1]?.node ?? "") ? [placed] : [{ heading: item.node }, placed];
  });
}
