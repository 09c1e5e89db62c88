"""The planner beside published runs, and beside what other planners say to the same ones."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from results import Row

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))
from published_runs import FEASIBLE, PICKS, RUNS

from nbdist.planner import model_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from published_runs import Ran, Run, Setting

GIB = 1 << 30
PEERS = Path(__file__).parents[1] / "build" / "peers"
ALLOC = "alloc==0.0.16"
ELEMENTS = {"adamw": "AdamW", "adamw_loop": "AdamW", "adamw_8bit": "AdamW8bit"}
Peer = tuple[str, "Callable[[Setting], float | None]"]


def measure() -> Iterator[Row]:
    """Rows about published runs; prints every one of them beside the planner's answer."""
    peers = list(others())
    print(table_of_runs(peers))
    print(table_of_feasibility(peers))
    yield feasibility(peers)
    yield picks()
    yield memory(peers)
    yield speed()


# -------------------------------------------------------------------------------- rows


def feasibility(peers: Sequence[Peer]) -> Row:
    """How many feasibilities are wrong."""
    wrong = [one.title for one in FEASIBLE if one.fits != one.ran]
    judged = ", ".join(f"{name} {score(ask)}" for name, ask in peers)
    return Row(
        name="plan: published setups whose feasibility is wrong",
        value=len(wrong),
        unit=f"of {len(FEASIBLE)}",
        limit=0,
        detail="; ".join(wrong) or f"right by others: {judged}",
    )


def score(ask: Callable[[Setting], float | None]) -> str:
    """Of the cases that a peer answers, how many it has right without any margin."""
    answers = [(one, ask(one)) for one in FEASIBLE]
    judged = [
        (one.ran, size * GIB <= one.cluster.smallest_device.memory_bytes)
        for one, size in answers
        if size is not None
    ]
    return f"{sum(ran == fits for ran, fits in judged)} of {len(judged)}"


def picks() -> Row:
    """How many choices are of another class than the published best."""
    best = {pick.title: (pick.plan.best, pick.best) for pick in PICKS}
    wrong = [title for title, (row, wanted) in best.items() if not row or row.backend not in wanted]
    return Row(
        name="plan: picks of another class than the published best",
        value=len(wrong),
        unit=f"of {len(PICKS)}",
        limit=0,
        detail="; ".join(wrong) or ", ".join(f"case {one.case} {one.best[0]}" for one in PICKS),
    )


def memory(peers: Sequence[Peer]) -> Row:
    """The largest error of GiB, in per cent."""
    runs = [run for run in RUNS if run.gib]
    errors = [percent(run.reserved_gib, run.gib) for run in runs]
    theirs = ", ".join(f"{name} {worst(ask, runs)}" for name, ask in peers)
    return Row(
        name="plan: GiB against published ones, largest error",
        value=max(errors),
        unit="%",
        limit=10,
        detail=f"{len(runs)} runs, median {sorted(errors)[len(runs) // 2]:.0f} %; others: {theirs}",
    )


def speed() -> Row:
    """The largest error of tokens/s, in per cent."""
    errors = [percent(run.tokens_per_s, run.tokens) for run in RUNS]
    return Row(
        name="plan: tokens/s against published ones, largest error",
        value=max(errors),
        unit="%",
        limit=25,
        detail=f"{len(RUNS)} runs, median {sorted(errors)[len(RUNS) // 2]:.0f} %",
    )


def percent(ours: float, published: float | None) -> float:
    """Relative error."""
    return 100 * abs(ours / published - 1) if published else 0.0


def worst(ask: Callable[[Setting], float | None], runs: Sequence[Run]) -> str:
    """A peer's largest error over the runs that it answers."""
    answers = [(ask(run), run.gib) for run in runs]
    errors = [percent(size, gib) for size, gib in answers if size is not None]
    return f"{max(errors):.0f} %" if errors else "no answer"


# ------------------------------------------------------------------------------ tables


def table_of_runs(peers: Sequence[Peer]) -> str:
    head = f"{'tokens/s of one GPU, GiB':48}{'published':>18}{'planner':>18}"
    lines = [head + "".join(f"{name:>20}" for name, _ in peers)]
    for run in RUNS:
        there = f"{run.tokens:,.0f}  {figure(run.gib)}"
        ours = f"{run.tokens_per_s:,.0f}  {figure(run.reserved_gib)}"
        theirs = "".join(f"{figure(ask(run)):>20}" for _, ask in peers)
        lines.append(f"{run.case:2} {run.title:45}{there:>18}{ours:>18}{theirs}")
    return "\n".join(lines)


def table_of_feasibility(peers: Sequence[Peer]) -> str:
    """Every setup that ran or did not, a line each."""
    head = f"{'GiB':70}{'of':>7}{'published':>12}{'planner':>10}"
    lines = [head + "".join(f"{name:>20}" for name, _ in peers)]
    return "\n".join(lines + [feasible_line(one, peers) for one in FEASIBLE[len(RUNS) :]])


def feasible_line(one: Ran, peers: Sequence[Peer]) -> str:
    there = "ran" if one.ran else "did not fit"
    of = figure(one.cluster.smallest_device.memory_bytes / GIB)
    theirs = "".join(f"{figure(ask(one)):>20}" for _, ask in peers)
    title = f"{one.case:2} {one.title}"[:69]
    return f"{title:70}{of:>7}{there:>12}{figure(one.peak.device_bytes / GIB):>10}{theirs}"


def figure(size: float | None) -> str:
    """GiB in a cell."""
    return "-" if size is None else f"{size:.1f}"


# ------------------------------------------------------------------------------- peers


def others() -> Iterator[Peer]:
    """The other planners that can be had, each a function from a setting to GiB on one GPU."""
    yield "accelerate estimate", accelerate_says
    yield "DeepSpeed estimator", deepspeed_says
    if alloc := alloc_or_none():
        yield "alloc ghost", alloc


def accelerate_says(one: Setting) -> float:
    """`accelerate estimate-memory`, "training using Adam": of the whole model on one GPU."""
    from accelerate.commands.estimate import estimate_training_usage

    types = {"no": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "fp8"}
    usage = estimate_training_usage(4 * model_spec.num_params(one.model), types[one.precision])
    return max(usage.values()) / GIB


def deepspeed_says(one: Setting) -> float | None:
    """DeepSpeed's estimators of model states, for the stages they know."""
    with contextlib.redirect_stdout(io.StringIO()):
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as three
        from deepspeed.runtime.zero.stage_1_and_2 import (
            estimate_zero2_model_states_mem_needs as two,
        )
    params, cluster = model_spec.num_params(one.model), one.cluster
    where = {"num_gpus_per_node": cluster.ranks_per_node, "num_nodes": cluster.num_nodes}
    offload = "offload" in one.options
    if one.backend == "zero2":
        return float(two(params, cpu_offload=offload, **where)[1]) / GIB
    if one.backend == "zero3":
        both = {"cpu_offload": offload, "cpu_offload_params": "offload_params" in one.options}
        tensors = (shape for group in one.model.groups for shape in group.tensors)
        largest = max(shape.num_elements for shape in tensors)
        return float(three(params, largest, **both, **where)[1]) / GIB
    return None


def alloc_or_none() -> Callable[[Setting], float | None] | None:
    """The ghost scan of the package `alloc`, which knows neither ranks nor strategies."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
    done = subprocess.run(
        [*command, "--target", str(PEERS), ALLOC], capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(f"{ALLOC} cannot be had here and is left out: {done.stderr.strip()[-200:]}")
        return None
    sys.path.append(str(PEERS))
    from alloc.ghost import ghost

    def says(one: Setting) -> float:
        report = ghost(
            param_count=model_spec.num_params(one.model),
            dtype="float32" if one.precision == "no" else "bfloat16",
            batch_size=one.batch_size,
            seq_length=one.seq_len,
            hidden_dim=one.model.hidden,
            optimizer_type=ELEMENTS[one.optimizer],
        )
        return float(report.total_gb)

    return says


if __name__ == "__main__":
    from results import table

    print(table(measure()))
