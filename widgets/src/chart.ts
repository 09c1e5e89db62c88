// Chart of one series, drawn by uPlot, with marks for switches, saves and non-finite values.

import uPlot from "uplot";
import type { Columns } from "./columns.ts";
import { h, setAttribute, setText } from "./dom.ts";
import { count, duration, short, ticks, value } from "./format.ts";
import type { EventMarkView } from "./protocol.ts";
import { symbolLegend, symbolFor, drawSymbol, groupMarks, type MarkGroup } from "./chart_marks.ts";
import { cssColor } from "./theme.ts";
import type { CurveOptions } from "./store.ts";

const HEIGHT = 150;
/** Marks closer than this are merged, and the cursor counts as on a mark; CSS pixels. */
const MERGE_DISTANCE = 4;
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6, 1e7, 1e8];
const SECONDS = [1, 5, 15, 30, 60, 300, 900, 1800, 3600, 7200, 14400, 43200, 86400, 604800];

export interface ChartData {
  columns: Columns;
  options: CurveOptions;
  marks: readonly EventMarkView[];
  /** Origin of the time axis in Unix seconds. */
  start: number;
}

export class Chart {
  private readonly value = h("span", { class: "nbd-figures" });
  private readonly holder = h("div", { class: "nbd-plot", role: "img" });
  private readonly legend = h("div", { class: "nbd-symbols" });
  readonly root: HTMLElement;
  private plot: uPlot | null = null;
  private data: ChartData | null = null;
  private kind = "";
  private labeledAt = 0;

  constructor(private readonly name: string, private readonly sync: string) {
    const onKey = (event: KeyboardEvent): void => this.moveCursor(event);
    const label = h("span", { class: "nbd-name", title: name }, name);
    const caption = h("div", { class: "nbd-caption" }, label, this.value);
    const description = `${name}: arrow keys read the values`;
    this.root = h(
      "div",
      { class: "nbd-chart", tabindex: 0, role: "group", "aria-label": description, onkeydown: onKey },
      caption,
      this.holder,
      this.legend,
    );
  }

  show(data: ChartData): void {
    this.data = data;
    // uPlot cannot change the kind of a scale in place. The mean is a separate line if smoothing is on.
    const { x, log, smoothing } = data.options;
    const kind = `${x} ${log} ${smoothing > 0}`;
    const columns = data.columns.slice(0, smoothing > 0 ? 3 : 2) as uPlot.AlignedData;
    const width = Math.floor(this.holder.clientWidth);
    if (!width) return;
    if (!this.plot || kind !== this.kind) {
      this.kind = kind;
      this.plot?.destroy();
      this.plot = new uPlot(this.plotOptions(width, data.options), columns, this.holder);
    } else {
      this.plot.batch((plot: uPlot) => {
        if (plot.width !== width) plot.setSize({ width, height: HEIGHT });
        plot.setData(columns);
      });
    }
    const symbols = symbolLegend(data.columns[3].values());
    setText(this.legend, symbols);
    this.legend.hidden = !symbols;
    this.showValue();
  }

  redraw(): void {
    this.plot?.redraw(false);
  }

  resize(): void {
    if (this.data && this.plot?.width !== Math.floor(this.holder.clientWidth)) this.show(this.data);
  }

  close(): void {
    this.plot?.destroy();
    this.plot = null;
  }

  private plotOptions(width: number, options: CurveOptions): uPlot.Options {
    const color = (variable: string) => (): string => cssColor(this.root, variable);
    const line = color("--nbd-line");
    const faint = (): string => (this.data?.options.smoothing ? cssColor(this.root, "--nbd-faint") : line());
    const axis = {
      stroke: color("--nbd-muted"),
      font: "11px system-ui, sans-serif",
      ticks: { show: false },
      grid: { stroke: color("--nbd-grid"), width: 1 },
    };
    const byStep = options.x === "step";
    return {
      width,
      height: HEIGHT,
      padding: [18, 14, 0, 0], // space for the labels of the marks
      legend: { show: false },
      cursor: { sync: { key: this.sync }, drag: { x: false, y: false }, y: false, points: { size: 6 } },
      scales: {
        x: { time: false },
        // A constant series, or one without a finite value, needs a scale too.
        y: options.log ? { distr: 3 } : { range: (_plot: uPlot, low: number | null, high: number | null) => paddedRange(low, high) },
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
        ...(options.smoothing > 0 ? [{ stroke: line, width: 1.75, points: { show: false } }] : []),
      ],
      hooks: { draw: [(plot) => (this.drawMarks(plot), this.drawSymbols(plot))], setCursor: [() => this.showValue()] },
    };
  }

  /** Marks inside the chart, in canvas or CSS pixels. */
  private groupMarks(plot: uPlot, canvas: boolean): MarkGroup[] {
    if (!this.data) return [];
    const { options, start, marks } = this.data;
    const [left, width] = canvas ? [plot.bbox.left, plot.bbox.width] : [0, plot.over.clientWidth];
    const place = (mark: EventMarkView): number | null => {
      const at = options.x === "step" ? mark.step : mark.time - start;
      const x = Math.round(plot.valToPos(at, "x", canvas));
      return x < left || x > left + width ? null : x;
    };
    return groupMarks(marks, place, canvas ? MERGE_DISTANCE * devicePixelRatio : MERGE_DISTANCE);
  }

  /** Draw vertical lines where a checkpoint was saved (dotted) and where the training changed (dashed). */
  private drawMarks(plot: uPlot): void {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = cssColor(this.root, "--nbd-muted");
    const ratio = devicePixelRatio;
    ctx.font = `${10 * ratio}px system-ui, sans-serif`;
    ctx.textBaseline = "bottom";
    ctx.textAlign = "left";
    let free = -Infinity;
    for (const { x, saves, label } of this.groupMarks(plot, true)) {
      ctx.setLineDash(saves ? [ratio, 3 * ratio] : [5 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const end = x + ctx.measureText(label).width;
      // Skip labels that overlap or extend beyond the chart.
      if (x < free || end > ctx.canvas.width) continue;
      ctx.fillText(label, x, bbox.top - 2 * ratio);
      free = end + 4 * ratio;
    }
    ctx.restore();
  }

  /** Draw a sign on the axis for each non-finite value: a gap alone is easily missed. */
  private drawSymbols(plot: uPlot): void {
    if (!this.data?.columns[3].size) return;
    const { ctx, bbox } = plot;
    const [xs, , , odd] = this.data.columns;
    const [bottom, size] = [bbox.top + bbox.height, 3.5 * devicePixelRatio];
    const last = new Map<string, number>();
    ctx.save();
    ctx.strokeStyle = cssColor(this.root, "--nbd-error");
    ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.beginPath();
    for (const [index, value] of odd) {
      const symbol = symbolFor(value);
      const x = plot.valToPos(xs[index]!, "x", true);
      if (x - (last.get(symbol.symbol) ?? -Infinity) < 2 * size) continue; // too close to be distinguished
      last.set(symbol.symbol, x);
      drawSymbol(ctx, symbol, x, bbox.top, bottom, size);
    }
    ctx.stroke();
    ctx.restore();
  }

  /** Return the events at the cursor. */
  private eventsAtCursor(): string {
    const at = this.plot?.cursor.left ?? -1;
    if (!this.plot || at < 0) return "";
    const near = this.groupMarks(this.plot, false).filter(({ x }) => Math.abs(x - at) <= MERGE_DISTANCE);
    return near.map(({ description }) => description).join(", ");
  }

  /** Show the value under the cursor, otherwise the latest. */
  private showValue(): void {
    if (!this.data) return;
    const [xs, raw, smooth, odd] = this.data.columns;
    const at = this.plot?.cursor.idx ?? null;
    const index = at ?? xs.length - 1;
    const [x, y] = [xs[index], raw[index] ?? null];
    if (x === undefined) return setText(this.value, "");
    const place = this.data.options.x === "step" ? `step ${count(x)}` : duration(x);
    const mean = this.data.options.smoothing && smooth[index] != null ? ` (mean ${value(smooth[index]!)})` : "";
    const nonFinite = odd.get(index) ?? NaN;
    const current = y !== null ? value(y) : Number.isFinite(nonFinite) ? value(nonFinite) : symbolFor(nonFinite).name;
    const events = this.eventsAtCursor();
    const text = [`${current}${mean}`, place, events].filter(Boolean).join(" · ");
    setText(this.value, text);
    setAttribute(this.holder, "title", events || null);
    if (Date.now() - this.labeledAt < 2000) return undefined;
    this.labeledAt = Date.now();
    setAttribute(this.holder, "aria-label", `chart of ${this.name}, ${xs.length} points, ${text}`);
    return undefined;
  }

  private moveCursor(event: KeyboardEvent): void {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!this.plot || !this.data || by === undefined) return;
    event.preventDefault();
    const xs = this.data.columns[0];
    const stride = event.shiftKey ? Math.ceil(xs.length / 20) : 1;
    const index = Math.min(Math.max((this.plot.cursor.idx ?? xs.length - 1) + by * stride, 0), xs.length - 1);
    this.plot.setCursor({ left: this.plot.valToPos(xs[index] ?? 0, "x"), top: 10 });
  }
}

function paddedRange(low: number | null, high: number | null): [number, number] {
  if (low === null || high === null || !Number.isFinite(low) || !Number.isFinite(high)) return [0, 1];
  const spare = (high - low || Math.abs(high) || 1) * 0.06;
  return [low >= 0 && low - spare < 0 ? 0 : low - spare, high + spare];
}
