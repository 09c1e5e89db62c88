// What a part of the panel is to main.ts.

import type { Topic } from "./store.ts";

export interface View {
  root: HTMLElement;
  /** Topics that this part shows. */
  topics: readonly Topic[];
  /** Draw what the store has now. */
  update(): void;
  /** Once a second: ages and running times. */
  tick?(): void;
  close?(): void;
}
