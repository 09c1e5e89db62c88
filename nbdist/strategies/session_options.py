"""All options of a session: those of the engine, its ranks, and the cluster they run on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from nbdist.strategies.accelerate_config import load_accelerate_config
from nbdist.strategies.backends import Options
from nbdist.strategies.option_arguments import option, strip_quotes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.strategies.option_arguments import Argument


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions(Options):
    """Declares the options of a session; `session.config` checks their values."""

    auto: bool = option(
        default=False,
        scope="ranks",
        help="choose the backend at accelerator.prepare() from model and machine, and explain it",
        can_switch=False,
    )
    config: Mapping[str, Any] | None = option(
        None,
        scope="ranks",
        metavar="FILE",
        help="Accelerate's config file or a DeepSpeed JSON, from which options are taken",
        type=strip_quotes,
        load=load_accelerate_config,
    )
    nproc: int | None = option(
        None,
        scope="ranks",
        short_flag="-n",
        metavar="N",
        help="number of ranks; default: one per visible GPU, or 2 CPU ranks without a GPU",
        type=int,
        panel_limit=4096,
    )
    devices: str | Sequence[int] | None = option(
        None,
        scope="ranks",
        flag="--gpus",
        metavar="LIST",
        help="GPU indices, such as 0,2; none: CPU ranks",
    )
    on: str = option(
        "local",
        scope="cluster",
        metavar="WHERE",
        help="where ranks run: local, ray, ray://HOST:PORT or slurm; default: local",
        values=("local", "ray", "ray://", "ray://auto", "slurm"),
        can_switch=False,
    )
    python: str | None = option(
        None,
        scope="cluster",
        metavar="PATH",
        help="Python interpreter or virtual environment of ranks on this machine; default: the"
        " notebook's",
        can_switch=False,
    )
    nodes: int | None = option(
        None,
        scope="cluster",
        metavar="N",
        help="number of cluster nodes, with equally many ranks",
        type=int,
    )
    gpus_per_node: int | None = option(
        None,
        scope="cluster",
        metavar="N",
        help="GPUs and ranks per node; 0: CPU ranks; default: all, but 0 with Slurm outside a job",
        type=int,
    )
    partition: str | None = option(
        None, scope="cluster", metavar="NAME", help="Slurm partition", can_switch=False
    )
    time: str | None = option(
        None,
        scope="cluster",
        metavar="TIME",
        help="time limit of the Slurm job, such as 1:00:00",
        can_switch=False,
    )
    account: str | None = option(
        None, scope="cluster", metavar="NAME", help="account of the Slurm job", can_switch=False
    )
    interface: str | None = option(
        None,
        scope="cluster",
        metavar="NAME",
        help="network interface between nodes, such as ib0",
        can_switch=False,
    )


ARGUMENTS: Mapping[str, Argument] = {
    item.name: item.metadata["argument"] for item in fields(SessionOptions)
}
"""Every option of a session, by its keyword."""
