"""Training loops with one bottleneck each, as cells of a notebook, and one without any.

`tests/e2e/test_profile.py` profiles them on real ranks; `make bench` gives the same text to
other tools, as scripts.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbdist import Profile, Session

SETUP = textwrap.dedent(
    """
    import os, socket, time
    import psutil
    from torch.utils.data import DataLoader
    from transformers import LlamaConfig, LlamaForCausalLM

    def rows(count, length):
        torch.manual_seed(1)
        return list(torch.randint(0, 256, (count, length)))

    def collate(some):
        ids = torch.stack(some)
        return {"input_ids": ids, "labels": ids}

    def slow_collate(some):
        time.sleep(0.2)  # a network disk
        return collate(some)

    def uneven_collate(some):
        return collate(some + some[: len(some) // 3] if rank == 1 else some)

    def build(
        batch_size=3, length=128, hidden=256, optimizer=torch.optim.AdamW, collate_fn=collate
    ):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=256,
        )
        bare = LlamaForCausalLM(config).train()
        data = DataLoader(
            rows(4096, length), batch_size=batch_size, num_workers=0, collate_fn=collate_fn
        )
        return accelerator.prepare(bare, optimizer(bare.parameters(), lr=1e-3), data)

    def limit_link(bytes_per_s):
        \"\"\"Let this rank's own connections to others send so many bytes a second; Linux.\"\"\"
        SO_MAX_PACING_RATE = 47
        for one in psutil.Process().net_connections("tcp"):
            if one.status == psutil.CONN_ESTABLISHED:
                with socket.socket(fileno=os.dup(one.fd)) as connection:
                    connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_s)
    """
)
"""Defines build(), whose default is bound by computing on CPU ranks, and limit_link()."""

LOOP = """
for step, batch in enumerate(loader):
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    report(loss=loss)
    if step == STEPS:
        break
"""
UNLIMITED = -1
"""Of `limit_link`: as fast as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BottleneckLoop:
    """A loop and what is wrong with it."""

    name: str
    build: str = ""
    """Arguments of the call that makes model, optimizer and loader."""
    before: str = ""
    """A line before the loop."""
    loop: str = LOOP
    after: str = ""
    """A line that undoes the one before."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the session."""
    blamed: str = ""
    """Kind of the only cause that is to be blamed; "" for none."""
    expected: str = ""
    """What the profile has to say of it, anywhere."""

    @property
    def model(self) -> str:
        """The cell that makes what is trained."""
        lines = [f"model, optimizer, loader = build({self.build})", self.before]
        return "\n".join(line for line in lines if line)

    def cell(self, steps: int) -> str:
        return self.loop.replace("STEPS", str(steps))

    def script(self, steps: int) -> str:
        """All of it as a script, for tools that read one."""
        head = "import torch\nfrom accelerate import Accelerator\n\naccelerator = Accelerator()\n"
        names = "rank = accelerator.process_index\n\ndef report(**scalars):\n    pass\n"
        return "\n".join([head + names, SETUP, self.model, self.cell(steps)])


ITEM = LOOP.replace("    report(loss=loss)\n", "    report(loss=loss)\n    total = loss.item()\n")

CONTROL = BottleneckLoop(name="nothing", expected="compute-bound, nothing cheap to gain")
DDP = (
    BottleneckLoop(
        name="a loader that takes 200 ms",
        build="batch_size=1, length=64, optimizer=torch.optim.SGD, collate_fn=slow_collate",
        blamed="input",
        expected="num_workers=",
    ),
    BottleneckLoop(
        name="a rank that is 30 % slower",
        build="collate_fn=uneven_collate",
        blamed="straggler",
        expected="rank 1 is",
    ),
    BottleneckLoop(
        name="tiny batches over a slow link",
        build="batch_size=1, length=16",
        before="limit_link(15_000_000)",
        after=f"limit_link({UNLIMITED})",
        blamed="communication",
        expected="all_reduce",
    ),
    BottleneckLoop(name="an .item() in every step", loop=ITEM, expected=".item() in every step"),
)
ONE_UNIT = BottleneckLoop(
    name="a model wrapped as one unit",
    build="batch_size=2, length=64, hidden=512, optimizer=torch.optim.SGD",
    options={"backend": "fsdp2", "fsdp_config": {"auto_wrap_policy": "NO_WRAP"}},
    blamed="communication",
    expected="one FSDP unit",
)
OFFLOADED = BottleneckLoop(
    name="an offloaded optimizer",
    build="batch_size=1, length=250, hidden=512, optimizer=torch.optim.Rprop",
    options={"backend": "zero2", "offload": "cpu"},
    blamed="offload",
    expected="offload",
)
ALL = (*DDP, ONE_UNIT, OFFLOADED)

SPIN = """
begin, used = time.perf_counter(), time.thread_time()
while time.perf_counter() < begin + 1:
    pass
(time.thread_time() - used) / (time.perf_counter() - begin)
"""
STEPS = 8
"""Of a window."""
ATTEMPTS = 5
"""The machine that runs the tests has other work too, and a rank that it keeps waiting is slower
indeed: so many profiles are made, if need be, for one in which only what was planted is there."""


def profiled(session: Session, one: BottleneckLoop) -> Profile:
    """Train with a profile on a session that has run `SETUP`, from a model of its own."""
    session.run(one.model)
    try:
        for _ in range(ATTEMPTS):
            session.run(one.cell(STEPS + 4), profile={"steps": STEPS}, output="none")
            if is_as_planted(session.profiles[-1], one):
                break
    finally:
        if one.after:
            session.run(one.after)
    return session.profiles[-1]


def cpu_share(session: Session) -> float:
    """The smallest share of a core that a rank gets while all of them compute, from 0 to 1.

    If it is small, other programs keep ranks waiting: a rank with more work then gets the core
    that another rank leaves, and nobody waits long for it.
    """
    return float(min(session.run(SPIN, output="none").values.values()))


def is_as_planted(profile: Profile, one: BottleneckLoop) -> bool:
    """Whether what was planted is told, and nothing else is blamed."""
    kinds = [blame.kind for blame in profile.bottlenecks]
    return one.expected in str(profile) and kinds == [one.blamed] * bool(one.blamed)
