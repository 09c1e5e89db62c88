import assert from "node:assert/strict";
import { test } from "node:test";
import { SCENES } from "../dev/scenes.ts";
import { show } from "../src/main.ts";
import { Store } from "../src/store.ts";
import { drawn, page } from "./page.ts";

interface Sent {
  kind: string;
  name?: string;
  arguments?: Record<string, unknown>;
}

async function panel(scene: string): Promise<{ sent: Sent[]; store: Store; root: HTMLElement; close: () => void }> {
  const dom = page();
  const sent: Sent[] = [];
  const store = new Store((message) => sent.push(message));
  const close = show(store, dom.window.document.body);
  store.receive({ kind: "reset", picture: SCENES[scene]!().picture, series: [], samples: null });
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

test("a row that a button cannot do shows its line alone", async () => {
  const { root, close } = await panel("gpu");
  button(root, /^zero3, offload cpu/).click();
  assert.equal(root.querySelector("code")?.textContent, "%nbdist switch zero3");
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

test("a kernel that is gone disables what it can no longer do", async () => {
  const { root, store, close } = await panel("gpu");
  store.connect("gone");
  await drawn();
  assert.match(root.textContent ?? "", /the kernel is gone: run the cell again/);
  for (const label of ["Stop", "Restart", "Save", "Switch"]) assert.equal(button(root, label).disabled, true);
  close();
});
