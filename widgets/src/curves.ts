// Curves of the values passed to report(): the selection and its options.

import { Chart } from "./chart.ts";
import { columns } from "./columns.ts";
import { title } from "./devices.ts";
import { h, KeyedList, setAttribute, setText } from "./dom.ts";
import { MAX_CURVES } from "./protocol.ts";
import type { Store } from "./store.ts";
import { watchTheme } from "./theme.ts";
import type { View } from "./view.ts";

/** Maximum number of charts shown at once. */
const MAX_SHOWN = 12;
let numViews = 0;

/** Sort names: loss and tokens/s first, the others in order of arrival. */
export function sortNames(names: Iterable<string>): string[] {
  const position = (name: string): number => {
    if (name === "loss") return 0;
    if (/^tokens(\/|_per_)s/.test(name)) return 1;
    return name.endsWith("loss") ? 2 : 3;
  };
  return [...names].sort((a, b) => position(a) - position(b));
}

export function curvesView(store: Store): View {
  numViews += 1;
  const sync = `nbdist-${numViews}`;
  const charts = h("div", { class: "nbd-charts" });
  const empty = h("p", { class: "nbd-empty" }, "No values yet: report(loss=loss) in a cell draws a curve here.");
  const x = toggle("x axis", ["step", "time"], () => store.curveOptions.x, (to) => store.setCurveOptions({ x: to as "step" | "time" }));
  const y = toggle("y axis", ["linear", "log"], () => (store.curveOptions.log ? "log" : "linear"), (to) => store.setCurveOptions({ log: to === "log" }));
  const smoothing = h("input", {
    type: "range", min: 0, max: 0.99, step: 0.01, "aria-label": "smoothing",
    oninput: () => store.setCurveOptions({ smoothing: Number(smoothing.value) }),
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
  const keyed = new KeyedList<string, Chart>(charts, (name) => name, (name) => new Chart(name, sync), () => {}, (chart) => chart.close());
  const resized = new ResizeObserver(() => keyed.shown.forEach((chart) => chart.resize()));
  resized.observe(charts);
  const unwatch = watchTheme(() => keyed.shown.forEach((chart) => chart.redraw()));

  function update(): void {
    const { curveOptions, series } = store;
    const names = sortNames(series.keys());
    empty.hidden = names.length > 0;
    tools.hidden = names.length === 0;
    x.update();
    y.update();
    smoothing.value = String(curveOptions.smoothing);
    const shown = shownNames(store, names);
    picker.update(names, shown);
    keyed.show(shown);
    let start = Infinity;
    for (const points of series.values()) if (points.length) start = Math.min(start, points.time[0]!);
    for (const [name, chart] of keyed.shown) {
      const points = series.get(name);
      if (points) chart.show({ columns: columns(points, curveOptions, start), options: curveOptions, marks: store.state.marks, start });
    }
  }
  return {
    root,
    topics: ["series", "marks", "curve_options"],
    update,
    close() {
      resized.disconnect();
      unwatch();
      keyed.show([]);
    },
  };
}

function shownNames(store: Store, names: string[]): string[] {
  const chosen = store.curveOptions.shown;
  return chosen ? names.filter((name) => chosen.includes(name)) : names.slice(0, 2);
}

function toggle(label: string, values: [string, string], now: () => string, choose: (to: string) => void): { root: HTMLElement; update(): void } {
  const buttons = values.map((to) => h("button", { onclick: () => choose(to) }, to));
  const root = h("span", { class: "nbd-toggle", role: "group", "aria-label": label }, ...buttons);
  const update = (): void => buttons.forEach((button) => setAttribute(button, "aria-pressed", button.textContent === now() ? "true" : "false"));
  return { root, update };
}

function makePicker(store: Store): { root: HTMLElement; button: HTMLElement; update(names: string[], shown: string[]): void } {
  let names: string[] = [];
  let shown: string[] = [];
  const search = h("input", { type: "search", placeholder: "find a name", "aria-label": "find a series", oninput: () => draw() });
  const list = h("div", { class: "nbd-names", role: "group", "aria-label": "series shown", tabindex: 0 });
  const note = h("span", { class: "nbd-muted" });
  const root = h("div", { class: "nbd-picker" }, h("div", { class: "nbd-tools" }, search, note), list);
  const button = h("button", { "aria-expanded": "false", onclick: () => {
    root.hidden = !root.hidden;
    setAttribute(button, "aria-expanded", root.hidden ? "false" : "true");
    draw();
    if (!root.hidden) search.focus();
  } });
  root.hidden = true;
  const keyed = new KeyedList<string, { root: HTMLElement; box: HTMLInputElement }>(
    list,
    (name) => name,
    (name) => {
      const box = h("input", { type: "checkbox", onchange: () => {
        const kept = shown.filter((other) => other !== name);
        store.setCurveOptions({ shown: box.checked ? [...kept, name] : kept });
      } });
      return { root: h("label", { title: name }, box, h("span", { class: "nbd-name" }, name)), box };
    },
    ({ box }, name) => {
      box.checked = shown.includes(name);
      box.disabled = !box.checked && shown.length >= MAX_SHOWN;
    },
  );
  function draw(): void {
    if (root.hidden) return;
    const wanted = search.value.toLowerCase();
    keyed.show(names.filter((name) => name.toLowerCase().includes(wanted)));
    setText(note, shown.length >= MAX_SHOWN ? `${MAX_SHOWN} at most` : "");
  }
  function update(all: string[], now: string[]): void {
    [names, shown] = [all, now];
    button.hidden = all.length < 2;
    setText(button, `${now.length} of ${all.length < MAX_CURVES ? "" : "the first "}${all.length} series`);
    draw();
  }
  return { root, button, update };
}
