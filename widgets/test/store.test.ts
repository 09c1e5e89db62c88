import assert from "node:assert/strict";
import { mock, test } from "node:test";
import { columns } from "../src/columns.ts";
import { Points } from "../src/points.ts";
import type { HeaderView, ResetMessage } from "../src/protocol.ts";
import { EMPTY, INTERRUPT_TIMEOUT_MS, STALE_S, Store, type Topic } from "../src/store.ts";

type Sent = { kind: string; id: string; name?: string; arguments?: unknown };

function made(): { store: Store; sent: Sent[]; topics: Topic[] } {
  const sent: Sent[] = [];
  const topics: Topic[] = [];
  const store = new Store((message) => sent.push(message as Sent));
  store.subscribe((topic) => topics.push(topic));
  return { store, sent, topics };
}

/** A buffer as a websocket hands it over: not at a multiple of eight bytes. */
function buffer(values: number[]): DataView {
  const bytes = new Uint8Array(8 * values.length + 3);
  bytes.set(new Uint8Array(Float64Array.from(values).buffer), 3);
  return new DataView(bytes.buffer, 3);
}
const header = (changed: Partial<HeaderView>): HeaderView => ({ ...EMPTY.header, ...changed });
const NO_SAMPLES = { times: [], devices: [] };
function filled(...triples: [number, number, number][]): Points {
  const points = new Points();
  for (const triple of triples) points.add(...triple);
  return points;
}

test("a reset brings everything, rows are appended, another reset starts anew", () => {
  const { store } = made();
  const state = { ...EMPTY, header: header({ state: "running" }) };
  const series = [{ name: "loss", points: 2 }, { name: "lr", points: 1 }];
  const reset: ResetMessage = { kind: "reset", state, series, samples: NO_SAMPLES };
  store.receive(reset, [buffer([1, 10, 3, 2, 11, 2, 1, 10, 0.5])]);
  assert.equal(store.state.header.state, "running");
  assert.equal(store.link, "live");
  store.receive({ kind: "points", series: [{ name: "loss", points: 1 }] }, [buffer([3, 12, NaN])]);
  assert.deepEqual(store.series.get("loss")?.value, [3, 2, NaN]);
  assert.deepEqual(store.series.get("lr")?.value, [0.5]);
  store.receive({ ...reset, series: [] }, [buffer([])]);
  assert.equal(store.series.size, 0);
});

test("a step that comes again replaces its value; a late one finds its place", () => {
  const points = filled([1, 1, 1], [3, 3, 3], [2, 2.5, 2], [3, 4, 30]);
  assert.deepEqual(points.value, [1, 2, 30]);
  points.add(1, 9, 10);
  const choice = { shown: null, x: "time" as const, log: false, smoothing: 0 };
  assert.deepEqual(columns(points, choice, 2)[0], [0.5, 2, 7]);
});

test("gaps, logarithms and smoothing", () => {
  const points = filled([1, 0, 1], [2, 0, Infinity], [3, 0, -1], [4, 0, 3]);
  const choice = { shown: null, x: "step" as const, log: true, smoothing: 0.5 };
  const [xs, raw, smooth, odd] = columns(points, choice, 0);
  assert.deepEqual(xs, [1, 2, 3, 4]);
  assert.deepEqual(raw, [1, null, null, 3]);
  assert.deepEqual([...odd], [[1, Infinity], [2, -1]]);
  assert.equal(smooth[0], 1);
  assert.ok(Math.abs(smooth[3]! - 7 / 3) < 1e-9);
});

test("answers are taken once and only by who asked", () => {
  const { store, sent, topics } = made();
  store.command("save", { name: "a" }, "save a");
  store.receive({ kind: "answer", id: "another", ok: true, text: "x", can_replace: false });
  assert.equal(store.answer, null);
  store.receive({ kind: "answer", id: sent[0]!.id, ok: false, text: "disk full", can_replace: false });
  assert.deepEqual(store.answer, { ok: false, text: "disk full" });
  assert.equal(store.pending.size, 0);
  assert.ok(topics.includes("answers"));
});

test("what was refused because something is there can be asked again, to replace it", () => {
  const { store, sent } = made();
  store.command("export", { folder: "out" }, "export to out");
  store.receive({ kind: "answer", id: sent[0]!.id, ok: false, text: "not empty", can_replace: true });
  store.replace(store.answer!.replacing!);
  assert.deepEqual([sent[1]!.name, sent[1]!.arguments], ["export", { folder: "out", overwrite: true }]);
  assert.equal(store.answer, null);
});

test("silence makes a panel stale, news make it live again", () => {
  mock.timers.enable({ apis: ["Date"], now: 1_000_000 });
  const { store } = made();
  store.receive({ kind: "heartbeat", time: 5000 });
  assert.equal(store.now(), 5000);
  mock.timers.tick(1000 * (STALE_S + 1));
  store.checkLink();
  assert.equal(store.link, "stale");
  store.receive({ kind: "heartbeat", time: 5008 });
  assert.equal(store.link, "live");
  mock.timers.reset();
});

test("an interrupt that nobody hears goes to the server; one that is heard does not", async () => {
  mock.timers.enable({ apis: ["setTimeout"] });
  for (const heard of ["nothing", "answer", "state"]) {
    const { store, sent } = made();
    const state = { ...EMPTY, header: header({ state: "running", kernel_id: "k-1" }) };
    store.receive({ kind: "reset", state, series: [], samples: NO_SAMPLES });
    const asked: (string | null)[] = [];
    store.stop((id) => (asked.push(id), Promise.resolve({ ok: true, text: "done" })));
    if (heard === "answer") store.receive({ kind: "answer", id: sent[0]!.id, ok: true, text: "", can_replace: false });
    if (heard === "state") store.receive({ kind: "state", changed: { header: header({ state: "interrupted" }) } });
    mock.timers.tick(INTERRUPT_TIMEOUT_MS + 1);
    await Promise.resolve();
    assert.deepEqual(asked, heard === "nothing" ? ["k-1"] : [], heard);
    if (heard === "nothing") assert.equal(store.answer?.text, "done");
  }
  mock.timers.reset();
});

test("samples keep the last minutes", () => {
  const { store } = made();
  const devices = [{ memory_bytes: [1], utilization: [null], power_w: [1] }];
  store.receive({ kind: "reset", state: EMPTY, series: [], samples: { times: [0], devices } });
  for (let time = 1; time < 400; time += 1) {
    store.receive({ kind: "samples", time, devices: [{ memory_bytes: time, utilization: null, power_w: 1 }] });
  }
  assert.equal(store.samples.times.length, 300);
  assert.equal(store.samples.devices[0]?.memory_bytes.at(-1), 399);
});
