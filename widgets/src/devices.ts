// Devices: predicted memory with the memory in use on top, and current readings.

import { inWords, percent, Stack } from "./bar.ts";
import { attribute, h, Keyed, say, style } from "./dom.ts";
import { bytes, bytesOf, gigabytes, NOTHING, ranks } from "./format.ts";
import { Legend } from "./legend.ts";
import { byNode, type Placed } from "./nodes.ts";
import type { DeviceView, NodeView } from "./protocol.ts";
import { Spark } from "./spark.ts";
import type { Store } from "./store.ts";
import type { View } from "./view.ts";

interface Row {
  root: HTMLElement;
  show(device: DeviceView, index: number): void;
}

/** Readings that not every machine provides; a column is shown if any device has it. */
const TELLS: Readonly<Record<string, (device: DeviceView) => unknown>> = {
  load: (device) => device.utilization,
  power: (device) => device.power_w,
  heat: (device) => device.temperature_c,
  pcie: (device) => device.pcie_tx ?? device.pcie_rx,
  nvlink: (device) => device.nvlink_tx ?? device.nvlink_rx,
};
const HEADS: Readonly<Record<string, string>> = {
  memory: "peak",
  load: "utilization",
  power: "power",
  heat: "temp.",
  pcie: "PCIe GB/s",
  nvlink: "NVLink GB/s",
};

export function devicesView(store: Store): View {
  const rows = h("div", { class: "nbd-devices-list", role: "list" });
  const heads = h(
    "div",
    { class: "nbd-device nbd-heads", "aria-hidden": "true" },
    h("span", {}, "device"),
    h("span", {}, "memory"),
    h("span", { class: "nbd-used" }, "in use"),
    h("div", { class: "nbd-now-figures" }, ...Object.entries(HEADS).map(([name, head]) => h("span", { class: `nbd-${name}` }, head))),
  );
  const grid = h("div", { class: "nbd-devices" }, heads, rows);
  const legend = new Legend();
  const empty = h("p", { class: "nbd-empty" }, "No device is in use yet: the first %%distribute cell starts the ranks.");
  const root = h("section", { class: "nbd-section", "aria-label": "memory and devices" }, grid, legend.root, empty);
  const keyed = new Keyed<Placed<DeviceView>, Heading | Row>(
    rows,
    (one) => (one.heading === null ? `${one.index} ${one.item.name}` : `node ${one.heading}`),
    (one) => (one.heading === null ? makeRow(store) : makeHeading()),
    (row, one) => {
      if (one.heading === null) (row as Row).show(one.item, one.index);
      else (row as Heading).show(store.picture.nodes.find(({ name }) => name === one.heading));
    },
  );

  function update(): void {
    const { devices } = store.picture;
    empty.hidden = devices.length > 0;
    grid.hidden = devices.length === 0;
    for (const [name, tells] of Object.entries(TELLS)) {
      root.classList.toggle(`nbd-no-${name}`, devices.every((device) => tells(device) === null));
    }
    keyed.show(byNode(devices));
    legend.root.hidden = devices.length === 0;
    legend.show(devices.map((device) => device.predicted), {
      live: devices.some((device) => device.used_bytes !== null),
      peak: devices.some((device) => device.peak_bytes !== null),
      others: devices.some((device) => device.others_bytes > 0),
    });
  }
  return { root, topics: ["devices", "nodes", "samples"], update };
}

interface Heading {
  root: HTMLElement;
  show(node: NodeView | undefined): void;
}

/** Heading above the devices of a node. */
function makeHeading(): Heading {
  const name = h("span", { class: "nbd-name" });
  const words = h("span", { class: "nbd-muted" });
  const memory = h("span", { class: "nbd-muted nbd-figures" });
  const root = h("div", { class: "nbd-node", role: "listitem" }, name, words, memory);
  return {
    root,
    show(node) {
      say(name, node?.name ?? "");
      say(words, node?.words ?? "");
      say(memory, node ? `host memory ${bytesOf(node.host_used_bytes, node.host_bytes)}` : "");
    },
  };
}

function makeRow(store: Store): Row {
  const name = h("span", { class: "nbd-name" });
  const which = h("span", { class: "nbd-muted" });
  const stack = new Stack();
  const live = h("div", { class: "nbd-live" });
  const others = h("div", { class: "nbd-others" });
  const peak = h("div", { class: "nbd-peak" });
  const bar = h("div", { class: "nbd-bar", role: "img" }, stack.root, others, live, peak);
  const used = h("span", { class: "nbd-cell nbd-used nbd-figures" });
  const memory = figure("nbd-memory");
  const load = figure("nbd-load");
  const power = figure("nbd-power");
  const heat = h("span", { class: "nbd-heat nbd-figures", title: "temperature" });
  const pcie = traffic("pcie", "PCIe");
  const nvlink = traffic("nvlink", "NVLink");
  const note = h("div", { class: "nbd-note" });
  const root = h(
    "div",
    { class: "nbd-device", role: "listitem" },
    h("div", { class: "nbd-label" }, name, which),
    bar,
    used,
    h("div", { class: "nbd-now-figures" }, memory.root, load.root, power.root, heat, pcie.root, nvlink.root),
    note,
  );

  function show(device: DeviceView, index: number): void {
    say(name, device.name.replace("NVIDIA ", "")); // common to all, so the space is used for the model
    name.title = device.name;
    const held = ranks(device.ranks);
    say(which, device.name.endsWith(held) ? "" : held);
    const total = device.predicted_bytes ?? device.predicted.reduce((sum, part) => sum + part.bytes, 0);
    const taken = (device.used_bytes ?? 0) + device.others_bytes;
    const scale = device.capacity_bytes ?? 1.1 * Math.max(total, taken, device.peak_bytes ?? 0, 1);
    stack.show(device.predicted, scale);
    style(live, "width", percent(device.used_bytes ?? 0, scale));
    style(others, "width", percent(device.others_bytes, scale));
    others.title = device.holders.length ? `other processes: ${device.holders.join(", ")}` : "other processes";
    peak.hidden = device.peak_bytes === null;
    style(peak, "left", percent(device.peak_bytes ?? 0, scale));
    peak.title = `peak ${bytes(device.peak_bytes)}`;
    attribute(bar, "aria-label", told(device, total));
    say(used, bytesOf(device.used_bytes, device.capacity_bytes));
    used.title = device.peak_bytes === null ? "in use" : `peak ${bytes(device.peak_bytes)}`;

    memory.root.title = "memory over the last minutes";
    say(memory.text, bytes(device.peak_bytes));
    load.root.title = "utilization";
    say(load.text, device.utilization === null ? NOTHING : `${Math.round(100 * device.utilization)} %`);
    power.root.title = device.power_limit_w ? `power, limit ${Math.round(device.power_limit_w)} W` : "power";
    say(power.text, device.power_w === null ? NOTHING : `${Math.round(device.power_w)} W`);
    say(heat, device.temperature_c === null ? NOTHING : `${Math.round(device.temperature_c)} °C`);
    pcie.show(device.pcie_tx, device.pcie_rx);
    nvlink.show(device.nvlink_tx, device.nvlink_rx);

    const remark = device.note || above(device, total);
    note.hidden = !remark;
    say(note, remark);
    sparks(device, index);
  }

  function sparks(device: DeviceView, index: number): void {
    const column = store.samples.devices[index];
    const highest = (values: readonly (number | null)[]): number => Math.max(1, ...values.map((v) => v ?? 0));
    const sizes = column?.memory_bytes ?? [];
    const watts = column?.power_w ?? [];
    memory.spark.show(sizes, device.capacity_bytes && device.kind === "cuda" ? device.capacity_bytes : 1.1 * highest(sizes));
    load.spark.show(column?.utilization ?? [], 1);
    power.spark.show(watts, device.power_limit_w ?? highest(watts));
  }
  return { root, show };
}

function figure(name: string): { root: HTMLElement; spark: Spark; text: HTMLElement } {
  const spark = new Spark();
  const text = h("span", { class: "nbd-figures" });
  return { root: h("span", { class: name }, spark.root as unknown as globalThis.Node, text), spark, text };
}

/** Bytes per second sent and received, in GB/s; with its name if there is no column head. */
function traffic(name: string, words: string): { root: HTMLElement; show(out: number | null, into: number | null): void } {
  const figures = h("span");
  const root = h(
    "span",
    { class: `nbd-${name} nbd-figures`, title: `${words}, sent and received` },
    h("span", { class: "nbd-word" }, `${words} `),
    figures,
    h("span", { class: "nbd-word nbd-unit" }, " GB/s"),
  );
  return { root, show: (out, into) => say(figures, `↑${gigabytes(out)} ↓${gigabytes(into)}`) };
}

function told(device: DeviceView, total: number): string {
  const words = [`${device.name}: ${bytes(device.used_bytes)} in use`];
  if (device.capacity_bytes !== null) words.push(`of ${bytes(device.capacity_bytes)}`);
  if (device.peak_bytes !== null) words.push(`peak ${bytes(device.peak_bytes)}`);
  if (device.others_bytes > 0) words.push(`other processes ${bytes(device.others_bytes)}`);
  if (total > 0) words.push(`predicted ${bytes(total)}: ${inWords(device.predicted)}`);
  return words.join(", ");
}

/** Return a note if the kernel sent none and the peak exceeds the prediction. */
function above(device: DeviceView, total: number): string {
  const { peak_bytes: peak, stated_error: error } = device;
  if (peak === null || error === null || total <= 0 || peak <= total * (1 + error)) return "";
  const more = Math.round(100 * (peak / total - 1));
  return `The peak of ${bytes(peak)} is ${more} % above the prediction of ${bytes(total)}.`;
}

export function title(text: string, ...beside: globalThis.Node[]): HTMLElement {
  return h("div", { class: "nbd-title" }, h("span", {}, text), ...beside);
}
