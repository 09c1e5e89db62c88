"""What DeepSpeed's offload compiles, and locks that killed builds have left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist import builds
from nbdist.doctor.finding import listed, note, ok

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from nbdist.doctor.finding import Finding

TOPIC = "compilers"
_SAYS = "an offload under the zero backends cannot be built here"


def look(*, missing: str | None = None, locks: Sequence[Path] | None = None) -> Iterator[Finding]:
    """Ask for compiler, ninja and libaio, which only an offload needs.

    Args:
        missing: what a build would miss, for tests.
        locks: stale ones, for tests.
    """
    missing = builds.missing(["cpu_adam", builds.NVME_OP]) if missing is None else missing
    if missing:
        yield note(TOPIC, f"{_SAYS}: {missing}", "nothing, unless you want --offload")
    else:
        yield ok(TOPIC, "compiler, ninja and libaio are there for --offload")
    locks = builds.stale_locks() if locks is None else locks
    if locks:
        says = f"left by killed builds, whoever builds these again waits for ever: {listed(locks)}"
        yield note("build locks", says, f"rm {' '.join(map(str, locks))}")
