"""A switch as the notebook's kernel sees it: the request to all ranks, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from nbdist.errors import SwitchError
from nbdist.protocol import messages
from nbdist.session.recovery import Transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.output.status_line import StatusLine
    from nbdist.session.config import Choice
    from nbdist.session.worker_group import Gang
    from nbdist.strategies import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchReport:
    """What a switch did."""

    before: str
    """Ranks and strategy, in words."""
    after: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase, of the slowest rank."""
    state_bytes: int = 0
    """Of weights and optimizer state, all ranks together."""
    moved_bytes: int = 0
    """That went from one rank to another."""
    verified: int = 0
    """Tensors whose digest was the same after as before."""
    carried: tuple[str, ...] = ()
    bound: tuple[str, ...] = ()
    """Variables of the ranks that were bound anew."""
    not_carried: Mapping[str, str] = field(default_factory=dict)
    """Variable -> why; only new processes lose any."""
    will_differ: tuple[str, ...] = ()
    """What the new engine computes otherwise, and why."""
    notes: tuple[str, ...] = ()
    """What to look out for, in sentences."""

    @classmethod
    def nothing(cls, words: str) -> Self:
        """Nothing had to change."""
        return cls(before=words, after=words)

    @property
    def total_s(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        """Say it in a few lines."""
        if self.before == self.after and not self.seconds:
            return f"{self.after}: nothing to switch"
        share = self.moved_bytes / self.state_bytes if self.state_bytes else 0.0
        lines = [
            f"{arrow(self.before, self.after)} in {self.total_s:.1f} s",
            f"  carried: {'; '.join(self.carried)}",
        ]
        if self.verified:
            lines += [
                f"  {self.verified} tensors, {size(self.state_bytes)}, each the same as before",
                f"  {size(self.moved_bytes)} ({share:.0%}) crossed between ranks",
            ]
        lines += [f"  bound anew: {', '.join(self.bound)}"] if self.bound else []
        lines += [f"  not carried: {name}: {why}" for name, why in self.not_carried.items()]
        lines += [f"  will differ: {one}" for one in self.will_differ]
        lines += [f"  note: {one}" for one in self.notes]
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: FBT001 - IPython's
        """Show the lines where IPython shows a value."""
        printer.text("SwitchReport(...)" if cycle else str(self))


def arrow(before: str, after: str) -> str:
    """Say both, but the ranks once where they are the same."""
    (ranks, _, old), (then, _, new) = before.partition(", "), after.partition(", ")
    return f"{ranks}: {old} -> {new}" if ranks == then else f"{before} -> {after}"


def size(count: int) -> str:
    """Bytes in words."""
    amount, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:  # noqa: PLR2004
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A switch that the ranks are asked for."""

    before: Choice
    then: Choice
    reset_optimizer: bool
    line: StatusLine
    """Shows the phases."""

    def send(
        self, gang: Gang, listen: Callable[[Callable[[str], object] | None], None]
    ) -> SwitchReport:
        """Let the living ranks switch, together.

        Args:
            gang: the ranks.
            listen: told who hears of the phases.

        Raises:
            SwitchError: all is as it was, or the message says that it is not.
        """
        now, then = self.before.options, self.then.options
        title = f"nbdist: {now.backend} -> {then.backend}"
        listen(lambda phase: self.line.show(f"{title}: {phase}"))
        content = messages.SwitchRequest(
            options=then.to_json(), reset_optimizer=self.reset_optimizer
        )
        work = Transaction(
            gang,
            range(self.before.placement.nproc),
            messages.SWITCH,
            raises=SwitchError,
            show=lambda text: self.line.show(f"{title}: {text}"),
        )
        try:
            replies = work.ask(content)
        finally:
            listen(None)
        reports = [reply["report"] for reply in replies.values()]
        first = reports[0]
        seconds = {
            phase: max(one["seconds"].get(phase, 0.0) for one in reports)
            for phase in first["seconds"]
        }
        report = SwitchReport(
            before=self.before.describe(),
            after=self.then.describe(),
            seconds=seconds,
            state_bytes=sum(one["state_bytes"] for one in reports),
            moved_bytes=sum(one["sent_bytes"] for one in reports),
            verified=first["verified"],
            carried=tuple(first["carried"]),
            bound=tuple(first["bound"]),
            will_differ=tuple(differences(now, then)),
            notes=tuple(dict.fromkeys(note for one in reports for note in one["notes"])),
        )
        self.line.show(f"{title} in {report.total_s:.1f} s")
        return report


def differences(now: Options, then: Options) -> list[str]:
    """What the new engine computes otherwise: sentences for the reader."""
    found = []
    engines = now.strategy.engine, then.strategy.engine
    half = then.precision not in {None, "no"}
    if now.precision != then.precision:
        found.append(
            f"precision {now.precision} -> {then.precision}: losses move by the rounding of the"
            " smaller type; weights and optimizer state are kept in fp32 as before"
        )
    elif half and (engines[0] != engines[1] or now.strategy.level != then.strategy.level):
        found.append(
            f"{then.precision} arithmetic: DDP computes under autocast with fp32 weights, FSDP and"
            " DeepSpeed with weights rounded before use; losses differ in the third digit"
        )
    offloaded = [
        one.offload != "none" and one.strategy.engine == "deepspeed" for one in (now, then)
    ]
    if offloaded[0] != offloaded[1]:
        found.append("DeepSpeed's CPU Adam rounds otherwise than torch's, about 1e-6")
    return found
