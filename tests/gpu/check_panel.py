"""What the panel shows of a real training on GPUs: run by hand on a machine that has them.

    python tests/gpu/check_panel.py [--layers 24] [--json build/panel_gpu.json]

A 1.3B model trains under FSDP2 while the panel's devices are read beside `nvidia-smi`. Bars:
memory within 64 MiB, temperature within 3 degrees, power within a quarter, and this session's
share told apart from that of others, or a note that it cannot be. The whole picture, with samples
and curves as the page gets them, is written as JSON, to be drawn where there is a browser.
`--layers 1` rehearses the script on a CPU. Exit status 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbdist
from nbdist.panel.live import Live, View, sample_history

if TYPE_CHECKING:
    from nbdist.panel.devices import Reading, Seat

MIB = 1 << 20
FIELDS = ("memory.used", "power.draw", "temperature.gpu", "utilization.gpu")
MEMORY_BYTES, DEGREES, POWER = 64 * MIB, 3, 0.25
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
        report(loss=loss)

train(3)
"""


def main() -> int:
    """Check; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path, default=Path("build/panel_gpu.json"))
    asked = parser.parse_args()
    with nbdist.Session(backend="fsdp2") as session:
        live = Live(view := View(session), lambda _message, _buffers: None)
        try:
            session.run(MODEL.format(layers=asked.layers))
            running = session.run(f"train({asked.steps})", background=True)
            missed = [fault for _ in range(5) for fault in compared(view)]
            running.wait()
        finally:
            live.close()
        drawn: dict[str, Any] = {"picture": view.draw(), "samples": sample_history(view.devices)}
        drawn["curves"] = {
            name: [column.tolist() for column in points] for name, points in live.history().items()
        }
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps(drawn))
    print(*drawn["picture"]["devices"], sep="\n")
    print("missed:", missed or "nothing", f"({asked.json} has the picture)")
    return 1 if missed else 0


def compared(view: View) -> list[str]:
    """One reading of each GPU beside nvidia-smi's; returns what differs."""
    seats = [seat for seat in view.devices.seats if seat.uuid.startswith("GPU-")]
    if not seats:
        return []
    readings = view.devices.look().readings
    return [
        fault for seat, reading in zip(seats, readings, strict=True) for fault in one(seat, reading)
    ]


def one(seat: Seat, reading: Reading) -> list[str]:
    """What differs for one GPU."""
    command = ["nvidia-smi", f"--id={seat.uuid}", f"--query-gpu={','.join(FIELDS)}",
               "--format=csv,noheader,nounits"]  # fmt: skip
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    memory, power, degrees, _ = (float(part) for part in told.split(","))
    pairs = {
        "memory": (reading.memory_bytes, memory * MIB, MEMORY_BYTES),
        "power": (reading.power_w, power, POWER * power),
        "temperature": (reading.temperature_c, degrees, DEGREES),
    }
    print(seat.name, reading)
    return [
        f"{seat.name}: {name} {ours} beside {theirs}"
        for name, (ours, theirs, bar) in pairs.items()
        if ours is None or abs(ours - theirs) > bar
    ]


if __name__ == "__main__":
    sys.exit(main())
