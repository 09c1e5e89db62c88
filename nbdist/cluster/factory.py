"""Which cluster `--on` names: local, ray, ray://HOST:PORT, ray://auto, slurm."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nbdist.cluster.ray import RayCluster
from nbdist.cluster.slurm import SlurmCluster
from nbdist.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping

OF_SLURM = ("partition", "time", "account")
OF_NODES = ("nodes", "gpus_per_node", "interface")
OF_CLUSTERS = (*OF_NODES, *OF_SLURM)
"""Options that say nothing on one machine."""
_RAY = re.compile(r"ray(?:://(auto|[\w.-]+(?::\d{1,5})?|\[[0-9a-fA-F:]+\](?::\d{1,5})?))?")


def opened(on: str, given: Mapping[str, object]) -> RayCluster | SlurmCluster | None:
    """The cluster of this name; None: this machine. Asks nobody yet.

    Args:
        on: the value of `--on`.
        given: the options of `OF_CLUSTERS` that were given.

    Raises:
        OptionError: no such cluster, or an option that it does not have.
    """
    ray = _RAY.fullmatch(on)
    if ray is None and on not in {"local", "slurm"}:
        raise OptionError(
            f"--on {on!r} is no place for ranks; use local, ray, ray://HOST:PORT or slurm."
        )
    _refuse(given, OF_SLURM if on != "slurm" else (), "--on slurm")
    _refuse(given, OF_NODES if on == "local" else (), "--on ray or --on slurm")
    interface = str(given.get("interface") or "")
    if ray:
        return RayCluster(ray[1] or "", interface)
    if on == "slurm":
        words = {name: str(given.get(name) or "") for name in OF_SLURM}
        return SlurmCluster(interface=interface, **words)
    return None


def _refuse(given: Mapping[str, object], names: tuple[str, ...], where: str) -> None:
    wrong = [f"--{name.replace('_', '-')}" for name in names if given.get(name) is not None]
    if wrong:
        raise OptionError(f"{', '.join(wrong)} can be used with {where} only; leave it out.")
