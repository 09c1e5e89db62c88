"""What only a GPU can show: run by hand on a machine that has one.

    python tests/gpu/check_cells.py

1. Importing what the launcher imports initialises no CUDA, so forked ranks can use it.
2. On every visible GPU, each of the six backends trains a real model in bf16.
3. After `stop()` no process of the session holds device memory.

Prints a line for each finding; the exit status is 1 when one of them is wrong.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import psutil
import pynvml

import nbdist
from nbdist.strategies import STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Iterator

IMPORTS = textwrap.dedent(
    """
    import importlib, os
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ["DS_ACCELERATOR"] = "cuda"
    from nbdist.launcher import __main__ as launcher
    for name in (*launcher.FIRST, *launcher.THEN):
        importlib.import_module(name)
    import torch
    assert not torch.cuda.is_initialized(), "torch.cuda is initialised"
    child = os.fork()
    if child == 0:
        torch.ones(1, device="cuda").sum().item()  # raises where CUDA was touched before
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "a forked child cannot use CUDA"
    """
)
TRAIN = textwrap.dedent(
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=688, num_hidden_layers=4,
        num_attention_heads=8, max_position_embeddings=256,
    ))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.frombuffer(bytearray(open(torch.__file__, "rb").read()), dtype=torch.uint8)
    rows = text[: len(text) // 128 * 128].view(-1, 128).long()
    loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(3):
        for batch in loader:
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss); optimizer.step(); optimizer.zero_grad()
            report(loss=loss)
            losses.append(loss.item())
    (losses[0], losses[-1], str(next(model.parameters()).device), accelerator.mixed_precision)
    """
)


def import_is_clean() -> Iterator[tuple[bool, str]]:
    """The launcher's imports leave CUDA alone."""
    ran = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False
    )
    yield ran.returncode == 0, f"imports before the fork: {ran.stderr.strip()[-300:] or 'clean'}"


def backends_train() -> Iterator[tuple[bool, str]]:
    """Each backend lowers the loss in bf16 on the GPU."""
    for backend, strategy in STRATEGIES.items():
        if strategy.engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
            yield False, f"{backend}: DeepSpeed is not installed"
            continue
        with nbdist.Session(backend=backend, precision="bf16") as session:
            first, last, device, precision = session.run(TRAIN).values[0]
            rows = len(session.metrics)
        good = last < first and device.startswith("cuda") and precision == "bf16" and rows > 0
        yield good, f"{backend}: loss {first:.3f} -> {last:.3f} on {device} in {precision}"


def device_is_free() -> Iterator[tuple[bool, str]]:
    """No process of ours holds a device any more."""
    pynvml.nvmlInit()
    ours = {child.pid for child in psutil.Process().children(recursive=True)}
    holders = {
        process.pid
        for index in range(pynvml.nvmlDeviceGetCount())
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(
            pynvml.nvmlDeviceGetHandleByIndex(index)
        )
    }
    yield not ours and not holders & ours, f"after stop: {len(ours)} processes of ours are left"


def main() -> int:
    """Run all checks."""
    good = True
    for check in (import_is_clean, backends_train, device_is_free):
        for holds, words in check():
            good &= holds
            print("ok  " if holds else "FAIL", words, flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
