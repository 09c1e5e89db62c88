// Rows of the plan against the memory of the device; selecting one offers to switch to it.

import { describeParts, cssPercent, MemoryBar } from "./memory_bar.ts";
import { confirmation } from "./confirm.ts";
import { h, KeyedList, setAttribute, setStyle, setText } from "./dom.ts";
import { bytes, bytesOf, speed as perSecond } from "./format.ts";
import { Legend } from "./legend.ts";
import type { StrategyRow } from "./protocol.ts";
import type { Store } from "./store.ts";
import type { View } from "./view.ts";

interface Row {
  root: HTMLElement;
  show(row: StrategyRow, scale: number): void;
}

export function strategiesView(store: Store): View {
  const note = h("p", { class: "nbd-muted nbd-tight" });
  const reason = h("p", { class: "nbd-tight" });
  const list = h("div", { class: "nbd-strategies", role: "list" });
  const legend = new Legend();
  const all = h("button", { class: "nbd-quiet", onclick: () => ((wide = !wide), update()) });
  const plan = h("button", { class: "nbd-quiet", onclick: () => store.command("plan", {}, "plan") });
  const root = h("div", {}, h("div", { class: "nbd-tools" }, note, h("span", { class: "nbd-grow" }), all, plan), reason, list, legend.root);
  let chosen: string | null = null;
  let wide = false;
  let scale = 1;

  const keyed = new KeyedList<StrategyRow, Row>(
    list,
    (row) => row.id || row.label || row.backend,
    (row) => makeRow(row.id),
    (element, row) => element.show(row, scale),
  );

  function makeRow(id: string): Row {
    let now: StrategyRow;
    const name = h("span", { class: "nbd-name" });
    const badges = h("span", { class: "nbd-badges" });
    const stack = new MemoryBar();
    const limit = h("div", { class: "nbd-limit" });
    const bar = h("div", { class: "nbd-bar", role: "img" }, stack.root, limit);
    const size = h("span", { class: "nbd-figures nbd-cell" });
    const speed = h("span", { class: "nbd-figures nbd-cell nbd-muted" });
    const more = h("div", { class: "nbd-more" });
    const choose = h("button", {
      class: "nbd-row",
      "aria-expanded": "false",
      onclick: () => {
        chosen = chosen === id ? null : id;
        update();
      },
    }, name, badges, bar, size, speed);
    const root = h("div", { class: "nbd-strategy", role: "listitem" }, choose, more);
    let opened = ""; // what the open row depends on
    const close = (): void => {
      chosen = null;
      update();
      choose.focus();
    };

    function open(noRanks: boolean): void {
      const lines = [now.why, describeParts(now.parts)].filter(Boolean);
      more.replaceChildren(...lines.map((line) => h("p", { class: "nbd-muted nbd-tight" }, line)));
      if (now.command) more.append(h("code", {}, now.command));
      const args = now.arguments;
      if (noRanks || now.current || !Object.keys(args).length) return; // the user pastes the command above
      const label = now.label || now.backend;
      more.append(confirmation({
        message: now.effect || `Switch to ${label}: the model, its optimizer and variables are kept.`,
        label: now.fits ? "Switch to it" : "Switch anyway: it may not fit",
        onConfirm: () => store.command("switch", args, `switch to ${label}`),
        onClose: close,
      }));
    }

    function show(row: StrategyRow, barScale: number): void {
      now = row;
      setText(name, row.label || row.backend);
      name.title = name.textContent;
      const badgeNames = [row.fits ? "fits" : "does not fit", row.current ? "current" : "", row.recommended ? "recommended" : ""];
      const names = badgeNames.filter(Boolean);
      if (badges.dataset.names !== names.join()) {
        badges.dataset.names = names.join();
        badges.replaceChildren(...names.map((word) => h("span", { class: "nbd-badge", "data-word": word }, word)));
      }
      stack.show(row.parts.length ? row.parts : [{ part: "other", bytes: row.device_bytes }], barScale);
      setStyle(limit, "left", cssPercent(row.capacity_bytes, barScale));
      setAttribute(bar, "aria-label", `${bytesOf(row.device_bytes, row.capacity_bytes)}`);
      setText(size, bytes(row.device_bytes));
      setText(speed, row.tokens_per_s ? `${perSecond(row.tokens_per_s)} tokens/s` : "");
      setAttribute(choose, "aria-expanded", chosen === id ? "true" : "false");
      const noRanks = !store.hasRanks;
      const details = chosen === id ? JSON.stringify([row.why, row.command, row.effect, noRanks]) : "";
      if (opened !== details) {
        opened = details;
        if (details) open(noRanks);
        else more.replaceChildren();
      }
    }
    return { root, show };
  }

  function update(): void {
    const { rows, note: planNote } = store.state.strategies;
    setText(note, planNote || (rows.length ? "Predicted memory of the rank with the highest peak." : "No plan yet: it is computed when a model is prepared."));
    const best = rows.find((row) => row.recommended);
    reason.hidden = !best;
    if (best) setText(reason, `Recommended: ${best.label || best.backend}${best.why ? ` (${best.why})` : ""}`);
    const capacity = Math.max(0, ...rows.map((row) => row.capacity_bytes));
    const largest = Math.max(1, ...rows.map((row) => row.device_bytes));
    // Limit the scale, so that a row that needs ten times the memory does not hide the others.
    scale = capacity ? Math.max(1.05 * capacity, Math.min(largest, 1.6 * capacity)) : largest;
    const few = rows.length <= 8;
    all.hidden = few;
    setText(all, wide ? "Show fewer" : `Show all ${rows.length}`);
    setText(plan, rows.length ? "Plan again" : "Plan");
    plan.disabled = !store.hasRanks;
    const shown = few || wide ? rows : shortList(rows);
    keyed.show(shown);
    legend.root.hidden = rows.length === 0;
    legend.show(shown.map((row) => row.parts), { limit: capacity > 0 });
  }
  return { root, topics: ["strategies", "header", "link"], update };
}

/** Return the first row of each backend, and the current and recommended ones. */
function shortList(rows: readonly StrategyRow[]): StrategyRow[] {
  const seen = new Set<string>();
  return rows.filter((row) => {
    const first = !seen.has(row.backend);
    seen.add(row.backend);
    return first || row.current || row.recommended;
  });
}
