"""What DeepSpeed's offload compiles, and locks that killed builds have left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.doctor.finding import listed, note, ok
from nbdist.hardware import deepspeed_requirements, discovery

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from nbdist.doctor.finding import Finding

TOPIC = "compilers"
_SAYS = "not every offload under the zero backends can be built here"


def look(
    *, missing: str | None = None, locks: Sequence[Path] | None = None, kind: str | None = None
) -> Iterator[Finding]:
    """Ask for compiler, ninja, libaio and the CUDA toolkit, which only an offload needs.

    Args:
        missing: what a build would miss, for tests.
        locks: stale ones, for tests.
        kind: of the ranks. Default: as a new session would have.
    """
    kind = kind or ("cuda" if discovery.found().gpus else "cpu")
    missing = (
        deepspeed_requirements.missing(["cpu_adam", deepspeed_requirements.NVME_OP], kind)
        if missing is None
        else missing
    )
    tools = "compiler, ninja, libaio and nvcc" if kind == "cuda" else "compiler, ninja and libaio"
    if missing:
        yield note(TOPIC, f"{_SAYS}: {missing}", "nothing, unless you want --offload")
    else:
        yield ok(TOPIC, f"{tools} are there for --offload")
    locks = deepspeed_requirements.stale_locks() if locks is None else locks
    if locks:
        says = f"left by killed builds, whoever builds these again waits for ever: {listed(locks)}"
        yield note("build locks", says, f"rm {' '.join(map(str, locks))}")
