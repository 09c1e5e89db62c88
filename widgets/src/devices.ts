// Devices: predicted memory with the memory in use on top, and current readings.

import { describeParts, cssPercent, MemoryBar } from "./memory_bar.ts";
import { h, KeyedList, setAttribute, setStyle, setText } from "./dom.ts";
import { bytes, bytesOf, gigabytes, NOTHING, ranks } from "./format.ts";
import { Legend } from "./legend.ts";
import { groupByNode, type NodeEntry } from "./group_by_node.ts";
import type { DeviceView, NodeView } from "./protocol.ts";
import { Sparkline } from "./sparkline.ts";
import type { Store } from "./store.ts";
import type { View } from "./view.ts";

interface Row {
  root: HTMLElement;
  show(device: DeviceView, index: number): void;
}

/** Readings that not every machine provides; a column is shown if any device has it. */
const READINGS: Readonly<Record<string, (device: DeviceView) => unknown>> = {
  load: (device) => device.utilization,
  power: (device) => device.power_w,
  heat: (device) => device.temperature_c,
  pcie: (device) => device.pcie_tx ?? device.pcie_rx,
  nvlink: (device) => device.nvlink_tx ?? device.nvlink_rx,
};
const COLUMN_TITLES: Readonly<Record<string, string>> = {
  memory: "peak",
  load: "utilization",
  power: "power",
  heat: "temp.",
  pcie: "PCIe GB/s",
  nvlink: "NVLink GB/s",
};

export function devicesView(store: Store): View {
  const rows = h("div", { class: "nbd-devices-list", role: "list" });
  const titles = h(
    "div",
    { class: "nbd-device nbd-heads", "aria-hidden": "true" },
    h("span", {}, "device"),
    h("span", {}, "memory"),
    h("span", { class: "nbd-used" }, "in use"),
    h("div", { class: "nbd-now-figures" }, ...Object.entries(COLUMN_TITLES).map(([name, head]) => h("span", { class: `nbd-${name}` }, head))),
  );
  const grid = h("div", { class: "nbd-devices" }, titles, rows);
  const legend = new Legend();
  const empty = h("p", { class: "nbd-empty" }, "No device is in use yet: the first %%distribute cell starts the ranks.");
  const root = h("section", { class: "nbd-section", "aria-label": "memory and devices" }, grid, legend.root, empty);
  const keyed = new KeyedList<NodeEntry<DeviceView>, Heading | Row>(
    rows,
    (entry) => (entry.heading === null ? `${entry.index} ${entry.item.name}` : `node ${entry.heading}`),
    (entry) => (entry.heading === null ? makeRow(store) : makeHeading()),
    (row, entry) => {
      if (entry.heading === null) (row as Row).show(entry.item, entry.index);
      else (row as Heading).show(store.state.nodes.find(({ name }) => name === entry.heading));
    },
  );

  function update(): void {
    const { devices } = store.state;
    empty.hidden = devices.length > 0;
    grid.hidden = devices.length === 0;
    for (const [name, read] of Object.entries(READINGS)) {
      root.classList.toggle(`nbd-no-${name}`, devices.every((device) => read(device) === null));
    }
    keyed.show(groupByNode(devices));
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
  const description = h("span", { class: "nbd-muted" });
  const memory = h("span", { class: "nbd-muted nbd-figures" });
  const root = h("div", { class: "nbd-node", role: "listitem" }, name, description, memory);
  return {
    root,
    show(node) {
      setText(name, node?.name ?? "");
      setText(description, node?.description ?? "");
      setText(memory, node ? `host memory ${bytesOf(node.host_used_bytes, node.host_bytes)}` : "");
    },
  };
}

function makeRow(store: Store): Row {
  const name = h("span", { class: "nbd-name" });
  const rankLabel = h("span", { class: "nbd-muted" });
  const stack = new MemoryBar();
  const live = h("div", { class: "nbd-live" });
  const others = h("div", { class: "nbd-others" });
  const peak = h("div", { class: "nbd-peak" });
  const bar = h("div", { class: "nbd-bar", role: "img" }, stack.root, others, live, peak);
  const used = h("span", { class: "nbd-cell nbd-used nbd-figures" });
  const memory = readingWithSparkline("nbd-memory");
  const load = readingWithSparkline("nbd-load");
  const power = readingWithSparkline("nbd-power");
  const heat = h("span", { class: "nbd-heat nbd-figures", title: "temperature" });
  const pcie = traffic("pcie", "PCIe");
  const nvlink = traffic("nvlink", "NVLink");
  const note = h("div", { class: "nbd-note" });
  const root = h(
    "div",
    { class: "nbd-device", role: "listitem" },
    h("div", { class: "nbd-label" }, name, rankLabel),
    bar,
    used,
    h("div", { class: "nbd-now-figures" }, memory.root, load.root, power.root, heat, pcie.root, nvlink.root),
    note,
  );

  function show(device: DeviceView, index: number): void {
    setText(name, device.name.replace("NVIDIA ", "")); // common to all, so the space is used for the model
    name.title = device.name;
    const text = ranks(device.ranks);
    setText(rankLabel, device.name.endsWith(text) ? "" : text);
    const total = device.predicted_bytes ?? device.predicted.reduce((sum, part) => sum + part.bytes, 0);
    const inUse = (device.used_bytes ?? 0) + device.others_bytes;
    const scale = device.capacity_bytes ?? 1.1 * Math.max(total, inUse, device.peak_bytes ?? 0, 1);
    stack.show(device.predicted, scale);
    setStyle(live, "width", cssPercent(device.used_bytes ?? 0, scale));
    setStyle(others, "width", cssPercent(device.others_bytes, scale));
    others.title = device.other_processes.length ? `other processes: ${device.other_processes.join(", ")}` : "other processes";
    peak.hidden = device.peak_bytes === null;
    setStyle(peak, "left", cssPercent(device.peak_bytes ?? 0, scale));
    peak.title = `peak ${bytes(device.peak_bytes)}`;
    setAttribute(bar, "aria-label", describe(device, total));
    setText(used, bytesOf(device.used_bytes, device.capacity_bytes));
    used.title = device.peak_bytes === null ? "in use" : `peak ${bytes(device.peak_bytes)}`;

    memory.root.title = "memory over the last minutes";
    setText(memory.text, bytes(device.peak_bytes));
    load.root.title = "utilization";
    setText(load.text, device.utilization === null ? NOTHING : `${Math.round(100 * device.utilization)} %`);
    power.root.title = device.power_limit_w ? `power, limit ${Math.round(device.power_limit_w)} W` : "power";
    setText(power.text, device.power_w === null ? NOTHING : `${Math.round(device.power_w)} W`);
    setText(heat, device.temperature_c === null ? NOTHING : `${Math.round(device.temperature_c)} °C`);
    pcie.show(device.pcie_tx, device.pcie_rx);
    nvlink.show(device.nvlink_tx, device.nvlink_rx);

    const noteText = device.note || noteOnPeak(device, total);
    note.hidden = !noteText;
    setText(note, noteText);
    showSparklines(device, index);
  }

  function showSparklines(device: DeviceView, index: number): void {
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

function readingWithSparkline(name: string): { root: HTMLElement; spark: Sparkline; text: HTMLElement } {
  const spark = new Sparkline();
  const text = h("span", { class: "nbd-figures" });
  return { root: h("span", { class: name }, spark.root as unknown as globalThis.Node, text), spark, text };
}

/** Bytes per second sent and received, in GB/s; with its name if there is no column head. */
function traffic(name: string, label: string): { root: HTMLElement; show(sent: number | null, received: number | null): void } {
  const figures = h("span");
  const root = h(
    "span",
    { class: `nbd-${name} nbd-figures`, title: `${label}, sent and received` },
    h("span", { class: "nbd-word" }, `${label} `),
    figures,
    h("span", { class: "nbd-word nbd-unit" }, " GB/s"),
  );
  return { root, show: (sent, received) => setText(figures, `↑${gigabytes(sent)} ↓${gigabytes(received)}`) };
}

function describe(device: DeviceView, total: number): string {
  const parts = [`${device.name}: ${bytes(device.used_bytes)} in use`];
  if (device.capacity_bytes !== null) parts.push(`of ${bytes(device.capacity_bytes)}`);
  if (device.peak_bytes !== null) parts.push(`peak ${bytes(device.peak_bytes)}`);
  if (device.others_bytes > 0) parts.push(`other processes ${bytes(device.others_bytes)}`);
  if (total > 0) parts.push(`predicted ${bytes(total)}: ${describeParts(device.predicted)}`);
  return parts.join(", ");
}

/** Return a note if the kernel sent none and the peak exceeds the prediction. */
function noteOnPeak(device: DeviceView, total: number): string {
  const { peak_bytes: peak, stated_error: error } = device;
  if (peak === null || error === null || total <= 0 || peak <= total * (1 + error)) return "";
  const more = Math.round(100 * (peak / total - 1));
  return `The peak of ${bytes(peak)} is ${more} % above the prediction of ${bytes(total)}.`;
}

export function title(text: string, ...others: globalThis.Node[]): HTMLElement {
  return h("div", { class: "nbd-title" }, h("span", {}, text), ...others);
}
