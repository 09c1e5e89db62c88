"""A profile on real GPUs: run by hand on a machine that has some.

    python tests/gpu/check_profile.py [--backends ddp,fsdp2,zero2] [--ranks 2] [--folder FOLDER]

Trains a small Llama in bf16 under each backend, profiles it as a user would, and checks on each
rank: the parts sum up to the step within 3 %; the device computed forward, backward and optimizer;
NCCL's kernels came with their bytes; the trace has device rows; the allocator's snapshot opens
and its peak is the device's; MFU lies between 0 and 1 and FLOPs agree with the cost model within
10 %. Exit status 1 where one of these does not hold. Steps inside the window take no more than
15 % longer than those after it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import pickle  # our own snapshot, written moments before
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbdist

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist import Session
    from nbdist.profile.figures import RankFigures

STEPS = 40
RECORDED = 10
INSIDE = 1.15
FLOPS = 0.10
SETUP = """
import time
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=12,
    num_attention_heads=16, max_position_embeddings=1024, use_cache=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32000, (4096, 1024))]
loader = torch.utils.data.DataLoader(rows, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()
"""
TRAIN = f"""
moments = []
for step, batch in zip(range({STEPS}), loader):
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    moments.append(time.time())
moments
"""
COUNTED = """
from torch.utils.flop_counter import FlopCounterMode
counter = FlopCounterMode(display=False)
with counter:
    loss = model(**next(iter(loader))).loss
    accelerator.backward(loss)
optimizer.step()
optimizer.zero_grad()
counter.get_total_flops()
"""


def main() -> int:
    """Check each backend; print what was found."""
    parser = argparse.ArgumentParser(description="hold a profile against a GPU")
    parser.add_argument("--backends", default="ddp,fsdp2,zero2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("build/profile_gpu"))
    asked = parser.parse_args()
    failed = 0
    for backend in asked.backends.split(","):
        folder = asked.folder.absolute() / backend
        with nbdist.Session(nproc=asked.ranks, backend=backend, precision="bf16") as session:
            for holds, text in checks(session, folder):
                failed += not holds
                print(f"{backend}: {'ok  ' if holds else 'FAIL'} {text}", flush=True)
    return 1 if failed else 0


def checks(session: Session, folder: Path) -> Iterator[tuple[bool, str]]:
    """Whether each thing holds, and its words."""
    session.run(SETUP)
    session.run(TRAIN)
    ends = session.run(TRAIN, profile={"steps": RECORDED, "trace": folder}).values[0]
    profile = session.profiles[-1]
    print(profile)
    for one in profile.ranks:
        for holds, text in of_rank(one):
            yield holds, f"rank {one.rank}: {text}"
    yield from inside(profile.ranks[0], ends)
    mfu = profile.mfu
    yield mfu is not None and 0 < mfu < 1, f"MFU {mfu} of {profile.peak_flops} FLOP/s"
    yield from flops(session, profile)


def of_rank(one: RankFigures) -> Iterator[tuple[bool, str]]:
    """What holds on each rank."""
    whole = sum(one.parts.values())
    yield abs(whole - one.step_s) <= 0.03 * one.step_s, f"parts {whole:.4f} s of {one.step_s:.4f} s"
    computing = {part: one.parts[part] for part in ("forward", "backward", "optimizer")}
    yield all(seconds > 0 for seconds in computing.values()), f"the device computed {computing}"
    sent = {kind.name: kind.bytes for kind in one.traffic}
    yield bool(sent) and all(sent.values()), f"NCCL moved {sent}"
    rows = device_rows(Path(one.trace))
    yield rows > 0, f"{rows} device rows in {one.trace}"
    memory = one.memory
    yield memory is not None, f"memory {memory and memory.parts}, notes {one.notes}"
    if memory is not None:
        with Path(memory.snapshot).open("rb") as file:
            snapshot: Any = pickle.load(file)  # noqa: S301
        events = sum(len(trace) for trace in snapshot["device_traces"])
        yield events > 0, f"{events} events in {memory.snapshot}; open it in pytorch.org/memory_viz"
        yield bool(memory.lines), f"lines {[(line.source, line.bytes) for line in memory.lines]}"


def device_rows(path: Path) -> int:
    """Kernels in a trace."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return sum(event.get("cat") == "kernel" for event in events)


def inside(one: RankFigures, ends: list[float]) -> Iterator[tuple[bool, str]]:
    """Steps inside the window, against those after it."""
    steps = [(then, then - now) for now, then in pairwise(ends)]
    in_it = statistics.median(s for at, s in steps if one.ends[0] < at <= one.ends[-1] + 0.05)
    behind = statistics.median([s for at, s in steps if at > one.ends[-1]][4:])
    yield in_it <= INSIDE * behind, f"inside {1000 * in_it:.1f} ms, after {1000 * behind:.1f} ms"


def flops(session: Session, profile: Any) -> Iterator[tuple[bool, str]]:
    """FLOPs of the cost model, against those that torch counts operation by operation."""
    counted = float(session.run(COUNTED).values[0])
    ours = profile.model_flops
    if ours is None:
        yield False, "no FLOPs: the cost model does not know this model"
        return
    yield abs(ours - counted) <= FLOPS * counted, f"FLOPs {ours:.3e}, counted {counted:.3e}"


if __name__ == "__main__":
    sys.exit(main())
