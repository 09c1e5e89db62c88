// Sparkline of the last minutes, without axes.

import { attribute } from "./dom.ts";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [60, 16];

export class Spark {
  readonly root = document.createElementNS(SVG, "svg");
  private readonly line = document.createElementNS(SVG, "path");

  constructor() {
    this.root.append(this.line);
    attribute(this.root, "viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    attribute(this.root, "class", "nbd-spark");
    attribute(this.root, "aria-hidden", "true"); // the text next to it contains the latest value
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
    attribute(this.line, "d", path);
  }
}
