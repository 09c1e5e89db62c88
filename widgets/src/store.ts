// What one panel knows: made once per model, watched by each of its views.

import { EMPTY, read } from "./protocol.ts";
import type { CommandName, Incoming, Outgoing, Picture, Rows, Sample, Samples } from "./protocol.ts";
import { Points } from "./points.ts";
import { interruptKernel } from "./rest.ts";

/** What a view can watch: a key of the picture, or one of these. */
export type Topic = keyof Picture | "series" | "samples" | "link" | "answers" | "log" | "choice";
/** live: news arrive; stale: none for a while; gone: the kernel has closed the connection. */
export type Link = "waiting" | "live" | "stale" | "gone";

export interface Asked {
  name: CommandName;
  args: Record<string, unknown>;
  words: string;
}
export interface Answer {
  ok: boolean;
  text: string;
  /** What was refused only because something is there, which it could replace. */
  replacing?: Asked;
}
/** How curves are shown, kept here so that a second view and a redraw show the same. */
export interface Choice {
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

/** Three missed beats of two seconds, and one for the way. */
export const STALE_S = 7;
/** An interrupt that has no effect for this long goes to the server instead. */
export const PATIENCE_MS = 1000;
const SAMPLES = 300;
const MOST_SERIES = 2000;
/** The kernel sends the points of so many names (MAX_NAMES in nbdist/panel/curves.py). */
export const SENT_SERIES = 200;

/** As much of a search as the kernel takes. */
export function sought(search: string): string {
  return search.slice(0, 200);
}

export class Store {
  picture: Picture = EMPTY;
  series = new Map<string, Points>();
  samples: Samples = { times: [], devices: [] };
  link: Link = "waiting";
  answer: Answer | null = null;
  /** When it came; unix seconds of the kernel. */
  answered = 0;
  log: Log | null = null;
  choice: Choice = { shown: null, x: "step", log: false, smoothing: 0 };
  /** Commands sent and not yet answered, by id. */
  asked = new Map<string, Asked>();
  /** Messages that could not be read. */
  dropped = 0;
  /** When the latest message came; unix seconds of this machine. */
  heard = Date.now() / 1000;
  /** The kernel's clock minus this machine's: they need not be the same machine. */
  private ahead = 0;
  private watchers = new Set<(topic: Topic) => void>();
  private numbered = 0;
  private readonly name = Math.random().toString(36).slice(2, 10);

  constructor(private readonly send: (message: Outgoing) => void) {}

  /** Unix seconds on the kernel's clock. */
  now(): number {
    return Date.now() / 1000 + this.ahead;
  }

  /** Call `seen` with each topic that changes; returns how to stop that. */
  watch(seen: (topic: Topic) => void): () => void {
    this.watchers.add(seen);
    return () => this.watchers.delete(seen);
  }

  tell(topic: Topic): void {
    for (const seen of this.watchers) seen(topic);
  }

  /** Take a message of the kernel; what cannot be read is counted and changes nothing. */
  receive(message: unknown, buffers: readonly unknown[] = []): void {
    const found = read(message, buffers);
    if (!found) {
      this.dropped += 1;
      this.tell("link");
      return;
    }
    this.heard = Date.now() / 1000;
    this.connect("live");
    this.take(found);
  }

  private take(message: Incoming): void {
    switch (message.kind) {
      case "reset":
        this.series.clear();
        this.samples = message.samples;
        this.change(message.picture);
        this.append(message.rows);
        this.tell("samples");
        break;
      case "picture":
        this.change(message.changed);
        break;
      case "rows":
        this.append(message.rows);
        break;
      case "samples":
        this.ahead = message.time - Date.now() / 1000;
        this.sample(message.time, message.devices);
        break;
      case "answer": {
        const asked = this.asked.get(message.id);
        if (!asked) return; // by another view's store
        this.asked.delete(message.id);
        this.say({ ok: message.ok, text: message.text, ...(message.replaces && { replacing: asked }) });
        break;
      }
      case "log":
        this.log = { rank: message.rank, search: message.search, lines: message.lines };
        this.tell("log");
        break;
      case "beat":
        this.ahead = message.time - Date.now() / 1000;
    }
  }

  /** Tell what came of something; as topic "answers". */
  say(answer: Answer): void {
    this.answer = answer;
    this.answered = this.now();
    this.tell("answers");
  }

  private change(changed: Partial<Picture>): void {
    this.picture = { ...this.picture, ...changed };
    for (const key of Object.keys(changed)) this.tell(key as keyof Picture);
  }

  private append(rows: Rows[]): void {
    for (const { name, triples } of rows) {
      let points = this.series.get(name);
      if (!points) {
        if (this.series.size >= MOST_SERIES) continue;
        points = new Points();
        this.series.set(name, points);
      }
      points.append(triples);
    }
    this.tell("series");
  }

  private sample(time: number, devices: Sample[]): void {
    const { times, devices: columns } = this.samples;
    times.push(time);
    devices.forEach((sample, index) => {
      const column = (columns[index] ??= { memory_bytes: [], utilization: [], power_w: [] });
      for (const key of ["memory_bytes", "utilization", "power_w"] as const) {
        column[key].push(sample[key]);
        if (column[key].length > SAMPLES) column[key].shift();
      }
    });
    if (times.length > SAMPLES) times.shift();
    this.tell("samples");
  }

  /** Say whether news have stopped coming; called once a second. */
  checkLink(): void {
    if (this.picture.header.state === "stopped") return; // its last word
    if (this.link === "live" && Date.now() / 1000 - this.heard > STALE_S) this.connect("stale");
  }

  connect(link: Link): void {
    if (link === this.link) return;
    this.link = link;
    this.tell("link");
  }

  /** Ask the kernel for everything it knows. */
  hello(): void {
    this.send({ kind: "hello" });
  }

  /** Send a command; its answer comes as topic "answers". */
  command(name: CommandName, args: Record<string, unknown>, words: string): string {
    this.numbered += 1;
    const id = `${this.name}-${this.numbered}`;
    this.asked.set(id, { name, args, words });
    this.answer = null;
    this.tell("answers");
    this.send({ kind: "command", id, name, arguments: args });
    return id;
  }

  /** Ask again for what was refused because something is there: this time it is replaced. */
  replace({ name, args, words }: Asked): void {
    this.command(name, { ...args, overwrite: true }, words);
  }

  /**
   * Interrupt the running cell. A kernel whose cell blocks may not read what we send, so where
   * nothing has changed after a second the notebook server is asked to interrupt it.
   */
  stop(interrupt = interruptKernel): void {
    const state = this.picture.header.state;
    const id = this.command("interrupt", {}, "stop");
    setTimeout(() => {
      const header = this.picture.header;
      if (!this.asked.has(id) || header.state !== state) return;
      void interrupt(header.kernel_id).then((answer) => {
        this.asked.delete(id);
        this.say(answer);
      });
    }, PATIENCE_MS);
  }

  /** Ask for the log of a rank, or the launcher's; it comes as topic "log". */
  askLog(rank: number | null, search: string): void {
    this.send({ kind: "log", rank, search: sought(search) });
  }

  choose(changed: Partial<Choice>): void {
    this.choice = { ...this.choice, ...changed };
    this.tell("choice");
  }
}
