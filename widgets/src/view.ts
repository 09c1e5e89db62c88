// Interface between main.ts and the parts of the panel.

import type { Topic } from "./store.ts";

export interface View {
  root: HTMLElement;
  /** Topics that this part depends on. */
  topics: readonly Topic[];
  /** Draw the current state of the store. */
  update(): void;
  /** Update ages and running times; called once a second. */
  tick?(): void;
  close?(): void;
}
