"""Variables that change what ranks do, or that another launcher has left."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nbdist.cluster.rank_environment import scrubbed
from nbdist.doctor.finding import is_secret, listed, note, ok, shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.doctor.finding import Finding

TOPIC = "environment"
OVERWRITTEN = frozenset(
    {"CUDA_DEVICE_ORDER", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "DS_ACCELERATOR"}
)
"""Set by nbdist for its ranks, whatever they were."""
SLOW = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "TORCH_DISTRIBUTED_DEBUG": "collectives are checked, and slower",
    "NCCL_DEBUG": "NCCL writes to each rank's log",
    "NCCL_P2P_DISABLE": "GPUs talk through host memory",
    "NCCL_SHM_DISABLE": "GPUs talk over the network",
}
_OFF = frozenset({"", "0", "OFF", "WARN", "VERSION"})
PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "PYTORCH_", "DEEPSPEED_", "DS_")


def look(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Look at this kernel's environment; secrets are counted and never shown.

    Args:
        environ: the environment, for tests.
    """
    stale = sorted(environ.keys() - scrubbed(environ).keys())
    left = [name for name in stale if not name.startswith(("JPY_", "NBDIST_"))]
    if left:
        says = f"of another launcher, and kept from the ranks: {listed(left, 8)}"
        yield note(TOPIC, says, "nothing, unless you launch by other means in this notebook too")
    for name, does in SLOW.items():
        if environ.get(name, "").upper() not in _OFF:
            says = f"{shown(name, environ[name])}: {does}"
            yield note(TOPIC, says, f"unset {name} when you do not need it")
    for name in sorted(OVERWRITTEN & environ.keys()):
        says = f"{shown(name, environ[name])} has no effect on ranks: nbdist sets its own"
        yield note(TOPIC, says, "nothing")
    known = {*stale, *SLOW, *OVERWRITTEN}
    others = [name for name in sorted(environ) if name.startswith(PREFIXES) and name not in known]
    if others:
        says = f"ranks take over {listed((shown(name, environ[name]) for name in others), 8)}"
        yield note(TOPIC, says, "unset what you did not mean, before Jupyter starts")
    secrets = sum(map(is_secret, environ))
    yield ok(TOPIC, f"{len(environ)} variables, {secrets} of them secret by their names: not shown")
