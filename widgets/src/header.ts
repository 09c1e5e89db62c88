// Panel header: current operation and duration, buttons, progress, queue, notices.

import { Question } from "./confirm.ts";
import { attribute, h, Keyed, say, style } from "./dom.ts";
import { duration } from "./format.ts";
import { BACKENDS, type QueuedCommand } from "./protocol.ts";
import { saveForm } from "./save.ts";
import type { Store } from "./store.ts";
import type { View } from "./view.ts";

const WORDS: Record<string, string> = {
  new: "not started",
  starting: "starting",
  ready: "ready",
  running: "running",
  switching: "switching",
  saving: "saving",
  loading: "loading",
  exporting: "exporting",
  interrupted: "interrupted",
  dead: "a rank died",
  stopped: "stopped",
};
/** Success messages are shown for this long, errors until the next message. */
const TOLD_S = 30;
/** States in which there is nothing to stop. */
const RESTS = new Set(["new", "ready", "interrupted", "dead", "stopped"]);

export function headerView(store: Store): View {
  const dot = h("span", { class: "nbd-dot", "aria-hidden": "true" });
  const state = h("strong", { class: "nbd-state", role: "status", "aria-live": "polite" });
  const running = h("span", { class: "nbd-muted nbd-figures" });
  const setup = h("span", { class: "nbd-setup" });
  const session = h("span", { class: "nbd-muted nbd-figures" });
  const question = new Question();
  const stop = h("button", { class: "nbd-stop", onclick: () => store.stop() }, "Stop");
  const restart = opener("Restart", () =>
    question.ask(
      restart,
      "Restart ends all ranks and starts new ones: their variables are lost.",
      "Restart ranks",
      () => store.command("restart", {}, "restart"),
    ),
  );
  const save = opener("Save", () => {
    const form = saveForm(store, () => question.close());
    question.put(save, form);
    form.querySelector("input")?.focus();
  });
  const change = opener("Switch", () => {
    const form = switchForm(store, question, change);
    question.put(change, form);
    form.querySelector("select")?.focus();
  });
  const profile = h("button", { onclick: () => {
    const { refused } = store.picture.profile;
    if (refused) store.say({ ok: false, text: refused });
    else store.command("profile", {}, "profile");
  } }, "Profile");
  function opener(label: string, open: () => void): HTMLButtonElement {
    return h(
      "button",
      {
        "aria-expanded": "false",
        onclick: (event: MouseEvent) =>
          (event.currentTarget as Element).getAttribute("aria-expanded") === "true"
            ? question.close()
            : open(),
      },
      label,
    );
  }
  const words = h("span");
  const elapsed = h("span", { class: "nbd-muted nbd-figures" });
  const fill = h("div", { class: "nbd-fill" });
  const meter = h("div", { class: "nbd-progress", role: "progressbar", "aria-label": "progress" }, fill);
  const progress = h("div", { class: "nbd-line" }, words, elapsed, meter);
  const queue = queueView(store);
  const replace = h("button", { onclick: () => {
    const refused = store.answer?.replacing;
    if (refused) store.replace(refused);
  } }, "Replace it");
  const answer = new Note(replace);
  const notice = new Note();
  const root = h(
    "header",
    { class: "nbd-header" },
    h(
      "div",
      { class: "nbd-head" },
      h(
        "div",
        { class: "nbd-grow nbd-who" },
        h("div", { class: "nbd-now" }, dot, state, running),
        h("div", { class: "nbd-sub" }, setup, session),
      ),
      h("div", { class: "nbd-buttons", role: "group", "aria-label": "session" }, stop, restart, save, change, profile),
    ),
    question.root,
    progress,
    queue.root,
    answer.root,
    notice.root,
  );

  function tick(): void {
    const { header, progress: work } = store.picture;
    const now = store.now();
    const timed = !["new", "ready", "stopped"].includes(header.state);
    say(running, timed && header.since !== null ? duration(now - header.since) : "");
    say(session, header.started === null || header.state === "stopped" ? "" : `session ${duration(now - header.started)}`);
    say(elapsed, work ? duration(now - work.since) : "");
    for (const note of [answer, notice]) if (now > note.until) note.root.hidden = true;
    if (store.link !== "stale") return;
    say(state, `no message from the kernel for ${duration(Date.now() / 1000 - store.heard)}`);
    say(running, "");
  }

  function update(): void {
    const { header, progress: work, queue: waiting, notice: told } = store.picture;
    const { link } = store;
    attribute(dot, "data-state", link === "live" ? header.state : link);
    if (link === "gone") say(state, "the kernel is gone: run the cell again");
    else if (link === "waiting") say(state, "waiting for the kernel");
    else if (link === "live") say(state, header.words || (WORDS[header.state] ?? header.state));
    const size = header.world_size ? `${header.world_size} ${header.world_size === 1 ? "rank" : "ranks"}` : "";
    const offload = header.offload && header.offload !== "none" ? `offload ${header.offload}` : "";
    const precision = header.precision === "no" ? "fp32" : header.precision;
    const facts = [header.backend, header.place || size, precision, offload, header.options];
    say(setup, facts.filter(Boolean).join(" · "));
    attribute(setup, "title", setup.textContent);

    const gone = link === "gone" || link === "waiting";
    const idle = ["new", "stopped"].includes(header.state);
    stop.disabled = gone || RESTS.has(header.state);
    restart.disabled = gone || idle;
    for (const button of [save, change]) button.disabled = gone || idle || header.state === "dead";
    // aria-disabled instead of disabled: the button stays focusable and shows the reason.
    const { refused } = store.picture.profile;
    profile.disabled = gone;
    attribute(profile, "aria-disabled", refused ? "true" : null);
    attribute(profile, "title", refused || "measure where the next steps spend their time");
    if (gone && question.open) question.close();

    progress.hidden = work === null;
    say(words, work?.text ?? "");
    const share = work?.share ?? null;
    attribute(meter, "aria-valuenow", share === null ? null : Math.round(100 * share));
    attribute(meter, "data-unknown", share === null);
    style(fill, "width", share === null ? "30%" : `${100 * share}%`);
    queue.show(waiting, gone);
    const { answer: said } = store;
    answer.show(said && { kind: said.ok ? "info" : "error", text: said.text, time: store.answered });
    replace.hidden = gone || !said?.replacing;
    notice.show(told && told.text !== said?.text ? told : null);
    tick();
  }
  const topics = ["header", "profile", "progress", "queue", "notice", "answers", "link"] as const;
  return { root, topics, update, tick };
}

/** Message about the result of a command, with an optional button. */
class Note {
  private readonly text = h("span");
  readonly root: HTMLElement;
  until = Infinity;

  constructor(button: HTMLButtonElement | null = null) {
    this.root = h("div", { class: "nbd-notice", role: "status", "aria-live": "polite" }, this.text, button);
  }

  show(told: { kind: string; text: string; time: number } | null): void {
    this.root.hidden = !told?.text;
    this.until = told?.kind === "info" ? told.time + TOLD_S : Infinity;
    attribute(this.root, "data-kind", told?.kind ?? null);
    say(this.text, told?.text ?? "");
  }
}

/** Commands that wait for the cell, each with a Cancel button; otherwise the requested ones. */
function queueView(store: Store): { root: HTMLElement; show(waiting: readonly QueuedCommand[], gone: boolean): void } {
  const told = h("span");
  const list = h("span", { class: "nbd-queue", role: "list" });
  const root = h("div", { class: "nbd-line nbd-muted" }, told, list);
  const keyed = new Keyed<QueuedCommand, { root: HTMLElement; button: HTMLButtonElement }>(
    list,
    ({ id }) => id,
    ({ id, text }) => {
      const button = h("button", { class: "nbd-quiet", "aria-label": `cancel ${text}`, onclick: () => store.command("cancel", { command: id }, `cancel ${text}`) }, "Cancel");
      return { root: h("span", { class: "nbd-queued", role: "listitem" }, h("span", {}, text), button), button };
    },
    () => {},
  );
  function show(waiting: readonly QueuedCommand[], gone: boolean): void {
    const asked = [...store.asked.values()].map(({ words }) => `requested: ${words}`);
    say(told, waiting.length ? "Waiting for the cell:" : asked.join(" · "));
    keyed.show(waiting);
    list.hidden = waiting.length === 0;
    for (const { button } of keyed.shown.values()) button.disabled = gone;
    root.hidden = waiting.length + asked.length === 0;
  }
  return { root, show };
}

/** Form to switch to any backend and options, even without a plan or a matching row. */
function switchForm(store: Store, question: Question, asker: HTMLElement): HTMLElement {
  const { header, strategies } = store.picture;
  const named = new Set([...strategies.rows.map((row) => row.backend), ...BACKENDS]);
  const backend = choice("backend", [...named].filter(Boolean), header.backend);
  const offload = choice("offload", ["none", "cpu"], header.offload || "none");
  const recompute = choice("activation checkpointing", ["as now", "on", "off"], "as now");
  const go = h("button", {
    class: "nbd-primary",
    onclick: () => {
      const args: Record<string, unknown> = { backend: backend.select.value };
      if (offload.select.value !== (header.offload || "none")) args.offload = offload.select.value;
      if (recompute.select.value !== "as now") {
        args.activation_checkpointing = recompute.select.value === "on";
      }
      const words = [args.backend, args.offload && `offload ${offload.select.value}`].filter(Boolean);
      question.ask(
        asker,
        `Switch to ${words.join(", ")}: model, optimizer state and variables are kept. ` +
          "Training pauses during the switch and continues with the next cell.",
        "Switch now",
        () => store.command("switch", args, `switch to ${backend.select.value}`),
      );
    },
  }, "Switch…");
  const cancel = h("button", { onclick: () => question.close() }, "Cancel");
  const escape = (event: KeyboardEvent): void => {
    if (event.key === "Escape") question.close();
  };
  return h(
    "div",
    { class: "nbd-confirm", role: "group", "aria-label": "switch", onkeydown: escape },
    backend.label,
    offload.label,
    recompute.label,
    h("span", { class: "nbd-buttons nbd-end" }, go, cancel),
  );
}

function choice(label: string, values: string[], now: string): { label: HTMLElement; select: HTMLSelectElement } {
  const listed = now && !values.includes(now) ? [now, ...values] : values;
  const select = h("select", {}, ...listed.map((value) => h("option", { value }, value)));
  select.value = now;
  return { label: h("label", {}, h("span", { class: "nbd-muted" }, label), select), select };
}
