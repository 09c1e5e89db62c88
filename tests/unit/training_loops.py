"""Training loops as people write them: good ones, and ones with something planted."""

from __future__ import annotations

MAKE = """\
from torch.utils.data import DataLoader
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""
STEPS = """\
for step, batch in enumerate(loader):
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
EACH_BATCH = STEPS.replace("step, batch in enumerate(loader)", "batch in loader")
LOOP = EACH_BATCH + "    report(loss=loss)\n"

GOOD: dict[str, list[str]] = {
    "with a loader": [MAKE + LOOP],
    "in two cells": [MAKE, LOOP],
    "no loop at all": ["print(model(x).loss.item())"],
    "magics and shell": [
        "%%distribute --backend fsdp\n!nvidia-smi\n%matplotlib inline\nfiles = !ls\n" + MAKE + LOOP
    ],
    "shown in each 50th step": [
        MAKE
        + """\
model.train()
total = 0
for step, batch in enumerate(loader):
    outputs = model(**batch)
    loss = outputs.loss
    total += loss.detach().float()
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step % 50 == 0:
        print(f"{step}: {loss.item():.3f}, {total / (step + 1)}")
print(total.item())
"""
    ],
    "continue before what is seldom": [
        MAKE
        + STEPS
        + """\
    if step % 100:
        continue
    print(loss.item())
"""
    ],
    "data divided by hand": [
        """\
loader = DataLoader(data[rank::world_size], batch_size=4)
for x in loader:
    loss = model(x).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    ],
    "a loader in the hands of others": [
        """\
loader = DataLoader(data)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)
for x in loader:
    loss = model(x).mean()
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
    ],
    "evaluated in each 100th step": [
        """\
@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    losses = [model(**batch).loss.item() for batch in loader]
    model.train()
    return sum(losses) / len(losses)

for step, batch in enumerate(loader):
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if step % 100 == 0:
        print(evaluate(model, eval_loader))
"""
    ],
    "a profiler and an environment that step too": [
        """\
for step in range(100):
    state, reward = env.step(action)
    print(reward.item())
for batch in loader:
    loss = model(batch)
    loss.backward()
    optimizer.step()
    prof.step()
    optimizer.zero_grad()
"""
    ],
    "an item of numpy's": [
        MAKE
        + LOOP
        + """\
    mean = np.mean([1, 2]).item()
    sizes = np.asarray(batch["sizes"])
    seen += sizes.sum().item() + sizes[0].item()
"""
    ],
    "prints what is no tensor": [
        MAKE
        + STEPS
        + """\
    print(step, scheduler.get_last_lr()[0], loss.shape, len(batch), float(step))
"""
    ],
    "shown where it went wrong": [
        """\
for batch in loader:
    try:
        loss = model(batch)
        loss.backward()
    except RuntimeError:
        print(loss)
        raise
    optimizer.step()
    optimizer.zero_grad()
    if step > 5:
        print(loss.item())
"""
    ],
    "a Trainer": [
        "trainer = Trainer(model, TrainingArguments(bf16=True, output_dir='out'), train_dataset=d)",
        "trainer.train()",
    ],
    "gradients summed as nanoGPT does": [
        """\
for step in range(1000):
    for micro in range(accumulate):
        model.require_backward_grad_sync = micro == accumulate - 1
        loss = model(x, y) / accumulate
        x, y = get_batch("train")
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % log_interval == 0:
        print(f"loss {loss.item()}")
"""
    ],
}

BAD: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
    "item in each step": (
        [MAKE + LOOP.replace("report(loss=loss)", "losses.append(loss.item())")],
        [("sync", "losses.append(loss.item())")],
    ),
    "printed in each step": (
        [MAKE + LOOP.replace("report(loss=loss)", 'print(f"loss {loss:.2f}")')],
        [("sync", 'print(f"loss {loss:.2f}")')],
    ),
    "a loop in a method of what is made there": (
        [
            MAKE
            + """\
class Training:
    def fit(self):
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item())
Training().fit()
"""
        ],
        [("sync", "print(loss.item())")],
    ),
    "outputs moved in each step": (
        [
            MAKE,
            (
                "for batch in loader:\n    outputs = model(**batch)\n    loss = outputs.loss\n"
                "    accelerator.backward(loss)\n    optimizer.step()\n    optimizer.zero_grad()\n"
                "    seen.append(outputs.logits.detach().cpu())\n"
            ),
        ],
        [("sync", "seen.append(outputs.logits.detach().cpu())")],
    ),
    "a loader that is not prepared": (
        [
            MAKE.replace(", loader = acc", " = acc").replace("optimizer, loader)", "optimizer)")
            + LOOP
        ],
        [("sharding", "loader = DataLoader(data, batch_size=8, shuffle=True)")],
    ),
    "a loader in the loop's own line": (
        [
            "model, optimizer = accelerator.prepare(model, optimizer)\n"
            + LOOP.replace("in loader", "in DataLoader(data, shuffle=True)")
        ],
        [("sharding", "for batch in DataLoader(data, shuffle=True):")],
    ),
    "a loader under another name": (
        [
            "from torch.utils.data import DataLoader as Batches\n"
            "loader = Batches(data, batch_size=8)\n" + LOOP
        ],
        [("sharding", "loader = Batches(data, batch_size=8)")],
    ),
    "evaluated, and not made to train again": (
        [MAKE, "model.eval()\nprint(model(x).loss.item())", LOOP],
        [("train_mode", "for batch in loader:")],
    ),
    "fp16 in the line of the magic": (
        ["%%distribute --backend ddp --precision fp16\n" + MAKE + LOOP],
        [("fp16", "%%distribute --backend ddp --precision fp16")],
    ),
    "fp16 of an Accelerator": (
        ['accelerator = Accelerator(mixed_precision="fp16")\n' + MAKE + LOOP],
        [("fp16", 'accelerator = Accelerator(mixed_precision="fp16")')],
    ),
}
"""Name -> cells, and the kind and line of each remark on the last, with figures that show it."""
