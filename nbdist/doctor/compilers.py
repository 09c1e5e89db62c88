"""Checks of the tools that compile DeepSpeed's offload ops, and of locks left by killed builds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.doctor.finding import note, ok, summarize_list
from nbdist.hardware import deepspeed_requirements, discovery

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from nbdist.doctor.finding import Finding

TOPIC = "compilers"
_CANNOT_COMPILE = "some offload ops of the zero backends cannot be compiled here"


def check_compilers(
    *, missing: str | None = None, locks: Sequence[Path] | None = None, kind: str | None = None
) -> Iterator[Finding]:
    """Check for the compiler, ninja, libaio and the CUDA toolkit, which only offload needs.

    Args:
        missing: error of a build, for tests. "" means that nothing is missing.
        locks: stale build locks, for tests.
        kind: device type of the ranks. Default: that of a new session.
    """
    kind = kind or ("cuda" if discovery.discover_machine().gpus else "cpu")
    missing = (
        deepspeed_requirements.missing_requirements(
            ["cpu_adam", deepspeed_requirements.NVME_OP], kind
        )
        if missing is None
        else missing
    )
    tools = "compiler, ninja, libaio and nvcc" if kind == "cuda" else "compiler, ninja and libaio"
    if missing:
        yield note(
            TOPIC, f"{_CANNOT_COMPILE}: {missing}", "no action needed, unless you use --offload"
        )
    else:
        yield ok(TOPIC, f"{tools} are installed, for --offload")
    locks = deepspeed_requirements.stale_build_locks() if locks is None else locks
    if locks:
        says = (
            "left by killed builds; the next build of these ops waits forever:"
            f" {summarize_list(locks)}"
        )
        yield note("build locks", says, f"rm {' '.join(map(str, locks))}")
