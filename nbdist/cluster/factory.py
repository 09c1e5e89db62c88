"""Creates the cluster named by `--on`: local, ray, ray://HOST:PORT, ray://auto, slurm."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nbdist.cluster.ray import RayCluster
from nbdist.cluster.slurm import SlurmCluster
from nbdist.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping

SLURM_OPTIONS = ("partition", "time", "account")
NODE_OPTIONS = ("nodes", "gpus_per_node", "interface")
CLUSTER_OPTIONS = (*NODE_OPTIONS, *SLURM_OPTIONS)
"""Options that have no effect on one machine."""
_RAY = re.compile(r"ray(?:://(auto|[\w.-]+(?::\d{1,5})?|\[[0-9a-fA-F:]+\](?::\d{1,5})?))?")


def create_cluster(
    on: str, cluster_options: Mapping[str, object]
) -> RayCluster | SlurmCluster | None:
    """Create the cluster, without connecting to it; None for this machine.

    Args:
        on: the value of `--on`.
        cluster_options: the ``CLUSTER_OPTIONS`` that were given.

    Raises:
        OptionError: unknown cluster, or an option that it does not support.
    """
    ray = _RAY.fullmatch(on)
    if ray is None and on not in {"local", "slurm"}:
        raise OptionError(f"Unknown --on {on!r}. Use local, ray, ray://HOST:PORT or slurm.")
    unsupported = [
        (SLURM_OPTIONS if on != "slurm" else (), "--on slurm"),
        (NODE_OPTIONS if on == "local" else (), "--on ray or --on slurm"),
        (("python",) if on != "local" else (), "--on local"),
    ]
    for names, where in unsupported:
        given = [
            f"--{name.replace('_', '-')}" for name in names if cluster_options.get(name) is not None
        ]
        if given:
            raise OptionError(f"{', '.join(given)} can be used with {where} only. Leave it out.")
    interface = str(cluster_options.get("interface") or "")
    if ray:
        return RayCluster(ray[1] or "", interface)
    if on == "slurm":
        options = {name: str(cluster_options.get(name) or "") for name in SLURM_OPTIONS}
        return SlurmCluster(interface=interface, **options)
    return None
