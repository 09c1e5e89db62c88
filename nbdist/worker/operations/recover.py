"""The prepared models made usable after a cell that was cut short; runs on a rank.

A broken process group is of no use to anybody, and every engine holds it; an engine whose
backward was cut short has half of the gradients in its buckets. So the engines are made again
as in a switch, to the same options: weights, optimizer state, schedules, random generators and
loaders go on. What a cell made on an old group by itself (`new_group`, a device mesh, a DDP of
its own) has to be made again by a cell.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from nbdist.errors import SwitchError
from nbdist.state import collectives, layouts
from nbdist.state.layouts.base import inside_compiled, is_engine
from nbdist.worker import process_group
from nbdist.worker.engines import accelerator as accelerators
from nbdist.worker.engines import fsdp
from nbdist.worker.operations.switch import Switch
from nbdist.worker.training import model_cleanup, prepared_models

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from nbdist.worker.collective_check import Meeting

REASON = (
    "this was prepared before a cell was cut short in the middle of a step; models and optimizers"
    " were made ready again and the variables that held them bound anew, so take what you need"
    " from those."
)


@dataclass(slots=True, kw_only=True)
class Report:
    """What a renewal did on this rank."""

    seconds: float = 0.0
    bound: list[str] = field(default_factory=list)
    """The user's variables that were bound anew."""
    stale: list[str] = field(default_factory=list)
    """The user's variables that hold the old group: a cell has to make them again."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields for a message."""
        return asdict(self)


class Renewal:
    """One renewal."""

    def __init__(
        self,
        names: MutableMapping[str, Any],
        meeting: Meeting | None,
        *,
        tell: Callable[[str], None],
    ) -> None:
        """Know what is to come.

        Args:
            names: the user's variables.
            meeting: where CPU ranks meet before collectives.
            tell: told of each phase.
        """
        self._names, self._meeting, self._tell = names, meeting, tell
        self._on_gpu = accelerators.current().hardware.kind == "cuda"
        self.report = Report()

    def run(self, era: int, *, groups: bool) -> Report:
        """Renew engines, and groups before them.

        Args:
            era: number of this renewal, the same on all ranks.
            groups: whether the groups too.

        Raises:
            SwitchError: the group works and the models could not be made ready again.
            RuntimeError: the group does not work; nothing was touched.
        """
        began = time.monotonic()
        old: list[Any] = []
        if not groups:
            process_group.prove(on_gpu=self._on_gpu)
        else:
            self._tell("making the process group anew")
            if self._meeting is not None:
                self._meeting.begin_anew()
            old = process_group.join_anew(era, on_gpu=self._on_gpu)
        try:
            in_pieces = [_is_in_pieces(one) for one in prepared_models.everything()]
            if groups or any(in_pieces):
                self._make_anew()
            else:
                for one in prepared_models.everything():
                    fsdp.start_over(one.model)
                    layouts.of(one.model)  # returns it to shards
                    one.midway = ""
        finally:
            self.report.stale = [name for name, one in self._names.items() if holds(one, old)]
            process_group.forget(old)
        self.report.seconds = time.monotonic() - began
        return self.report

    def _make_anew(self) -> None:
        """Make the engines again; gradients of the step that was stopped are dropped."""
        model_cleanup.let_go()
        trained = prepared_models.everything()
        steps = collectives.everyones([one.steps for one in trained])
        if any(one != steps[0] for one in steps):
            made = ", ".join(f"rank {rank}: {max(one)}" for rank, one in enumerate(steps) if one)
            message = (
                f"the ranks were stopped at different optimizer steps ({made}), so their weights"
                " do not belong together; load the last checkpoint."
            )
            raise SwitchError(message)
        for one in trained:
            drop_gradients(one)
        if not trained:
            return
        options = accelerators.current().options
        change = Switch(options, self._names, tell=self._tell, reason=REASON)
        self.report.bound = change.run().bound


def _is_in_pieces(one: prepared_models.Trained) -> bool:
    """Whether its engine cannot go on: a forward leaves FSDP no more than gathered weights."""
    engine = is_engine(inside_compiled(one.model))
    together = collectives.everyones((one.midway, engine))
    return any(cut == "backward" or (cut and deepspeed) for cut, deepspeed in together)


def drop_gradients(one: prepared_models.Trained) -> None:
    """Forget the gradients of a step that was stopped half-way."""
    for parameter in one.model.parameters():
        parameter.grad = None
    one.waiting = 0


def holds(value: object, groups: list[Any]) -> bool:
    """Whether a variable is one of these process groups, or was made on one by a cell."""
    with contextlib.suppress(Exception):  # an object that is of no use any more answers nothing
        own = value if isinstance(value, torch.distributed.ProcessGroup) else None
        own = own or getattr(value, "process_group", None)
        return own is not None and any(own is one for one in groups)
    return False
