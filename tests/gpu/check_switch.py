"""A switch of a 1.3B model in bf16 on a real GPU: run by hand on a machine that has one.

    python tests/gpu/check_switch.py [--layers 24] [--json build/switch_gpu.json]

One rank goes FSDP2 -> ZeRO-3 -> ZeRO-2 with CPU offload -> DDP -> FSDP2 and trains between.
After each switch every tensor has the digest of before, or the switch itself fails.

Bar: when the walk is back at FSDP2, its tensors take what they took at first, within 2 %.
Seconds are printed beside those that the bytes alone
take over PCIe. `--layers 1` rehearses the script on a CPU. Exit status 1 when it is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import nbdist

WALK = (
    ("zero3", {"offload": "none"}),
    ("zero2", {"offload": "cpu"}),
    ("ddp", {"offload": "none"}),
    ("fsdp2", {"offload": "none"}),
)
NEAR = 0.02
MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_hidden_layers={layers},
    num_attention_heads=16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
model, optimizer = accelerator.prepare(model, optimizer)
tokens = torch.randint(0, 32_000, (1, 512), device=device)

def train(steps):
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()
"""
MEMORY = """
import gc
gc.collect()
if device.type == "cuda":
    torch.cuda.synchronize()
torch.cuda.memory_allocated() if device.type == "cuda" else 0
"""
PCIE = """
import time
if device.type == "cuda":
    there = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    here = torch.empty_like(there, device=device)
    here.copy_(there)
    torch.cuda.synchronize()
    began = time.perf_counter()
    here.copy_(there)
    torch.cuda.synchronize()
    taken = time.perf_counter() - began
    del there, here
    torch.cuda.empty_cache()
(1 << 30) / taken if device.type == "cuda" else float("inf")
"""


def main() -> int:
    """Walk over the engines; print a line for each switch."""
    parser = argparse.ArgumentParser(description="switch a large model on a GPU")
    parser.add_argument("--layers", type=int, default=24, help="of the model; 24 are 1.3B")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    asked = parser.parse_args()
    found = walked(asked.layers)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))
    first, last = found[0]["allocated_bytes"], found[-1]["allocated_bytes"]
    back = not first or abs(last / first - 1) <= NEAR
    print(f"{'ok  ' if back else 'MISS'} back at FSDP2: {last:,} of {first:,} bytes")
    return 0 if back else 1


def walked(layers: int) -> list[dict[str, Any]]:
    """Figures of the start and of each switch."""
    with nbdist.Session(nproc=1, backend="fsdp2", precision="bf16") as session:
        session.run(MODEL.format(layers=layers), output="none")
        pcie = value(session, PCIE)
        found = [step(session, None, pcie)]
        for backend, options in WALK:
            report = session.switch(backend, **options)
            print(report)
            found.append(step(session, report, pcie))
    return found


def step(
    session: nbdist.Session, report: nbdist.SwitchReport | None, pcie: float
) -> dict[str, Any]:
    """Train, and look at the device."""
    figures = {
        "options": session.options.describe(),
        "loss": value(session, "train(2)"),
        "allocated_bytes": value(session, MEMORY),
    }
    if report is None:
        return figures
    floor = report.state_bytes / pcie
    print(f"     {report.total_s:.1f} s; its bytes once over PCIe: {floor:.1f} s")
    return figures | {
        "seconds": dict(report.seconds),
        "state_bytes": report.state_bytes,
        "verified": report.verified,
        "once_over_pcie_s": floor,
    }


def value(session: nbdist.Session, code: str) -> Any:
    """The value of a cell on the only rank."""
    return session.run(code, output="none").values[0]


if __name__ == "__main__":
    sys.exit(main())
