import assert from "node:assert/strict";
import { test } from "node:test";
import * as format from "../src/format.ts";

const GIB = 2 ** 30;

test("bytes are GiB with one decimal, MiB below one", () => {
  assert.equal(format.bytes(31.2 * GIB), "31.2 GiB");
  assert.equal(format.bytes(GIB), "1.0 GiB");
  assert.equal(format.bytes(512 * 2 ** 20), "512 MiB");
  assert.equal(format.bytes(3.5 * 2 ** 20), "3.5 MiB");
  assert.equal(format.bytes(12), "<1 MiB");
  assert.equal(format.bytes(0), "0 MiB");
  assert.equal(format.bytes(null), "–");
  assert.equal(format.bytes(1e15), "931,322.6 GiB");
});

test("a share of bytes says its unit once", () => {
  assert.equal(format.bytesOf(31.2 * GIB, 80 * GIB), "31.2 / 80.0 GiB");
  assert.equal(format.bytesOf(100 * 2 ** 20, 80 * GIB), "100 MiB / 80.0 GiB");
  assert.equal(format.bytesOf(5 * GIB, null), "5.0 GiB");
});

test("speeds of one size have as many digits", () => {
  assert.deepEqual([839.6, 14_000, 12_345, 1.2e6].map(format.speed), ["840", "14.0k", "12.3k", "1.2M"]);
});

test("times", () => {
  assert.equal(format.duration(42.9), "00:42");
  assert.equal(format.duration(3723), "1:02:03");
  assert.equal(format.duration(-5), "00:00");
  assert.deepEqual([1, 42, 300, 7200, 200_000].map(format.age), ["now", "42 s", "5 min", "2 h", "2 d"]);
});

test("parts of a step", () => {
  assert.deepEqual([0, 0.00004, 0.0004, 0.0123, 0.99951, 1.239, NaN].map(format.seconds), ["0 ms", "0.0 ms", "0.4 ms", "12 ms", "1000 ms", "1.24 s", "NaN ms"]);
});

test("ticks of large values that differ by little are told apart", () => {
  assert.deepEqual(format.ticks([1_000, 2_000, null]), ["1000", "2000", ""]);
  const close = format.ticks([1_800_000_000, 1_800_000_100]);
  assert.equal(new Set(close).size, 2);
});

test("numbers", () => {
  assert.equal(format.short(12_340), "12.3k");
  assert.equal(format.short(1_250_000), "1.25M");
  assert.equal(format.short(0.00002), "2.00e-5");
  assert.equal(format.short(812), "812");
  assert.equal(format.short(NaN), "–");
  assert.equal(format.value(2.31449), "2.314");
  assert.equal(format.value(91_173.4), "91,173");
  assert.equal(format.gigabytes(112e9), "112");
  assert.equal(format.gigabytes(1.24e9), "1.2");
});

test("ranks", () => {
  assert.deepEqual([[3], [0, 1], [2, 0, 1, 3], []].map(format.ranks), ["rank 3", "ranks 0, 1", "ranks 0-3", "no rank"]);
});
