import assert from "node:assert/strict";
import { mock, test } from "node:test";
import { columns } from "../src/columns.ts";
import { KEPT, Points } from "../src/points.ts";
import { PATIENCE_MS, STALE_S, Store, type Topic } from "../src/store.ts";

type Sent = { kind: string; id?: string; name?: string; arguments?: unknown };

function made(): { store: Store; sent: Sent[]; topics: Topic[] } {
  const sent: Sent[] = [];
  const topics: Topic[] = [];
  const store = new Store((message) => sent.push(message as Sent));
  store.watch((topic) => topics.push(topic));
  return { store, sent, topics };
}

/** A buffer as a websocket hands it over: not at a multiple of eight bytes. */
function buffer(values: number[]): DataView {
  const bytes = new Uint8Array(8 * values.length + 3);
  bytes.set(new Uint8Array(Float64Array.from(values).buffer), 3);
  return new DataView(bytes.buffer, 3);
}
const values = (points: Points | undefined): number[] => [...(points?.value.slice(0, points.length) ?? [])];

test("a reset brings everything, rows are appended, another reset starts anew", () => {
  const { store } = made();
  const reset = { kind: "reset", picture: { header: { state: "running" } }, series: [{ name: "loss", points: 2 }, { name: "lr", points: 1 }] };
  store.receive(reset, [buffer([1, 10, 3, 2, 11, 2, 1, 10, 0.5])]);
  assert.equal(store.picture.header.state, "running");
  assert.equal(store.link, "live");
  store.receive({ kind: "rows", series: [{ name: "loss", points: 1 }] }, [buffer([3, 12, NaN])]);
  assert.deepEqual(values(store.series.get("loss")), [3, 2, NaN]);
  assert.deepEqual(values(store.series.get("lr")), [0.5]);
  store.receive({ ...reset, series: [] }, [buffer([])]);
  assert.equal(store.series.size, 0);
});

test("a step that comes again replaces its value; a late one finds its place", () => {
  const points = new Points();
  points.append(Float64Array.from([1, 1, 1, 3, 3, 3, 2, 2.5, 2, 3, 4, 30]));
  assert.deepEqual(values(points), [1, 2, 30]);
  points.append(Float64Array.from([1, 9, 10]));
  const choice = { shown: null, x: "time" as const, log: false, smoothing: 0 };
  assert.deepEqual(columns(points, choice, 2)[0], [0.5, 2, 7]);
});

test("long series are thinned and keep their extremes and gaps", () => {
  const points = new Points();
  const triples = Array.from({ length: 3 * KEPT }, (_, i) => [i, i, i === 1234 ? 99 : i === 3000 ? NaN : Math.sin(i)]);
  points.append(Float64Array.from(triples.flat()));
  assert.ok(points.length < 2 * KEPT);
  assert.ok(values(points).includes(99));
  assert.ok(values(points).some(Number.isNaN));
  assert.equal(points.step[points.length - 1], 3 * KEPT - 1);
  const steps = [...points.step.slice(0, points.length)];
  assert.deepEqual(steps, [...steps].sort((a, b) => a - b));
});

test("gaps, logarithms and smoothing", () => {
  const points = new Points();
  points.append(Float64Array.from([1, 0, 1, 2, 0, Infinity, 3, 0, -1, 4, 0, 3]));
  const choice = { shown: null, x: "step" as const, log: true, smoothing: 0.5 };
  const [xs, raw, smooth, odd] = columns(points, choice, 0);
  assert.deepEqual(xs, [1, 2, 3, 4]);
  assert.deepEqual(raw, [1, null, null, 3]);
  assert.deepEqual([...odd], [[1, Infinity], [2, -1]]);
  assert.equal(smooth[0], 1);
  assert.ok(Math.abs(smooth[3]! - 7 / 3) < 1e-9);
});

test("what cannot be read changes nothing", () => {
  const { store } = made();
  store.receive({ kind: "reset", picture: { ranks: [{ rank: 0, state: "ready" }] } });
  const before = store.picture;
  const bad: [unknown, unknown[]][] = [
    [null, []], ["reset", []], [[], []], [{}, []], [{ kind: "nonsense" }, []], [{ kind: "reset", picture: 3 }, []],
    [{ kind: "rows", series: [{ name: "loss", points: 2 }] }, [buffer([1, 2, 3])]],
    [{ kind: "rows", series: [{ name: 3, points: 1 }] }, [buffer([1, 2, 3])]],
    [{ kind: "rows", series: [{ name: "loss", points: -1 }] }, [buffer([])]],
    [{ kind: "rows", series: [{ name: "loss", points: 1 }] }, ["text"]],
    [{ kind: "samples", time: "now", devices: [] }, []], [{ kind: "answer", id: 7 }, []], [{ kind: "beat" }, []],
  ];
  for (const [message, buffers] of bad) store.receive(message, buffers);
  assert.equal(store.dropped, bad.length);
  assert.equal(store.picture, before);
  assert.equal(store.series.size, 0);
});

test("wrong types inside a picture become empty values", () => {
  const { store } = made();
  const device = { name: 3, capacity_bytes: "80", used_bytes: -5, predicted: [{ part: "x", bytes: NaN }, 7], holders: [1, "a"], ranks: "0" };
  const profile = { verdict: 4, ranks: [{ rank: -1, step_s: "x", parts: [{ part: 3, seconds: NaN }, 7], straggler: 1 }, null], advice: [{ title: {}, arguments: [] }, "a"], notes: [1, "a"], time: "x", refused: null };
  const changed = { profile, devices: [device, null, 5], header: { state: "dancing", since: "x", words: {} }, progress: { share: 9 }, ranks: 4 };
  store.receive({ kind: "picture", changed });
  const [found] = store.picture.devices;
  assert.equal(store.picture.devices.length, 1);
  assert.deepEqual([found!.name, found!.capacity_bytes, found!.used_bytes, found!.ranks], ["device", null, null, []]);
  assert.deepEqual([found!.predicted, found!.holders], [[{ part: "x", bytes: 0 }], ["a"]]);
  assert.deepEqual([store.picture.header.state, store.picture.header.words], ["new", ""]);
  assert.equal(store.picture.progress?.share, 1);
  assert.deepEqual(store.picture.ranks, []);
  assert.deepEqual(store.picture.profile, {
    verdict: "", facts: "", gained: "", notes: ["a"], time: null, refused: "",
    ranks: [{ rank: 0, step_s: 0, parts: [{ part: "", seconds: 0 }], straggler: false, figures: "" }],
    advice: [{ title: "", text: "", command: "", does: "", arguments: {} }],
  });
});

test("answers are taken once and only by who asked", () => {
  const { store, sent, topics } = made();
  store.command("save", { name: "a" }, "save a");
  store.receive({ kind: "answer", id: "another", ok: true, text: "x" });
  assert.equal(store.answer, null);
  store.receive({ kind: "answer", id: sent[0]!.id, ok: false, text: "disk full" });
  assert.deepEqual(store.answer, { ok: false, text: "disk full" });
  assert.equal(store.asked.size, 0);
  assert.ok(topics.includes("answers"));
});

test("what was refused because something is there can be asked again, to replace it", () => {
  const { store, sent } = made();
  store.command("export", { folder: "out" }, "export to out");
  store.receive({ kind: "answer", id: sent[0]!.id, ok: false, text: "not empty", replaces: true });
  store.replace(store.answer!.replacing!);
  assert.deepEqual([sent[1]!.name, sent[1]!.arguments], ["export", { folder: "out", overwrite: true }]);
  assert.equal(store.answer, null);
});

test("silence makes a panel stale, news make it live again", () => {
  mock.timers.enable({ apis: ["Date"], now: 1_000_000 });
  const { store } = made();
  store.receive({ kind: "beat", time: 5000 });
  assert.equal(store.now(), 5000);
  mock.timers.tick(1000 * (STALE_S + 1));
  store.checkLink();
  assert.equal(store.link, "stale");
  store.receive({ kind: "beat", time: 5008 });
  assert.equal(store.link, "live");
  mock.timers.reset();
});

test("an interrupt that nobody hears goes to the server; one that is heard does not", async () => {
  mock.timers.enable({ apis: ["setTimeout"] });
  for (const heard of ["nothing", "answer", "state"]) {
    const { store, sent } = made();
    store.receive({ kind: "reset", picture: { header: { state: "running", kernel_id: "k-1" } } });
    const asked: (string | null)[] = [];
    store.stop((id) => (asked.push(id), Promise.resolve({ ok: true, text: "done" })));
    if (heard === "answer") store.receive({ kind: "answer", id: sent[0]!.id, ok: true, text: "" });
    if (heard === "state") store.receive({ kind: "picture", changed: { header: { state: "interrupted" } } });
    mock.timers.tick(PATIENCE_MS + 1);
    await Promise.resolve();
    assert.deepEqual(asked, heard === "nothing" ? ["k-1"] : [], heard);
    if (heard === "nothing") assert.equal(store.answer?.text, "done");
  }
  mock.timers.reset();
});

test("samples keep the last minutes", () => {
  const { store } = made();
  store.receive({ kind: "reset", picture: {}, series: [], samples: { times: [0], devices: [{ memory_bytes: [1, "x"], utilization: null }] } });
  assert.deepEqual(store.samples.devices[0]?.memory_bytes, [1, null]);
  for (let time = 1; time < 400; time += 1) {
    store.receive({ kind: "samples", time, devices: [{ memory_bytes: time, utilization: null, power_w: 1 }] });
  }
  assert.equal(store.samples.times.length, 300);
  assert.equal(store.samples.devices[0]?.memory_bytes.at(-1), 399);
});
