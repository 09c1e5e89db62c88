// Points of one series: three columns sorted by step, thinned when they get long.

/** A series is thinned to this many points when it reaches twice as many. */
export const KEPT = 2000;

const COLUMNS = ["step", "time", "value"] as const;

export class Points {
  step = new Float64Array(256);
  time = new Float64Array(256);
  value = new Float64Array(256);
  length = 0;

  /** Append triples of step, time and value. */
  append(triples: Float64Array): void {
    for (let at = 0; at + 2 < triples.length; at += 3) {
      this.push(triples[at]!, triples[at + 1]!, triples[at + 2]!);
    }
  }

  private push(step: number, time: number, value: number): void {
    // A point without a position on an axis cannot be drawn.
    if (!Number.isFinite(step) || !Number.isFinite(time)) return;
    const at = this.place(step);
    if (at === this.length || this.step[at] !== step) this.open(at);
    // Otherwise a rank was late, or a loaded checkpoint went back: the later value replaces the step's.
    this.step[at] = step;
    this.time[at] = time;
    this.value[at] = value;
    if (this.length === 2 * KEPT) this.thin(KEPT);
  }

  /** Return the insertion index of a step; nearly always the end. */
  private place(step: number): number {
    if (this.length === 0 || step > this.step[this.length - 1]!) return this.length;
    let [low, high] = [0, this.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.step[middle]! < step) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** Make room for one point. */
  private open(at: number): void {
    if (this.length === this.step.length) this.grow();
    if (at < this.length) {
      for (const key of COLUMNS) this[key].copyWithin(at + 1, at, this.length);
    }
    this.length += 1;
  }

  private grow(): void {
    for (const key of COLUMNS) {
      const longer = new Float64Array(2 * this.length);
      longer.set(this[key]);
      this[key] = longer;
    }
  }

  /**
   * Keep the minimum and maximum of each of `points / 2` intervals, in order, so that no spike is
   * lost. An interval with a NaN or an infinity keeps one such point, which is drawn as a gap.
   */
  thin(points: number): void {
    if (this.length <= points) return;
    const stretches = Math.floor(points / 2);
    const keep: number[] = [];
    for (let i = 0; i < stretches; i += 1) {
      const from = Math.floor((i * this.length) / stretches);
      const to = Math.floor(((i + 1) * this.length) / stretches);
      keep.push(...this.extremes(from, to));
    }
    keep.forEach((from, to) => {
      this.step[to] = this.step[from]!;
      this.time[to] = this.time[from]!;
      this.value[to] = this.value[from]!;
    });
    this.length = keep.length;
  }

  private extremes(from: number, to: number): number[] {
    let [least, greatest, odd] = [-1, -1, -1];
    for (let i = from; i < to; i += 1) {
      const value = this.value[i]!;
      if (!Number.isFinite(value)) odd = i;
      else if (least < 0) least = greatest = i;
      else if (value < this.value[least]!) least = i;
      else if (value > this.value[greatest]!) greatest = i;
    }
    if (odd >= 0) return least >= 0 ? pair(least, odd) : [odd];
    return pair(least, greatest);
  }
}

function pair(a: number, b: number): number[] {
  return a === b ? [a] : a < b ? [a, b] : [b, a];
}
