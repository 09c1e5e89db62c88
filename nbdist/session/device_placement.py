"""Chooses the devices of a session's ranks.

Runs in the notebook's kernel. Without a GPU the session runs on CPU ranks. GPUs are selected by
UUID, since CUDA's default order (fastest first) differs from NVML's (by PCI bus).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from nbdist import rank_python, strategies
from nbdist.cluster.allocation import format_count, format_names
from nbdist.errors import OptionError, StartError
from nbdist.hardware import discovery
from nbdist.hardware.discovery import (
    DEFAULT_CPU_RANKS,
    gpu_memory_usage,
    open_nvml,
    refusal,
)
from nbdist.number_formatting import format_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from nbdist.cluster.allocation import RankDistribution
    from nbdist.hardware.discovery import Machine, SessionNode
    from nbdist.rank_python import RankPython

_INDEX = re.compile(r"[0-9]{1,4}")
_COUNT = re.compile(r"[0-9]{1,6}")
_FP8_PACKAGES = ("transformer_engine", "torchao")


@dataclass(frozen=True, slots=True)
class DevicePlacement:
    """Devices of a session's ranks."""

    nproc: int
    devices: tuple[int, ...] | None
    """GPU index of each rank, in torch's order in this kernel; None for CPU ranks."""
    visible_devices: tuple[str, ...] = ()
    """UUIDs of the same GPUs; empty for CPU ranks."""
    num_nodes: int = 1
    """With several nodes, or on a cluster, indices are per node and UUIDs are empty."""
    is_remote: bool = False
    """True if the ranks run on cluster nodes."""

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """Device type of the ranks."""
        return "cpu" if self.devices is None else "cuda"

    def describe(self) -> str:
        """Return a short description: "4 ranks on GPUs 0,1,2,3", "2 CPU ranks"."""
        if self.is_remote:
            ranks = format_count(self.nproc, "CPU rank" if self.devices is None else "GPU rank")
            return f"{ranks} on {format_count(self.num_nodes, 'node')}"
        if self.devices is None:
            return format_count(self.nproc, "CPU rank")
        gpus = "GPU" if self.nproc == 1 else "GPUs"
        return f"{format_count(self.nproc, 'rank')} on {gpus} {_join(self.devices)}"


def choose_placement(
    nproc: int | str | None, gpus: str | Sequence[int] | None, machine: Machine
) -> DevicePlacement:
    """Choose the devices of a session's ranks.

    Args:
        nproc: number of ranks (-n). Default: one per GPU; without a GPU 2.
        gpus: GPU indices (--gpus), "0,2" or a sequence; "none" or an empty sequence for CPU
            ranks. Default: every visible GPU, of which -n N uses the first N.
        machine: from `discovery.found()`.

    Raises:
        OptionError: more ranks than devices, an unknown GPU, or a contradiction.
    """
    count = parse_count(nproc)
    chosen = _chosen_gpus(gpus, machine)
    if not chosen:
        max_ranks = max(8, 4 * machine.num_cpus)
        if count is not None and count > max_ranks:
            raise OptionError(
                f"{count} CPU ranks are too many for {machine.num_cpus} CPUs: each is a process"
                f" that imports torch. Use -n {max_ranks} or fewer."
            )
        return DevicePlacement(count or DEFAULT_CPU_RANKS, None)
    if count is not None and count > len(chosen):
        raise OptionError(
            f"{count} ranks need {count} GPUs, but {len(chosen)} are available"
            f" ({_join(chosen)}). Use -n {len(chosen)} or fewer, or --gpus none for CPU ranks."
        )
    if count is not None and gpus is not None and count != len(chosen):
        raise OptionError(
            f"-n {count} contradicts --gpus {_join(chosen)} with {len(chosen)} devices. Leave"
            " one of them out."
        )
    devices = tuple(chosen[:count])
    return DevicePlacement(len(devices), devices, tuple(machine.gpus[i].uuid for i in devices))


def check_usable(
    placement: DevicePlacement, found: Machine, *, own: Collection[int] = ()
) -> list[str]:
    """Return warnings about GPUs before ranks start on them: failures, and use by others.

    Args:
        placement: devices of the ranks, on this machine.
        found: from `discovery.found()`.
        own: processes of this session.

    Raises:
        StartError: a GPU does not accept another process.
    """
    if placement.devices is None:
        return [] if found.gpus else list(found.warnings)  # no warnings if CPU ranks were chosen
    nvml = discovery.import_pynvml()
    if nvml is None:
        return list(found.warnings)
    chosen = [found.gpus[index] for index in placement.devices]
    try:
        with open_nvml(nvml):
            refused = [refusal(nvml, gpu, own=own) for gpu in chosen]
    except nvml.NVMLError:
        refused = []
    for index, reason in zip(placement.devices, refused, strict=False):
        if reason:
            msg = f"GPU {index} cannot be used: {reason.says}. Exclude it with --gpus, or"
            raise StartError(f"{msg} {reason.do}.")
    usage = gpu_memory_usage(replace(found, gpus=tuple(chosen)), own=own)
    occupied = (
        f"GPU {index} has {format_bytes(now.free_bytes)} of {format_bytes(gpu.memory_bytes)} free"
        f" (used by {format_names(now.holders)})"
        for index, gpu, now in zip(placement.devices, chosen, usage, strict=False)
        if now.holders and now.free_bytes < gpu.memory_bytes / 2
    )
    return [*found.warnings, *occupied]


def cluster_placement(spread: RankDistribution) -> DevicePlacement:
    """Return the placement of ranks on cluster nodes; each node assigns its own GPUs."""
    if spread.kind == "cpu":
        return DevicePlacement(spread.nproc, None, num_nodes=spread.num_nodes, is_remote=True)
    devices = tuple(range(spread.ranks_per_node)) * spread.num_nodes
    return DevicePlacement(
        spread.nproc, devices, ("",) * len(devices), spread.num_nodes, is_remote=True
    )


def parse_count(value: object, option: str = "-n", *, minimum: int = 1) -> int | None:
    """Parse a number of ranks, nodes or GPUs; None stays None.

    Raises:
        OptionError: not an integer of at least the minimum.
    """
    if value is None:
        return None
    text = str(value).strip()
    if isinstance(value, bool) or not _COUNT.fullmatch(text) or int(text) < minimum:
        raise OptionError(f"{option} must be an integer >= {minimum}, got {_quote(value)}.")
    return int(text)


def parse_gpus(text: str) -> tuple[int, ...]:
    """Parse "0,2", keeping the order; "none" is the empty tuple.

    Raises:
        OptionError: not of this form.
    """
    if text.strip() == "none":
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(map(_INDEX.fullmatch, parts)):
        raise OptionError(
            f"--gpus must be a list of indices such as 0,2, or none for CPU ranks, got"
            f" {_quote(text)}."
        )
    return tuple(map(int, parts))


def hardware_for_placement(
    placement: DevicePlacement,
    machine: Machine,
    nodes: Sequence[SessionNode] = (),
    python: RankPython = rank_python.KERNEL_PYTHON,
) -> strategies.Hardware:
    """Return the properties of the devices that strategies depend on; imports no backend.

    Args:
        placement: devices of the ranks.
        machine: this machine.
        nodes: cluster nodes, once allocated. Before that their GPUs are assumed to support
            bf16 and fp8.
        python: interpreter of the ranks.
    """
    here = [] if placement.is_remote else [machine.gpus[index] for index in placement.devices or ()]
    gpus = [gpu for node in nodes for gpu in node.machine.gpus] or here
    unseen = (9, 0) if placement.is_remote and placement.devices else (0, 0)
    weakest = min((gpu.capability for gpu in gpus), default=unseen)
    return strategies.Hardware(
        kind=placement.kind,
        bf16=weakest >= (8, 0),
        fp8=weakest >= (8, 9) and any(map(python.has, _FP8_PACKAGES)),
        world_size=placement.nproc,
        nodes=placement.num_nodes,
        deepspeed=python.has("deepspeed"),
    )


def mixed_gpus_warning(nodes: Sequence[SessionNode]) -> str:
    """Return a warning if the GPUs of nodes differ, else ""."""
    kinds: dict[str, list[str]] = {}
    for node in nodes:
        titles = sorted({gpu.title for gpu in node.machine.gpus})
        kinds.setdefault(" and ".join(titles), []).append(node.name)
    if len(kinds) < 2:  # noqa: PLR2004 - two kinds differ
        return ""
    groups = "; ".join(f"{gpus} on {format_names(names)}" for gpus, names in kinds.items())
    return f"The GPUs of the nodes differ ({groups}): only features common to all are used"


def _chosen_gpus(gpus: str | Sequence[int] | None, machine: Machine) -> tuple[int, ...]:
    if gpus is None:
        return tuple(range(len(machine.gpus)))
    try:
        chosen = parse_gpus(gpus) if isinstance(gpus, str) else tuple(gpus)
    except TypeError as error:
        message = f"GPUs must be indices such as [0, 2] or '0,2', got {_quote(gpus)}."
        raise OptionError(message) from error
    for index in chosen:
        if isinstance(index, bool) or not isinstance(index, int):
            raise OptionError(f"GPU indices must be integers such as [0, 2], got {_quote(index)}.")
        if not 0 <= index < len(machine.gpus):
            raise OptionError(
                f"GPU {index} is not visible. Use --gpus with some of"
                f" {_join(range(len(machine.gpus)))}."
                if machine.gpus
                else f"GPU {index} is not visible: no GPU was found. Leave --gpus out for CPU"
                " ranks."
            )
    if len(set(chosen)) != len(chosen):
        raise OptionError(f"--gpus {_join(chosen)} repeats a GPU. Each rank needs its own.")
    return chosen


def _join(indices: Sequence[int]) -> str:
    return ",".join(map(str, indices))


def _quote(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."  # noqa: PLR2004 - fits on a line
