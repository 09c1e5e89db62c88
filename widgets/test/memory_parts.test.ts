import assert from "node:assert/strict";
import { test } from "node:test";
import { colorOf, sortParts } from "../src/memory_parts.ts";
import { MEMORY_COLORS, STEP_COLORS } from "../src/protocol.ts";

function luminance(hex: string): number {
  const channel = (at: number): number => {
    const value = parseInt(hex.slice(at, at + 2), 16) / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  };
  return 0.2126 * channel(1) + 0.7152 * channel(3) + 0.0722 * channel(5);
}
const contrast = (a: string, b: string): number => {
  const [dark, light] = [luminance(a), luminance(b)].sort((x, y) => x - y) as [number, number];
  return (light + 0.05) / (dark + 0.05);
};

for (const [part, hex] of [...Object.entries(MEMORY_COLORS), ...Object.entries(STEP_COLORS)]) {
  test(`${part} stands out from light and dark`, () => {
    for (const paper of ["#ffffff", "#111111", "#212121"]) {
      assert.ok(contrast(hex, paper) >= 3, `${contrast(hex, paper).toFixed(2)} on ${paper}`);
    }
  });
}

test("parts come in one order, unknown ones last, empty ones not at all", () => {
  const parts = ["new", "context", "parameters", "optimizer"].map((part) => ({ part, bytes: 1 }));
  const found = sortParts([...parts, { part: "master", bytes: 0 }]).map((one) => one.part);
  assert.deepEqual(found, ["parameters", "optimizer", "context", "new"]);
  assert.equal(colorOf("constructor"), MEMORY_COLORS.other);
});
