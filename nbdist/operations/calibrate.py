"""Calibration, the notebook's side: request measurements from all ranks and store the result.

Later plans for this machine use the measurements.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from nbdist.display import Table, element, join, lines
from nbdist.errors import OptionError
from nbdist.number_formatting import format_bytes
from nbdist.paths import expand_user
from nbdist.planner import step_time, target_devices
from nbdist.planner.measurement_store import COLLECTIVES, is_memory_filesystem
from nbdist.protocol.operations import CALIBRATE, CalibrateRequest
from nbdist.session.collective_request import CollectiveRequest
from nbdist.session.progress import StatusLine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.planner.cluster_spec import ClusterSpec
    from nbdist.session.worker_group import WorkerGroup
    from nbdist.strategies import Hardware, Options

_TYPES = {"no": "fp32", "fp8": "bf16"}
_PRECISIONS = {"fp32": "no"}
_GIGA = 1e9
_TERA = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRow:
    """One measured quantity."""

    what: str
    measured: str
    before: str = ""
    """Value that plans used so far; empty if plans do not use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """Result of a calibration."""

    place: str
    """Ranks and devices."""
    seconds: float
    lines: tuple[CalibrationRow, ...] = ()
    notes: tuple[str, ...] = ()
    figures: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Measurements of each rank, from ``worker.operations.calibrate.calibrate``."""

    def __str__(self) -> str:
        shown = [*self._table.text.splitlines(), *self.notes]
        return "\n".join([self._title, *(f"  {line}" for line in shown)])

    __repr__ = __str__

    @property
    def _title(self) -> str:
        return f"{self.place}: measured in {self.seconds:.1f} s; used by plans for this machine"

    @property
    def _table(self) -> Table:
        rows = [(row.what, row.measured, row.before) for row in self.lines]
        return Table(header=("", "measured", "plans took"), rows=rows)

    def _repr_html_(self) -> str:
        title = element("div", element("b", self._title))
        return str(join([title, self._table.html, lines(self.notes)]))


def calibrate(
    workers: WorkerGroup,
    *,
    options: Options,
    hardware: Hardware,
    cluster: ClusterSpec,
    disk: str | os.PathLike[str] | Literal[True] | None,
) -> CalibrationReport:
    """Measure on all ranks, store the result, and compare it with earlier values.

    Args:
        workers: the worker group; no cell is running.
        options: of the session; its precision is measured besides fp32, and its NVMe folder.
        hardware: hardware of the ranks.
        cluster: devices of the ranks.
        disk: a folder whose disk is measured too; True: the temp folder. The disk that the
            session offloads to is always measured.

    Raises:
        OptionError: the folder `disk` is not writable.
        SessionError: the measurement failed; nothing was stored.
    """
    if isinstance(disk, (str, os.PathLike)) and hardware.nodes == 1:
        _check_disk(disk)
    start_time = time.monotonic()
    # The planner's default dtypes, then the session's own.
    own = _TYPES.get(options.precision or "no", options.precision or "no")
    usual = ("fp32", "bf16") if hardware.kind == "cpu" or hardware.bf16 else ("fp32",)
    folder = options.offload_path if disk is None or disk is True else disk
    if folder is None and disk is True:
        folder = tempfile.gettempdir()
    request = CalibrateRequest(
        kinds=[*(kind for kind in usual if kind != own), own],
        disk=None if folder is None else str(expand_user(folder).absolute()),
    )
    with StatusLine() as line:
        reports = CollectiveRequest(
            workers, CALIBRATE, lambda text: line.show(f"measuring: {text}")
        ).run(request)
        line.show(f"measured in {time.monotonic() - start_time:.1f} s")
    figures = {rank: report.figures for rank, report in enumerate(reports)}
    before = target_devices.resolve_cluster(cluster, workers.world_size)
    after = target_devices.apply_calibration(list(figures.values()), before)
    return CalibrationReport(
        place=after.describe(),
        seconds=time.monotonic() - start_time,
        lines=tuple(_lines(figures, before, after, kinds=request.kinds)),
        notes=tuple(_notes(figures)),
        figures=figures,
    )


def _check_disk(disk: str | os.PathLike[str]) -> None:
    """Raise OptionError if the folder is not writable, before the ranks start to measure."""
    try:
        with tempfile.TemporaryFile(dir=expand_user(disk)):
            return
    except OSError as error:
        reason = error.strerror or error
        raise OptionError(
            f"Cannot write to --disk {os.fspath(disk)}: {reason}. Use a writable folder on the disk"
            " to measure."
        ) from None


def _lines(
    figures: Mapping[int, Mapping[str, Any]],
    before: ClusterSpec,
    after: ClusterSpec,
    *,
    kinds: list[str],
) -> Iterator[CalibrationRow]:
    """Yield measured values and the values that plans used so far."""
    for name in COLLECTIVES:
        measured = (after.comm_speed or {}).get(name)
        for size, copy_speed in measured.curve if measured else ():
            time_before = step_time.collective_time_s(name, size, before)
            yield CalibrationRow(
                what=f"{name} of {format_bytes(size)}",
                measured=_time(copy_speed),
                before=_time(time_before),
            )
    device, then_device = after.slowest_device, before.slowest_device
    for kind in kinds:
        precision_name = _PRECISIONS.get(kind, kind)
        product = min(rank["products"][kind] for rank in figures.values())
        yield CalibrationRow(what=f"matrix products in {kind}", measured=_flops(product))
        yield CalibrationRow(
            what=f"  of these in a training loop, {kind}",
            measured=_flops(device.sustained_flops(precision_name)),
            before=_flops(then_device.sustained_flops(precision_name)),
        )
    precision = _PRECISIONS.get(kinds[-1], kinds[-1])
    own = min(rank["memory"] for rank in figures.values())
    yield CalibrationRow(what="elementwise kernels", measured=_speed(own))
    yield CalibrationRow(
        what="  of these in a training loop",
        measured=_speed(device.sustained_memory_bandwidth(precision)),
        before=_speed(then_device.sustained_memory_bandwidth(precision)),
    )
    copies = [rank["copies"] for rank in figures.values() if "copies" in rank]
    for name in copies[0] if copies else ():
        planned = _speed(then_device.host_link) if name == "to_device_pinned" else ""
        copy_speed = min(speeds[name] for speeds in copies)
        yield CalibrationRow(
            what=f"copies {name.replace('_', ' ')}", measured=_speed(copy_speed), before=planned
        )
    disks = [rank["disk"] for rank in figures.values() if "disk" in rank]
    for direction in ("read", "write") if disks else ():
        speed = sum(disk[direction] for disk in disks)
        yield CalibrationRow(
            what=f"disk, {direction}", measured=_speed(speed), before=_speed(before.nvme_bandwidth)
        )


def _notes(figures: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """Yield remarks about the measurements."""
    if any(not rank["curves"] for rank in figures.values()) and len(figures) > 1:
        yield "Not enough free memory to measure collectives."
    disks = [rank["disk"] for rank in figures.values() if "disk" in rank]
    if disks:
        name = disks[0]["filesystem"]
        cache = "bypassing" if disks[0]["direct"] else "through"
        yield f"The filesystem is {name}, measured {cache} the page cache."
        if is_memory_filesystem(name):
            yield "That is memory, not a disk: plans do not use it. Use another folder."


def _time(seconds: float) -> str:
    """Format a time: "85 us", "12 ms"."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def _flops(speed: float) -> str:
    return f"{speed / _GIGA:.3g} GFLOP/s" if speed < _TERA else f"{speed / _TERA:.3g} TFLOP/s"


def _speed(speed: float) -> str:
    return f"{speed / _GIGA:.3g} GB/s"
