// Checkpoints: the list, and the forms to save, load and export.

import { confirmation } from "./confirm.ts";
import { h, KeyedList, setAttribute, setText } from "./dom.ts";
import { age, bytes, count, NOTHING } from "./format.ts";
import type { CheckpointView } from "./protocol.ts";
import { saveForm } from "./save_form.ts";
import type { Store } from "./store.ts";
import type { View } from "./view.ts";

interface Row {
  root: HTMLElement;
  show(checkpoint: CheckpointView): void;
  tick(): void;
  enable(enabled: boolean): void;
}

export function checkpointsView(store: Store): View {
  const formArea = h("div");
  const closeForm = (): void => {
    formArea.replaceChildren();
    save.focus();
  };
  const save = h("button", { onclick: () => {
    const form = saveForm(store, closeForm);
    formArea.replaceChildren(form);
    form.querySelector("input")?.focus();
  } }, "Save…");
  const exportButton = h("button", { onclick: () => {
    const form = exportForm(store, () => (formArea.replaceChildren(), exportButton.focus()));
    formArea.replaceChildren(form);
    form.querySelector("input")?.focus();
  } }, "Export…");
  const body = h("tbody");
  const titles = ["name", "step", "size", "age", "saved under", "state", ""];
  const table = h(
    "table",
    { class: "nbd-table nbd-checkpoints" },
    h("thead", {}, h("tr", {}, ...titles.map((title) => title ? h("th", { scope: "col" }, title) : h("td")))),
    body,
  );
  const empty = h("p", { class: "nbd-empty" }, "Nothing saved yet. A checkpoint loads under any strategy and any number of ranks.");
  const root = h(
    "div",
    {},
    h("div", { class: "nbd-tools" }, h("span", { class: "nbd-grow" }), save, exportButton),
    formArea,
    empty,
    h("div", { class: "nbd-scroll", tabindex: 0, role: "group", "aria-label": "checkpoints" }, table),
  );
  const keyed = new KeyedList<CheckpointView, Row>(body, (checkpoint) => checkpoint.name, () => makeRow(store), (row, checkpoint) => row.show(checkpoint));
  function update(): void {
    const { checkpoints } = store.state;
    empty.hidden = checkpoints.length > 0;
    table.hidden = checkpoints.length === 0;
    keyed.show(checkpoints);
    save.disabled = exportButton.disabled = !store.hasRanks;
    for (const row of keyed.shown.values()) row.enable(store.hasRanks);
  }
  const tick = (): void => {
    for (const row of keyed.shown.values()) row.tick();
  };
  return { root, topics: ["checkpoints", "link", "header"], update, tick };
}

function makeRow(store: Store): Row {
  let checkpoint: CheckpointView;
  const name = h("th", { scope: "row", class: "nbd-clip" });
  const step = h("td", { class: "nbd-figures" });
  const size = h("td", { class: "nbd-figures" });
  const when = h("td", { class: "nbd-figures" });
  const backend = h("td");
  const state = h("td", { class: "nbd-wide" });
  const action = h("td");
  const load = h("button", { class: "nbd-quiet", onclick: () => {
    const close = (): void => {
      action.replaceChildren(load);
      load.focus();
    };
    const dialog = confirmation({
      message: "Replaces the current state of the model.",
      label: "Load it",
      onConfirm: () => store.command("load", { name: checkpoint.name }, `load ${checkpoint.name}`),
      onClose: close,
    });
    action.replaceChildren(dialog);
    dialog.querySelector("button")?.focus();
  } }, "Load…");
  action.append(load);
  const root = h("tr", {}, name, step, size, when, backend, state, action);
  const tick = (): void => setText(when, age(store.now() - checkpoint.saved_at));
  return {
    root,
    tick,
    enable: (enabled) => (load.disabled = !enabled || checkpoint.state !== "done"),
    show(latest) {
      checkpoint = latest;
      setText(name, checkpoint.name);
      name.title = checkpoint.path || checkpoint.name;
      setText(step, checkpoint.step === null ? NOTHING : count(checkpoint.step));
      setText(size, bytes(checkpoint.size_bytes));
      setText(backend, checkpoint.backend || NOTHING);
      const seconds = checkpoint.seconds === null ? "" : ` in ${checkpoint.seconds.toFixed(1)} s`;
      const labels = { done: `saved${seconds}`, running: "being saved", failed: checkpoint.error || "failed" };
      setText(state, labels[checkpoint.state]);
      setAttribute(state, "data-state", checkpoint.state);
      setAttribute(load, "aria-label", `load ${checkpoint.name}`);
      tick();
    },
  };
}

function exportForm(store: Store, onClose: () => void): HTMLElement {
  const folder = h("input", { type: "text", placeholder: "folder, for example out/", "aria-label": "folder", maxlength: 1000 });
  const send = (): void => {
    const path = folder.value.trim();
    if (!path) return folder.focus();
    onClose();
    store.command("export", { folder: path }, `export to ${path}`);
    return undefined;
  };
  const onKey = (event: KeyboardEvent): void => {
    if (event.key === "Enter" && event.target === folder) {
      event.preventDefault(); // otherwise it presses the button that gets the focus
      send();
    }
    if (event.key === "Escape") onClose();
  };
  return h(
    "div",
    { class: "nbd-confirm", role: "group", "aria-label": "export", onkeydown: onKey },
    h("label", {}, h("span", { class: "nbd-muted" }, "Export to"), folder),
    h("span", { class: "nbd-grow nbd-muted" }, "the current model, as safetensors for from_pretrained"),
    h("button", { class: "nbd-primary", onclick: send }, "Export"),
    h("button", { onclick: onClose }, "Cancel"),
  );
}
