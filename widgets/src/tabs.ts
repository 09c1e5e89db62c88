// Tabs for strategies, ranks and checkpoints, following the ARIA tabs pattern.

import { h, setAttribute, setText } from "./dom.ts";
import type { Store } from "./store.ts";
import type { View } from "./view.ts";

let numGroups = 0;

export function tabsView(store: Store, parts: { name: string; view: View; count(): number }[]): View {
  numGroups += 1;
  const group = `nbd-${numGroups}`;
  const counts = parts.map(() => h("span", { class: "nbd-count" }));
  const buttons = parts.map((part, index) =>
    h(
      "button",
      {
        role: "tab",
        id: `${group}-tab-${index}`,
        "aria-controls": `${group}-page-${index}`,
        onclick: () => open(index),
        onkeydown: (event: KeyboardEvent) => {
          const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
          if (by === undefined) return;
          event.preventDefault();
          const next = (index + by + parts.length) % parts.length;
          open(next);
          buttons[next]?.focus();
        },
      },
      part.name,
      counts[index]!,
    ),
  );
  const pages = parts.map((part, index) =>
    h(
      "div",
      { role: "tabpanel", id: `${group}-page-${index}`, "aria-labelledby": `${group}-tab-${index}` },
      part.view.root,
    ),
  );
  const bar = h("div", { class: "nbd-tabs", role: "tablist", "aria-label": "details" }, ...buttons);
  const root = h("section", { class: "nbd-section", "aria-label": "details" }, bar, ...pages);
  let chosenByUser = false;

  function open(index: number, byUser = true): void {
    chosenByUser ||= byUser;
    buttons.forEach((button, at) => {
      setAttribute(button, "aria-selected", at === index ? "true" : "false");
      setAttribute(button, "tabindex", at === index ? 0 : -1);
      pages[at]!.hidden = at !== index;
    });
  }
  open(0, false);
  const topics = [...new Set(parts.flatMap((part) => part.view.topics))];
  return {
    root,
    topics,
    update() {
      parts.forEach((part, index) => {
        part.view.update();
        setText(counts[index]!, part.count() ? String(part.count()) : "");
      });
      // Until the user selects a tab: show ranks if one is dead or there is no plan, otherwise the plan.
      const dead = store.state.ranks.some((rank) => rank.state === "dead");
      if (!chosenByUser) open(dead || !store.state.strategies.rows.length ? 1 : 0, false);
    },
    tick: () => parts.forEach((part) => part.view.tick?.()),
    close: () => parts.forEach((part) => part.view.close?.()),
  };
}
