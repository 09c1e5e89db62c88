"""Figures of ranks as a profile would have measured them, written by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from nbdist.planner import cluster_spec, target_devices
from nbdist.planner.models import analytic
from nbdist.profiler.measurements import (
    STEP_PARTS,
    CollectiveStats,
    DataLoaderStats,
    ProfiledModel,
    RankProfile,
)
from nbdist.profiler.profile import Profile
from nbdist.profiler.profile_data import ProfiledConfig
from nbdist.strategies import Options

if TYPE_CHECKING:
    from collections.abc import Sequence

BALANCED = {
    "data": 0.003,
    "forward": 0.030,
    "backward": 0.060,
    "optimizer": 0.010,
    "communication": 0.008,
    "python": 0.004,
}
"""A step without a bottleneck, in seconds."""
SAMPLES, LENGTH = 8, 64
MODEL = ProfiledModel(
    backend="ddp",
    params=1 << 20,
    units=0,
    largest_unit=0,
    training=True,
    precision="no",
    optimizer="AdamW",
    samples=SAMPLES,
    seq_len=LENGTH,
    accumulate=1,
)
LOADER = DataLoaderStats(
    num_workers=0, pin_memory=False, batch_size=SAMPLES, sharded=True, batches=1, fetch_s=0.0
)
BEGAN = 1_790_000_000.0
"""Unix seconds of the window's begin."""


def rank(
    number: int = 0,
    *,
    steps: int = 8,
    late: Sequence[float] | None = None,
    kind: Literal["cuda", "cpu"] = "cpu",
    collective: str = "all_reduce",
    model: dict[str, Any] | None = None,
    loader: dict[str, Any] | None = None,
    **parts: float,
) -> RankProfile:
    """One rank's figures: the balanced step but for the parts named.

    Args:
        number: of the rank.
        steps: of the window, all alike.
        late: seconds by which the rank comes later to each step's collective than rank 0
            does in `BALANCED`; default: what its own work takes longer.
        kind: of its device.
        collective: the one that each step has.
        model: fields that differ.
        loader: fields that differ.
        parts: seconds of a step.
    """
    whole = dict.fromkeys(STEP_PARTS, 0.0) | BALANCED | parts
    step = sum(whole.values())
    ends = [BEGAN + at * step for at in range(steps + 1)]
    exposed = whole["communication"]
    after = BALANCED["optimizer"]  # so that collectives end alike on all ranks
    offsets = late or [0.0] * steps
    begins = [
        [end - after - exposed + offset, exposed - offset]
        for end, offset in zip(ends[1:], offsets, strict=True)
    ]
    traffic = CollectiveStats(
        name=collective, count=1, bytes=4 << 20, seconds=exposed, exposed_s=exposed
    )
    return RankProfile(
        rank=number,
        kind=kind,
        device="CPU rank" if kind == "cpu" else "H100-80GB",
        ends=ends,
        parts=whole,
        traffic=[traffic],
        begins={"0": begins},
        loaders=[replace(LOADER, **(loader or {}))],
        model=replace(MODEL, **(model or {})),
    )


def setting(devices_: str = "", **options: Any) -> ProfiledConfig:
    """Two CPU ranks under DDP with a small model, or other devices and options."""
    chosen = {"backend": "ddp", "precision": "no", **options}
    cluster = (
        target_devices.parse_devices(devices_)
        if devices_
        else cluster_spec.cpu_cluster(2, host_memory_bytes=16 << 30, num_cpus=2)
    )
    return ProfiledConfig(
        options=Options(**chosen),
        cluster=cluster,
        model_spec=analytic.spec_from_parameter_count("7b" if devices_ else "1m"),
    )


def both(**changes: Any) -> list[RankProfile]:
    """Two ranks alike."""
    return [rank(number, **changes) for number in (0, 1)]


def profile(*figures: RankProfile, where: ProfiledConfig | None = None, **more: Any) -> Profile:
    return Profile.of(figures, where or setting(), **more)


def noisy(seed: int) -> list[RankProfile]:
    """Two to four ranks of a control run: no part is large, none is the same everywhere.

    Ranks take turns in being late, as they do on busy cores: each step another one comes up to
    a twentieth of its computing after the first.
    """
    luck = random.Random(seed)  # noqa: S311 - no secret
    number = luck.choice((2, 2, 3, 4))
    steps = luck.randint(5, 10)
    computing = luck.uniform(0.02, 0.5)
    base = {
        "data": luck.uniform(0, 0.06),
        "copies": luck.uniform(0, 0.02),
        "forward": luck.uniform(0.3, 0.5),
        "backward": luck.uniform(0.6, 0.9),
        "optimizer": luck.uniform(0.02, 0.3),
        "communication": luck.uniform(0.02, 0.2),
        "python": luck.uniform(0.01, 0.12),
        "idle": luck.uniform(0, 0.05),
    }
    late = [[0.0] * steps for _ in range(number)]
    for at in range(steps):
        for one in luck.sample(range(number), number - 1):
            late[one][at] = luck.uniform(0, 0.05) * computing
    owns = [
        {part: computing * share * luck.uniform(0.95, 1.05) for part, share in base.items()}
        for _ in range(number)
    ]
    whole = max(sum(own.values()) for own in owns) + 0.05 * computing
    for own in owns:
        own["communication"] += whole - sum(own.values())
    return [rank(one, steps=steps, late=late[one], **own) for one, own in enumerate(owns)]
