// Sparkline of the last minutes, without axes.

import { setAttribute } from "./dom.ts";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [60, 16];

export class Sparkline {
  readonly root = document.createElementNS(SVG, "svg");
  private readonly line = document.createElementNS(SVG, "path");

  constructor() {
    this.root.append(this.line);
    setAttribute(this.root, "viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    setAttribute(this.root, "class", "nbd-spark");
    setAttribute(this.root, "aria-hidden", "true"); // the text next to it contains the latest value
  }

  /** Values from oldest to newest; null is a gap. The scale is 0 to `full`. */
  show(values: readonly (number | null)[], full: number): void {
    const space = Math.max(60, values.length); // the first minute fills from the right
    let path = "";
    let pen = false;
    values.forEach((value, index) => {
      if (value === null || !(full > 0)) {
        pen = false;
        return;
      }
      const x = WIDTH * (1 - (values.length - 1 - index) / (space - 1));
      const y = HEIGHT - 1 - (HEIGHT - 2) * Math.min(1, value / full);
      path += `${pen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      pen = true;
    });
    setAttribute(this.line, "d", path);
  }
}
