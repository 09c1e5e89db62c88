// Checkpoints: the list, and the forms to save, load and export.

import { confirmation } from "./confirm.ts";
import { attribute, h, Keyed, say } from "./dom.ts";
import { age, bytes, count, NOTHING } from "./format.ts";
import type { CheckpointView } from "./protocol.ts";
import { saveForm } from "./save.ts";
import type { Store } from "./store.ts";
import type { View } from "./view.ts";

interface Row {
  root: HTMLElement;
  show(found: CheckpointView): void;
  tick(): void;
  enable(yes: boolean): void;
}

export function checkpointsView(store: Store): View {
  const place = h("div");
  const closeForm = (): void => {
    place.replaceChildren();
    save.focus();
  };
  const save = h("button", { onclick: () => {
    const form = saveForm(store, closeForm);
    place.replaceChildren(form);
    form.querySelector("input")?.focus();
  } }, "Save…");
  const exporting = h("button", { onclick: () => {
    const form = exportForm(store, () => (place.replaceChildren(), exporting.focus()));
    place.replaceChildren(form);
    form.querySelector("input")?.focus();
  } }, "Export…");
  const body = h("tbody");
  const heads = ["name", "step", "size", "age", "saved under", "state", ""];
  const table = h(
    "table",
    { class: "nbd-table nbd-checkpoints" },
    h("thead", {}, h("tr", {}, ...heads.map((head) => head ? h("th", { scope: "col" }, head) : h("td")))),
    body,
  );
  const empty = h("p", { class: "nbd-empty" }, "Nothing saved yet. A checkpoint loads under any strategy and any number of ranks.");
  const root = h(
    "div",
    {},
    h("div", { class: "nbd-tools" }, h("span", { class: "nbd-grow" }), save, exporting),
    place,
    empty,
    h("div", { class: "nbd-scroll", tabindex: 0, role: "group", "aria-label": "checkpoints" }, table),
  );
  const keyed = new Keyed<CheckpointView, Row>(body, (found) => found.name, () => makeRow(store), (row, found) => row.show(found));
  function update(): void {
    const { checkpoints, header } = store.picture;
    empty.hidden = checkpoints.length > 0;
    table.hidden = checkpoints.length === 0;
    keyed.show(checkpoints);
    const usable = store.link !== "gone" && !["new", "stopped", "dead"].includes(header.state);
    save.disabled = exporting.disabled = !usable;
    for (const row of keyed.shown.values()) row.enable(usable);
  }
  const tick = (): void => {
    for (const row of keyed.shown.values()) row.tick();
  };
  return { root, topics: ["checkpoints", "link", "header"], update, tick };
}

function makeRow(store: Store): Row {
  let now: CheckpointView;
  const name = h("th", { scope: "row", class: "nbd-clip" });
  const step = h("td", { class: "nbd-figures" });
  const size = h("td", { class: "nbd-figures" });
  const when = h("td", { class: "nbd-figures" });
  const backend = h("td");
  const state = h("td", { class: "nbd-wide" });
  const action = h("td");
  const load = h("button", { class: "nbd-quiet", onclick: () => {
    const over = (): void => {
      action.replaceChildren(load);
      load.focus();
    };
    const asked = confirmation({
      says: "Replaces the current state of the model.",
      label: "Load it",
      does: () => store.command("load", { name: now.name }, `load ${now.name}`),
      over,
    });
    action.replaceChildren(asked);
    asked.querySelector("button")?.focus();
  } }, "Load…");
  action.append(load);
  const root = h("tr", {}, name, step, size, when, backend, state, action);
  const tick = (): void => say(when, age(store.now() - now.saved));
  return {
    root,
    tick,
    enable: (yes) => (load.disabled = !yes || now.state !== "done"),
    show(found) {
      now = found;
      say(name, found.name);
      name.title = found.path || found.name;
      say(step, found.step === null ? NOTHING : count(found.step));
      say(size, bytes(found.size_bytes));
      say(backend, found.backend || NOTHING);
      const seconds = found.seconds === null ? "" : ` in ${found.seconds.toFixed(1)} s`;
      const words = { done: `saved${seconds}`, running: "being saved", failed: found.problem || "failed" };
      say(state, words[found.state]);
      attribute(state, "data-state", found.state);
      attribute(load, "aria-label", `load ${found.name}`);
      tick();
    },
  };
}

function exportForm(store: Store, over: () => void): HTMLElement {
  const folder = h("input", { type: "text", placeholder: "folder, for example out/", "aria-label": "folder", maxlength: 1000 });
  const send = (): void => {
    const wanted = folder.value.trim();
    if (!wanted) return folder.focus();
    over();
    store.command("export", { folder: wanted }, `export to ${wanted}`);
    return undefined;
  };
  const keys = (event: KeyboardEvent): void => {
    if (event.key === "Enter" && event.target === folder) {
      event.preventDefault(); // otherwise it presses the button that gets the focus
      send();
    }
    if (event.key === "Escape") over();
  };
  return h(
    "div",
    { class: "nbd-confirm", role: "group", "aria-label": "export", onkeydown: keys },
    h("label", {}, h("span", { class: "nbd-muted" }, "Export to"), folder),
    h("span", { class: "nbd-grow nbd-muted" }, "the current model, as safetensors for from_pretrained"),
    h("button", { class: "nbd-primary", onclick: send }, "Export"),
    h("button", { onclick: over }, "Cancel"),
  );
}
