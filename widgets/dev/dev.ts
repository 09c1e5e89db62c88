// Development page: the panel with a model that replays a scene. Not part of the bundle.

import panel from "../src/main.ts";
import { Chart } from "../src/chart.ts";
import { columns } from "../src/columns.ts";
import { Points } from "../src/points.ts";
import { NOW, SCENES, type Scene } from "./scenes.ts";

const asked = new URLSearchParams(location.search);
const holder = document.getElementById("panel")!;
document.body.classList.toggle("dark", asked.has("dark"));
for (const name of Object.keys(SCENES)) {
  const link = document.createElement("a");
  link.href = `?scene=${name}${asked.has("dark") ? "&dark" : ""}`;
  link.textContent = name;
  document.getElementById("scenes")!.append(link);
}

type Heard = (...told: unknown[]) => void;
class Replayed {
  private heard: Heard[] = [];
  sent: unknown[] = [];
  constructor(private readonly scene: Scene) {}

  on(event: string, heard: Heard): void {
    if (event === "msg:custom") this.heard.push(heard);
  }
  off(): void {}

  tell(message: unknown, values: number[] = []): void {
    const buffer = new DataView(Float64Array.from(values).buffer);
    for (const heard of this.heard) heard(message, [buffer]);
  }

  send(message: { kind: string; id?: string; name?: string; rank?: number | null; search?: string }): void {
    this.sent.push(message);
    const { kind } = message;
    if (kind === "hello") setTimeout(() => this.reset());
    if (kind === "command") {
      setTimeout(() => this.tell({ kind: "answer", id: message.id, ok: true, text: `${message.name}: done in 1.2 s` }), 300);
    }
    if (kind === "log") {
      const lines = Array.from({ length: 40 }, (_, step) => `step ${step} loss ${(3 - step / 40).toFixed(3)} <b>not bold</b>`);
      this.tell({ kind: "log", rank: message.rank, lines: lines.filter((line) => line.includes(message.search ?? "")) });
    }
  }

  private reset(): void {
    const { state, series, steps } = this.scene;
    const values: number[] = [];
    const parts = Object.entries(series).map(([name, value]) => {
      for (let step = 1; step <= steps; step += 1) values.push(step, NOW - (steps - step) * 0.6, value(step));
      return { name, points: steps };
    });
    const seconds = Array.from({ length: 180 }, (_, at) => at);
    const devices = state.devices.map((device, index) => ({
      memory_bytes: seconds.map((s) => (device.used_bytes ?? 0) * (0.8 + 0.2 * Math.abs(Math.sin(s / 3 + index)))),
      utilization: seconds.map((s) => (s > 80 && s < 95 ? 0.02 : 0.9 + 0.1 * Math.sin(s * 1.7 + index))),
      power_w: seconds.map((s) => (device.power_w === null ? null : s > 80 && s < 95 ? 140 : 620 + 40 * Math.sin(s + index))),
    }));
    this.tell({ kind: "reset", state, series: parts, samples: { times: seconds.map((s) => NOW - 180 + s), devices } }, values);
    setInterval(() => this.tell({ kind: "heartbeat", time: Date.now() / 1000 }), 2000);
    if (asked.has("live")) this.live();
  }

  private live(): void {
    let step = this.scene.steps;
    setInterval(() => {
      step += 1;
      const names = Object.entries(this.scene.series);
      const values = names.flatMap(([, value]) => [step, Date.now() / 1000, value(step)]);
      this.tell({ kind: "points", series: names.map(([name]) => ({ name, points: 1 })) }, values);
    }, 200);
  }
}

/** Milliseconds of a drawing of four charts with 5,000 points each, until uPlot is done. */
async function bench(): Promise<void> {
  const charts = [0, 1, 2, 3].map((index) => new Chart(`series ${index}`, "bench"));
  holder.className = "nbdist";
  holder.append(...charts.map((chart) => chart.root));
  const options = { shown: null, x: "step" as const, log: false, smoothing: 0 };
  const curves = charts.map((_, index) => {
    const points = new Points();
    for (let at = 0; at < 5000; at += 1) points.add(at, at, 2 + Math.exp(-at / 900) + 0.1 * Math.sin(at * (index + 12.9)));
    return points;
  });
  const took: number[] = [];
  for (let turn = 0; turn < 60; turn += 1) {
    await new Promise(requestAnimationFrame);
    const from = performance.now();
    curves.forEach((one, at) => {
      one.value[4999] = 2 + Math.random();
      charts[at]!.show({ columns: columns(one, options, 0), options, marks: [], start: 0 });
    });
    await Promise.resolve().then(() => Promise.resolve()); // uPlot draws in a microtask
    took.push(performance.now() - from);
  }
  const sorted = took.slice(10).sort((a, b) => a - b);
  const told = document.createElement("p");
  told.id = "bench";
  told.textContent = JSON.stringify({ least_ms: sorted[0], median_ms: sorted[25], p90_ms: sorted[45], first_ms: took[0] });
  holder.append(told);
}

if (asked.has("bench")) {
  void bench();
} else {
  const model = new Replayed((SCENES[asked.get("scene") ?? "gpu"] ?? SCENES.gpu!)());
  Object.assign(window, { model });
  const widget = panel();
  widget.initialize({ model: model as never });
  widget.render({ el: holder });
}
