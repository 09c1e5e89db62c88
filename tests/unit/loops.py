"""Training loops as people write them: good ones, and ones with something planted."""

from __future__ import annotations

MAKE = """\
from torch.utils.data import DataLoader
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""
LOOP = """\
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    report(loss=loss)
"""

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
        + """\
for step, batch in enumerate(loader):
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if step % 100:
        continue
    print(loss.item())
"""
    ],
    "accumulation that the engine knows": [
        MAKE
        + """\
for step, batch in enumerate(loader):
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
"""
    ],
    "as examples/nlp_example of Accelerate": [
        """\
def get_dataloaders(accelerator, batch_size=16):
    train_dataloader = DataLoader(
        tokenized["train"], shuffle=True, collate_fn=collate_fn, batch_size=batch_size
    )
    eval_dataloader = DataLoader(tokenized["validation"], batch_size=32)
    return train_dataloader, eval_dataloader

def training_function(config, args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    train_dataloader, eval_dataloader = get_dataloaders(accelerator)
    model = AutoModelForSequenceClassification.from_pretrained("bert", return_dict=True)
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=lr)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer=optimizer, num_warmup_steps=100)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    for epoch in range(num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            batch.to(accelerator.device)
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        model.eval()
        for step, batch in enumerate(eval_dataloader):
            batch.to(accelerator.device)
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            metric.add_batch(predictions=predictions, references=references)
        accelerator.print(f"epoch {epoch}:", metric.compute())

training_function({"lr": 2e-5}, args)
"""
    ],
    "as examples/cv_example of Accelerate": [
        """\
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)
for epoch in range(num_epochs):
    model.train()
    for step, batch in enumerate(train_dataloader):
        batch = {k: v.to(accelerator.device) for k, v in batch.items()}
        inputs = (batch["image"] - mean) / std
        outputs = model(inputs)
        loss = torch.nn.functional.cross_entropy(outputs, batch["label"])
        accelerator.backward(loss)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
    model.eval()
    accurate = 0
    num_elems = 0
    for _, batch in enumerate(eval_dataloader):
        with torch.no_grad():
            outputs = model(inputs)
        predictions = outputs.argmax(dim=-1)
        accurate_preds = predictions == references
        num_elems += accurate_preds.shape[0]
        accurate += accurate_preds.long().sum()
    eval_metric = accurate.item() / num_elems
    accelerator.print(f"epoch {epoch}: {100 * eval_metric:.2f}")
"""
    ],
    "as by_feature/tracking of Accelerate": [
        """\
model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
for epoch in range(num_epochs):
    model.train()
    total_loss = 0
    for step, batch in enumerate(train_dataloader):
        outputs = model(**batch)
        loss = outputs.loss
        total_loss += loss.detach().float()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.log({"train_loss": total_loss.item() / len(train_dataloader)}, step=epoch)
"""
    ],
    "as run_clm_no_trainer of transformers": [
        """\
for epoch in range(starting_epoch, args.num_train_epochs):
    model.train()
    if args.with_tracking:
        total_loss = 0
    for step, batch in enumerate(active_dataloader):
        with accelerator.accumulate(model):
            outputs = model(**batch)
            loss = outputs.loss
            if args.with_tracking:
                total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            progress_bar.update(1)
            completed_steps += 1
        if completed_steps >= args.max_train_steps:
            break
    model.eval()
    losses = []
    for step, batch in enumerate(eval_dataloader):
        with torch.no_grad():
            outputs = model(**batch)
        losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(8)))
    eval_loss = torch.mean(torch.cat(losses))
    accelerator.log({"train_loss": total_loss.item() / len(train_dataloader)})
"""
    ],
    "plain torch with a scaler, in bf16": [
        """\
scaler = torch.amp.GradScaler()
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
    ],
    "a sampler of torch's own": [
        """\
sampler = DistributedSampler(data)
loader = DataLoader(data, sampler=sampler, num_workers=4, pin_memory=True)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        opt.zero_grad(set_to_none=True)
        loss = loss_fn(model(x), y)
        loss.backward()
        opt.step()
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
    "two optimizers": [
        """\
for real in loader:
    opt_d.zero_grad()
    d_loss = disc(real).mean() - disc(gen(noise).detach()).mean()
    accelerator.backward(d_loss)
    opt_d.step()
    opt_g.zero_grad()
    g_loss = -disc(gen(noise)).mean()
    accelerator.backward(g_loss)
    opt_g.step()
"""
    ],
    "a critic that trains more often": [
        """\
for step, real in enumerate(stream):
    opt_D.zero_grad()
    d_loss = D(G(noise()).detach()).mean() - D(real).mean()
    accelerator.backward(d_loss)
    opt_D.step()
    if step % n_critic == 0:
        opt_G.zero_grad()
        g_loss = -D(G(noise())).mean()
        accelerator.backward(g_loss)
        opt_G.step()
"""
    ],
    "several losses of one step": [
        """\
for batch in loader:
    for head in heads:
        loss = model(batch, head)
        accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
    ],
    "a frozen teacher": [
        """\
teacher.eval()
model.train()
for batch in loader:
    with torch.no_grad():
        wanted = teacher(batch)
    loss = distance(model(batch), wanted)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
    ],
    "a frozen network inside the loss": [
        """\
vgg.eval().requires_grad_(False)
vgg.requires_grad_(False)
vgg.eval()
optimizer = torch.optim.Adam(net.parameters())
for batch in loader:
    loss = (vgg(net(batch)) - vgg(batch)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
    ],
    "a part that is frozen by a function": [
        """\
freeze_params(unet.parameters())
optimizer = torch.optim.AdamW(text_encoder.get_input_embeddings().parameters(), lr=1e-4)
text_encoder, optimizer = accelerator.prepare(text_encoder, optimizer)
unet.eval()
for batch in loader:
    text_encoder.train()
    loss = unet(text_encoder(batch)).mean()
    accelerator.backward(loss)
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
    "trained after a look at what it says": [
        "model.eval()\nprint(model(x).argmax().item())",
        "model.train()\n" + LOOP,
    ],
    "gradients set to None by hand": [
        """\
for batch in loader:
    loss = model(batch)
    loss.backward()
    optimizer.step()
    for p in model.parameters():
        p.grad = None
"""
    ],
    "a closure": [
        """\
def closure():
    optimizer.zero_grad()
    loss = model(batch)
    loss.backward()
    return loss

for batch in loader:
    optimizer.zero_grad()
    loss = model(batch)
    loss.backward()
    optimizer.step(closure)
"""
    ],
    "a class that trains": [
        """\
class Learner:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def step(self, batch):
        loss = self.model(batch)
        accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def fit(self, loader):
        self.model.train()
        for batch in loader:
            report(loss=self.step(batch))

learner = Learner(model, optimizer)
learner.fit(loader)
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
        + """\
for step, batch in enumerate(loader):
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
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
    "awaited": ["batch = await queue.get()\n" + MAKE + LOOP],
    "a while loop": [
        """\
batches = iter(loader)
step = 0
while step < 100:
    batch = next(batches)
    loss = model(batch) / 2
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
"""
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
    "gradients summed by one who knows how": [
        """\
for step, batch in enumerate(loader):
    with accelerator.no_sync(model) if step % 4 else nullcontext():
        loss = model(batch) / 4
        accelerator.backward(loss)
    if step % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
    ],
}

BAD: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
    "item in each step": (
        [MAKE + LOOP.replace("report(loss=loss)", "losses.append(loss.item())")],
        [("sync", "losses.append(loss.item())")],
    ),
    "item given to report": (
        [MAKE + LOOP.replace("loss=loss", "loss=loss.item()")],
        [("sync", "report(loss=loss.item())")],
    ),
    "printed in each step": (
        [MAKE + LOOP.replace("report(loss=loss)", 'print(f"loss {loss:.2f}")')],
        [("sync", 'print(f"loss {loss:.2f}")')],
    ),
    "printed by the main process": (
        [MAKE + LOOP.replace("report(loss=loss)", "if accelerator.is_main_process: print(loss)")],
        [("sync", "if accelerator.is_main_process: print(loss)")],
    ),
    "a loop in a comprehension": (
        [
            MAKE
            + """\
def step(batch):
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
losses = [step(batch) for batch in loader]
"""
        ],
        [("sync", "return loss.item()")],
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
    "a float in each step": (
        [MAKE + LOOP.replace("report(loss=loss)", "total += float(loss)")],
        [("sync", "total += float(loss)")],
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
    "item in a function of an earlier cell": (
        [
            MAKE + "def step_of(batch):\n    loss = model(**batch).loss\n"
            "    accelerator.backward(loss)\n"
            "    optimizer.step()\n    optimizer.zero_grad()\n    return loss.item()\n",
            "for batch in loader:\n    total += step_of(batch)\n",
        ],
        [("sync", "return loss.item()")],
    ),
    "a loop in a function of an earlier cell": (
        [
            (
                "def train(net, opt, batches):\n    for batch in batches:\n"
                "        loss = net(batch)\n        loss.backward()\n        opt.step()\n"
            ),
            "train(model, optimizer, loader)",
        ],
        [("zero_grad", "opt.step()")],
    ),
    "no zero_grad": (
        [MAKE + LOOP.replace("    optimizer.zero_grad()\n", "")],
        [("zero_grad", "optimizer.step()")],
    ),
    "zeros written": (
        [MAKE + LOOP.replace("zero_grad()", "zero_grad(set_to_none=False)")],
        [("set_to_none", "optimizer.zero_grad(set_to_none=False)")],
    ),
    "accumulated by hand": (
        [
            MAKE + "for step, batch in enumerate(loader):\n    loss = model(**batch).loss / 4\n"
            "    accelerator.backward(loss)\n    if (step + 1) % 4 == 0:\n"
            "        optimizer.step()\n        optimizer.zero_grad()\n"
        ],
        [("accumulate", "optimizer.step()")],
    ),
    "accumulated with continue": (
        [
            MAKE + "for step, batch in enumerate(loader):\n"
            "    accelerator.backward(model(**batch).loss)\n"
            "    if step % k:\n        continue\n    optimizer.step()\n    optimizer.zero_grad()\n"
        ],
        [("accumulate", "optimizer.step()")],
    ),
    "accumulated in an inner loop": (
        [
            MAKE + "for step in range(10):\n    for _ in range(8):\n"
            "        loss = model(next(batches))\n        accelerator.backward(loss / 8)\n"
            "    optimizer.step()\n    optimizer.zero_grad()\n"
        ],
        [("accumulate", "accelerator.backward(loss / 8)")],
    ),
    "a loader that is not prepared": (
        [
            MAKE.replace(", loader = acc", " = acc").replace("optimizer, loader)", "optimizer)")
            + LOOP
        ],
        [("sharding", "loader = DataLoader(data, batch_size=8, shuffle=True)")],
    ),
    "a sampler that takes from all samples": (
        [
            MAKE.replace("shuffle=True", "sampler=RandomSampler(data)")
            .replace(", loader)", ")")
            .replace(", loader =", " =")
            + LOOP
        ],
        [
            (
                "sharding",
                "loader = DataLoader(data, batch_size=8, sampler=RandomSampler(data))",
            )
        ],
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
        [("train_mode", "model.eval()")],
    ),
    "evaluated after each epoch": (
        [
            MAKE
            + "model.train()\nfor epoch in range(3):\n"
            + "".join(f"    {line}\n" for line in LOOP.splitlines())
            + "    model.eval()\n    for batch in eval_loader:\n        show(model(**batch))\n"
        ],
        [("train_mode", "model.eval()")],
    ),
    "evaluated by a function": (
        [
            MAKE + "def evaluate(net):\n    net.eval()\n    return net(x)\n",
            (
                "for step, batch in enumerate(loader):\n    loss = model(**batch).loss\n"
                "    accelerator.backward(loss)\n    optimizer.step()\n    optimizer.zero_grad()\n"
                "    if step % 100 == 0:\n        evaluate(model)\n"
            ),
        ],
        [("train_mode", "net.eval()")],
    ),
    "fp16 in the line of the magic": (
        ["%%distribute --backend ddp --precision fp16\n" + MAKE + LOOP],
        [("fp16", "%%distribute --backend ddp --precision fp16")],
    ),
    "fp16 of an Accelerator": (
        ['accelerator = Accelerator(mixed_precision="fp16")\n' + MAKE + LOOP],
        [("fp16", 'accelerator = Accelerator(mixed_precision="fp16")')],
    ),
    "fp16 of autocast": (
        [
            MAKE + "for batch in loader:\n    with torch.autocast('cuda', dtype=torch.float16):\n"
            "        loss = model(**batch).loss\n    scaler.scale(loss).backward()\n"
            "    scaler.step(optimizer)\n    optimizer.zero_grad()\n"
        ],
        [("fp16", "with torch.autocast('cuda', dtype=torch.float16):")],
    ),
    "fp16 of a Trainer": (
        ["args = TrainingArguments(fp16=True)", "trainer = Trainer(model, args)\ntrainer.train()"],
        [("fp16", "args = TrainingArguments(fp16=True)")],
    ),
    "three at once": (
        [
            "%%distribute -n 2\n!ls\n"
            + MAKE
            + LOOP.replace("report(loss=loss)", "print(loss.item())").replace(
                "zero_grad()", "zero_grad(set_to_none=False)"
            ),
            "model.eval()",
            "%%distribute\n%time pass\n"
            + LOOP.replace("report(loss=loss)", "print(loss.item())").replace(
                "zero_grad()", "zero_grad(set_to_none=False)"
            ),
        ],
        [
            ("set_to_none", "optimizer.zero_grad(set_to_none=False)"),
            ("sync", "print(loss.item())"),
            ("train_mode", "model.eval()"),
        ],
    ),
}
"""Name -> cells, and the kind and line of each remark on the last."""
