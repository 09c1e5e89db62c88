// State of one panel: created once per widget model, observed by each of its views.

import { HEARTBEAT_INTERVAL_S, MAX_SAMPLES } from "./protocol.ts";
import type { CommandName, CurveSlice, DeviceSample, FrontendMessage, PageMessage, PanelState, SampleHistory } from "./protocol.ts";
import { Points } from "./points.ts";
import { interruptKernel, type CommandResult } from "./notebook_server.ts";

/** Topics that a view can watch: a key of the state, or one of these. */
export type Topic = keyof PanelState | "series" | "samples" | "link" | "answers" | "log" | "curve_options";
/** live: messages arrive; stale: none for a while; gone: the kernel has closed the connection. */
export type Link = "waiting" | "live" | "stale" | "gone";

export interface PendingCommand {
  name: CommandName;
  args: Record<string, unknown>;
  label: string;
}
export interface Answer extends CommandResult {
  /** Command that was refused only because its target exists, and that could replace it. */
  replacing?: PendingCommand;
}
/** Display options of curves, shared by all views of the panel. */
export interface CurveOptions {
  shown: string[] | null;
  x: "step" | "time";
  log: boolean;
  smoothing: number;
}
export interface Log {
  rank: number | null;
  search: string;
  lines: string[];
}

/** Three missed heartbeats, plus one second of latency. */
export const STALE_S = 3 * HEARTBEAT_INTERVAL_S + 1;
/** If an interrupt has no effect for this long, it is sent to the server instead. */
export const INTERRUPT_TIMEOUT_MS = 1000;

/** State before the first message of the kernel. */
export const EMPTY: PanelState = {
  header: {
    backend: "",
    world_size: 0,
    precision: "",
    offload: "",
    options: "",
    place: "",
    state: "new",
    description: "",
    state_since: null,
    started_at: null,
    kernel_id: null,
    version: "",
  },
  nodes: [],
  devices: [],
  strategies: { rows: [], note: "" },
  profile: { verdict: "", facts: "", outcome: "", ranks: [], advice: [], notes: [], time: null, unavailable_reason: "" },
  ranks: [],
  checkpoints: [],
  progress: null,
  queue: [],
  marks: [],
  notice: null,
};

export class Store {
  state: PanelState = EMPTY;
  series = new Map<string, Points>();
  samples: SampleHistory = { times: [], devices: [] };
  link: Link = "waiting";
  answer: Answer | null = null;
  /** Time of the answer in Unix seconds of the kernel. */
  answeredAt = 0;
  log: Log | null = null;
  curveOptions: CurveOptions = { shown: null, x: "step", log: false, smoothing: 0 };
  /** Commands sent and not yet answered, by id. */
  pending = new Map<string, PendingCommand>();
  /** Time of the latest message in Unix seconds of this machine. */
  lastMessageAt = Date.now() / 1000;
  /** The kernel's clock minus this machine's, which may be a different machine. */
  private clockOffset = 0;
  private listeners = new Set<(topic: Topic) => void>();
  private numCommands = 0;
  private readonly name = Math.random().toString(36).slice(2, 10);

  constructor(private readonly send: (message: PageMessage) => void) {}

  /** Return the Unix time of the kernel's clock. */
  now(): number {
    return Date.now() / 1000 + this.clockOffset;
  }

  /** Whether there are ranks, and a kernel, to run a command. */
  get hasRanks(): boolean {
    return this.link !== "gone" && !["new", "dead", "stopped"].includes(this.state.header.state);
  }

  /** Call `listener` with each topic that changes. Returns a function that unsubscribes. */
  subscribe(listener: (topic: Topic) => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  notify(topic: Topic): void {
    for (const listener of this.listeners) listener(topic);
  }

  /** Process a message of the kernel. */
  receive(message: FrontendMessage, buffers: readonly ArrayBufferView[] = []): void {
    this.lastMessageAt = Date.now() / 1000;
    this.connect("live");
    switch (message.kind) {
      case "reset":
        this.series.clear();
        this.samples = message.samples;
        this.change(message.state);
        this.append(message.series, buffers[0]);
        this.notify("samples");
        break;
      case "state":
        this.change(message.changed);
        break;
      case "points":
        this.append(message.series, buffers[0]);
        break;
      case "samples":
        this.clockOffset = message.time - Date.now() / 1000;
        this.sample(message.time, message.devices);
        break;
      case "answer": {
        const command = this.pending.get(message.id);
        if (!command) return; // the command of another page's store
        this.pending.delete(message.id);
        this.showAnswer({ ok: message.ok, text: message.text, ...(message.can_replace && { replacing: command }) });
        break;
      }
      case "log":
        this.log = { rank: message.rank, search: message.search, lines: message.lines };
        this.notify("log");
        break;
      case "heartbeat":
        this.clockOffset = message.time - Date.now() / 1000;
    }
  }

  /** Publish the result of a command, as topic "answers". */
  showAnswer(answer: Answer): void {
    this.answer = answer;
    this.answeredAt = this.now();
    this.notify("answers");
  }

  private change(changed: Partial<PanelState>): void {
    this.state = { ...this.state, ...changed };
    for (const key of Object.keys(changed)) this.notify(key as keyof PanelState);
  }

  /** Append the points of a message: for each curve in turn triples of step, time and value. */
  private append(curves: CurveSlice[], buffer?: ArrayBufferView): void {
    if (!buffer) return;
    // Copy, because a buffer from a websocket need not be aligned to eight bytes.
    const { byteOffset: from, byteLength } = buffer;
    const numbers = new Float64Array(buffer.buffer.slice(from, from + byteLength) as ArrayBuffer);
    let at = 0;
    for (const { name, points: added } of curves) {
      const points = this.series.get(name) ?? new Points();
      this.series.set(name, points);
      for (const end = at + 3 * added; at < end; at += 3) points.add(numbers[at]!, numbers[at + 1]!, numbers[at + 2]!);
    }
    this.notify("series");
  }

  private sample(time: number, devices: DeviceSample[]): void {
    const { times, devices: columns } = this.samples;
    times.push(time);
    devices.forEach((sample, index) => {
      const column = (columns[index] ??= { memory_bytes: [], utilization: [], power_w: [] });
      for (const key of ["memory_bytes", "utilization", "power_w"] as const) {
        column[key].push(sample[key]);
        if (column[key].length > MAX_SAMPLES) column[key].shift();
      }
    });
    if (times.length > MAX_SAMPLES) times.shift();
    this.notify("samples");
  }

  /** Mark the link as stale if messages have stopped; called once a second. */
  checkLink(): void {
    if (this.state.header.state === "stopped") return; // no further messages follow
    if (this.link === "live" && Date.now() / 1000 - this.lastMessageAt > STALE_S) this.connect("stale");
  }

  connect(link: Link): void {
    if (link === this.link) return;
    this.link = link;
    this.notify("link");
  }

  /** Request the full state from the kernel. */
  hello(): void {
    this.send({ kind: "hello" });
  }

  /** Send a command; its answer is published as topic "answers". */
  command(name: CommandName, args: Record<string, unknown>, label: string): string {
    this.numCommands += 1;
    const id = `${this.name}-${this.numCommands}`;
    this.pending.set(id, { name, args, label });
    this.answer = null;
    this.notify("answers");
    this.send({ kind: "command", id, name, arguments: args });
    return id;
  }

  /** Repeat a command that was refused because its target exists, and replace the target. */
  replace({ name, args, label }: PendingCommand): void {
    this.command(name, { ...args, overwrite: true }, label);
  }

  /**
   * Interrupt the running cell. A kernel that is blocked by a cell may not read messages, so if
   * nothing has changed after a second, the notebook server is asked to interrupt it.
   */
  stop(interrupt = interruptKernel): void {
    const state = this.state.header.state;
    const id = this.command("interrupt", {}, "stop");
    setTimeout(() => {
      const header = this.state.header;
      if (!this.pending.has(id) || header.state !== state) return;
      void interrupt(header.kernel_id).then((answer) => {
        this.pending.delete(id);
        this.showAnswer(answer);
      });
    }, INTERRUPT_TIMEOUT_MS);
  }

  /** Request the log of a rank or the launcher; it is published as topic "log". */
  requestLog(rank: number | null, search: string): void {
    this.send({ kind: "log", rank, search });
  }

  setCurveOptions(changed: Partial<CurveOptions>): void {
    this.curveOptions = { ...this.curveOptions, ...changed };
    this.notify("curve_options");
  }
}
