"""Code that the checks run on ranks."""

from __future__ import annotations

TINY = {"hidden": 64, "layers": 2, "vocab": 256, "length": 64, "batch": 2}
LARGE = {"hidden": 1024, "layers": 12, "vocab": 32_000, "length": 1024, "batch": 4}

PRELUDE = """
import copy, gc, os, sys, time
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

cuda = device.type == "cuda"

def sync():
    if cuda:
        torch.cuda.synchronize()

def level():
    "Bytes of tensors, of the allocator, of page-locked memory and of the device; descriptors."
    gc.collect()
    sync()
    figures = {"descriptors": len(os.listdir("/proc/self/fd"))}
    if cuda:
        counted, host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
        free, total = torch.cuda.mem_get_info()
        figures |= {
            "allocated": counted.get("allocated_bytes.all.current", 0),
            "reserved": counted.get("reserved_bytes.all.current", 0),
            "pinned": host.get("allocated_bytes.current", 0),
            "device": total - free,
        }
    return figures

def llama(hidden, layers, vocab, length, **_):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers, num_attention_heads=hidden // 32,
        max_position_embeddings=length, use_cache=False))

def text(vocab, length, batch, **_):
    "The same tokens on all ranks."
    seeded = torch.Generator().manual_seed(1)
    return torch.randint(0, vocab, (batch, length), generator=seeded).to(device)

def prepare(sizes, on=None, **how):
    global model, optimizer, tokens
    with torch.device(on or "cpu"):
        bare = llama(**sizes)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3, **how)
    model, optimizer = accelerator.prepare(bare, optimizer)
    model.train()
    tokens = text(**sizes)

def train(steps):
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        report(loss=loss)
        losses.append(loss.detach())
    return [loss.item() for loss in losses]

def plainly(sizes, steps, precision, clip):
    "The same training in torch alone."
    twin = llama(**sizes).to(device).train()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    adam = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    batch, losses = text(**sizes), []
    for _ in range(steps):
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss = twin(input_ids=batch, labels=batch).loss
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(adam)
            torch.nn.utils.clip_grad_norm_(twin.parameters(), clip)
        scaler.step(adam)
        scaler.update()
        adam.zero_grad()
        losses.append(loss.item())
    return losses

def total(number):
    "Sum over the ranks, by the session's own process group."
    added = torch.full((3,), float(number), device=device)
    dist.all_reduce(added)
    return added.tolist()
"""

STANDING = """
device_kind = str(device)
computed = torch.ones(3, device=device).sum().item()
properties = torch.cuda.get_device_properties(device) if cuda else None
{"device": device_kind, "computed": computed, "threads": torch.get_num_threads(),
 "uuid": str(properties.uuid) if cuda else "", "bad_fork": torch.cuda._is_in_bad_fork(),
 "capability": (properties.major, properties.minor) if cuda else (0, 0),
 "nccl": torch.cuda.nccl.version() if cuda else (), "cuda": str(torch.version.cuda),
 "python_fds": len(os.listdir("/proc/self/fd"))}
"""

CAPTURE = """
static = torch.ones(1024, device=device)
report(warm=static.sum())
failures = []
for round in range(10):
    sync()
    if cuda:
        torch.cuda._sleep(200_000_000)  # 0.1 s: the copy of report() waits behind it
    report(captured=static.sum())
    if cuda:
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        try:
            with torch.cuda.stream(side):
                graph.capture_begin()
                doubled = static * 2
                time.sleep(0.3)  # report()'s thread asks for its event meanwhile
                graph.capture_end()
            graph.replay()
            sync()
            assert doubled.sum().item() == 2048
        except Exception as error:
            failures.append(str(error)[:200])
failures
"""

WAIT_FOR_THE_DEVICE = """
if cuda:
    torch.cuda._sleep(200_000_000_000)  # more than a minute
    torch.cuda.synchronize()
else:
    torch.linalg.matrix_power(torch.eye(1500), 1 << 62)  # in C, without the GIL, for long
"""

LONG_KERNELS = """
big = torch.ones(8192 if cuda else 256, 8192 if cuda else 256, device=device)
for _ in range(10**7):
    big = big @ big * 0
"""

ALONE = """
if rank == 0:
    alone = torch.ones(1, device=device)
    dist.all_reduce(alone)
    alone.item()
else:
    while True:
        time.sleep(0.05)
"""

PLANTED = """
if rank == 1:
    usual = dist.all_to_all_single
    def fails_once(*args, **kwargs):
        dist.all_to_all_single = usual
        raise RuntimeError("a planted fault")
    dist.all_to_all_single = fails_once
"""

COLLECTIVES = """
wrong = []
for dtype in (torch.float32, torch.bfloat16, torch.int64):
    size = 1 << 16
    mine = torch.full((size,), rank + 1, dtype=dtype, device=device)
    added = mine.clone()
    dist.all_reduce(added)
    everyones = torch.empty(size * world_size, dtype=dtype, device=device)
    dist.all_gather_into_tensor(everyones, mine)
    first = mine.clone()
    dist.broadcast(first, src=0)
    crossed = torch.empty_like(mine)
    dist.all_to_all_single(crossed, mine) if size % world_size == 0 else crossed.fill_(1)
    share = torch.empty(size // world_size, dtype=dtype, device=device)
    dist.reduce_scatter_tensor(share, mine[: size // world_size * world_size].clone())
    expected = world_size * (world_size + 1) // 2
    right = {
        "all_reduce": (added == expected).all(),
        "all_gather": (everyones.view(world_size, size)[-1] == world_size).all(),
        "broadcast": (first == 1).all(),
        "all_to_all": (crossed[0] == 1).all(),
        "reduce_scatter": (share == expected).all(),
    }
    wrong += [f"{name} {dtype}" for name, holds in right.items() if not holds.item()]
wrong
"""

COUNTED = """
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
optimizer.step()
optimizer.zero_grad()
counter.get_total_flops()
"""
