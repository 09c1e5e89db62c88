import assert from "node:assert/strict";
import { test } from "node:test";
import type { EventMarkView } from "../src/protocol.ts";
import { symbolLegend, symbolFor, groupMarks } from "../src/chart_marks.ts";

const mark = (step: number, kind: EventMarkView["kind"], text: string): EventMarkView => ({ step, time: 0, kind, text });
const steps = ({ step }: EventMarkView): number | null => (step < 100 ? step : null);

test("two saves at one step are one line that names both", () => {
  const found = groupMarks([mark(40, "save", "base"), mark(40, "save", "best")], steps, 4);
  assert.deepEqual(found, [{ x: 40, saves: true, label: "base, best", description: "save base, save best" }]);
});

test("marks are told from left to right; what has no place is left out, what has no room is counted", () => {
  const long = "a-very-long-name-of-a-checkpoint";
  const marks = [mark(90, "switch", "ddp → zero3"), mark(500, "save", "x"), mark(10, "save", long), mark(12, "load", "base")];
  const [first, second] = groupMarks(marks, steps, 4);
  assert.deepEqual([first!.label, first!.saves], ["a-very-long-na… +1", false]);
  assert.equal(first!.description, `save ${long}, load base`);
  assert.deepEqual([second!.label, second!.saves], ["ddp → zero3", false]);
});

test("values without a place on the axis are told by name and shape, not by colour alone", () => {
  assert.deepEqual([NaN, Infinity, -Infinity, -3].map((one) => symbolFor(one).name), ["NaN", "inf", "-inf", "0 or less"]);
  assert.equal(symbolLegend([NaN, Infinity, NaN]), "× NaN  ▲ inf");
  assert.equal(symbolLegend([]), "");
});
