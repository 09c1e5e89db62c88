// Form to save a checkpoint; asks for confirmation if the name exists.

import { confirmation } from "./confirm.ts";
import { h } from "./dom.ts";
import type { Store } from "./store.ts";

export function saveForm(store: Store, onClose: () => void): HTMLElement {
  const name = h("input", { type: "text", placeholder: "name", "aria-label": "checkpoint name", maxlength: 200 });
  const send = (overwrite: boolean): void => {
    onClose();
    const args = overwrite ? { name: name.value.trim(), overwrite } : { name: name.value.trim() };
    store.command("save", args, `save ${name.value.trim()}`);
  };
  const save = (): void => {
    const wanted = name.value.trim();
    if (!wanted) return name.focus();
    if (!store.state.checkpoints.some((checkpoint) => checkpoint.name === wanted)) return send(false);
    const message = `“${wanted}” exists: saving replaces it.`;
    const dialog = confirmation({ message, label: "Replace it", onConfirm: () => send(true), onClose });
    form.replaceChildren(dialog);
    dialog.querySelector("button")?.focus();
    return undefined;
  };
  const onKey = (event: KeyboardEvent): void => {
    if (event.key === "Enter" && event.target === name) {
      event.preventDefault(); // otherwise it presses the button that gets the focus
      save();
    }
    if (event.key === "Escape") onClose();
  };
  const form = h(
    "div",
    { class: "nbd-confirm", role: "group", "aria-label": "save", onkeydown: onKey },
    h("label", {}, h("span", { class: "nbd-muted" }, "Save as"), name),
    h("span", { class: "nbd-grow nbd-muted" }, "loads under any strategy and number of ranks"),
    h("button", { class: "nbd-primary", onclick: save }, "Save"),
    h("button", { onclick: onClose }, "Cancel"),
  );
  return form;
}
