// Confirmation of an action that loses something: a sentence, a confirm button and Cancel.

import { h } from "./dom.ts";

export interface Confirmed {
  /** The consequence of the action. */
  says: string;
  label: string;
  does: () => void;
  /** Called when the confirmation is closed, confirmed or not. */
  over: () => void;
}

/** Return the confirmation as an element; Escape cancels it. Give it the focus with `focus()`. */
export function confirmation({ says, label, does, over }: Confirmed): HTMLElement {
  const yes = h("button", { class: "nbd-primary", onclick: () => (over(), does()) }, label);
  const no = h("button", { onclick: over }, "Cancel");
  const escape = (event: KeyboardEvent): void => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    over();
  };
  return h(
    "div",
    { class: "nbd-confirm", role: "group", "aria-label": label, onkeydown: escape },
    h("span", { class: "nbd-grow" }, says),
    yes,
    no,
  );
}

/** Container for one confirmation at a time; returns the focus to the button that opened it. */
export class Question {
  readonly root = h("div", { class: "nbd-question" });
  private asker: HTMLElement | null = null;

  get open(): boolean {
    return this.root.childElementCount > 0;
  }

  ask(asker: HTMLElement, says: string, label: string, does: () => void): void {
    this.put(asker, confirmation({ says, label, does, over: () => this.close() }));
    this.root.querySelector("button")?.focus();
  }

  put(asker: HTMLElement, content: HTMLElement): void {
    this.asker?.setAttribute("aria-expanded", "false");
    this.asker = asker;
    asker.setAttribute("aria-expanded", "true");
    this.root.replaceChildren(content);
  }

  close(): void {
    this.root.replaceChildren();
    this.asker?.setAttribute("aria-expanded", "false");
    this.asker?.focus();
    this.asker = null;
  }
}
