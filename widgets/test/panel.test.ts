import assert from "node:assert/strict";
import { mock, test } from "node:test";
import { SCENES } from "../dev/scenes.ts";
import { show } from "../src/main.ts";
import { Store } from "../src/store.ts";
import { drawn, page } from "./page.ts";

interface Sent {
  kind: string;
  id: string;
  name?: string;
  arguments?: Record<string, unknown>;
}

async function panel(scene: string): Promise<{ sent: Sent[]; store: Store; root: HTMLElement; close: () => void }> {
  const dom = page();
  const sent: Sent[] = [];
  const store = new Store((message) => sent.push(message as Sent));
  const close = show(store, dom.window.document.body);
  store.receive({ kind: "reset", state: SCENES[scene]!().state, series: [], samples: { times: [], devices: [] } });
  await drawn();
  return { sent, store, root: dom.window.document.body, close };
}

function button(root: Element, label: string | RegExp): HTMLButtonElement {
  const all = [...root.querySelectorAll("button")];
  const found = all.find((one) => (typeof label === "string" ? one.textContent === label : label.test(one.textContent ?? "")));
  assert.ok(found, `no button ${String(label)}`);
  return found;
}

for (const scene of Object.keys(SCENES)) {
  test(`${scene}: all texts are text`, async () => {
    const { root, close } = await panel(scene);
    assert.equal(root.querySelectorAll("img, b, script").length, 0);
    for (const one of root.querySelectorAll("button, input, select, [tabindex]")) {
      assert.ok(one.hasAttribute("data-lm-suppress-shortcuts"), one.outerHTML);
    }
    close();
    assert.equal(root.childElementCount, 0);
  });
}

test("stop is there while something runs", async () => {
  for (const [scene, there] of [["gpu", true], ["cpu", false], ["dead", false], ["hostile", false], ["empty", false]] as const) {
    const { root, close } = await panel(scene);
    assert.equal(button(root, "Stop").disabled, !there, scene);
    close();
  }
});

test("devices and ranks stand below their nodes", async () => {
  const { root, close } = await panel("nodes");
  const listed = [...root.querySelectorAll(".nbd-devices-list > *")].map((one) => one.className);
  const rows = Array.from({ length: 4 }, () => "nbd-device");
  assert.deepEqual(listed, ["nbd-node", ...rows, "nbd-node", ...rows]);
  const [alpha, beta] = [...root.querySelectorAll(".nbd-node")].map((one) => one.textContent);
  assert.match(alpha!, /^alpha4 x NVIDIA H100 .* 96 coreshost memory 214\.3 \/ 1,007\.0 GiB$/);
  assert.match(beta!, /^beta/);
  const heads = [...root.querySelectorAll(".nbd-ranks tbody > tr")].map((row) => row.firstElementChild!.textContent);
  assert.deepEqual(heads, ["alpha", "0", "1", "2", "3", "beta", "4", "5", "6", "7"]);
  close();
});

test("on one machine no node is named", async () => {
  const { root, close } = await panel("gpu");
  assert.equal(root.querySelectorAll(".nbd-node, .nbd-of-node").length, 0);
  close();
});

test("restart asks first, and can be taken back", async () => {
  const { root, sent, close } = await panel("gpu");
  const restart = button(root, "Restart");
  restart.click();
  assert.equal(sent.length, 0);
  assert.equal(restart.getAttribute("aria-expanded"), "true");
  assert.equal(root.ownerDocument.activeElement, button(root, "Restart ranks"));
  button(root, "Cancel").click();
  assert.equal(root.ownerDocument.activeElement, restart);
  restart.click();
  button(root, "Restart ranks").click();
  assert.deepEqual(sent.map((one) => one.name), ["restart"]);
  close();
});

test("choosing a strategy says what it will do, then switches", async () => {
  const { root, sent, close } = await panel("gpu");
  button(root, /^zero3fits/).click();
  assert.match(root.textContent ?? "", /Switches to zero3: moves 55\.9 GiB/);
  button(root, "Switch to it").click();
  assert.deepEqual([sent[0]?.name, sent[0]?.arguments], ["switch", { backend: "zero3" }]);
  close();
});

test("without rows the plan is not made again", async () => {
  for (const [scene, label] of [["gpu", "Plan again"], ["empty", "Plan"]] as const) {
    const { root, close } = await panel(scene);
    button(root, label);
    close();
  }
});

test("an open row offers no switch to the current strategy", async () => {
  const { root, store, close } = await panel("gpu");
  button(root, /^zero3fits/).click();
  const { strategies } = SCENES["gpu"]!().state;
  const rows = strategies.rows.map((row) => (row.label === "zero3" ? { ...row, current: true, effect: "" } : { ...row, current: false }));
  store.receive({ kind: "state", changed: { strategies: { ...strategies, rows } } });
  await drawn();
  assert.equal([...root.querySelectorAll("button")].some((one) => one.textContent === "Switch to it"), false);
  close();
});

test("a row that a button cannot do shows its line alone", async () => {
  const { root, close } = await panel("gpu");
  button(root, /^zero3, offload cpu/).click();
  assert.equal(root.querySelector(".nbd-strategies code")?.textContent, "%nbdist switch zero3");
  assert.equal([...root.querySelectorAll("button")].some((one) => one.textContent === "Switch to it"), false);
  close();
});

test("saving under a name that exists asks once more", async () => {
  const { root, sent, close } = await panel("gpu");
  for (const [name, further] of [["new", null], ["base", "Replace it"]] as const) {
    button(root, "Save").click();
    root.querySelector<HTMLInputElement>("input[aria-label='checkpoint name']")!.value = name;
    const form = root.querySelector(".nbd-question")!;
    button(form, "Save").click();
    if (further) button(form, further).click();
  }
  const saved = [{ name: "new" }, { name: "base", overwrite: true }];
  assert.deepEqual(sent.map((one) => one.arguments), saved);
  close();
});

test("Enter saves, and does not press the button that has the focus then", async () => {
  const { root, sent, close } = await panel("gpu");
  button(root, "Save").click();
  const name = root.querySelector<HTMLInputElement>("input[aria-label='checkpoint name']")!;
  name.value = "new";
  const Key = root.ownerDocument.defaultView!.KeyboardEvent;
  const enter = new Key("keydown", { key: "Enter", bubbles: true, cancelable: true });
  assert.equal(name.dispatchEvent(enter), false);
  assert.deepEqual(sent.map((one) => one.name), ["save"]);
  assert.equal(root.querySelector(".nbd-question")!.childElementCount, 0);
  close();
});

test("loading asks first", async () => {
  const { root, sent, close } = await panel("gpu");
  root.querySelector<HTMLButtonElement>("[aria-label='load base']")!.click();
  assert.equal(sent.length, 0);
  button(root, "Load it").click();
  assert.deepEqual(sent[0]?.arguments, { name: "base" });
  close();
});

test("a command that waits can be cancelled", async () => {
  const { root, sent, store, close } = await panel("gpu");
  assert.match(root.querySelector(".nbd-queue")!.textContent!, /switch to zero3/);
  const cancel = root.querySelector<HTMLButtonElement>("[aria-label='cancel switch to zero3']")!;
  cancel.click();
  assert.deepEqual([sent[0]?.name, sent[0]?.arguments], ["cancel", { command: "1" }]);
  store.receive({ kind: "state", changed: { queue: [] } });
  await drawn();
  assert.equal(root.querySelector<HTMLElement>(".nbd-queue")!.hidden, true);
  close();
});

test("an export into a folder with files offers to replace them", async () => {
  const { root, sent, store, close } = await panel("gpu");
  const replace = button(root, "Replace it");
  assert.equal(replace.hidden, true);
  store.command("export", { folder: "out" }, "export to out");
  store.receive({ kind: "answer", id: sent[0]!.id, ok: false, text: "out is not empty", can_replace: true });
  await drawn();
  assert.equal(replace.hidden, false);
  replace.click();
  await drawn();
  assert.deepEqual(sent[1]?.arguments, { folder: "out", overwrite: true });
  assert.equal(replace.hidden, true);
  close();
});

test("an open log follows a rank that prints, but not under a reader's hands", async () => {
  mock.timers.enable({ apis: ["setInterval", "Date"] });
  const { root, sent, store, close } = await panel("gpu");
  const requests = (): number => sent.filter((one) => one.kind === "log").length;
  const printed = (num_chars: number): void => {
    const ranks = store.state.ranks.map((rank) => ({ ...rank, num_chars }));
    store.receive({ kind: "state", changed: { ranks } });
    mock.timers.tick(3000);
  };
  root.querySelector<HTMLButtonElement>("[aria-label='log of rank 0']")!.click();
  store.receive({ kind: "log", rank: 0, search: "", lines: ["first"] });
  await drawn();
  printed(4000); // as many as when it was asked
  assert.equal(requests(), 1);
  printed(4010);
  assert.equal(requests(), 2);
  store.receive({ kind: "log", rank: 0, search: "other", lines: ["of another page"] });
  await drawn();
  const lines = root.querySelector(".nbd-log")!;
  assert.equal(lines.textContent, "first");
  root.ownerDocument.getSelection()!.selectAllChildren(lines);
  printed(4020);
  assert.equal(requests(), 2);
  root.ownerDocument.getSelection()!.removeAllRanges();
  mock.timers.tick(3000);
  assert.equal(requests(), 3);
  button(root, "Close").click();
  printed(4030);
  assert.equal(requests(), 3);
  close();
  mock.timers.reset();
});

test("the mark of the device's memory and the reason for a recommendation are told", async () => {
  const { root, close } = await panel("gpu");
  const page = [...root.querySelectorAll("[role=tabpanel]")].find((one) => one.querySelector(".nbd-strategies"))!;
  assert.match(page.querySelector(".nbd-legend")!.textContent!, /parameters.*free memory of a device/);
  assert.match(page.textContent!, /Recommended: zero3 \(the fastest that fits/);
  close();
});

test("a kernel that is gone disables what it can no longer do", async () => {
  const { root, store, close } = await panel("gpu");
  store.connect("gone");
  await drawn();
  assert.match(root.textContent ?? "", /the kernel is gone: run the cell again/);
  for (const label of ["Stop", "Restart", "Save", "Switch", "Profile"]) assert.equal(button(root, label).disabled, true);
  close();
});

test("a session that was stopped can neither be restarted nor planned, and does not age", async () => {
  const { root, store, close } = await panel("gpu");
  assert.match(root.textContent ?? "", /session \d/);
  store.state.header.state = "stopped";
  store.notify("header");
  await drawn();
  for (const label of ["Stop", "Restart", "Save", "Switch", "Plan again"]) assert.equal(button(root, label).disabled, true, label);
  assert.doesNotMatch(root.textContent ?? "", /session \d/);
  close();
});
