"""The plan of the model on the ranks: the strategies, and the memory parts of the current one.

The closed form takes milliseconds and runs after each cell that has prepared a model. A model
without a closed form is traced when the user requests it ("plan").
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nbdist.errors import NbdistError, PlanError
from nbdist.operations import switch
from nbdist.panel.protocol import MEMORY_PARTS, MemoryPart, StrategiesView, StrategyRow
from nbdist.planner import result
from nbdist.session import planner

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.planner.plan_types import PlanRow
    from nbdist.planner.result import Plan
    from nbdist.protocol import messages
    from nbdist.session.session import Session
    from nbdist.strategies import Options

log = logging.getLogger(__name__)

NO_MODEL_MESSAGE = "No model is prepared yet. Call accelerator.prepare() in a %%distribute cell."


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan as the panel shows it."""

    strategies: StrategiesView = field(
        default_factory=lambda: StrategiesView(rows=[], note=NO_MODEL_MESSAGE)
    )
    parts: tuple[MemoryPart, ...] = ()
    """Memory parts of the current strategy; empty if unknown."""
    device_bytes: int | None = None
    stated_error: float | None = None
    """None for CPU ranks, whose resident memory is not predicted."""
    plan: Plan | None = None
    options: Options | None = None
    """The options of the current strategy."""

    @classmethod
    def empty(cls, reason: str) -> PlanView:
        """Return a view without a plan."""
        return cls(StrategiesView(rows=[], note=reason))

    def with_current_options(self, options: Options) -> PlanView:
        """Return the same plan after a switch, with another current strategy."""
        if self.plan is None or self.options == options:
            return self
        return view_from_plan(self.plan, options)

    def is_valid_for(self, options: Options, world_size: int) -> bool:
        """Return whether the plan has this precision and number of ranks."""
        if self.plan is None:
            return False
        request = self.plan.question
        return (request.precision, request.world_size) == (options.precision or "no", world_size)


def plan_session_model(session: Session, *, quick: bool) -> PlanView:
    """Plan the model that the ranks have prepared. The session must be free.

    Args:
        session: the session of the ranks.
        quick: use only the closed form of the model; takes milliseconds.
    """
    try:
        return view_from_plan(planner.plan_model(session, quick=quick), session.options)
    except NbdistError as error:
        return PlanView.empty(str(error))
    except Exception as error:  # the planner does not support the model: show no plan
        log.exception("the prepared model could not be planned")
        return PlanView.empty(f"Cannot plan the model ({type(error).__name__}: {error}).")


def plan_running_model(session: Session, reply: messages.ModelReply) -> PlanView | None:
    """Plan the model that the running cell has prepared; None if it cannot be planned yet."""
    try:
        return view_from_plan(planner.plan_running_model(session, reply), session.options)
    except NbdistError:
        return None


def view_from_plan(plan: Plan, options: Options) -> PlanView:
    """Convert a plan."""
    # the row of the current options, if the plan has it
    fixed = {name: getattr(options, name) for name in result.VARIANT_OPTIONS}
    fixed["offload"] = options.offload_device
    fixed["reshard_after_forward"] = options.reshard_after_forward
    try:
        current = plan.row(options.backend, **fixed)
    except PlanError:
        current = None
    best_id = None if plan.best is None else _id(plan.best.options)
    rows = [
        _strategy_row(
            plan, row, options, current=row is current, recommended=_id(row.options) == best_id
        )
        for row in _shown_rows(plan, current)
    ]
    return PlanView(
        StrategiesView(rows=rows, note=" ".join([f"{result.heading(plan)}.", *plan.advice])),
        parts=() if current is None else tuple(_parts(current.memory)),
        device_bytes=None if current is None else current.device_bytes,
        stated_error=current.margin.total
        if current is not None and plan.question.cluster.kind == "cuda"
        else None,
        plan=plan,
        options=options,
    )


def _strategy_row(
    plan: Plan, row: PlanRow, options: Options, *, current: bool, recommended: bool
) -> StrategyRow:
    # the button of a row that is not the current one
    effect, arguments = "", {}
    if not current and _is_switchable(row):
        new = {name: getattr(row.options, name) for name in result.VARIANT_OPTIONS}
        changed = {name: value for name, value in new.items() if value != getattr(options, name)}
        arguments = {"backend": row.backend, **changed}
        effect = describe_switch(options, replace(options, **arguments), fits=row.fits)
    return StrategyRow(
        id=_id(row.options),
        backend=row.backend,
        label=row.variant,
        device_bytes=row.device_bytes,
        capacity_bytes=plan.question.cluster.smallest_device.free_bytes,
        parts=_parts(row.memory),
        fits=row.fits,
        current=current,
        recommended=recommended,
        tokens_per_s=row.tokens_per_s or None,
        why=row.why,
        command=row.command,
        effect=effect,
        arguments=arguments,
    )


def _shown_rows(plan: Plan, current: PlanRow | None) -> list[PlanRow]:
    """The best row, and the best row per backend and offload that a button can switch to."""
    possible = tuple(row for row in plan.rows if row.cost is not None and _is_switchable(row))
    rows = result.summary_rows(replace(plan, rows=possible))
    if current is not None and current not in rows:
        rows.append(current)
    if plan.best is not None and _id(plan.best.options) not in {_id(row.options) for row in rows}:
        rows.insert(0, plan.best)
    return rows


def _is_switchable(row: PlanRow) -> bool:
    """Return whether a button can switch to a row: it needs no config file and no folder."""
    return row.options.fsdp_config is None and row.options.offload_device != "nvme"


def _parts(memory: Mapping[str, int]) -> list[MemoryPart]:
    """The parts of a bar, in order."""
    sizes: Counter[str] = Counter()
    for name, size in memory.items():
        sizes[name if name in MEMORY_PARTS else "other"] += size
    return [MemoryPart(part=part, bytes=sizes[part]) for part in MEMORY_PARTS if sizes[part]]


def _id(options: Options) -> str:
    """Unique id of a strategy."""
    words = [options.backend, options.offload_device]
    words += ["params"] if options.offload_params else []
    words += ["checkpointing"] if options.activation_checkpointing else []
    words += [] if options.reshard_after_forward else ["gathered"]
    words += ["replicated"] if options.replicate_across != "none" else []
    return "-".join(words)


def describe_switch(now: Options, new_options: Options, *, fits: bool = True) -> str:
    """Return a description of what a switch does.

    Args:
        now: the current options.
        new_options: the new options.
        fits: whether the new strategy fits into memory, by the plan.
    """
    change = (
        f"Switches the running ranks from {now.describe()} to {new_options.describe()}."
        " Weights, optimizer state and variables are kept."
    )
    warning = "" if fits else " According to the plan it does not fit."
    differences = switch.describe_numeric_differences(now, new_options)
    return " ".join(
        [
            change + warning,
            *(f"{difference[0].upper()}{difference[1:]}." for difference in differences),
        ]
    )
