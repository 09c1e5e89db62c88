import assert from "node:assert/strict";
import { test } from "node:test";
import { SCENES } from "../dev/scenes.ts";
import { show } from "../src/main.ts";
import { STEP_COLORS } from "../src/protocol.ts";
import { Store } from "../src/store.ts";
import { describeRank, formatShare } from "../src/step_times.ts";
import { drawn, page } from "./page.ts";

type Sent = { kind: string; name?: string; arguments?: unknown };

async function panel(scene: string): Promise<{ sent: Sent[]; store: Store; root: HTMLElement; close: () => void }> {
  const dom = page();
  const sent: Sent[] = [];
  const store = new Store((message) => sent.push(message as Sent));
  const close = show(store, dom.window.document.body);
  store.receive({ kind: "reset", state: SCENES[scene]!().state, series: [], samples: { times: [], devices: [] } });
  await drawn();
  return { sent, store, root: dom.window.document.querySelector<HTMLElement>(".nbdist")!, close };
}
const section = (root: Element): HTMLElement => root.querySelector<HTMLElement>("[aria-label=profile]")!;
const button = (root: Element, label: string): HTMLButtonElement =>
  [...root.querySelectorAll("button")].find((one) => one.textContent === label)!;

test("the verdict stands above one bar for each rank; parts have names, shares and patterns", async () => {
  const { root, close } = await panel("gpu");
  const profile = section(root);
  assert.match(profile.textContent!, /Profile.*communication-bound: 41 %.*10 steps.*predicted 35 % faster, measured 31 %.*rank 0/);
  const bars = [...profile.querySelectorAll(".nbd-bar")];
  assert.equal(bars.length, 8);
  const parts = [...bars[0]!.querySelectorAll<HTMLElement>(".nbd-time")];
  assert.deepEqual(parts.map((part) => part.dataset.part), Object.keys(STEP_COLORS));
  const widths = parts.map((part) => parseFloat(part.style.width));
  assert.ok(Math.abs(widths.reduce((sum, one) => sum + one, 0) - 100) < 0.1);
  const legend = [...profile.querySelectorAll(".nbd-legend > span")].map((one) => one.textContent);
  assert.deepEqual([legend.length, legend[2], legend[3]], [10, "forward 18 %", "backward 31 %"]);
  const slow = [...profile.querySelectorAll<HTMLElement>(".nbd-step .nbd-badge")].map((badge) => !badge.hidden);
  assert.deepEqual(slow, [0, 1, 2, 3, 4, 5, 6, 7].map((rank) => rank === 5));
  close();
});

test("focus, arrow keys and the pointer give the figures", async () => {
  const { root, close } = await panel("gpu");
  const bar = section(root).querySelector<HTMLElement>(".nbd-bar")!;
  const reading = section(root).querySelector(".nbd-reading")!;
  const hint = reading.textContent;
  const { KeyboardEvent, MouseEvent } = root.ownerDocument.defaultView!;
  const press = (key: string): boolean => bar.dispatchEvent(new KeyboardEvent("keydown", { key, cancelable: true }));
  bar.focus();
  assert.match(reading.textContent!, /^rank 0: step 212 ms: data 4\.0 ms, 2 %; .*idle.*all_gather/);
  assert.equal(reading.textContent, bar.getAttribute("aria-label"));
  for (let time = 0; time < 3; time += 1) assert.equal(press("ArrowRight"), false);
  assert.equal(reading.textContent, "rank 0: forward 38 ms, 18 %");
  assert.equal(bar.querySelector("[data-on]")!.getAttribute("data-part"), "forward");
  press("ArrowLeft");
  assert.equal(reading.textContent, "rank 0: copies 1.5 ms, 1 %");
  assert.equal(press("Tab"), true);
  bar.blur();
  assert.equal(reading.textContent, hint);
  bar.querySelector("[data-part=backward]")!.dispatchEvent(new MouseEvent("pointerover", { bubbles: true }));
  assert.equal(reading.textContent, "rank 0: backward 66 ms, 31 %");
  bar.dispatchEvent(new MouseEvent("pointerleave"));
  assert.equal(bar.querySelector("[data-on]"), null);
  close();
});

test("a new state does not take away what somebody reads", async () => {
  const { root, store, close } = await panel("gpu");
  section(root).querySelector<HTMLElement>(".nbd-bar")!.focus();
  const reading = section(root).querySelector(".nbd-reading")!;
  const before = reading.textContent;
  store.receive({ kind: "state", changed: { profile: { ...store.state.profile, unavailable_reason: "not now" } } });
  await drawn();
  assert.equal(reading.textContent, before);
  close();
});

test("advice has its line to copy; a switch says first what it will do", async () => {
  const { root, sent, close } = await panel("gpu");
  const [first, second] = [...section(root).querySelectorAll(".nbd-advice > div")];
  assert.match(first!.textContent!, /^zero2: about 52 % faster/);
  assert.equal(second!.querySelector("code")!.textContent, "DataLoader(..., num_workers=4, persistent_workers=True)");
  assert.equal(button(second!, "Switch…").hidden, true);
  const ask = button(first!, "Switch…");
  ask.click();
  assert.equal(sent.length, 0);
  assert.equal(ask.getAttribute("aria-expanded"), "true");
  assert.match(first!.textContent!, /weights, optimizer state and variables are kept/);
  button(first!, "Cancel").click();
  assert.equal(root.ownerDocument.activeElement, ask);
  ask.click();
  button(first!, "Switch to it").click();
  assert.deepEqual([sent[0]?.name, sent[0]?.arguments], ["switch", { backend: "zero2" }]);
  close();
});

test("where there is no clipboard the line is selected", async () => {
  const { root, close } = await panel("gpu");
  const first = section(root).querySelector(".nbd-advice > div")!;
  const copy = button(first, "Copy");
  assert.equal(copy.getAttribute("aria-label"), "copy %nbdist switch zero2");
  copy.click();
  await drawn();
  assert.equal(copy.textContent, "Selected: press Ctrl+C");
  assert.equal(root.ownerDocument.getSelection()!.toString(), "%nbdist switch zero2");
  close();
});

test("the button profiles; where it cannot it tells why and asks nothing", async () => {
  for (const [scene, asked] of [["gpu", true], ["cpu", false]] as const) {
    const { root, sent, store, close } = await panel(scene);
    const profile = button(root, "Profile");
    profile.click();
    await drawn();
    assert.deepEqual(sent.map((one) => [one.name, one.arguments]), asked ? [["profile", {}]] : []);
    assert.equal(profile.getAttribute("aria-disabled"), asked ? null : "true");
    if (!asked) assert.match(root.querySelector(".nbd-header")!.textContent!, /its verdict comes in a few seconds/);
    if (!asked) assert.match(profile.title, /a profile is under way/);
    store.connect("gone");
    await drawn();
    assert.equal(profile.disabled, true);
    close();
  }
});

test("before the first profile there is no section; without ranks nothing is switched", async () => {
  const { root, store, close } = await panel("empty");
  assert.equal(section(root).hidden, true);
  const { profile } = SCENES.gpu!().state;
  store.receive({ kind: "state", changed: { profile } });
  await drawn();
  assert.equal(section(root).hidden, false);
  assert.equal(button(section(root), "Switch…").hidden, true);
  close();
});

test("figures of no step are no numbers that frighten", () => {
  assert.equal(formatShare(1, 0), "0 %");
  assert.equal(describeRank({ rank: 1, step_s: 0, parts: [], straggler: false, figures: "" }), "rank 1: step 0 ms: ");
});
