"""The planner's time of a step beside the measured one, before and after this machine is measured.

On two CPU ranks, for a few strategies. Steps are measured before and after each calibration, so
that what else this machine does meets all sides. Three predictions: by the catalogue, after
`Session.calibrate`, and after a profile of the loop as well.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import statistics
import tempfile
import time
from typing import TYPE_CHECKING

from results import Row

from nbdist import Session
from nbdist.session import planner

if TYPE_CHECKING:
    from collections.abc import Iterator

BACKENDS = ("ddp", "fsdp2")
ROUNDS = 2
STEPS = 4
VERDICT_S = 60.0
BATCH, LENGTH = 4, 64
SETUP = f"""
import statistics, time
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=4000, hidden_size=384, intermediate_size=1152, num_hidden_layers=4,
    num_attention_heads=6, max_position_embeddings=256, use_cache=False))
ids = torch.randint(0, 4000, ({BATCH}, {LENGTH}))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

def step():
    since = time.perf_counter()
    loss = model(input_ids=ids, labels=ids).loss
    forward = time.perf_counter()
    accelerator.backward(loss)
    backward = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad()
    return forward - since, backward - forward, time.perf_counter() - backward

def steps(count=5):
    torch.distributed.barrier()
    rows = [step() for _ in range(count)]
    return [statistics.median(map(sum, rows)), *map(statistics.median, zip(*rows))]

for _ in range(3):
    _ = step()
"""
Times = list[float]
"""Of a step, and of its forward, backward and optimizer."""


def measure() -> Iterator[Row]:
    """Rows: how far off a prediction is, as a ratio to how far the catalogue is."""
    off: dict[str, list[float]] = {"catalogue": [], "calibrated": [], "profiled": []}
    print(f"{'':8}{'measured':>12}{'catalogue':>12}{'calibrated':>12}{'profiled':>12}")
    for backend in BACKENDS:
        for seen, planned in rounds(backend):
            cells = (f"{1000 * planned[name]:9.0f} ms" for name in off)
            print(f"{backend:8}{1000 * seen:9.0f} ms{''.join(cells)}", flush=True)
            for name, errors in off.items():
                errors.append(abs(math.log(planned[name] / seen)))
    typical = {name: statistics.mean(errors) for name, errors in off.items()}
    factors = {name: f"{math.exp(error):.2f}" for name, error in typical.items()}
    detail = ", ".join(f"{name} off by a factor of {factors[name]}" for name in off)
    for name, bar in (("calibrated", 1.0), ("profiled", 0.8)):
        yield Row(
            name=f"planned step time, {name}: error to the catalogue's",
            value=typical[name] / typical["catalogue"],
            unit="x",
            limit=bar,
            detail=detail,
        )


def rounds(backend: str) -> list[tuple[float, dict[str, float]]]:
    """Measured and predicted seconds of a step, of a few rounds in one session."""
    found = []
    with quiet(), Session(nproc=2, backend=backend, precision="no") as session:
        session.run(SETUP, output="none")
        for _ in range(ROUNDS):
            with own_cache():
                before = times(session)
                planned = {"catalogue": predicted(session)}
                session.calibrate()
                planned["calibrated"] = predicted(session)
                profile(session)
                planned["profiled"] = predicted(session)
                after = times(session)
            found.append((math.sqrt(before[0] * after[0]), planned))
    return found


def times(session: Session) -> Times:
    found = session.run("steps()", output="none").values.values()
    return [max(parts) for parts in zip(*found, strict=True)]


def predicted(session: Session) -> float:
    """Seconds of a step under the session's own backend."""
    return planner.plan_model(session).row(session.backend).step_time_s


def profile(session: Session) -> None:
    """Profile the loop; the planner learns from it as from any."""
    before = len(session.profiles)
    session.run("for _ in range(7): _ = step()", output="none", profile={"steps": STEPS})
    since = time.monotonic()
    while len(session.profiles) == before and time.monotonic() - since < VERDICT_S:
        time.sleep(0.1)
    if len(session.profiles) == before:
        message = "there is no profile: was the loop stopped?"
        raise RuntimeError(message)


@contextlib.contextmanager
def own_cache() -> Iterator[None]:
    """Know nothing of this machine, and leave nothing known."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            put_back(before)


def put_back(before: str | None) -> None:
    """Give the environment its own folder again."""
    if before is None:
        os.environ.pop("XDG_CACHE_HOME")
    else:
        os.environ["XDG_CACHE_HOME"] = before


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Show nothing of what a session says meanwhile."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        yield
