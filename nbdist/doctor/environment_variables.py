"""Checks of environment variables."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nbdist.cluster.launcher_process import remove_launch_variables
from nbdist.doctor.finding import is_secret_name, note, ok, redacted_variable, summarize_list

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.doctor.finding import Finding

TOPIC = "environment"
OVERWRITTEN_VARIABLES = frozenset(
    {"CUDA_DEVICE_ORDER", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "DS_ACCELERATOR"}
)
"""Variables that nbdist sets for its ranks, whatever value they have here."""
SLOW_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "the CPU waits for every CUDA kernel",
    "TORCH_DISTRIBUTED_DEBUG": "collectives are checked, which makes them slower",
    "NCCL_DEBUG": "NCCL writes to each rank's log",
    "NCCL_P2P_DISABLE": "GPUs communicate through host memory",
    "NCCL_SHM_DISABLE": "GPUs communicate over the network",
}
_OFF = frozenset({"", "0", "OFF", "WARN", "VERSION"})
RELEVANT_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "PYTORCH_", "DEEPSPEED_", "DS_")


def check_environment(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check the kernel's environment. Secrets are counted but never shown.

    Args:
        environ: the environment, for tests.
    """
    stale = sorted(environ.keys() - remove_launch_variables(environ).keys())
    names = [name for name in stale if not name.startswith(("JPY_", "NBDIST_"))]
    if names:
        message = f"set by another launcher and not passed to the ranks: {summarize_list(names, 8)}"
        yield note(
            TOPIC,
            message,
            "no action needed, unless you also use another launcher in this notebook",
        )
    for name, effect in SLOW_VARIABLES.items():
        if environ.get(name, "").upper() not in _OFF:
            message = f"{redacted_variable(name, environ[name])}: {effect}"
            yield note(TOPIC, message, f"unset {name} if you do not need it")
    for name in sorted(OVERWRITTEN_VARIABLES & environ.keys()):
        message = (
            f"{redacted_variable(name, environ[name])} has no effect on ranks: nbdist sets its own"
        )
        yield note(TOPIC, message, "no action needed")
    handled = {*stale, *SLOW_VARIABLES, *OVERWRITTEN_VARIABLES}
    others = [
        name
        for name in sorted(environ)
        if name.startswith(RELEVANT_PREFIXES) and name not in handled
    ]
    if others:
        variables = (redacted_variable(name, environ[name]) for name in others)
        message = f"ranks inherit {summarize_list(variables, 8)}"
        yield note(TOPIC, message, "unset those that you do not need before you start Jupyter")
    secrets = sum(map(is_secret_name, environ))
    yield ok(TOPIC, f"{len(environ)} variables, {secrets} of them hidden because of their names")
