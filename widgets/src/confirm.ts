// Confirmation of an action that loses something: a sentence, a confirm button and Cancel.

import { h } from "./dom.ts";

export interface Confirmation {
  /** The consequence of the action. */
  message: string;
  label: string;
  onConfirm: () => void;
  /** Called when the confirmation is closed, confirmed or not. */
  onClose: () => void;
}

/** Return the confirmation as an element; Escape cancels it. Give it the focus with `focus()`. */
export function confirmation({ message, label, onConfirm, onClose }: Confirmation): HTMLElement {
  const confirm = h("button", { class: "nbd-primary", onclick: () => (onClose(), onConfirm()) }, label);
  const cancel = h("button", { onclick: onClose }, "Cancel");
  const onKey = (event: KeyboardEvent): void => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    onClose();
  };
  return h(
    "div",
    { class: "nbd-confirm", role: "group", "aria-label": label, onkeydown: onKey },
    h("span", { class: "nbd-grow" }, message),
    confirm,
    cancel,
  );
}

/** Container for one confirmation at a time; returns the focus to the button that opened it. */
export class ConfirmationArea {
  readonly root = h("div", { class: "nbd-question" });
  private opener: HTMLElement | null = null;

  get isOpen(): boolean {
    return this.root.childElementCount > 0;
  }

  confirm(opener: HTMLElement, message: string, label: string, onConfirm: () => void): void {
    this.open(opener, confirmation({ message, label, onConfirm, onClose: () => this.close() }));
    this.root.querySelector("button")?.focus();
  }

  open(opener: HTMLElement, content: HTMLElement): void {
    this.opener?.setAttribute("aria-expanded", "false");
    this.opener = opener;
    opener.setAttribute("aria-expanded", "true");
    this.root.replaceChildren(content);
  }

  close(): void {
    this.root.replaceChildren();
    this.opener?.setAttribute("aria-expanded", "false");
    this.opener?.focus();
    this.opener = null;
  }
}
