"""What the plan says of the model on the ranks: its rows, and the parts of the running strategy.

Plans are made by closed forms, in milliseconds, after a cell in which a model was prepared; a
model without one is traced where the user asks for it ("plan").
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nbdist.display import plan as display_plan
from nbdist.errors import NbdistError, PlanError
from nbdist.operations import switch
from nbdist.panel.protocol import PARTS, Part, Strategies, StrategyRow
from nbdist.planner.search import MARGIN
from nbdist.session import planner

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nbdist.planner.result import Plan, Row
    from nbdist.protocol import messages
    from nbdist.session.session import Session
    from nbdist.strategies import Options

log = logging.getLogger(__name__)

NOTHING_YET = "no model is prepared yet: call accelerator.prepare() in a %%distribute cell."
_OTHER = {"margin": "other"}
"""The planner's name of a part -> the panel's."""
_GIVEN = ("offload", "offload_params", "activation_checkpointing", "replicate_across")
"""Options that tell strategies of one backend apart, and that a switch takes."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """A plan as the panel shows it."""

    strategies: Strategies = field(default_factory=lambda: Strategies(rows=[], note=NOTHING_YET))
    parts: tuple[Part, ...] = ()
    """Of the strategy that runs; empty where it is not known."""
    device_bytes: int | None = None
    stated_error: float | None = None
    """None for CPU ranks, whose resident memory is not what is predicted."""
    plan: Plan | None = None

    @classmethod
    def nothing(cls, why: str) -> Predicted:
        """There is no plan."""
        return cls(Strategies(rows=[], note=why))

    def running(self, options: Options) -> Predicted:
        """The same plan after a switch: another row is the current one."""
        return self if self.plan is None else of_plan(self.plan, options)

    def holds_for(self, options: Options, world_size: int) -> bool:
        """Whether the plan is one for this precision and number of ranks."""
        if self.plan is None:
            return False
        asked = self.plan.question
        return (asked.precision, asked.world_size) == (options.precision or "no", world_size)


def predict(session: Session, *, quick: bool) -> Predicted:
    """Plan the model that the ranks have prepared; the session must be free.

    Args:
        session: whose ranks.
        quick: by the model's closed form or not at all; milliseconds.
    """
    try:
        return of_plan(planner.plan(session, quick=quick), session.options)
    except NbdistError as error:
        return Predicted.nothing(str(error))
    except Exception as error:  # a model that the planner has not met: the panel does without
        log.exception("the prepared model could not be planned")
        return Predicted.nothing(f"the model cannot be planned ({type(error).__name__}: {error}).")


def peek(session: Session, seen: messages.ModelReply) -> Predicted | None:
    """Plan what the running cell has prepared; None where that cannot be told yet.

    Args:
        session: whose ranks.
        seen: what rank 0 says of its model.
    """
    try:
        return of_plan(planner.peeked(session, seen), session.options)
    except NbdistError:
        return None


def of_plan(plan: Plan, options: Options) -> Predicted:
    """Take over what a plan says.

    Args:
        plan: of the model on the ranks.
        options: of the session.
    """
    current = _row_of(plan, options)
    capacity = plan.question.cluster.smallest.free_bytes
    rows = [
        StrategyRow(
            id=_id(row.options),
            backend=row.backend,
            words=row.variant,
            device_bytes=row.device_bytes,
            capacity_bytes=capacity,
            parts=list(_parts(row.memory)),
            fits=row.fits,
            current=row is current,
            recommended=plan.best is not None and _id(row.options) == _id(plan.best.options),
            tokens_per_s=row.tokens_per_s or None,
            why=row.why,
            command=row.command,
            does="" if row is current or not _switchable(row) else _does(options, row),
            arguments={} if row is current or not _switchable(row) else _arguments(options, row),
        )
        for row in _shown(plan, current)
    ]
    return Predicted(
        Strategies(rows=rows, note=" ".join([f"{display_plan.heading(plan)}.", *plan.advice])),
        parts=() if current is None else tuple(_parts(current.memory)),
        device_bytes=None if current is None else current.device_bytes,
        stated_error=MARGIN if plan.question.cluster.kind == "cuda" else None,
        plan=plan,
    )


def _row_of(plan: Plan, options: Options) -> Row | None:
    """The row of what runs."""
    offload = options.offload_device
    try:
        return plan.row(
            options.backend,
            offload=offload,
            reshard_after_forward=options.reshard_after_forward,
            **{name: getattr(options, name) for name in _GIVEN if name != "offload"},
        )
    except PlanError:
        return None


def _shown(plan: Plan, current: Row | None) -> list[Row]:
    """The best row, and of each backend and offload the best that a button can ask for."""
    possible = tuple(row for row in plan.rows if row.cost is not None and _switchable(row))
    rows = display_plan.briefly(replace(plan, rows=possible))
    if current is not None and current not in rows:
        rows.append(current)
    if plan.best is not None and _id(plan.best.options) not in {_id(row.options) for row in rows}:
        rows.insert(0, plan.best)
    return rows


def _switchable(row: Row) -> bool:
    """Whether a button can ask for it: it needs no config file and no folder."""
    return row.options.fsdp_config is None and row.options.offload_device != "nvme"


def _parts(memory: Mapping[str, int]) -> Iterable[Part]:
    """The parts of a bar, in its order."""
    named: dict[str, int] = {}
    for name, size in memory.items():
        part = _OTHER.get(name, name)
        part = part if part in PARTS else "other"
        named[part] = named.get(part, 0) + size
    return (Part(part=part, bytes=named[part]) for part in PARTS if named.get(part))


def _id(options: Options) -> str:
    """Tells strategies apart."""
    words = [options.backend, options.offload_device]
    words += ["params"] if options.offload_params else []
    words += ["checkpointing"] if options.activation_checkpointing else []
    words += [] if options.reshard_after_forward else ["gathered"]
    words += ["replicated"] if options.replicate_across != "none" else []
    return "-".join(words)


def _arguments(now: Options, row: Row) -> dict[str, Any]:
    """What the switch command is to be given."""
    changed = {name: getattr(row.options, name) for name in _GIVEN}
    kept = {name for name in _GIVEN if changed[name] == getattr(now, name)}
    return {
        "backend": row.backend,
        **{name: value for name, value in changed.items() if name not in kept},
    }


def _does(now: Options, row: Row) -> str:
    """What the switch to a row will do, in sentences."""
    then = replace(now, backend=row.backend, **{n: getattr(row.options, n) for n in _GIVEN})
    return does(now, then, fits=row.fits)


def does(now: Options, then: Options, *, fits: bool = True) -> str:
    """What a switch will do, in sentences.

    Args:
        now: what runs.
        then: what is to run.
        fits: by the plan.
    """
    said = (
        f"The living ranks go from {now.describe()} to {then.describe()}: weights, optimizer"
        " state and variables are kept."
    )
    warning = "" if fits else " By the plan it does not fit."
    differ = switch.differences(now, then)
    return " ".join([said + warning, *(f"{one[0].upper()}{one[1:]}." for one in differ)])
