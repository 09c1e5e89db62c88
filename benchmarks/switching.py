"""A switch from FSDP2 to ZeRO-3 with 110M parameters, against doing it by hand and a plain copy.

By hand means what Accelerate offers: `save_state` under FSDP2, `merge_fsdp_weights` and torch's
own conversion of the optimizer's state, a new `accelerate launch` that fills a ZeRO-3 model.
That is less than a switch does: nothing brings the moments into DeepSpeed, and variables are lost.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from results import Row, middle, paired_ratio
from starts import launch_command

import nbdist
from nbdist.cluster.local_launcher import LocalLauncherProvider

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROUNDS = 3
GPT2 = """
from transformers import GPT2Config, GPT2LMHeadModel

model = GPT2LMHeadModel(GPT2Config(
    vocab_size=32000, n_positions=128, n_layer=12, n_embd=768, bos_token_id=0, eos_token_id=0))
"""
MODEL = f"""
{GPT2}
tokens = torch.randint(0, 32000, (1, 32))
optimizer = torch.optim.AdamW(model.parameters())
"""
TRAINING = """
model, optimizer = accelerator.prepare(model, optimizer)

def train(steps):
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""
RESET = """
from pathlib import Path
Path("/proc/self/clear_refs").write_text("5")
"""
PEAK = """
import re
int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
"""
FLOOR = """
import time
share = torch.ones({elements})
torch.distributed.barrier()
begin = time.perf_counter()
copied = share.clone()
torch.distributed.barrier()
taken = time.perf_counter() - begin
del share, copied
taken
"""
START = """
import sys, time, torch
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from nbdist.worker.engines import cpu_patches as rehearsal

rehearsal.patch_accelerate()  # accelerate runs neither engine on a CPU by itself
rehearsal.skip_shared_memory_op()
"""
SAVE = f"""
{START}
accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
{MODEL}{TRAINING}
train(2)
accelerator.wait_for_everyone()
begin = time.perf_counter()
accelerator.save_state("state")
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    print("seconds", time.perf_counter() - begin)
"""
CONVERT = """
from accelerate.utils import merge_fsdp_weights
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

merge_fsdp_weights("state/pytorch_model_fsdp_0", "merged")
dcp_to_torch_save("state/optimizer_0", "merged/optimizer.pt")
"""
LOAD = f"""
{START}
config = {{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {{"stage": 3}}}}
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
{MODEL}
model.load_state_dict(load_file("merged/model.safetensors"))
{TRAINING}
"""


def measure(build: Path) -> Iterator[Row]:
    """Time, bytes and memory of a switch."""
    engine = LocalLauncherProvider()
    engine.warm_up("cpu")  # as %load_ext does
    hand = [by_hand(build)]
    taken: list[float] = []
    floors: list[float] = []
    peaks: list[float] = []
    with nbdist.Session(nproc=2, backend="fsdp2", precision="no", engine=engine) as session:
        session.run(MODEL + TRAINING + "\ntrain(3)", output="none")
        for number in range(-1, ROUNDS):
            session.run(RESET, output="none")
            session.run("train(1)", output="none")
            training = values(session, PEAK)
            session.run(RESET, output="none")
            report = session.switch("zero3")
            peak = values(session, PEAK)
            share = report.state_bytes / 2
            floor = max(values(session, FLOOR.format(elements=int(share) // 4)).values())
            session.run("train(1)", output="none")
            session.switch("fsdp2")
            session.run("train(1)", output="none")
            if number >= 0:  # the first round imports
                taken.append(report.total_s)
                floors.append(floor)
                peaks.append(max((peak[rank] - training[rank]) / share for rank in peak))
    hand.append(by_hand(build))  # before and after, should the machine have become slower
    state = f"{report.state_bytes / 2**30:.2f} GiB of state, 2 ranks"
    yield Row(
        name="switch FSDP2 to ZeRO-3, against save, convert and launch by hand",
        value=middle(taken) / middle(hand),
        unit="x",
        limit=0.15,  # copying the state once takes 0.10 on a machine with slow memory
        detail=f"{middle(taken):.1f} / {middle(hand):.1f} s, {state}",
    )
    yield Row(
        name="the same, against copying the state once",
        **paired_ratio(taken, floors),
        unit="x",
        limit=4,
        detail=f"{middle(taken):.2f} / {middle(floors):.2f} s",
    )
    yield Row(
        name="bytes that cross between ranks in it, of the state",
        value=100 * report.moved_bytes / report.state_bytes,
        unit="%",
        limit=5,
        detail=state,
    )
    yield Row(
        name="peak host memory in it over a step's, of a rank's share",
        value=middle(peaks),
        unit="x",
        limit=1.2,
        detail=state,
    )


def values(session: nbdist.Session, code: str) -> dict[int, Any]:
    """The value of a cell on each rank."""
    return dict(session.run(code, output="none").values)


def by_hand(build: Path) -> float:
    """Seconds of saving in one job, of converting, and of a second job that loads."""
    folder = build / "bench-switch"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    saved = run(folder, "save", SAVE, launched=True)
    seconds = float(next(line for line in saved.splitlines() if "seconds" in line).split()[1])
    begin = time.monotonic()
    run(folder, "convert", CONVERT, launched=False)
    run(folder, "load", LOAD, launched=True)
    taken = seconds + time.monotonic() - begin
    shutil.rmtree(folder)
    return taken


def run(folder: Path, name: str, code: str, *, launched: bool) -> str:
    """What a script prints, under accelerate launch or in one process."""
    script = folder / f"{name}.py"
    script.write_text(code)
    command = launch_command(script) if launched else [sys.executable, str(script)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout
