// The latest profile: the verdict, a bar for each rank's step, and suggested changes.

import { ConfirmationArea } from "./confirm.ts";
import { title } from "./devices.ts";
import { h, KeyedList, setAttribute, setText } from "./dom.ts";
import { age, seconds } from "./format.ts";
import { STEP_COLORS, type AdviceView, type ProfiledRank, type StepPartTime } from "./protocol.ts";
import type { Store } from "./store.ts";
import { describeRank, colored, formatShare, TimeBar, describePart } from "./step_times.ts";
import type { View } from "./view.ts";

const HINT = "Point at a part of a bar, or select it with Tab and the arrow keys, to see its figures.";
const COPIED_MS = 2000;

interface RankRow {
  root: HTMLElement;
  show(rank: ProfiledRank): void;
}
interface AdviceRow {
  root: HTMLElement;
  show(advice: AdviceView): void;
}
interface Entry {
  part: string;
  label: string;
}

export function profileView(store: Store): View {
  const verdict = h("p", { class: "nbd-verdict" });
  const when = h("div", { class: "nbd-tools nbd-muted" });
  const facts = h("p", { class: "nbd-muted nbd-tight" });
  const outcome = h("p", { class: "nbd-outcome nbd-tight" });
  const bars = h("div", { class: "nbd-steps", role: "list" });
  const legend = h("div", { class: "nbd-legend" });
  const reading = h("p", { class: "nbd-reading nbd-muted nbd-tight", "aria-live": "polite" });
  const list = h("div", { class: "nbd-advice", role: "list", "aria-label": "advice" });
  const notes = h("p", { class: "nbd-muted nbd-tight" });
  const root = h(
    "section",
    { class: "nbd-section", "aria-label": "profile" },
    title("Profile", when),
    verdict, facts, outcome, bars, reading, legend, list, notes,
  );
  let scale = 1;

  const showReading = (text: string): void => setText(reading, text || HINT);
  const ranks = new KeyedList<ProfiledRank, RankRow>(
    bars,
    ({ rank }) => String(rank),
    () => rankRow(showReading, () => scale),
    (row, rank) => row.show(rank),
  );
  const entries = new KeyedList<Entry, { root: HTMLElement; label: HTMLElement }>(
    legend,
    ({ part }) => part,
    ({ part }) => {
      const label = h("span");
      return { root: h("span", {}, colored("i", part, "nbd-swatch"), label), label };
    },
    (row, { label }) => setText(row.label, label),
  );
  const adviceList = new KeyedList<AdviceView, AdviceRow>(
    list,
    ({ title, command }) => `${title} ${command}`,
    () => adviceRow(store),
    (row, advice) => row.show(advice),
  );

  function tick(): void {
    const { time } = store.state.profile;
    setText(when, time === null ? "" : `${age(store.now() - time)} ago`.replace("now ago", "just now"));
  }

  function update(): void {
    const { profile } = store.state;
    root.hidden = !profile.verdict;
    if (root.hidden) return;
    setText(verdict, profile.verdict);
    for (const [element, text] of [[facts, profile.facts], [outcome, profile.outcome], [notes, profile.notes.join(" ")]] as const) {
      setText(element, text);
      element.hidden = !text;
    }
    scale = Math.max(...profile.ranks.map(({ step_s }) => step_s), 1e-9);
    ranks.show(profile.ranks);
    entries.show(meanOf(profile.ranks));
    reading.hidden = profile.ranks.length === 0;
    if (!bars.contains(document.activeElement)) showReading("");
    list.hidden = profile.advice.length === 0;
    adviceList.show(profile.advice);
    tick();
  }
  return { root, topics: ["profile", "link", "header"], update, tick };
}

/** Return the parts of all ranks, with their share of the total step time. */
function meanOf(ranks: readonly ProfiledRank[]): Entry[] {
  const total = ranks.reduce((sum, { step_s }) => sum + step_s, 0);
  const sums = new Map<string, number>();
  for (const { part, seconds: taken } of ranks.flatMap(({ parts }) => parts)) {
    if (taken > 0) sums.set(part, (sums.get(part) ?? 0) + taken);
  }
  const order = Object.keys(STEP_COLORS);
  const sorted = [...sums].sort(([a], [b]) => order.indexOf(a) - order.indexOf(b));
  return sorted.map(([part, sum]) => ({ part, label: `${part} ${formatShare(sum, total)}` }));
}

function rankRow(showReading: (text: string) => void, scale: () => number): RankRow {
  let current: ProfiledRank;
  let shown: readonly StepPartTime[] = [];
  let at = -1;
  const name = h("span", { class: "nbd-figures" });
  const badge = h("span", { class: "nbd-badge", title: "the other ranks wait for it" }, "slowest");
  const stack = new TimeBar();
  const step = h("span", { class: "nbd-figures nbd-cell" });

  /** Show the figures of one part, or of the whole rank. */
  function go(to: number): void {
    at = Math.max(-1, Math.min(to, shown.length - 1));
    stack.mark(at);
    const part = shown[at];
    showReading(part ? `rank ${current.rank}: ${describePart(part, current.step_s)}` : describeRank(current));
  }
  const leave = (): void => (stack.mark((at = -1)), showReading(""));
  const bar = h(
    "div",
    {
      class: "nbd-bar",
      role: "img",
      tabindex: 0,
      onfocus: () => go(-1),
      onblur: leave,
      onpointerover: (event: PointerEvent) => go(stack.indexOf(event.target)),
      onpointerleave: leave,
      onkeydown: (event: KeyboardEvent) => {
        const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (by === undefined) return;
        event.preventDefault();
        go(at + by);
      },
    },
    stack.root,
  );
  return {
    root: h("div", { class: "nbd-step", role: "listitem" }, h("span", { class: "nbd-label" }, name, badge), bar, step),
    show(rank) {
      current = rank;
      shown = rank.parts.filter((part) => part.seconds > 0);
      setText(name, `rank ${rank.rank}`);
      badge.hidden = !rank.straggler;
      stack.show(shown, rank.step_s, scale());
      setAttribute(bar, "aria-label", describeRank(rank));
      setText(step, seconds(rank.step_s));
    },
  };
}

function adviceRow(store: Store): AdviceRow {
  let current: AdviceView;
  const text = h("span");
  const head = h("strong");
  const line = h("code");
  const confirmationArea = new ConfirmationArea();
  const copy = h("button", { class: "nbd-quiet", onclick: () => void copyText(line).then((word) => {
    setText(copy, word);
    setTimeout(() => setText(copy, "Copy"), COPIED_MS);
  }) }, "Copy");
  const change = h("button", { class: "nbd-quiet", "aria-expanded": "false", onclick: () => {
    if (confirmationArea.isOpen) return confirmationArea.close();
    const { arguments: args, command, effect } = current;
    return confirmationArea.confirm(change, effect, "Switch to it", () => store.command("switch", args, command.replace("%nbdist ", "")));
  } }, "Switch…");
  const paste = h("div", { class: "nbd-tools" }, line, copy, change);
  return {
    root: h("div", { role: "listitem" }, h("p", { class: "nbd-tight" }, head, text), paste, confirmationArea.root),
    show(advice) {
      current = advice;
      setText(text, advice.text);
      setText(head, advice.title ? `${advice.title}: ` : "");
      setText(line, advice.command);
      paste.hidden = !advice.command;
      setAttribute(copy, "aria-label", `copy ${advice.command}`);
      change.hidden = !store.hasRanks || !advice.effect || Object.keys(advice.arguments).length === 0;
      if (change.hidden && confirmationArea.isOpen) confirmationArea.close();
    },
  };
}

/** Copy an element's text, or select it if the page is not served over https. Returns a status text. */
async function copyText(element: HTMLElement): Promise<string> {
  try {
    await navigator.clipboard.writeText(element.textContent ?? "");
    return "Copied";
  } catch {
    element.ownerDocument.getSelection()?.selectAllChildren(element);
    return "Selected: press Ctrl+C";
  }
}
