// Panel header: current operation and duration, buttons, progress, queue, notices.

import { ConfirmationArea } from "./confirm.ts";
import { h, KeyedList, setAttribute, setStyle, setText } from "./dom.ts";
import { duration } from "./format.ts";
import { BACKENDS, type QueuedCommand } from "./protocol.ts";
import { saveForm } from "./save_form.ts";
import type { Store } from "./store.ts";
import type { View } from "./view.ts";

const STATE_LABELS: Record<string, string> = {
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
const NOTICE_S = 30;
/** States in which there is nothing to stop. */
const IDLE_STATES = new Set(["new", "ready", "interrupted", "dead", "stopped"]);

export function headerView(store: Store): View {
  const dot = h("span", { class: "nbd-dot", "aria-hidden": "true" });
  const state = h("strong", { class: "nbd-state", role: "status", "aria-live": "polite" });
  const running = h("span", { class: "nbd-muted nbd-figures" });
  const setup = h("span", { class: "nbd-setup" });
  const session = h("span", { class: "nbd-muted nbd-figures" });
  const confirmationArea = new ConfirmationArea();
  const stop = h("button", { class: "nbd-stop", onclick: () => store.stop() }, "Stop");
  const restart = openingButton("Restart", () =>
    confirmationArea.confirm(
      restart,
      "Restart ends all ranks and starts new ones: their variables are lost.",
      "Restart ranks",
      () => store.command("restart", {}, "restart"),
    ),
  );
  const save = openingButton("Save", () => {
    const form = saveForm(store, () => confirmationArea.close());
    confirmationArea.open(save, form);
    form.querySelector("input")?.focus();
  });
  const switchButton = openingButton("Switch", () => {
    const form = switchForm(store, confirmationArea, switchButton);
    confirmationArea.open(switchButton, form);
    form.querySelector("select")?.focus();
  });
  const profile = h("button", { onclick: () => {
    const { unavailable_reason: reason } = store.state.profile;
    if (reason) store.showAnswer({ ok: false, text: reason });
    else store.command("profile", {}, "profile");
  } }, "Profile");
  function openingButton(label: string, open: () => void): HTMLButtonElement {
    return h(
      "button",
      {
        "aria-expanded": "false",
        onclick: (event: MouseEvent) =>
          (event.currentTarget as Element).getAttribute("aria-expanded") === "true"
            ? confirmationArea.close()
            : open(),
      },
      label,
    );
  }
  const progressText = h("span");
  const elapsed = h("span", { class: "nbd-muted nbd-figures" });
  const fill = h("div", { class: "nbd-fill" });
  const meter = h("div", { class: "nbd-progress", role: "progressbar", "aria-label": "progress" }, fill);
  const progress = h("div", { class: "nbd-line" }, progressText, elapsed, meter);
  const queueList = queueView(store);
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
      h("div", { class: "nbd-buttons", role: "group", "aria-label": "session" }, stop, restart, save, switchButton, profile),
    ),
    confirmationArea.root,
    progress,
    queueList.root,
    answer.root,
    notice.root,
  );

  function tick(): void {
    const { header, progress: operation } = store.state;
    const now = store.now();
    const timed = !["new", "ready", "stopped"].includes(header.state);
    setText(running, timed && header.state_since !== null ? duration(now - header.state_since) : "");
    setText(session, header.started_at === null || header.state === "stopped" ? "" : `session ${duration(now - header.started_at)}`);
    setText(elapsed, operation ? duration(now - operation.started_at) : "");
    for (const note of [answer, notice]) if (now > note.until) note.root.hidden = true;
    if (store.link !== "stale") return;
    setText(state, `no message from the kernel for ${duration(Date.now() / 1000 - store.lastMessageAt)}`);
    setText(running, "");
  }

  function update(): void {
    const { header, progress: operation, queue, notice: latest } = store.state;
    const { link } = store;
    setAttribute(dot, "data-state", link === "live" ? header.state : link);
    if (link === "gone") setText(state, "the kernel is gone: run the cell again");
    else if (link === "waiting") setText(state, "waiting for the kernel");
    else if (link === "live") setText(state, header.description || (STATE_LABELS[header.state] ?? header.state));
    const size = header.world_size ? `${header.world_size} ${header.world_size === 1 ? "rank" : "ranks"}` : "";
    const offload = header.offload && header.offload !== "none" ? `offload ${header.offload}` : "";
    const precision = header.precision === "no" ? "fp32" : header.precision;
    const facts = [header.backend, header.place || size, precision, offload, header.options];
    setText(setup, facts.filter(Boolean).join(" · "));
    setAttribute(setup, "title", setup.textContent);

    const gone = link === "gone" || link === "waiting";
    const idle = ["new", "stopped"].includes(header.state);
    stop.disabled = gone || IDLE_STATES.has(header.state);
    restart.disabled = gone || idle;
    for (const button of [save, switchButton]) button.disabled = gone || idle || header.state === "dead";
    // aria-disabled instead of disabled: the button stays focusable and shows the reason.
    const { unavailable_reason: reason } = store.state.profile;
    profile.disabled = gone;
    setAttribute(profile, "aria-disabled", reason ? "true" : null);
    setAttribute(profile, "title", reason || "measure where the next steps spend their time");
    if (gone && confirmationArea.isOpen) confirmationArea.close();

    progress.hidden = operation === null;
    setText(progressText, operation?.text ?? "");
    const fraction = operation?.fraction_done ?? null;
    setAttribute(meter, "aria-valuenow", fraction === null ? null : Math.round(100 * fraction));
    setAttribute(meter, "data-unknown", fraction === null);
    setStyle(fill, "width", fraction === null ? "30%" : `${100 * fraction}%`);
    queueList.show(queue, gone);
    const { answer: result } = store;
    answer.show(result && { kind: result.ok ? "info" : "error", text: result.text, time: store.answeredAt });
    replace.hidden = gone || !result?.replacing;
    notice.show(latest && latest.text !== result?.text ? latest : null);
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

  show(message: { kind: string; text: string; time: number } | null): void {
    this.root.hidden = !message?.text;
    this.until = message?.kind === "info" ? message.time + NOTICE_S : Infinity;
    setAttribute(this.root, "data-kind", message?.kind ?? null);
    setText(this.text, message?.text ?? "");
  }
}

/** Commands that wait for the cell, each with a Cancel button; otherwise the requested ones. */
function queueView(store: Store): { root: HTMLElement; show(queued: readonly QueuedCommand[], gone: boolean): void } {
  const title = h("span");
  const list = h("span", { class: "nbd-queue", role: "list" });
  const root = h("div", { class: "nbd-line nbd-muted" }, title, list);
  const keyed = new KeyedList<QueuedCommand, { root: HTMLElement; button: HTMLButtonElement }>(
    list,
    ({ id }) => id,
    ({ id, text }) => {
      const button = h("button", { class: "nbd-quiet", "aria-label": `cancel ${text}`, onclick: () => store.command("cancel", { command: id }, `cancel ${text}`) }, "Cancel");
      return { root: h("span", { class: "nbd-queued", role: "listitem" }, h("span", {}, text), button), button };
    },
    () => {},
  );
  function show(queued: readonly QueuedCommand[], gone: boolean): void {
    const requested = [...store.pending.values()].map(({ label }) => `requested: ${label}`);
    setText(title, queued.length ? "Waiting for the cell:" : requested.join(" · "));
    keyed.show(queued);
    list.hidden = queued.length === 0;
    for (const { button } of keyed.shown.values()) button.disabled = gone;
    root.hidden = queued.length + requested.length === 0;
  }
  return { root, show };
}

/** Form to switch to any backend and options, even without a plan or a matching row. */
function switchForm(store: Store, confirmationArea: ConfirmationArea, button: HTMLElement): HTMLElement {
  const { header, strategies } = store.state;
  const named = new Set([...strategies.rows.map((row) => row.backend), ...BACKENDS]);
  const backend = labeledSelect("backend", [...named].filter(Boolean), header.backend);
  const offload = labeledSelect("offload", ["none", "cpu"], header.offload || "none");
  const recompute = labeledSelect("activation checkpointing", ["as now", "on", "off"], "as now");
  const go = h("button", {
    class: "nbd-primary",
    onclick: () => {
      const args: Record<string, unknown> = { backend: backend.select.value };
      if (offload.select.value !== (header.offload || "none")) args.offload = offload.select.value;
      if (recompute.select.value !== "as now") {
        args.activation_checkpointing = recompute.select.value === "on";
      }
      const target = [args.backend, args.offload && `offload ${offload.select.value}`].filter(Boolean);
      confirmationArea.confirm(
        button,
        `Switch to ${target.join(", ")}: model, optimizer state and variables are kept. ` +
          "Training pauses during the switch and continues with the next cell.",
        "Switch now",
        () => store.command("switch", args, `switch to ${backend.select.value}`),
      );
    },
  }, "Switch…");
  const cancel = h("button", { onclick: () => confirmationArea.close() }, "Cancel");
  const onKey = (event: KeyboardEvent): void => {
    if (event.key === "Escape") confirmationArea.close();
  };
  return h(
    "div",
    { class: "nbd-confirm", role: "group", "aria-label": "switch", onkeydown: onKey },
    backend.label,
    offload.label,
    recompute.label,
    h("span", { class: "nbd-buttons nbd-end" }, go, cancel),
  );
}

function labeledSelect(label: string, values: string[], now: string): { label: HTMLElement; select: HTMLSelectElement } {
  const listed = now && !values.includes(now) ? [now, ...values] : values;
  const select = h("select", {}, ...listed.map((value) => h("option", { value }, value)));
  select.value = now;
  return { label: h("label", {}, h("span", { class: "nbd-muted" }, label), select), select };
}
