// Panel states as a kernel would send them, for the development page.

import type { DeviceView, EventMarkView, HeaderView, MemoryPart, PanelState, ProfileView, ProfiledRank, RankView, StrategyRow } from "../src/protocol.ts";
import { EMPTY } from "../src/store.ts";

const GIB = 2 ** 30;
export const NOW = Date.now() / 1000;

export interface Scene {
  state: PanelState;
  /** Name -> value of a step. */
  series: Record<string, (step: number) => number>;
  steps: number;
}

const header = (changed: Partial<HeaderView>): HeaderView => ({
  ...EMPTY.header,
  kernel_id: "7f1c",
  version: "0.1.0",
  started_at: NOW - 3723,
  ...changed,
});

const gib = (sizes: Record<string, number>): MemoryPart[] =>
  Object.entries(sizes).map(([part, size]) => ({ part, bytes: size * GIB }));
const sum = (parts: MemoryPart[]): number => parts.reduce((all, part) => all + part.bytes, 0);

function gpu(index: number, changed: Partial<DeviceView> = {}): DeviceView {
  const predicted = gib({
    parameters: 3.8, master: 7.6, gradients: 3.8, optimizer: 15.2, gathered: 1.6,
    activations: 18.4, logits: 4.1, buffers: 1.2, temporaries: 0.8, context: 1.6,
  });
  return {
    name: `GPU ${index} · NVIDIA H100 80GB HBM3`, node: "", kind: "cuda", ranks: [index], capacity_bytes: 79.6 * GIB,
    predicted, predicted_bytes: sum(predicted), stated_error: 0.05,
    used_bytes: (46 + index * 0.7) * GIB, peak_bytes: (56.2 + index * 0.4) * GIB, others_bytes: 0, other_processes: [],
    utilization: 0.97 - 0.02 * index, power_w: 640 - 9 * index, power_limit_w: 700, temperature_c: 61 + index,
    pcie_tx: 1.2e9, pcie_rx: 0.8e9, nvlink_tx: 112e9, nvlink_rx: 109e9, note: "", ...changed,
  };
}

function row(id: string, label: string, sizes: Record<string, number>, changed: Partial<StrategyRow> = {}): StrategyRow {
  const parts = gib(sizes);
  const device_bytes = sum(parts);
  const backend = label.split(",")[0]!;
  return {
    id, backend, label, parts, device_bytes, capacity_bytes: 79.6 * GIB, fits: device_bytes < 79.6 * GIB,
    current: false, recommended: false, tokens_per_s: null, why: "", command: `%nbdist switch ${backend}`,
    effect: `Switches to ${label}: moves 55.9 GiB of state between the ranks, about 9 s.`, arguments: { backend }, ...changed,
  };
}
const ROWS = [
  row("1", "ddp", { parameters: 30.4, master: 60.8, gradients: 30.4, optimizer: 121, activations: 18 }, { why: "does not fit: 260.6 of 79.6 GiB, optimizer 121.0" }),
  row("2", "fsdp2", { parameters: 3.8, master: 7.6, gradients: 3.8, optimizer: 15.2, gathered: 1.6, activations: 18.4, logits: 4.1, buffers: 1.2, context: 1.6 }, { current: true, tokens_per_s: 92_300, why: "fits, 2% slower: waits for communication over NVLink" }),
  row("3", "fsdp2, activation checkpointing", { parameters: 3.8, master: 7.6, gradients: 3.8, optimizer: 15.2, gathered: 1.6, activations: 3.4, logits: 4.1, context: 1.6 }, { tokens_per_s: 74_100, arguments: { backend: "fsdp2", activation_checkpointing: true } }),
  row("4", "zero2", { parameters: 30.4, master: 7.6, gradients: 8.8, optimizer: 15.2, activations: 12, context: 1.6 }, { tokens_per_s: 88_000 }),
  row("5", "zero3", { parameters: 3.8, master: 7.6, gradients: 3.8, optimizer: 15.2, gathered: 2.6, activations: 18.4, logits: 4.1, buffers: 2.6, context: 1.6 }, { tokens_per_s: 93_700, recommended: true, why: "the fastest that fits; network-bound" }),
  row("6", "zero3, offload cpu, activation checkpointing", { parameters: 3.8, gradients: 3.8, gathered: 2.6, activations: 3.4, logits: 4.1, buffers: 2.6, context: 1.6 }, { tokens_per_s: 31_200, arguments: {} }),
];

function ranks(number: number, device: (rank: number) => string): RankView[] {
  return Array.from({ length: number }, (_, rank) => ({
    rank, pid: 41_230 + rank, device: device(rank), node: "", state: "running" as const,
    last_line: `step 1840 loss 2.14${rank} lr 2.0e-05`, num_chars: 4000, current_line: "",
  }));
}
const marks: EventMarkView[] = [
  { step: 420, time: NOW - 900, kind: "save", text: "base" },
  { step: 420, time: NOW - 899, kind: "save", text: "best" },
  { step: 900, time: NOW - 600, kind: "switch", text: "ddp → fsdp2" },
  { step: 1500, time: NOW - 300, kind: "save", text: "step-1500" },
];
const noise = (step: number, seed = 1): number => Math.sin(step * 12.9898 * seed) * 43_758.5453 % 1;
const loss = (step: number): number => 2 + 8 * Math.exp(-step / 300) + 0.22 * noise(step);
const speed = (step: number): number => (step < 900 ? 61_000 : 92_000) + 2400 * noise(step, 3);

function profiled(rank: number, milliseconds: Record<string, number>, changed: Partial<ProfiledRank> = {}): ProfiledRank {
  const parts = Object.entries(milliseconds).map(([part, taken]) => ({ part, seconds: taken / 1000 }));
  const step_s = parts.reduce((all, part) => all + part.seconds, 0);
  return { rank, step_s, parts, straggler: false, figures: `p90 ${Math.round(1100 * step_s)} ms; all_gather 1.9 GiB in 74 ms (25.6 GB/s), 12 ms of communication overlap with computation`, ...changed };
}
const PROFILE: ProfileView = {
  verdict: "communication-bound: 41 % of the step waits for all_gather; NVLink",
  facts: "10 steps of 212 ms, p50 211 ms, p90 221 ms, 92.4k tokens/s, MFU 31 % of 989 TFLOP/s",
  outcome: "fsdp2: predicted 35 % faster, measured 31 %",
  ranks: Array.from({ length: 8 }, (_, rank) =>
    profiled(rank, { data: 4, copies: 1.5, forward: 38, backward: 66, optimizer: 6, communication: 74, waiting: rank === 5 ? 0 : 12, offload: 2, python: rank === 5 ? 15 : 3, idle: 5 }, { straggler: rank === 5 })),
  advice: [
    { title: "zero2", text: "about 52 % faster (38 to 66 %). The planner predicts that exposed communication takes 12 ms of a step instead of 74 ms, and that it fits.", command: "%nbdist switch zero2", effect: "Switches the running ranks from fsdp2 to zero2: weights, optimizer state and variables are kept.", arguments: { backend: "zero2" } },
    { title: "num_workers=4", text: "about 6 % faster (4 to 8 %). Batches are loaded by the main thread, and each step waits 13 ms for them. 4 workers load them while the ranks compute.", command: "DataLoader(..., num_workers=4, persistent_workers=True)", effect: "", arguments: {} },
  ],
  notes: ["The collectives of the ranks could not be matched, so waiting for a slower rank counts as communication."], time: NOW - 75, unavailable_reason: "",
};

export const SCENES: Record<string, () => Scene> = {
  gpu: () => ({
    state: {
      header: header({ backend: "fsdp2", world_size: 8, precision: "bf16", offload: "none", options: "clip 1.0", place: "8 x NVIDIA H100 80GB", state: "running", description: "running cell 4", state_since: NOW - 42 }),
      nodes: [],
      devices: Array.from({ length: 8 }, (_, index) => gpu(index, index === 5 ? { peak_bytes: 64.4 * GIB, note: "the peak is 11% above the prediction, whose stated error is 5%: %nbdist plan --check shows which part" } : index === 7 ? { others_bytes: 6.2 * GIB, other_processes: ["python (pid 9120, 6.2 GiB)"] } : {})),
      profile: PROFILE,
      strategies: { rows: ROWS, note: "Qwen2.5-7B on 8 x NVIDIA H100 80GB: micro-batch 4 x 2048, adamw, bf16; closed form." },
      ranks: ranks(8, (rank) => `cuda:${rank}`).map((rank) => (rank.rank === 3 ? { ...rank, state: "waiting" as const, current_line: "In[4] line 7: accelerator.backward(loss) · all_reduce" } : rank)),
      checkpoints: [
        { name: "step-1500", step: 1500, size_bytes: 85.2 * GIB, backend: "fsdp2", saved_at: NOW - 300, seconds: 12.4, path: "/data/run/step-1500", state: "done", error: "" },
        { name: "base", step: 420, size_bytes: 85.2 * GIB, backend: "ddp", saved_at: NOW - 9000, seconds: 31.8, path: "/data/run/base", state: "done", error: "" },
      ],
      progress: { text: "writing checkpoint step-1840, 37%", fraction_done: 0.37, started_at: NOW - 6 },
      queue: [{ id: "1", text: "switch to zero3" }],
      marks, notice: null,
    },
    series: { loss, "tokens/s": speed, lr: (step) => 2e-5 * Math.min(1, step / 200), grad_norm: (step) => 1 + Math.abs(noise(step, 7)) },
    steps: 1840,
  }),
  cpu: () => ({
    state: {
      ...EMPTY,
      header: header({ backend: "ddp", world_size: 2, precision: "no", offload: "none", place: "2 CPU ranks (no GPU found)", state: "ready", description: "ready", started_at: NOW - 95 }),
      devices: [0, 1].map((rank) => ({
        ...gpu(rank), name: `CPU rank ${rank}`, kind: "cpu" as const, ranks: [rank], capacity_bytes: 15.6 * GIB, predicted: gib({ parameters: 0.1, gradients: 0.1, optimizer: 0.2, activations: 0.5 }), predicted_bytes: 0.9 * GIB,
        used_bytes: 0.84 * GIB, peak_bytes: 0.91 * GIB, utilization: 0.49, power_w: null, power_limit_w: null, temperature_c: null,
        pcie_tx: null, pcie_rx: null, nvlink_tx: null, nvlink_rx: null,
      })),
      profile: {
        ...EMPTY.profile, verdict: "input-bound: 83 % of the step waits for the next batch (num_workers=0)", facts: "7 steps of 242 ms, p50 241 ms, p90 247 ms", time: NOW - 8,
        ranks: [0, 1].map((rank) => profiled(rank, { data: 201, forward: 12, backward: 19, optimizer: 3, communication: 4, python: 2, idle: 0.4 }, { figures: "" })),
        advice: [{ title: "num_workers=4", text: "about 4.9 times as fast (3.8 to 5.4). Batches are loaded by the main thread, and each step waits 201 ms for them. 4 workers load them while the ranks compute.", command: "DataLoader(..., num_workers=4)", effect: "", arguments: {} }],
        unavailable_reason: "a profile is under way: its verdict comes in a few seconds.",
      },
      strategies: { rows: [], note: "No plan: memory of CPU ranks is not predicted." },
      ranks: ranks(2, () => "cpu").map((rank) => ({ ...rank, state: "ready" as const })),
      checkpoints: [], marks: [],
    },
    series: { loss: (step) => (step > 60 && step < 70 ? NaN : loss(10 * step)), "tokens/s": (step) => 812 + 30 * noise(step) },
    steps: 180,
  }),
  nodes: () => {
    const scene = SCENES.gpu!();
    const of = (rank: number): string => (rank < 4 ? "alpha" : "beta");
    const description = "4 x NVIDIA H100 80GB HBM3, NVLink, 96 cores";
    return {
      ...scene,
      state: {
        ...scene.state,
        header: header({ backend: "fsdp2", world_size: 8, precision: "bf16", options: "clip 1.0", place: "8 GPU ranks on 2 nodes", state: "running", description: "running cell 4", state_since: NOW - 42 }),
        nodes: [
          { name: "alpha", description, host_bytes: 1007 * GIB, host_used_bytes: 214.3 * GIB },
          { name: "beta", description, host_bytes: 1007 * GIB, host_used_bytes: null },
        ],
        devices: scene.state.devices.map((device, rank) => ({
          ...device, name: "NVIDIA H100 80GB HBM3", node: of(rank), ...(rank < 4 ? {} : { used_bytes: null, utilization: null, power_w: null, temperature_c: null, pcie_tx: null, pcie_rx: null, nvlink_tx: null, nvlink_rx: null }),
        })),
        ranks: ranks(8, (rank) => `cuda:${rank % 4}`).map((rank) => ({ ...rank, node: of(rank.rank) })),
      },
    };
  },
  empty: () => ({ state: { ...EMPTY, header: header({ place: "4 x NVIDIA A100 80GB, NVLink", started_at: null }) }, series: {}, steps: 0 }),
  dead: () => {
    const scene = SCENES.gpu!();
    return {
      ...scene,
      state: {
        ...scene.state, devices: scene.state.devices.slice(0, 1), queue: [], progress: null,
        header: header({ backend: "fsdp2", world_size: 2, precision: "bf16", place: "2 x NVIDIA H100 80GB", state: "dead", description: "rank 1 ended with signal 9 (SIGKILL): maybe the OOM killer: see dmesg; all ranks were ended and their variables are lost. Use %nbdist restart to start new ranks.", state_since: NOW - 15 }),
        ranks: ranks(2, (rank) => `cuda:${rank}`).map((rank) => (rank.rank === 1 ? { ...rank, state: "dead" as const, last_line: "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB." } : { ...rank, state: "waiting" as const, current_line: "In[4] line 9: optimizer.step() · all_gather" })),
        notice: { kind: "error", text: "rank 1 ended with signal 9 (SIGKILL): maybe the OOM killer: see dmesg; all ranks were ended and their variables are lost. Use %nbdist restart to start new ranks.\nThe last checkpoint is 'step-1500' at step 1500: use %nbdist restart, run the cell that calls prepare(), then %nbdist load step-1500.", time: NOW - 15 },
      },
    };
  },
  hostile: () => {
    const evil = "<img src=x onerror=alert(1)>";
    const long = "a-name-that-is-much-too-long-".repeat(6);
    const scene = SCENES.gpu!();
    const names = Array.from({ length: 196 }, (_, index) => `layer.${index}.grad_norm`);
    return {
      ...scene,
      state: {
        ...scene.state,
        header: header({ backend: evil, world_size: 1, precision: long, options: evil, state: "interrupted", description: `interrupted in ${evil}`, state_since: NOW - 90_000 }),
        nodes: [{ name: evil, description: long, host_bytes: 5, host_used_bytes: 1e15 }],
        devices: [gpu(0, { name: long, node: evil, ranks: [0], note: evil, capacity_bytes: null, predicted: [...gib({ "<b>new part</b>": 3, other: 2 })], others_bytes: 1e15 })],
        profile: {
          verdict: `${evil} ${long}`, facts: long, outcome: evil, time: NOW + 1e6, notes: [evil, long], unavailable_reason: evil,
          ranks: [profiled(0, { [evil]: 1e9, data: 1, nothing: 0 }, { figures: evil, straggler: true }), profiled(4095, {}), profiled(3, { [long]: 5, constructor: 3 })],
          advice: [{ title: evil, text: long, command: `%nbdist ${long}`, effect: evil, arguments: { backend: evil } }, { title: "", text: long, command: "", effect: "", arguments: {} }],
        },
        strategies: { rows: [...ROWS, row("7", long, { parameters: 4000 })], note: evil },
        ranks: [{ rank: 0, pid: 1, device: long, node: evil, state: "running", last_line: `${evil} ${long}`, num_chars: 9, current_line: long }],
        checkpoints: [
          { name: evil, step: 12, size_bytes: 12, backend: evil, saved_at: NOW + 1e6, seconds: 0, path: evil, state: "failed", error: `disk full: ${long}` },
          { name: long, step: null, size_bytes: 1e15, backend: "zero3", saved_at: 0, seconds: null, path: long, state: "running", error: "" },
        ],
        progress: { text: long, fraction_done: null, started_at: NOW },
        notice: { kind: "error", text: evil, time: NOW },
      },
      series: { loss: (step) => (step % 50 < 10 ? Infinity : loss(step)), [evil]: () => NaN, [long]: () => 1, flat: () => 0, ...Object.fromEntries(names.map((name, at) => [name, (step: number) => noise(step, at)])) },
      steps: 300,
    };
  },
};
