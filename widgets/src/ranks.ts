// Ranks: state, last output line, and a searchable log.

import { h, KeyedList, setAttribute, setText } from "./dom.ts";
import { groupByNode, type NodeEntry } from "./group_by_node.ts";
import { MAX_SEARCH_CHARS, type RankView } from "./protocol.ts";
import type { Store } from "./store.ts";
import type { View } from "./view.ts";

interface Row {
  root: HTMLElement;
  show(rank: RankView): void;
}

export function ranksView(store: Store): View {
  const body = h("tbody");
  const titles = ["rank", "state", "pid", "device", "last line", ""];
  const table = h(
    "table",
    { class: "nbd-table nbd-ranks" },
    h("thead", {}, h("tr", {}, ...titles.map((title) => title ? h("th", { scope: "col" }, title) : h("td")))),
    body,
  );
  const empty = h("p", { class: "nbd-empty" }, "No ranks yet: the first %%distribute cell starts them.");
  const log = logView(store);
  const root = h("div", {}, h("div", { class: "nbd-scroll", tabindex: 0, role: "group", "aria-label": "ranks" }, table), empty, log.root);
  const keyed = new KeyedList<NodeEntry<RankView>, Row>(
    body,
    (entry) => (entry.heading === null ? String(entry.item.rank) : `node ${entry.heading}`),
    (entry) => (entry.heading === null ? makeRow(() => log.open(entry.item.rank)) : makeHeading(entry.heading, titles.length)),
    (row, entry) => {
      if (entry.heading === null) row.show(entry.item);
    },
  );
  function update(): void {
    const { ranks } = store.state;
    table.hidden = ranks.length === 0;
    empty.hidden = ranks.length > 0;
    keyed.show(groupByNode(ranks));
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
  const currentLine = h("div", { class: "nbd-code nbd-current-line" });
  const button = h("button", { class: "nbd-quiet", onclick: open }, "Log");
  const root = h("tr", {}, number, state, pid, device, h("td", { class: "nbd-wide" }, line, currentLine), h("td", {}, button));
  return {
    root,
    show(rank) {
      setText(number, String(rank.rank));
      setText(state, rank.state);
      setAttribute(state, "class", `nbd-rank-${rank.state}`);
      setText(pid, rank.pid === null ? "" : String(rank.pid));
      setText(device, rank.device);
      device.title = rank.device;
      setText(line, rank.last_line);
      line.title = rank.last_line;
      currentLine.hidden = !rank.current_line;
      setText(currentLine, rank.current_line);
      setAttribute(button, "aria-label", `log of rank ${rank.rank}`);
    },
  };
}

/** Delay after typing before the log is requested. */
const TYPING_PAUSE_MS = 250;
/** Interval between two requests for new lines. */
const REFRESH_INTERVAL_MS = 2000;

interface LogView {
  root: HTMLElement;
  open(rank: number): void;
  update(): void;
  tick(): void;
  close(): void;
}

function logView(store: Store): LogView {
  const select = h("select", { "aria-label": "rank", onchange: () => load() });
  const search = h("input", { type: "search", placeholder: "search the log", maxlength: MAX_SEARCH_CHARS, "aria-label": "search the log", oninput: () => loadSoon() });
  const lines = h("pre", { class: "nbd-log", tabindex: 0, role: "log", "aria-label": "log", "aria-live": "off" });
  const status = h("span", { class: "nbd-muted nbd-grow" });
  const refresh = h("button", { class: "nbd-quiet", onclick: () => load() }, "Refresh");
  const close = h("button", { class: "nbd-quiet", onclick: () => (root.hidden = true) }, "Close");
  const root = h("div", { class: "nbd-logs" }, h("div", { class: "nbd-tools" }, select, search, status, refresh, close), lines);
  root.hidden = true;
  let timer = 0;
  let requestedAt = 0;
  let numCharsLoaded = 0;
  let shown: unknown = null;
  let options = "";

  const selectedRank = (): number | null => (select.value === "" ? null : Number(select.value));
  function loadSoon(): void {
    window.clearTimeout(timer);
    timer = window.setTimeout(load, TYPING_PAUSE_MS);
  }
  /** Number of characters printed by the rank, as of the last update. */
  const numCharsPrinted = (): number => store.state.ranks.find(({ rank }) => rank === selectedRank())?.num_chars ?? 0;
  function load(): void {
    setText(status, "loading …");
    requestLog();
  }
  function requestLog(): void {
    [requestedAt, numCharsLoaded] = [Date.now(), numCharsPrinted()];
    store.requestLog(selectedRank(), search.value);
  }
  /** Load new lines of a rank that prints, unless the user has selected text in the log. */
  function tick(): void {
    if (root.hidden || store.link !== "live" || numCharsPrinted() === numCharsLoaded) return;
    const selection = document.getSelection();
    const hasSelection = selection !== null && !selection.isCollapsed && lines.contains(selection.anchorNode);
    if (!hasSelection && Date.now() - requestedAt >= REFRESH_INTERVAL_MS) requestLog();
  }
  function open(rank: number): void {
    root.hidden = false;
    select.value = String(rank);
    load();
    search.focus();
  }
  function update(): void {
    const numbers = store.state.ranks.map((rank) => rank.rank);
    if (options !== numbers.join()) {
      options = numbers.join();
      const before = select.value;
      const launcher = h("option", { value: "" }, "launcher");
      select.replaceChildren(launcher, ...numbers.map((rank) => h("option", { value: rank }, `rank ${rank}`)));
      select.value = before;
    }
    if (store.log === shown || store.log?.rank !== selectedRank()) return;
    if (store.log.search !== search.value) return; // the reply to another page's request
    shown = store.log;
    const text = store.log.lines;
    setText(status, `${text.length} ${text.length === 1 ? "line" : "lines"}`);
    const atEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 20;
    setText(lines, text.length ? text.join("\n") : search.value ? "Nothing found." : "Nothing was printed yet.");
    if (atEnd) lines.scrollTop = lines.scrollHeight;
  }
  return { root, open, update, tick, close: () => window.clearTimeout(timer) };
}
