// Messages between the kernel and this front end; mirrors nbdist/panel/protocol.py.
// Every value from the kernel is validated here: a value of a wrong type is replaced by an empty one
// or keeps the previous one, so that views never receive a wrong type.

export type State =
  | "new"
  | "starting"
  | "ready"
  | "running"
  | "switching"
  | "saving"
  | "loading"
  | "exporting"
  | "interrupted"
  | "dead"
  | "stopped";

export interface Header {
  backend: string;
  world_size: number;
  precision: string;
  offload: string;
  options: string;
  place: string;
  state: State;
  words: string;
  since: number | null;
  started: number | null;
  kernel_id: string | null;
  version: string;
}
export interface Part {
  part: string;
  bytes: number;
}
/** One machine of a cluster; the list is empty if all ranks are on the notebook's machine. */
export interface Node {
  name: string;
  words: string;
  host_bytes: number | null;
  host_used_bytes: number | null;
}
export interface Device {
  name: string;
  /** Equals `Node.name`; empty on the notebook's machine. The same for `Rank`. */
  node: string;
  kind: "cuda" | "cpu";
  ranks: number[];
  capacity_bytes: number | null;
  predicted: Part[];
  predicted_bytes: number | null;
  stated_error: number | null;
  used_bytes: number | null;
  peak_bytes: number | null;
  others_bytes: number;
  holders: string[];
  /** Fraction of the time, 0 to 1. */
  utilization: number | null;
  power_w: number | null;
  power_limit_w: number | null;
  temperature_c: number | null;
  pcie_tx: number | null;
  pcie_rx: number | null;
  nvlink_tx: number | null;
  nvlink_rx: number | null;
  note: string;
}
export interface StrategyRow {
  id: string;
  backend: string;
  words: string;
  device_bytes: number;
  capacity_bytes: number | null;
  parts: Part[];
  fits: boolean;
  current: boolean;
  recommended: boolean;
  tokens_per_s: number | null;
  why: string;
  command: string;
  does: string;
  /** Arguments of the switch command; empty if a button cannot do it. */
  arguments: Record<string, unknown>;
}
export interface Strategies {
  rows: StrategyRow[];
  note: string;
}
/** One part of a step's time. */
export interface Span {
  part: string;
  seconds: number;
}
export interface ProfiledRank {
  rank: number;
  step_s: number;
  parts: Span[];
  /** True if the other ranks wait for it. */
  straggler: boolean;
  figures: string;
}
export interface Advice {
  title: string;
  /** The predicted gain and its reason. */
  text: string;
  command: string;
  does: string;
  /** Arguments of the switch command; empty if a button cannot do it. */
  arguments: Record<string, unknown>;
}
/** The latest profile; the verdict is empty before the first. */
export interface Profile {
  verdict: string;
  facts: string;
  gained: string;
  ranks: ProfiledRank[];
  advice: Advice[];
  notes: string[];
  time: number | null;
  /** Reason why no profile can be requested now; empty if one can. */
  refused: string;
}
export type RankState = "ready" | "running" | "waiting" | "dead" | "starting" | "ended";
export interface Rank {
  rank: number;
  pid: number | null;
  device: string;
  node: string;
  state: RankState;
  line: string;
  /** Number of characters printed. */
  written: number;
  where: string;
}
export interface Checkpoint {
  name: string;
  step: number | null;
  size_bytes: number | null;
  backend: string;
  saved: number | null;
  seconds: number | null;
  path: string;
  state: "done" | "running" | "failed";
  problem: string;
}
export interface Progress {
  text: string;
  share: number | null;
  since: number | null;
}
export interface Queued {
  id: string;
  text: string;
}
export interface Mark {
  step: number | null;
  time: number | null;
  kind: "switch" | "save" | "load" | "restart";
  text: string;
}
export interface Notice {
  kind: "error" | "info";
  text: string;
  time: number | null;
}
export interface Picture {
  header: Header;
  nodes: Node[];
  devices: Device[];
  strategies: Strategies;
  profile: Profile;
  ranks: Rank[];
  checkpoints: Checkpoint[];
  progress: Progress | null;
  queue: Queued[];
  marks: Mark[];
  notice: Notice | null;
}
export interface Sample {
  memory_bytes: number | null;
  utilization: number | null;
  power_w: number | null;
}
export interface Samples {
  times: number[];
  devices: Record<keyof Sample, (number | null)[]>[];
}
/** Points of one series: consecutive triples of step, Unix seconds and value. */
export interface Rows {
  name: string;
  triples: Float64Array;
}
export type Incoming =
  | { kind: "reset"; picture: Picture; rows: Rows[]; samples: Samples }
  | { kind: "picture"; changed: Partial<Picture> }
  | { kind: "rows"; rows: Rows[] }
  | { kind: "samples"; time: number; devices: Sample[] }
  | { kind: "answer"; id: string; ok: boolean; text: string; replaces: boolean }
  | { kind: "log"; rank: number | null; search: string; lines: string[] }
  | { kind: "beat"; time: number };

export type CommandName =
  | "interrupt"
  | "restart"
  | "cancel"
  | "switch"
  | "save"
  | "load"
  | "export"
  | "plan"
  | "profile";
export type Outgoing =
  | { kind: "hello" }
  | { kind: "command"; id: string; name: CommandName; arguments: Record<string, unknown> }
  | { kind: "log"; rank: number | null; search: string };

/** Backends in the switch form; the kernel checks them against nbdist.strategies. */
export const BACKENDS = ["ddp", "fsdp2", "fsdp1", "zero1", "zero2", "zero3"] as const;

export const EMPTY: Picture = {
  header: {
    backend: "",
    world_size: 0,
    precision: "",
    offload: "",
    options: "",
    place: "",
    state: "new",
    words: "",
    since: null,
    started: null,
    kernel_id: null,
    version: "",
  },
  nodes: [],
  devices: [],
  strategies: { rows: [], note: "" },
  profile: { verdict: "", facts: "", gained: "", ranks: [], advice: [], notes: [], time: null, refused: "" },
  ranks: [],
  checkpoints: [],
  progress: null,
  queue: [],
  marks: [],
  notice: null,
};

const STATES: readonly State[] = [
  "new",
  "starting",
  "ready",
  "running",
  "switching",
  "saving",
  "loading",
  "exporting",
  "interrupted",
  "dead",
  "stopped",
];
const LONGEST_LIST = 4096;
const LONGEST_TEXT = 20_000;

type Plain = Record<string, unknown>;
const isPlain = (value: unknown): value is Plain =>
  typeof value === "object" && value !== null && !Array.isArray(value);

function text(value: unknown, otherwise = ""): string {
  return typeof value === "string" ? value.slice(0, LONGEST_TEXT) : otherwise;
}
function number(value: unknown): number | null {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}
/** Read bytes or counts: a finite, non-negative number. */
function amount(value: unknown): number | null {
  const found = number(value);
  return found === null || found < 0 ? null : found;
}
function one<T extends string>(value: unknown, allowed: readonly T[], otherwise: T): T {
  return allowed.includes(value as T) ? (value as T) : otherwise;
}
/** Read the valid items of a list; others are dropped. */
function list<T>(value: unknown, read: (item: unknown) => T | null): T[] {
  if (!Array.isArray(value)) return [];
  const items = value.slice(0, LONGEST_LIST).map(read);
  return items.filter((item): item is Awaited<T> & T => item !== null);
}
const texts = (value: unknown): string[] =>
  list(value, (item) => (typeof item === "string" ? text(item) : null));
function object<T>(read: (plain: Plain) => T): (value: unknown) => T | null {
  return (value) => (isPlain(value) ? read(value) : null);
}
const part = object<Part>((p) => ({ part: text(p.part, "other"), bytes: amount(p.bytes) ?? 0 }));

const header = object<Header>((p) => ({
  backend: text(p.backend),
  world_size: amount(p.world_size) ?? 0,
  precision: text(p.precision),
  offload: text(p.offload),
  options: text(p.options),
  place: text(p.place),
  state: one(p.state, STATES, "new"),
  words: text(p.words),
  since: number(p.since),
  started: number(p.started),
  kernel_id: typeof p.kernel_id === "string" ? p.kernel_id : null,
  version: text(p.version),
}));
const node = object<Node>((p) => ({
  name: text(p.name, "node"),
  words: text(p.words),
  host_bytes: amount(p.host_bytes),
  host_used_bytes: amount(p.host_used_bytes),
}));
const device = object<Device>((p) => ({
  name: text(p.name, "device"),
  node: text(p.node),
  kind: one(p.kind, ["cuda", "cpu"], "cpu"),
  ranks: list(p.ranks, amount),
  capacity_bytes: amount(p.capacity_bytes),
  predicted: list(p.predicted, part),
  predicted_bytes: amount(p.predicted_bytes),
  stated_error: amount(p.stated_error),
  used_bytes: amount(p.used_bytes),
  peak_bytes: amount(p.peak_bytes),
  others_bytes: amount(p.others_bytes) ?? 0,
  holders: texts(p.holders),
  utilization: amount(p.utilization),
  power_w: amount(p.power_w),
  power_limit_w: amount(p.power_limit_w),
  temperature_c: number(p.temperature_c),
  pcie_tx: amount(p.pcie_tx),
  pcie_rx: amount(p.pcie_rx),
  nvlink_tx: amount(p.nvlink_tx),
  nvlink_rx: amount(p.nvlink_rx),
  note: text(p.note),
}));
const strategy = object<StrategyRow>((p) => ({
  id: text(p.id),
  backend: text(p.backend),
  words: text(p.words),
  device_bytes: amount(p.device_bytes) ?? 0,
  capacity_bytes: amount(p.capacity_bytes),
  parts: list(p.parts, part),
  fits: p.fits === true,
  current: p.current === true,
  recommended: p.recommended === true,
  tokens_per_s: amount(p.tokens_per_s),
  why: text(p.why),
  command: text(p.command),
  does: text(p.does),
  arguments: isPlain(p.arguments) ? p.arguments : {},
}));
const span = object<Span>((p) => ({ part: text(p.part), seconds: amount(p.seconds) ?? 0 }));
const profiledRank = object<ProfiledRank>((p) => ({
  rank: amount(p.rank) ?? 0,
  step_s: amount(p.step_s) ?? 0,
  parts: list(p.parts, span),
  straggler: p.straggler === true,
  figures: text(p.figures),
}));
const advice = object<Advice>((p) => ({
  title: text(p.title),
  text: text(p.text),
  command: text(p.command),
  does: text(p.does),
  arguments: isPlain(p.arguments) ? p.arguments : {},
}));
const profile = object<Profile>((p) => ({
  verdict: text(p.verdict),
  facts: text(p.facts),
  gained: text(p.gained),
  ranks: list(p.ranks, profiledRank),
  advice: list(p.advice, advice),
  notes: texts(p.notes),
  time: number(p.time),
  refused: text(p.refused),
}));
const rank = object<Rank>((p) => ({
  rank: amount(p.rank) ?? 0,
  pid: amount(p.pid),
  device: text(p.device),
  node: text(p.node),
  state: one(p.state, ["ready", "running", "waiting", "dead", "starting", "ended"], "starting"),
  line: text(p.line),
  written: amount(p.written) ?? 0,
  where: text(p.where),
}));
const checkpoint = object<Checkpoint>((p) => ({
  name: text(p.name),
  step: amount(p.step),
  size_bytes: amount(p.size_bytes),
  backend: text(p.backend),
  saved: number(p.saved),
  seconds: amount(p.seconds),
  path: text(p.path),
  state: one(p.state, ["done", "running", "failed"], "done"),
  problem: text(p.problem),
}));
const progress = object<Progress>((p) => {
  const share = number(p.share);
  return {
    text: text(p.text),
    share: share === null ? null : Math.min(Math.max(share, 0), 1),
    since: number(p.since),
  };
});
const queued = object<Queued>((p) => ({ id: text(p.id), text: text(p.text) }));
const mark = object<Mark>((p) => ({
  step: number(p.step),
  time: number(p.time),
  kind: one(p.kind, ["switch", "save", "load", "restart"], "save"),
  text: text(p.text),
}));
const notice = object<Notice>((p) => ({
  kind: one(p.kind, ["error", "info"], "info"),
  text: text(p.text),
  time: number(p.time),
}));
const strategies = object<Strategies>((p) => ({
  rows: list(p.rows, strategy),
  note: text(p.note),
}));

/** Read the valid top-level keys of a picture; null if it is not an object. */
function picture(value: unknown): Partial<Picture> | null {
  if (!isPlain(value)) return null;
  const found: Partial<Picture> = {};
  const head = header(value.header);
  if (head) found.header = head;
  const plan = strategies(value.strategies);
  if (plan) found.strategies = plan;
  const profiled = profile(value.profile);
  if (profiled) found.profile = profiled;
  if (Array.isArray(value.nodes)) found.nodes = list(value.nodes, node);
  if (Array.isArray(value.devices)) found.devices = list(value.devices, device);
  if (Array.isArray(value.ranks)) found.ranks = list(value.ranks, rank);
  if (Array.isArray(value.checkpoints)) found.checkpoints = list(value.checkpoints, checkpoint);
  if (Array.isArray(value.queue)) found.queue = list(value.queue, queued);
  if (Array.isArray(value.marks)) found.marks = list(value.marks, mark);
  if ("progress" in value) found.progress = progress(value.progress);
  if ("notice" in value) found.notice = notice(value.notice);
  return found;
}

function doubles(buffer: unknown): Float64Array {
  if (!ArrayBuffer.isView(buffer) || buffer.byteLength % 8) return new Float64Array(0);
  // Copy, because a buffer from a websocket need not be aligned to eight bytes.
  const from = buffer.byteOffset;
  return new Float64Array(buffer.buffer.slice(from, from + buffer.byteLength) as ArrayBuffer);
}

/** Split a buffer into the series of a message; null if names and buffer do not match. */
function rows(series: unknown, buffers: readonly unknown[]): Rows[] | null {
  if (!Array.isArray(series)) return null;
  const values = doubles(buffers[0]);
  const found: Rows[] = [];
  let at = 0;
  for (const item of series) {
    if (!isPlain(item) || typeof item.name !== "string") return null;
    const points = amount(item.points);
    if (points === null || !Number.isInteger(points)) return null;
    const end = at + 3 * points;
    if (end > values.length) return null;
    found.push({ name: text(item.name), triples: values.subarray(at, end) });
    at = end;
  }
  return at === values.length ? found : null;
}

const sample = object<Sample>((p) => ({
  memory_bytes: amount(p.memory_bytes),
  utilization: amount(p.utilization),
  power_w: amount(p.power_w),
}));
const column = (value: unknown): (number | null)[] =>
  Array.isArray(value) ? value.slice(-LONGEST_LIST).map(amount) : [];
const samples = object<Samples>((p) => ({
  times: list(p.times, number),
  devices: list(
    p.devices,
    object((d) => ({
      memory_bytes: column(d.memory_bytes),
      utilization: column(d.utilization),
      power_w: column(d.power_w),
    })),
  ),
}));

/** Parse a message from the kernel; null if it is invalid. */
export function read(message: unknown, buffers: readonly unknown[] = []): Incoming | null {
  if (!isPlain(message)) return null;
  switch (message.kind) {
    case "reset": {
      const found = picture(message.picture);
      const points = rows(message.series ?? [], buffers);
      if (!found) return null;
      return {
        kind: "reset",
        picture: { ...EMPTY, ...found },
        rows: points ?? [],
        samples: samples(message.samples) ?? { times: [], devices: [] },
      };
    }
    case "picture": {
      const changed = picture(message.changed);
      return changed && { kind: "picture", changed };
    }
    case "rows": {
      const points = rows(message.series, buffers);
      return points && { kind: "rows", rows: points };
    }
    case "samples": {
      const time = number(message.time);
      if (time === null || !Array.isArray(message.devices)) return null;
      return { kind: "samples", time, devices: list(message.devices, sample) };
    }
    case "answer":
      if (typeof message.id !== "string") return null;
      return {
        kind: "answer",
        id: message.id,
        ok: message.ok === true,
        text: text(message.text),
        replaces: message.replaces === true,
      };
    case "log":
      return {
        kind: "log",
        rank: amount(message.rank),
        search: text(message.search),
        lines: texts(message.lines),
      };
    case "beat": {
      const time = number(message.time);
      return time === null ? null : { kind: "beat", time };
    }
    default:
      return null;
  }
}
