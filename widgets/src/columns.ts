// Columns that a chart draws for a series: sorted, smoothed, with values that cannot be drawn kept apart.

import type { Points } from "./points.ts";
import type { CurveOptions } from "./store.ts";

export type Columns = [
  x: number[],
  raw: (number | null)[],
  smooth: (number | null)[],
  /** By index: values that are null in `raw` because they are not finite or have no logarithm. */
  odd: Map<number, number>,
];

/** Return the columns for uPlot; on a time axis, x is in seconds since `start`. */
export function columns(points: Points, options: CurveOptions, start: number): Columns {
  const odd: Columns[3] = new Map();
  const xs: number[] = new Array<number>(points.length);
  const ys: (number | null)[] = new Array<number | null>(points.length);
  const from = options.x === "step" ? points.step : points.time;
  const shift = options.x === "step" ? 0 : start;
  const order = options.x === "step" ? null : byTime(points);
  for (let i = 0; i < points.length; i += 1) {
    const at = order ? order[i]! : i;
    const y = points.value[at]!;
    xs[i] = from[at]! - shift;
    const drawn = Number.isFinite(y) && !(options.log && y <= 0);
    ys[i] = drawn ? y : null;
    if (!drawn) odd.set(i, y);
  }
  return [xs, ys, options.smoothing > 0 ? smoothed(ys, options.smoothing) : ys, odd];
}

/** Return the indices in order of time if that differs from the order of steps, otherwise null. */
function byTime({ time, length }: Points): Uint32Array | null {
  let sorted = true;
  for (let i = 1; sorted && i < length; i += 1) sorted = time[i - 1]! <= time[i]!;
  return sorted ? null : Uint32Array.from({ length }, (_, i) => i).sort((a, b) => time[a]! - time[b]!);
}

/** Exponential moving average with bias correction (as in Adam); gaps do not change it. */
export function smoothed(values: readonly (number | null)[], weight: number): (number | null)[] {
  let [mean, left] = [0, 1];
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    left *= weight;
    return mean / (1 - left);
  });
}
