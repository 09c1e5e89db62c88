// Chart of one series, drawn by uPlot, with marks for switches, saves and non-finite values.

import uPlot from "uplot";
import type { Columns } from "./columns.ts";
import { attribute, h, say } from "./dom.ts";
import { count, duration, short, ticks, value } from "./format.ts";
import type { EventMarkView } from "./protocol.ts";
import { keyOf, oddity, trace, uprights, type Upright } from "./signs.ts";
import { colourOf } from "./theme.ts";
import type { Choice } from "./store.ts";

const HEIGHT = 150;
/** Marks closer than this are merged, and the cursor counts as on a mark; CSS pixels. */
const NEAR = 4;
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6, 1e7, 1e8];
const SECONDS = [1, 5, 15, 30, 60, 300, 900, 1800, 3600, 7200, 14400, 43200, 86400, 604800];

export interface Drawn {
  columns: Columns;
  choice: Choice;
  marks: readonly EventMarkView[];
  /** Origin of the time axis in Unix seconds. */
  start: number;
}

export class Chart {
  private readonly now = h("span", { class: "nbd-figures" });
  private readonly holder = h("div", { class: "nbd-plot", role: "img" });
  private readonly signs = h("div", { class: "nbd-signs" });
  readonly root: HTMLElement;
  private plot: uPlot | null = null;
  private drawn: Drawn | null = null;
  private kind = "";
  private toldAt = 0;

  constructor(private readonly name: string, private readonly sync: string) {
    const keys = (event: KeyboardEvent): void => this.key(event);
    const label = h("span", { class: "nbd-name", title: name }, name);
    const caption = h("div", { class: "nbd-caption" }, label, this.now);
    const about = `${name}: arrow keys read the values`;
    this.root = h(
      "div",
      { class: "nbd-chart", tabindex: 0, role: "group", "aria-label": about, onkeydown: keys },
      caption,
      this.holder,
      this.signs,
    );
  }

  show(drawn: Drawn): void {
    this.drawn = drawn;
    // uPlot cannot change the kind of a scale in place. The mean is a separate line if smoothing is on.
    const { x, log, smoothing } = drawn.choice;
    const kind = `${x} ${log} ${smoothing > 0}`;
    const columns = drawn.columns.slice(0, smoothing > 0 ? 3 : 2) as uPlot.AlignedData;
    const width = Math.floor(this.holder.clientWidth);
    if (!width) return;
    if (!this.plot || kind !== this.kind) {
      this.kind = kind;
      this.plot?.destroy();
      this.plot = new uPlot(this.options(width, drawn.choice), columns, this.holder);
    } else {
      this.plot.batch((plot: uPlot) => {
        if (plot.width !== width) plot.setSize({ width, height: HEIGHT });
        plot.setData(columns);
      });
    }
    const key = keyOf(drawn.columns[3].values());
    say(this.signs, key);
    this.signs.hidden = !key;
    this.say();
  }

  redraw(): void {
    this.plot?.redraw(false);
  }

  resize(): void {
    if (this.drawn && this.plot?.width !== Math.floor(this.holder.clientWidth)) this.show(this.drawn);
  }

  close(): void {
    this.plot?.destroy();
    this.plot = null;
  }

  private options(width: number, choice: Choice): uPlot.Options {
    const colour = (variable: string) => (): string => colourOf(this.root, variable);
    const line = colour("--nbd-line");
    const faint = (): string => (this.drawn?.choice.smoothing ? colourOf(this.root, "--nbd-faint") : line());
    const axis = {
      stroke: colour("--nbd-muted"),
      font: "11px system-ui, sans-serif",
      ticks: { show: false },
      grid: { stroke: colour("--nbd-grid"), width: 1 },
    };
    const byStep = choice.x === "step";
    return {
      width,
      height: HEIGHT,
      padding: [18, 14, 0, 0], // space for the labels of the marks
      legend: { show: false },
      cursor: { sync: { key: this.sync }, drag: { x: false, y: false }, y: false, points: { size: 6 } },
      scales: {
        x: { time: false },
        // A constant series, or one without a finite value, needs a scale too.
        y: choice.log ? { distr: 3 } : { range: (_plot: uPlot, low: number | null, high: number | null) => room(low, high) },
      },
      axes: [
        {
          ...axis,
          size: 20,
          incrs: byStep ? STEPS : SECONDS,
          space: 60,
          values: (_plot, splits) => splits.map((x) => (byStep ? short(x) : duration(x))),
        },
        { ...axis, size: 52, space: 28, values: (_plot, splits) => ticks(splits) },
      ],
      series: [
        {},
        { stroke: faint, width: 1.5, points: { size: 4 } },
        ...(choice.smoothing > 0 ? [{ stroke: line, width: 1.75, points: { show: false } }] : []),
      ],
      hooks: { draw: [(plot) => (this.mark(plot), this.sign(plot))], setCursor: [() => this.say()] },
    };
  }

  /** Marks inside the chart, in canvas or CSS pixels. */
  private uprights(plot: uPlot, canvas: boolean): Upright[] {
    if (!this.drawn) return [];
    const { choice, start, marks } = this.drawn;
    const [left, width] = canvas ? [plot.bbox.left, plot.bbox.width] : [0, plot.over.clientWidth];
    const place = (mark: EventMarkView): number | null => {
      const at = choice.x === "step" ? mark.step : mark.time - start;
      const x = Math.round(plot.valToPos(at, "x", canvas));
      return x < left || x > left + width ? null : x;
    };
    return uprights(marks, place, canvas ? NEAR * devicePixelRatio : NEAR);
  }

  /** Draw vertical lines where a checkpoint was saved (dotted) and where the training changed (dashed). */
  private mark(plot: uPlot): void {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colourOf(this.root, "--nbd-muted");
    const ratio = devicePixelRatio;
    ctx.font = `${10 * ratio}px system-ui, sans-serif`;
    ctx.textBaseline = "bottom";
    ctx.textAlign = "left";
    let free = -Infinity;
    for (const { x, saves, words } of this.uprights(plot, true)) {
      ctx.setLineDash(saves ? [ratio, 3 * ratio] : [5 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const end = x + ctx.measureText(words).width;
      // Skip labels that overlap or extend beyond the chart.
      if (x < free || end > ctx.canvas.width) continue;
      ctx.fillText(words, x, bbox.top - 2 * ratio);
      free = end + 4 * ratio;
    }
    ctx.restore();
  }

  /** Draw a sign on the axis for each non-finite value: a gap alone is easily missed. */
  private sign(plot: uPlot): void {
    if (!this.drawn?.columns[3].size) return;
    const { ctx, bbox } = plot;
    const [xs, , , odd] = this.drawn.columns;
    const [bottom, size] = [bbox.top + bbox.height, 3.5 * devicePixelRatio];
    const last = new Map<string, number>();
    ctx.save();
    ctx.strokeStyle = colourOf(this.root, "--nbd-error");
    ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.beginPath();
    for (const [index, value] of odd) {
      const found = oddity(value);
      const x = plot.valToPos(xs[index]!, "x", true);
      if (x - (last.get(found.sign) ?? -Infinity) < 2 * size) continue; // too close to be distinguished
      last.set(found.sign, x);
      trace(ctx, found, x, bbox.top, bottom, size);
    }
    ctx.stroke();
    ctx.restore();
  }

  /** Return the events at the cursor. */
  private told(): string {
    const at = this.plot?.cursor.left ?? -1;
    if (!this.plot || at < 0) return "";
    const near = this.uprights(this.plot, false).filter(({ x }) => Math.abs(x - at) <= NEAR);
    return near.map(({ told }) => told).join(", ");
  }

  /** Show the value under the cursor, otherwise the latest. */
  private say(): void {
    if (!this.drawn) return;
    const [xs, raw, smooth, odd] = this.drawn.columns;
    const at = this.plot?.cursor.idx ?? null;
    const index = at ?? xs.length - 1;
    const [x, y] = [xs[index], raw[index] ?? null];
    if (x === undefined) return say(this.now, "");
    const place = this.drawn.choice.x === "step" ? `step ${count(x)}` : duration(x);
    const mean = this.drawn.choice.smoothing && smooth[index] != null ? ` (mean ${value(smooth[index]!)})` : "";
    const gone = odd.get(index) ?? NaN;
    const said = y !== null ? value(y) : Number.isFinite(gone) ? value(gone) : oddity(gone).name;
    const happened = this.told();
    const text = [`${said}${mean}`, place, happened].filter(Boolean).join(" · ");
    say(this.now, text);
    attribute(this.holder, "title", happened || null);
    if (Date.now() - this.toldAt < 2000) return undefined;
    this.toldAt = Date.now();
    attribute(this.holder, "aria-label", `chart of ${this.name}, ${xs.length} points, ${text}`);
    return undefined;
  }

  private key(event: KeyboardEvent): void {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!this.plot || !this.drawn || by === undefined) return;
    event.preventDefault();
    const xs = this.drawn.columns[0];
    const stride = event.shiftKey ? Math.ceil(xs.length / 20) : 1;
    const index = Math.min(Math.max((this.plot.cursor.idx ?? xs.length - 1) + by * stride, 0), xs.length - 1);
    this.plot.setCursor({ left: this.plot.valToPos(xs[index] ?? 0, "x"), top: 10 });
  }
}

function room(low: number | null, high: number | null): [number, number] {
  if (low === null || high === null || !Number.isFinite(low) || !Number.isFinite(high)) return [0, 1];
  const spare = (high - low || Math.abs(high) || 1) * 0.06;
  return [low >= 0 && low - spare < 0 ? 0 : low - spare, high + spare];
}
