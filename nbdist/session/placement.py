"""Which devices of this machine a session takes.

Runs in the notebook's kernel. No GPU: the session rehearses on CPU ranks.
`Placement.visible` names GPUs by UUID, since CUDA's own order (fastest first) is not NVML's (by
PCI bus).
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from nbdist import strategies
from nbdist.cluster.version_check import listed
from nbdist.errors import OptionError, StartError
from nbdist.hardware.discovery import CPU_RANKS, opened, pynvml, refusal, usage

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from nbdist.cluster.rank_distribution import Spread
    from nbdist.hardware.discovery import Machine, Node

_INDEX = re.compile(r"[0-9]{1,4}")
_FP8_PACKAGES = ("transformer_engine", "torchao")


@dataclass(frozen=True, slots=True)
class Placement:
    """Which devices a session's ranks run on."""

    nproc: int
    devices: tuple[int, ...] | None
    """Index of each rank's GPU, as torch counts them in this kernel; None for CPU ranks."""
    visible: tuple[str, ...] = ()
    """UUIDs of the same GPUs; empty for CPU ranks."""
    nodes: int = 1
    """With more, or on a cluster, each device is counted on its own node and has no name here."""
    away: bool = False
    """Whether the ranks are on nodes of a cluster."""

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """What the ranks compute on."""
        return "cpu" if self.devices is None else "cuda"

    def describe(self) -> str:
        """Describe in a few words: "4 ranks on GPUs 0,1,2,3", "2 CPU ranks"."""
        ranks = "rank" if self.nproc == 1 else "ranks"
        if self.away:
            nodes = "node" if self.nodes == 1 else "nodes"
            what = f"CPU {ranks}" if self.devices is None else f"GPU {ranks}"
            return f"{self.nproc} {what} on {self.nodes} {nodes}"
        if self.devices is None:
            return f"{self.nproc} CPU {ranks}"
        gpus = "GPU" if self.nproc == 1 else "GPUs"
        return f"{self.nproc} {ranks} on {gpus} {','.join(map(str, self.devices))}"


def placement(
    nproc: int | str | None, gpus: str | Sequence[int] | None, machine: Machine
) -> Placement:
    """Choose the devices of a session's ranks.

    Args:
        nproc: number of ranks (-n). Default: one for each GPU; without a GPU 2.
        gpus: indices of GPUs (--gpus), "0,2" or a sequence; "none" or an empty sequence
            for CPU ranks. Default: every visible GPU, of which -n N takes the first N.
        machine: from `machine.found()`.

    Raises:
        OptionError: more ranks than devices, an unknown GPU, or a contradiction.
    """
    wanted = None if nproc is None else parse_nproc(nproc)
    chosen = _chosen_gpus(gpus, machine)
    if not chosen:
        return Placement(_cpu_ranks(wanted, machine), None)
    if wanted is not None and wanted > len(chosen):
        raise OptionError(
            f"{wanted} ranks need {wanted} GPUs and there are {len(chosen)}"
            f" ({_listed(chosen)}); use -n {len(chosen)} or fewer,"
            f" or --gpus none for a rehearsal on CPU ranks."
        )
    if wanted is not None and gpus is not None and wanted != len(chosen):
        raise OptionError(
            f"-n {wanted} contradicts --gpus {_listed(chosen)}, which are {len(chosen)} devices;"
            f" leave one of the two out."
        )
    devices = tuple(chosen[:wanted])
    return Placement(len(devices), devices, tuple(machine.gpus[i].uuid for i in devices))


def check_usable(
    placement: Placement, found: Machine, *, own: Collection[int] = (), nvml: Any = None
) -> list[str]:
    """What to know of the GPUs before ranks start on them: which fail, which others fill.

    Args:
        placement: of the ranks, on this machine.
        found: from `machine.found()`.
        own: processes of this session.
        nvml: a module with the functions of `pynvml`, for tests.

    Raises:
        StartError: a GPU takes no further process.
    """
    if placement.devices is None:
        return [] if found.gpus else list(found.warnings)  # without GPUs by choice
    nvml = nvml or pynvml()
    if nvml is None:
        return list(found.warnings)
    chosen = [found.gpus[index] for index in placement.devices]
    try:
        with opened(nvml):
            refused = [refusal(nvml, gpu, own=own) for gpu in chosen]
    except nvml.NVMLError:
        refused = []
    for index, reason in zip(placement.devices, refused, strict=False):
        if reason:
            msg = f"GPU {index} cannot be used: {reason.says}. Leave it out with --gpus, or"
            raise StartError(f"{msg} {reason.do}.")
    held = usage(replace(found, gpus=tuple(chosen)), own=own, nvml=nvml)
    busy = (
        f"GPU {index} has {now.free_bytes / 2**30:.0f} of {gpu.memory_bytes / 2**30:.0f} GB free"
        f" beside {listed(now.holders)}"
        for index, gpu, now in zip(placement.devices, chosen, held, strict=False)
        if now.holders and now.free_bytes < gpu.memory_bytes / 2
    )
    return [*found.warnings, *busy]


def spread_out(spread: Spread) -> Placement:
    """The devices of ranks on nodes of a cluster; who has which GPU is the nodes' business."""
    if spread.kind == "cpu":
        return Placement(spread.nproc, None, nodes=spread.nodes, away=True)
    devices = tuple(range(spread.each)) * spread.nodes
    return Placement(spread.nproc, devices, ("",) * len(devices), spread.nodes, away=True)


def parse_nproc(given: int | str) -> int:
    """Read a number of ranks: a whole number from 1.

    Raises:
        OptionError: anything else.
    """
    text = str(given).strip()
    if isinstance(given, bool) or not _INDEX.fullmatch(text) or int(text) < 1:
        message = f"-n {_short(given)} is not a number of ranks; use a whole number from 1."
        raise OptionError(message)
    return int(text)


def parse_gpus(text: str) -> tuple[int, ...]:
    """Read "0,2" in the order given; "none" is the empty tuple.

    Raises:
        OptionError: not of this form.
    """
    if text.strip() == "none":
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(map(_INDEX.fullmatch, parts)):
        message = (
            f"--gpus {_short(text)} is not a list of GPUs; use indices such as --gpus 0,2,"
            f" or --gpus none for CPU ranks."
        )
        raise OptionError(message)
    return tuple(map(int, parts))


def hardware(
    placement: Placement, machine: Machine, nodes: Sequence[Node] = ()
) -> strategies.Hardware:
    """Say what the strategies must know of the devices; imports no engine.

    Args:
        placement: where the ranks are.
        machine: this one.
        nodes: of a cluster, once they are there. Until then their GPUs are taken for such as
            have bf16 and fp8.
    """
    here = [] if placement.away else [machine.gpus[index] for index in placement.devices or ()]
    gpus = [gpu for node in nodes for gpu in node.machine.gpus] or here
    unseen = (9, 0) if placement.away and placement.devices else (0, 0)
    weakest = min((gpu.capability for gpu in gpus), default=unseen)
    return strategies.Hardware(
        kind=placement.kind,
        bf16=weakest >= (8, 0),
        fp8=weakest >= (8, 9) and any(map(_installed, _FP8_PACKAGES)),
        world_size=placement.nproc,
        nodes=placement.nodes,
        deepspeed=_installed("deepspeed"),
    )


def differing_gpus(nodes: Sequence[Node]) -> str:
    """A sentence where the GPUs of nodes differ; else nothing."""
    kinds: dict[str, list[str]] = {}
    for node in nodes:
        titles = sorted({gpu.title for gpu in node.machine.gpus})
        kinds.setdefault(" and ".join(titles), []).append(node.name)
    if len(kinds) < 2:  # noqa: PLR2004 - a difference has two sides
        return ""
    told = "; ".join(f"{gpus} on {listed(names)}" for gpus, names in kinds.items())
    return f"The GPUs of the nodes differ ({told}): what one lacks, none uses"


def _chosen_gpus(gpus: str | Sequence[int] | None, machine: Machine) -> tuple[int, ...]:
    if gpus is None:
        return tuple(range(len(machine.gpus)))
    try:
        chosen = parse_gpus(gpus) if isinstance(gpus, str) else tuple(gpus)
    except TypeError as error:
        message = f"{_short(gpus)} is not a list of GPUs; use indices such as [0, 2] or '0,2'."
        raise OptionError(message) from error
    for index in chosen:
        if isinstance(index, bool) or not isinstance(index, int):
            message = f"GPU {_short(index)} is not an index; use whole numbers such as [0, 2]."
            raise OptionError(message)
        if not 0 <= index < len(machine.gpus):
            raise OptionError(_unknown_gpu(index, machine))
    if len(set(chosen)) != len(chosen):
        message = f"--gpus {_listed(chosen)} names a GPU twice; each rank needs its own."
        raise OptionError(message)
    return chosen


def _unknown_gpu(index: int, machine: Machine) -> str:
    if not machine.gpus:
        return f"GPU {index} is not visible: there is none here; leave --gpus out for CPU ranks."
    there = _listed(range(len(machine.gpus)))
    return f"GPU {index} is not visible; use --gpus with some of {there}."


def _cpu_ranks(wanted: int | None, machine: Machine) -> int:
    """Number of CPU ranks: a rehearsal may crowd the CPUs, but not drown them."""
    if wanted is None:
        return CPU_RANKS
    most = max(8, 4 * machine.num_cpus)
    if wanted > most:
        raise OptionError(
            f"{wanted} CPU ranks are too many for {machine.num_cpus} CPUs, each is a process"
            f" with torch loaded; use -n {most} or fewer."
        )
    return wanted


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _listed(indices: Sequence[int]) -> str:
    return ",".join(map(str, indices))


def _short(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 40 else f"{text[:37]}..."  # noqa: PLR2004 - a line's share
