"""A calibration on real GPUs: run by hand on a machine that has one or more.

    python tests/gpu/check_bandwidth.py [--disk DIR] [--json build/bandwidth_gpu.json]

Bars:
* nothing beyond what the device can: matrix products in bf16 and fp32 under its peak, elementwise
  kernels under its memory's bandwidth, page-locked copies under PCIe;
* nothing far below it either: half of what the catalogue expects, which a healthy, idle device
  reaches;
* page-locked copies are no slower than others;
* the memory is given back: tensors take what they took, the allocator holds no more;
* with two GPUs or more, collectives of 64 MiB within a factor of 3 of the catalogue's time;
* the prediction of a bf16 step of a 350M Llama is no farther off afterwards than before, or
  within 15 %.

Exit status 1 when one is missed. On a machine without a GPU the script is rehearsed on CPU ranks
with a tiny model, and checks nothing but that it runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbdist
from nbdist import machine
from nbdist.kernel import planning
from nbdist.plan import cost, here

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.plan.devices import Cluster

LEAST = 0.5
NEAR = 0.15
LINK_FACTOR = 3.0
MODEL = """
import statistics, time
from transformers import LlamaConfig, LlamaForCausalLM

model = LlamaForCausalLM(LlamaConfig(
    vocab_size=32_000, hidden_size={hidden}, intermediate_size={hidden} * 3,
    num_hidden_layers={layers}, num_attention_heads=16, use_cache=False))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-5))
tokens = torch.randint(0, 32_000, ({batch}, {length}), device=device)

def train(steps):
    taken = []
    for _ in range(steps):
        since = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - since)
    return statistics.median(taken[2:])
"""
HELD = (
    "[torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]"
    " if device.type == 'cuda' else [0, 0]"
)
Finding = tuple[str, float, str, bool]
"""What, its value, the bar in words, whether it holds."""


def main() -> int:
    """Calibrate, check, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disk", default=None, help="a folder whose disk is measured too")
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    gpus = machine.found().gpus
    sizes = {"hidden": 1024, "layers": 24, "batch": 4, "length": 1024}
    if not gpus:
        sizes = {"hidden": 128, "layers": 2, "batch": 2, "length": 64}
        print("no GPU here: a rehearsal, nothing is checked")
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="check-bandwidth-")
    findings = list(checked(sizes, asked.disk))
    for what, value, bar, holds in findings:
        print(f"{'ok  ' if holds else 'MISS'} {what:52}{value:10.3g}   {bar}")
    if asked.json is not None:
        plain = [dict(zip(("what", "value", "bar", "holds"), one, strict=True)) for one in findings]
        asked.json.write_text(json.dumps(plain, indent=1))
    return 0 if not gpus or all(holds for *_, holds in findings) else 1


def checked(sizes: dict[str, int], disk: str | None) -> Iterator[Finding]:
    """Measure, and hold it against what the devices are."""
    with nbdist.Session(backend="ddp") as session:
        session.run(MODEL.format(**sizes))
        session.run("train(4)")
        before = here.cluster(here.found(session.world_size), session.world_size)
        old = planning.plan(session).row("ddp").step_time_s
        held = session.run(HELD).values
        measured = session.calibrate(disk=disk)
        print(measured)
        for rank, (allocated, reserved) in session.run(HELD).values.items():
            yield over("tensors, bytes more", allocated - held[rank][0], 0)
            yield over("the allocator, bytes more", reserved - held[rank][1], 0)
        yield from plausible(measured.figures[0], before)
        new = planning.plan(session).row("ddp").step_time_s
        taken = max(session.run("train(12)").values.values())
        print(planning.plan(session))
        print(f"a step: measured {taken:.4f} s, planned {old:.4f} s before, {new:.4f} s after")
        off_before, off = abs(math.log(old / taken)), abs(math.log(new / taken))
        bar = f"<= {max(off_before, NEAR):.3g}, the error before or {NEAR:.0%}"
        yield "error of the planned step", off, bar, off <= max(off_before, NEAR)


def plausible(figures: dict[str, Any], before: Cluster) -> Iterator[Finding]:
    """What rank 0 measured beside what its device can do."""
    device = before.slowest
    for kind, speed in figures["products"].items():
        precision = "no" if kind == "fp32" else kind
        share = speed / device.peak(precision)
        # torch may compute fp32 products in TF32 where the user has allowed it
        yield over(f"matrix products in {kind}, share of the peak", share, 1.0)
        expected = device.reached(precision)
        yield under(f"matrix products in {kind}, against the catalogue", speed / expected, LEAST)
    share = figures["memory"] / device.memory_bandwidth
    yield over("elementwise kernels, share of the memory's bandwidth", share, 1.0)
    yield under("elementwise kernels, share of the memory's bandwidth", share, LEAST)
    if copies := figures.get("copies"):
        pinned = copies["to_device_pinned"]
        yield over("page-locked copies, against PCIe", pinned / device.pcie, 1.05)
        yield under("page-locked copies, against the catalogue", pinned / device.host_link, LEAST)
        ratio = pinned / copies["to_device_pageable"]
        yield under("page-locked copies, against pageable ones", ratio, 0.95)
    for name, curve in figures["curves"].items():
        size, seconds = curve[-1]
        ratio = seconds / cost.collective_s(name, size, before)
        yield over(f"{name} of {size >> 20} MiB, against the catalogue", ratio, LINK_FACTOR)


def over(what: str, value: float, bar: float) -> Finding:
    """No more than the bar."""
    return what, value, f"<= {bar:g}", value <= bar


def under(what: str, value: float, bar: float) -> Finding:
    """No less than the bar."""
    return what, value, f">= {bar:g}", value >= bar


if __name__ == "__main__":
    sys.exit(main())
