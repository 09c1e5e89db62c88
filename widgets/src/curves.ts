// Curves of the values passed to report(): the selection and its options.

import { Chart } from "./chart.ts";
import { columns } from "./columns.ts";
import { title } from "./devices.ts";
import { attribute, h, Keyed, say } from "./dom.ts";
import { MAX_CURVES } from "./protocol.ts";
import type { Store } from "./store.ts";
import { watchTheme } from "./theme.ts";
import type { View } from "./view.ts";

/** Maximum number of charts shown at once. */
const MOST = 12;
let views = 0;

/** Sort names: loss and tokens/s first, the others in order of arrival. */
export function inOrder(names: Iterable<string>): string[] {
  const place = (name: string): number => {
    if (name === "loss") return 0;
    if (/^tokens(\/|_per_)s/.test(name)) return 1;
    return name.endsWith("loss") ? 2 : 3;
  };
  return [...names].sort((a, b) => place(a) - place(b));
}

export function curvesView(store: Store): View {
  views += 1;
  const sync = `nbdist-${views}`;
  const charts = h("div", { class: "nbd-charts" });
  const empty = h("p", { class: "nbd-empty" }, "No values yet: report(loss=loss) in a cell draws a curve here.");
  const x = toggle("x axis", ["step", "time"], () => store.choice.x, (to) => store.choose({ x: to as "step" | "time" }));
  const y = toggle("y axis", ["linear", "log"], () => (store.choice.log ? "log" : "linear"), (to) => store.choose({ log: to === "log" }));
  const smoothing = h("input", {
    type: "range", min: 0, max: 0.99, step: 0.01, "aria-label": "smoothing",
    oninput: () => store.choose({ smoothing: Number(smoothing.value) }),
  });
  const picker = makePicker(store);
  const tools = h(
    "div",
    { class: "nbd-tools" },
    x.root,
    y.root,
    h("label", {}, h("span", { class: "nbd-muted" }, "smooth"), smoothing),
    picker.button,
  );
  const root = h("section", { class: "nbd-section", "aria-label": "curves" }, title("Curves", tools), picker.root, empty, charts);
  const keyed = new Keyed<string, Chart>(charts, (name) => name, (name) => new Chart(name, sync), () => {}, (chart) => chart.close());
  const resized = new ResizeObserver(() => keyed.shown.forEach((chart) => chart.resize()));
  resized.observe(charts);
  const unwatch = watchTheme(() => keyed.shown.forEach((chart) => chart.redraw()));

  function update(): void {
    const { choice, series } = store;
    const names = inOrder(series.keys());
    empty.hidden = names.length > 0;
    tools.hidden = names.length === 0;
    x.update();
    y.update();
    smoothing.value = String(choice.smoothing);
    const shown = shownOf(store, names);
    picker.update(names, shown);
    keyed.show(shown);
    let start = Infinity;
    for (const points of series.values()) if (points.length) start = Math.min(start, points.time[0]!);
    for (const [name, chart] of keyed.shown) {
      const points = series.get(name);
      if (points) chart.show({ columns: columns(points, choice, start), choice, marks: store.picture.marks, start });
    }
  }
  return {
    root,
    topics: ["series", "marks", "choice"],
    update,
    close() {
      resized.disconnect();
      unwatch();
      keyed.show([]);
    },
  };
}

function shownOf(store: Store, names: string[]): string[] {
  const chosen = store.choice.shown;
  return chosen ? names.filter((name) => chosen.includes(name)) : names.slice(0, 2);
}

function toggle(label: string, values: [string, string], now: () => string, choose: (to: string) => void): { root: HTMLElement; update(): void } {
  const buttons = values.map((to) => h("button", { onclick: () => choose(to) }, to));
  const root = h("span", { class: "nbd-toggle", role: "group", "aria-label": label }, ...buttons);
  const update = (): void => buttons.forEach((button) => attribute(button, "aria-pressed", button.textContent === now() ? "true" : "false"));
  return { root, update };
}

function makePicker(store: Store): { root: HTMLElement; button: HTMLElement; update(names: string[], shown: string[]): void } {
  let names: string[] = [];
  let shown: string[] = [];
  const search = h("input", { type: "search", placeholder: "find a name", "aria-label": "find a series", oninput: () => draw() });
  const list = h("div", { class: "nbd-names", role: "group", "aria-label": "series shown", tabindex: 0 });
  const told = h("span", { class: "nbd-muted" });
  const root = h("div", { class: "nbd-picker" }, h("div", { class: "nbd-tools" }, search, told), list);
  const button = h("button", { "aria-expanded": "false", onclick: () => {
    root.hidden = !root.hidden;
    attribute(button, "aria-expanded", root.hidden ? "false" : "true");
    draw();
    if (!root.hidden) search.focus();
  } });
  root.hidden = true;
  const keyed = new Keyed<string, { root: HTMLElement; box: HTMLInputElement }>(
    list,
    (name) => name,
    (name) => {
      const box = h("input", { type: "checkbox", onchange: () => {
        const kept = shown.filter((one) => one !== name);
        store.choose({ shown: box.checked ? [...kept, name] : kept });
      } });
      return { root: h("label", { title: name }, box, h("span", { class: "nbd-name" }, name)), box };
    },
    ({ box }, name) => {
      box.checked = shown.includes(name);
      box.disabled = !box.checked && shown.length >= MOST;
    },
  );
  function draw(): void {
    if (root.hidden) return;
    const wanted = search.value.toLowerCase();
    keyed.show(names.filter((name) => name.toLowerCase().includes(wanted)));
    say(told, shown.length >= MOST ? `${MOST} at most` : "");
  }
  function update(all: string[], now: string[]): void {
    [names, shown] = [all, now];
    button.hidden = all.length < 2;
    say(button, `${now.length} of ${all.length < MAX_CURVES ? "" : "the first "}${all.length} series`);
    draw();
  }
  return { root, button, update };
}
