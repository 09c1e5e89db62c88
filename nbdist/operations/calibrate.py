"""A calibration as the notebook's kernel sees it: the request to all ranks, and what they measured.

What it measured counts in every later plan for this machine.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from nbdist.errors import OptionError, SessionError
from nbdist.output.status_line import StatusLine
from nbdist.paths import expanded
from nbdist.planner import fit_measurements, local_devices, step_time
from nbdist.planner.measurements import COLLECTIVES, Disk
from nbdist.protocol import messages
from nbdist.session.recovery import Transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from nbdist.planner.cluster_spec import Cluster
    from nbdist.session.worker_group import Gang
    from nbdist.strategies import Hardware, Options

    Listen = Callable[[Callable[[str], object] | None], None]

_TYPES = {"no": "fp32", "fp8": "bf16"}
_PRECISIONS = {"fp32": "no"}
_GIGA = 1e9
_TERA = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One thing that was measured."""

    what: str
    measured: str
    before: str = ""
    """What a plan took for it until now; empty where plans do not use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """What a calibration measured."""

    place: str
    """Ranks and devices, in words."""
    seconds: float
    lines: tuple[Line, ...] = ()
    notes: tuple[str, ...] = ()
    figures: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """What each rank measured, as `worker.benchmarks.communication.measure` gives it."""

    def __str__(self) -> str:
        """A table for a terminal."""
        lines = ((one.what, one.measured, one.before) for one in self.lines)
        rows = [("", "measured", "plans took"), *lines]
        table = [f"  {what:<34}{now:>16}{then:>16}".rstrip() for what, now, then in rows]
        return "\n".join([self._title, *table, *(f"  {note}" for note in self.notes)])

    __repr__ = __str__

    @property
    def _title(self) -> str:
        return f"{self.place}: measured in {self.seconds:.1f} s, and plans for this machine use it"

    def _repr_html_(self) -> str:
        """The same as a table."""
        cells = [
            f"<tr><td>{escape(one.what)}</td>"
            f"<td style='text-align:right'>{escape(one.measured)}</td>"
            f"<td style='text-align:right'>{escape(one.before)}</td></tr>"
            for one in self.lines
        ]
        head = "<tr><th></th><th>measured</th><th>plans took</th></tr>"
        notes = "".join(f"<div>{escape(note)}</div>" for note in self.notes)
        table = f"<table>{head}{''.join(cells)}</table>"
        return f"<div><b>{escape(self._title)}</b></div>{table}{notes}"


def calibrate(
    gang: Gang,
    listen: Listen,
    *,
    options: Options,
    world_size: int,
    hardware: Hardware,
    there: Cluster,
    disk: str | os.PathLike[str] | Literal[True] | None,
) -> Calibrated:
    """Let the ranks measure, keep it, and say what is new.

    Args:
        gang: the ranks, which run no cell.
        listen: told who hears how far they are.
        options: of the session; its precision is measured beside fp32, and its NVMe folder.
        world_size: number of ranks.
        hardware: what the ranks run on.
        there: their devices.
        disk: a folder whose disk is measured too; True: of the temp folder. The disk that the
            session offloads to is measured in any case.

    Raises:
        OptionError: nothing can be written in the folder `disk`.
        SessionError: the ranks cannot be measured; nothing was kept.
    """
    if isinstance(disk, (str, os.PathLike)) and hardware.nodes == 1:
        _check_disk(disk)
    kind = hardware.kind
    began, precision = time.monotonic(), options.precision or "no"
    request = messages.BandwidthRequest(
        kinds=_kinds(precision, bf16=kind == "cpu" or hardware.bf16),
        disk=_folder(disk, options),
    )
    with StatusLine() as line:
        listen(lambda text: line.show(f"nbdist: measuring: {text}"))
        work = Transaction(
            gang,
            range(world_size),
            messages.BANDWIDTH,
            raises=SessionError,
            show=lambda text: line.show(f"nbdist: measuring: {text}"),
        )
        try:
            replies = work.ask(request)
        finally:
            listen(None)
        line.show(f"nbdist: measured in {time.monotonic() - began:.1f} s")
    figures = {rank: replies[rank]["figures"] for rank in range(world_size)}
    before = local_devices.cluster(there, world_size)
    after = fit_measurements.calibrated(list(figures.values()), before)
    return Calibrated(
        place=after.describe(),
        seconds=time.monotonic() - began,
        lines=tuple(_lines(figures, before, after, kinds=request["kinds"])),
        notes=tuple(_notes(figures)),
        figures=figures,
    )


def _kinds(precision: str, *, bf16: bool) -> list[str]:
    """Types to measure: what plans take by default, and the session's own, which comes last."""
    usual = ("fp32", "bf16") if bf16 else ("fp32",)
    own = _TYPES.get(precision, precision)
    return [*(one for one in usual if one != own), own]


def _folder(disk: str | os.PathLike[str] | Literal[True] | None, options: Options) -> str | None:
    """Whose disk is measured: the one asked for, or the one that the session offloads to."""
    chosen = options.offload_path if disk is None or disk is True else disk
    if chosen is not None:
        return str(expanded(chosen).absolute())
    return tempfile.gettempdir() if disk is True else None


def _check_disk(disk: str | os.PathLike[str]) -> None:
    """Raise OptionError where nothing can be written, before the ranks measure for seconds."""
    try:
        with tempfile.TemporaryFile(dir=expanded(disk)):
            return
    except OSError as error:
        why = error.strerror or error
        message = (
            f"--disk {os.fspath(disk)}: nothing can be written there ({why}); name a folder on the"
            " disk that is to be measured."
        )
        raise OptionError(message) from None


def _lines(
    figures: Mapping[int, Mapping[str, Any]], before: Cluster, after: Cluster, *, kinds: list[str]
) -> Iterator[Line]:
    """What was measured beside what plans took for it."""
    curves = {} if after.links is None else after.links.curves
    for name in COLLECTIVES:
        for size, taken in curves.get(name, ()):
            then = step_time.collective_s(name, size, before)
            yield Line(what=f"{name} of {_size(size)}", measured=_time(taken), before=_time(then))
    device, then_device = after.slowest, before.slowest
    for kind in kinds:
        asked = _PRECISIONS.get(kind, kind)
        product = min(one["products"][kind] for one in figures.values())
        yield Line(what=f"matrix products in {kind}", measured=_flops(product))
        yield Line(
            what=f"  of these in a training loop, {kind}",
            measured=_flops(device.reached(asked)),
            before=_flops(then_device.reached(asked)),
        )
    precision = _PRECISIONS.get(kinds[-1], kinds[-1])
    own = min(one["memory"] for one in figures.values())
    yield Line(what="elementwise kernels", measured=_speed(own))
    yield Line(
        what="  of these in a training loop",
        measured=_speed(device.memory_reached(precision)),
        before=_speed(then_device.memory_reached(precision)),
    )
    copies = [one["copies"] for one in figures.values() if "copies" in one]
    for name in copies[0] if copies else ():
        planned = _speed(then_device.host_link) if name == "to_device_pinned" else ""
        taken = min(one[name] for one in copies)
        yield Line(what=f"copies {name.replace('_', ' ')}", measured=_speed(taken), before=planned)
    disks = [one["disk"] for one in figures.values() if "disk" in one]
    for way in ("read", "write") if disks else ():
        speed = sum(one[way] for one in disks)
        yield Line(
            what=f"disk, {way}", measured=_speed(speed), before=_speed(before.nvme_bandwidth)
        )


def _notes(figures: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """What a reader should know of the figures."""
    if any(not one["curves"] for one in figures.values()) and len(figures) > 1:
        yield "Too little memory is free to measure collectives."
    disks = [one["disk"] for one in figures.values() if "disk" in one]
    if disks:
        name = disks[0]["filesystem"]
        yield f"The disk is {name}, {'past' if disks[0]['direct'] else 'without'} the page cache."
        if Disk.is_memory(name):
            yield "That is memory and no disk, so plans do not use it; give another folder."


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _time(seconds: float) -> str:
    """A time in the unit that fits: "85 us", "12 ms"."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def _flops(speed: float) -> str:
    return f"{speed / _GIGA:.3g} GFLOP/s" if speed < _TERA else f"{speed / _TERA:.3g} TFLOP/s"


def _speed(speed: float) -> str:
    return f"{speed / _GIGA:.3g} GB/s"
