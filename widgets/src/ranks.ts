// Ranks: state, last output line, and a searchable log.

import { attribute, h, Keyed, say } from "./dom.ts";
import { byNode, type Placed } from "./nodes.ts";
import { MAX_SEARCH_CHARS, type RankView } from "./protocol.ts";
import type { Store } from "./store.ts";
import type { View } from "./view.ts";

interface Row {
  root: HTMLElement;
  show(rank: RankView): void;
}

export function ranksView(store: Store): View {
  const body = h("tbody");
  const heads = ["rank", "state", "pid", "device", "last line", ""];
  const table = h(
    "table",
    { class: "nbd-table nbd-ranks" },
    h("thead", {}, h("tr", {}, ...heads.map((head) => head ? h("th", { scope: "col" }, head) : h("td")))),
    body,
  );
  const empty = h("p", { class: "nbd-empty" }, "No ranks yet: the first %%distribute cell starts them.");
  const log = logView(store);
  const root = h("div", {}, h("div", { class: "nbd-scroll", tabindex: 0, role: "group", "aria-label": "ranks" }, table), empty, log.root);
  const keyed = new Keyed<Placed<RankView>, Row>(
    body,
    (one) => (one.heading === null ? String(one.item.rank) : `node ${one.heading}`),
    (one) => (one.heading === null ? makeRow(() => log.open(one.item.rank)) : makeHeading(one.heading, heads.length)),
    (row, one) => {
      if (one.heading === null) row.show(one.item);
    },
  );
  function update(): void {
    const { ranks } = store.picture;
    table.hidden = ranks.length === 0;
    empty.hidden = ranks.length > 0;
    keyed.show(byNode(ranks));
    log.update();
  }
  return { root, topics: ["ranks", "log", "link"], update, tick: log.tick, close: log.close };
}

/** Heading above the ranks of a node. */
function makeHeading(node: string, columns: number): Row {
  const cell = h("th", { class: "nbd-of-node", scope: "rowgroup", colspan: columns }, node);
  return { root: h("tr", {}, cell), show: () => {} };
}

function makeRow(open: () => void): Row {
  const number = h("th", { scope: "row" });
  const state = h("td", {});
  const pid = h("td", { class: "nbd-figures" });
  const device = h("td", { class: "nbd-clip" });
  const line = h("div", { class: "nbd-code nbd-clip" });
  const where = h("div", { class: "nbd-code nbd-where" });
  const button = h("button", { class: "nbd-quiet", onclick: open }, "Log");
  const root = h("tr", {}, number, state, pid, device, h("td", { class: "nbd-wide" }, line, where), h("td", {}, button));
  return {
    root,
    show(rank) {
      say(number, String(rank.rank));
      say(state, rank.state);
      attribute(state, "class", `nbd-rank-${rank.state}`);
      say(pid, rank.pid === null ? "" : String(rank.pid));
      say(device, rank.device);
      device.title = rank.device;
      say(line, rank.line);
      line.title = rank.line;
      where.hidden = !rank.where;
      say(where, rank.where);
      attribute(button, "aria-label", `log of rank ${rank.rank}`);
    },
  };
}

/** Delay after typing before the log is requested. */
const REST_MS = 250;
/** Interval between two requests for new lines. */
const AGAIN_MS = 2000;

interface LogView {
  root: HTMLElement;
  open(rank: number): void;
  update(): void;
  tick(): void;
  close(): void;
}

function logView(store: Store): LogView {
  const which = h("select", { "aria-label": "rank", onchange: () => ask() });
  const search = h("input", { type: "search", placeholder: "search the log", maxlength: MAX_SEARCH_CHARS, "aria-label": "search the log", oninput: () => later() });
  const lines = h("pre", { class: "nbd-log", tabindex: 0, role: "log", "aria-label": "log", "aria-live": "off" });
  const told = h("span", { class: "nbd-muted nbd-grow" });
  const again = h("button", { class: "nbd-quiet", onclick: () => ask() }, "Refresh");
  const shut = h("button", { class: "nbd-quiet", onclick: () => (root.hidden = true) }, "Close");
  const root = h("div", { class: "nbd-logs" }, h("div", { class: "nbd-tools" }, which, search, told, again, shut), lines);
  root.hidden = true;
  let timer = 0;
  let askedAt = 0;
  let written = 0;
  let shown: unknown = null;
  let options = "";

  const wanted = (): number | null => (which.value === "" ? null : Number(which.value));
  function later(): void {
    window.clearTimeout(timer);
    timer = window.setTimeout(ask, REST_MS);
  }
  /** Number of characters printed by the rank, as of the last update. */
  const printed = (): number => store.picture.ranks.find(({ rank }) => rank === wanted())?.written ?? 0;
  function ask(): void {
    say(told, "loading …");
    askAgain();
  }
  function askAgain(): void {
    [askedAt, written] = [Date.now(), printed()];
    store.askLog(wanted(), search.value);
  }
  /** Load new lines of a rank that prints, unless the user has selected text in the log. */
  function tick(): void {
    if (root.hidden || store.link !== "live" || printed() === written) return;
    const marked = document.getSelection();
    const kept = marked !== null && !marked.isCollapsed && lines.contains(marked.anchorNode);
    if (!kept && Date.now() - askedAt >= AGAIN_MS) askAgain();
  }
  function open(rank: number): void {
    root.hidden = false;
    which.value = String(rank);
    ask();
    search.focus();
  }
  function update(): void {
    const numbers = store.picture.ranks.map((rank) => rank.rank);
    if (options !== numbers.join()) {
      options = numbers.join();
      const before = which.value;
      const launcher = h("option", { value: "" }, "launcher");
      which.replaceChildren(launcher, ...numbers.map((rank) => h("option", { value: rank }, `rank ${rank}`)));
      which.value = before;
    }
    if (store.log === shown || store.log?.rank !== wanted()) return;
    if (store.log.search !== search.value) return; // the reply to another page's request
    shown = store.log;
    const found = store.log.lines;
    say(told, `${found.length} ${found.length === 1 ? "line" : "lines"}`);
    const end = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 20;
    say(lines, found.length ? found.join("\n") : search.value ? "Nothing found." : "Nothing was printed yet.");
    if (end) lines.scrollTop = lines.scrollHeight;
  }
  return { root, open, update, tick, close: () => window.clearTimeout(timer) };
}
