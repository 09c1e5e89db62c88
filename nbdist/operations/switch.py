"""Switch of the backend on living ranks: the request to all ranks, and its report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from nbdist.number_formatting import format_bytes
from nbdist.protocol.operations import SWITCH, SwitchRequest, distinct_notes, slowest_phases
from nbdist.session.collective_request import CollectiveRequest
from nbdist.session.progress import StatusLine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.session.config import SessionConfig
    from nbdist.session.worker_group import WorkerGroup
    from nbdist.strategies import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchReport:
    """Result of a switch."""

    before: str
    """Ranks and strategy."""
    after: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase, of the slowest rank."""
    state_bytes: int = 0
    """Size of weights and optimizer state, over all ranks."""
    moved_bytes: int = 0
    """Bytes sent between ranks."""
    verified: int = 0
    """Number of tensors whose digest did not change."""
    carried: tuple[str, ...] = ()
    bound: tuple[str, ...] = ()
    """Variables of the ranks that were rebound."""
    not_carried: Mapping[str, str] = field(default_factory=dict)
    """Variable -> reason; only with new processes."""
    will_differ: tuple[str, ...] = ()
    """Numeric differences of the new backend, with reasons."""
    notes: tuple[str, ...] = ()
    """Warnings, in sentences."""

    @classmethod
    def nothing(cls, words: str) -> Self:
        """Return the report of a switch that changes nothing."""
        return cls(before=words, after=words)

    @property
    def total_s(self) -> float:
        """Sum over all phases in seconds."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        if self.before == self.after and not self.seconds:
            return f"{self.after}: nothing to switch"
        share = self.moved_bytes / self.state_bytes if self.state_bytes else 0.0
        lines = [
            f"{describe_change(self.before, self.after)} in {self.total_s:.1f} s",
            f"  kept: {'; '.join(self.carried)}",
        ]
        if self.verified:
            lines += [
                f"  {self.verified} tensors, {format_bytes(self.state_bytes)}, verified by digest",
                f"  {format_bytes(self.moved_bytes)} ({share:.0%}) sent between ranks",
            ]
        lines += [f"  rebound: {', '.join(self.bound)}"] if self.bound else []
        lines += [f"  not kept: {name}: {reason}" for name, reason in self.not_carried.items()]
        lines += [f"  will differ: {item}" for item in self.will_differ]
        lines += [f"  note: {item}" for item in self.notes]
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: FBT001 - IPython's
        printer.text("SwitchReport(...)" if cycle else str(self))


def describe_change(before: str, after: str) -> str:
    """Return "ranks: old -> new", with the ranks once if they are the same."""
    (ranks, _, old), (then, _, new) = before.partition(", "), after.partition(", ")
    return f"{ranks}: {old} -> {new}" if ranks == then else f"{before} -> {after}"


def switch_backend(
    workers: WorkerGroup,
    before: SessionConfig,
    after: SessionConfig,
    *,
    reset_optimizer: bool,
    on_late_success: Callable[[], object],
) -> SwitchReport:
    """Switch the backend on living ranks.

    Args:
        workers: the worker group.
        before: current options.
        after: new options.
        reset_optimizer: discard the optimizer state.
        on_late_success: called if the switch succeeds after an interrupt returned the prompt.

    Raises:
        SwitchError: everything was rolled back, or the message says otherwise.
    """
    now, then = before.options, after.options
    title = f"nbdist: {now.backend} -> {then.backend}"
    with StatusLine() as line:
        request = CollectiveRequest(
            workers,
            SWITCH,
            before.placement.nproc,
            lambda text: line.show(f"{title}: {text}"),
        )
        request.late = on_late_success
        reports = request.run(
            SwitchRequest(options=then.to_json(), reset_optimizer=reset_optimizer)
        )
        first = reports[0]
        report = SwitchReport(
            before=before.describe(),
            after=after.describe(),
            seconds=slowest_phases(reports),
            state_bytes=sum(report.state_bytes for report in reports),
            moved_bytes=sum(report.sent_bytes for report in reports),
            verified=first.verified,
            carried=tuple(first.carried),
            bound=tuple(first.bound),
            will_differ=tuple(describe_numeric_differences(now, then)),
            notes=distinct_notes(reports),
        )
        line.show(f"{title} in {report.total_s:.1f} s")
    return report


def describe_numeric_differences(now: Options, new_options: Options) -> list[str]:
    """Return numeric differences of the new backend, as sentences."""
    remarks = []
    engines = now.strategy.engine, new_options.strategy.engine
    half = new_options.precision not in {None, "no"}
    if now.precision != new_options.precision:
        remarks.append(
            f"precision {now.precision} -> {new_options.precision}: losses change by the rounding"
            " of the smaller dtype; weights and optimizer state stay in fp32"
        )
    elif half and (engines[0] != engines[1] or now.strategy.level != new_options.strategy.level):
        remarks.append(
            f"{new_options.precision} arithmetic: DDP uses autocast with fp32 weights, FSDP and"
            " DeepSpeed cast the weights first; losses differ in the third digit"
        )
    offloaded = [
        options.offload != "none" and options.strategy.engine == "deepspeed"
        for options in (now, new_options)
    ]
    if offloaded[0] != offloaded[1]:
        remarks.append("DeepSpeed's CPU Adam rounds differently from torch's, by about 1e-6")
    return remarks
