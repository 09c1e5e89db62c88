// Rows of the plan against the memory of the device; selecting one offers to switch to it.

import { inWords, percent, Stack } from "./bar.ts";
import { confirmation } from "./confirm.ts";
import { attribute, h, Keyed, say, style } from "./dom.ts";
import { bytes, bytesOf, speed as perSecond } from "./format.ts";
import { Legend } from "./legend.ts";
import type { StrategyRow } from "./protocol.ts";
import type { Store } from "./store.ts";
import type { View } from "./view.ts";

/** States in which no ranks can switch. */
const RANKLESS = new Set(["new", "dead", "stopped"]);

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

  const keyed = new Keyed<StrategyRow, Row>(
    list,
    (row) => row.id || row.words || row.backend,
    (row) => makeRow(row.id),
    (made, row) => made.show(row, scale),
  );

  function makeRow(id: string): Row {
    let now: StrategyRow;
    const name = h("span", { class: "nbd-name" });
    const badges = h("span", { class: "nbd-badges" });
    const stack = new Stack();
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

    function open(ended: boolean): void {
      const lines = [now.why, inWords(now.parts)].filter(Boolean);
      more.replaceChildren(...lines.map((line) => h("p", { class: "nbd-muted nbd-tight" }, line)));
      if (now.command) more.append(h("code", {}, now.command));
      const args = now.arguments;
      if (ended || now.current || !Object.keys(args).length) return; // the user pastes the command above
      const words = now.words || now.backend;
      more.append(confirmation({
        says: now.does || `Switch to ${words}: the model, its optimizer and variables are kept.`,
        label: now.fits ? "Switch to it" : "Switch anyway: it may not fit",
        does: () => store.command("switch", args, `switch to ${words}`),
        over: close,
      }));
    }

    function show(row: StrategyRow, scaled: number): void {
      now = row;
      say(name, row.words || row.backend);
      name.title = name.textContent;
      const said = [row.fits ? "fits" : "does not fit", row.current ? "current" : "", row.recommended ? "recommended" : ""];
      const kept = said.filter(Boolean);
      if (badges.dataset.said !== kept.join()) {
        badges.dataset.said = kept.join();
        badges.replaceChildren(...kept.map((word) => h("span", { class: "nbd-badge", "data-word": word }, word)));
      }
      stack.show(row.parts.length ? row.parts : [{ part: "other", bytes: row.device_bytes }], scaled);
      style(limit, "left", percent(row.capacity_bytes, scaled));
      attribute(bar, "aria-label", `${bytesOf(row.device_bytes, row.capacity_bytes)}`);
      say(size, bytes(row.device_bytes));
      say(speed, row.tokens_per_s ? `${perSecond(row.tokens_per_s)} tokens/s` : "");
      attribute(choose, "aria-expanded", chosen === id ? "true" : "false");
      const ended = store.link === "gone" || RANKLESS.has(store.picture.header.state);
      const wanted = chosen === id ? JSON.stringify([row.why, row.command, row.does, ended]) : "";
      if (opened !== wanted) {
        opened = wanted;
        if (wanted) open(ended);
        else more.replaceChildren();
      }
    }
    return { root, show };
  }

  function update(): void {
    const { rows, note: told } = store.picture.strategies;
    say(note, told || (rows.length ? "Predicted memory of the rank with the highest peak." : "No plan yet: it is computed when a model is prepared."));
    const best = rows.find((row) => row.recommended);
    reason.hidden = !best;
    if (best) say(reason, `Recommended: ${best.words || best.backend}${best.why ? ` (${best.why})` : ""}`);
    const capacity = Math.max(0, ...rows.map((row) => row.capacity_bytes));
    const largest = Math.max(1, ...rows.map((row) => row.device_bytes));
    // Limit the scale, so that a row that needs ten times the memory does not hide the others.
    scale = capacity ? Math.max(1.05 * capacity, Math.min(largest, 1.6 * capacity)) : largest;
    const few = rows.length <= 8;
    all.hidden = few;
    say(all, wide ? "Show fewer" : `Show all ${rows.length}`);
    say(plan, rows.length ? "Plan again" : "Plan");
    plan.disabled = store.link === "gone" || RANKLESS.has(store.picture.header.state);
    const shown = few || wide ? rows : shortened(rows);
    keyed.show(shown);
    legend.root.hidden = rows.length === 0;
    legend.show(shown.map((row) => row.parts), { limit: capacity > 0 });
  }
  return { root, topics: ["strategies", "header", "link"], update };
}

/** Return the first row of each backend, and the current and recommended ones. */
function shortened(rows: readonly StrategyRow[]): StrategyRow[] {
  const seen = new Set<string>();
  return rows.filter((row) => {
    const first = !seen.has(row.backend);
    seen.add(row.backend);
    return first || row.current || row.recommended;
  });
}
