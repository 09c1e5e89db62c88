// Groups items of a cluster under headings of their nodes.

/** A heading, or an item below it with its index among all items. */
export type NodeEntry<T> = { heading: string } | { heading: null; item: T; index: number };

/** Insert a heading before the first item of each node; items on the notebook's machine get none. */
export function groupByNode<T extends { node: string }>(items: readonly T[]): NodeEntry<T>[] {
  return items.flatMap((item, index): NodeEntry<T>[] => {
    const placed = { heading: null, item, index };
    return item.node === (items[index - 1]?.node ?? "") ? [placed] : [{ heading: item.node }, placed];
  });
}
