"""Recovery of the prepared models after an interrupted cell; runs on a rank.

Engines hold the process group, which may be broken, and after an interrupted backward pass
their gradient buckets are partly filled. The engines are therefore rebuilt as in a switch, with
the same options: weights, optimizer state, schedules, random generators and loaders are kept.
Objects that a cell created on an old group (`new_group`, a device mesh, its own DDP) must be
created again by a cell.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from nbdist.errors import SwitchError
from nbdist.state import collectives, layouts
from nbdist.state.layouts.base import is_deepspeed_engine, unwrap_compiled
from nbdist.worker import process_group
from nbdist.worker.engines import accelerator as accelerators
from nbdist.worker.engines import fsdp
from nbdist.worker.operations.switch import EngineSwitch
from nbdist.worker.training import model_cleanup, prepared_models

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from nbdist.worker.collective_check import CollectiveBarrier

STALE_REASON = (
    "This object was prepared before a cell was interrupted within a step. Models and optimizers"
    " were rebuilt and the variables that held them rebound. Use those variables instead."
)


@dataclass(slots=True, kw_only=True)
class RankRecoveryReport:
    """Result of a recovery on this rank."""

    seconds: float = 0.0
    bound: list[str] = field(default_factory=list)
    """The user's variables that were rebound to new objects."""
    stale: list[str] = field(default_factory=list)
    """The user's variables that hold an old group: a cell must create them again."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields for a message."""
        return asdict(self)


class EngineRebuild:
    """Rebuild of the engines, and of the process groups if needed."""

    def __init__(
        self,
        names: MutableMapping[str, Any],
        barrier: CollectiveBarrier | None,
        *,
        on_phase: Callable[[str], None],
    ) -> None:
        """Set up a recovery.

        Args:
            names: the user's variables.
            barrier: barrier that CPU ranks use before collectives.
            on_phase: called with the name of each phase.
        """
        self._names, self._meeting, self._tell = names, barrier, on_phase
        self._on_gpu = accelerators.current_config().hardware.kind == "cuda"
        self.report = RankRecoveryReport()

    def run(self, era: int, *, groups: bool) -> RankRecoveryReport:
        """Rebuild the engines, after the process groups if requested.

        Args:
            era: number of this recovery, the same on all ranks.
            groups: recreate the process groups too.

        Raises:
            SwitchError: the process group works but the models could not be rebuilt.
            RuntimeError: the process group does not work; nothing was changed.
        """
        began = time.monotonic()
        old_groups: list[Any] = []
        if not groups:
            process_group.verify_group(on_gpu=self._on_gpu)
        else:
            self._tell("recreating the process group")
            if self._meeting is not None:
                self._meeting.reset()
            old_groups = process_group.recreate_default_group(era, on_gpu=self._on_gpu)
        try:
            in_pieces = [_is_in_pieces(prepared) for prepared in prepared_models.all_models()]
            if groups or any(in_pieces):
                self._rebuild()
            else:
                for prepared in prepared_models.all_models():
                    fsdp.reset_iteration_state(prepared.model)
                    layouts.layout_for(prepared.model)  # reshards the parameters
                    prepared.interrupted_pass = ""
        finally:
            self.report.stale = [
                name for name, value in self._names.items() if is_bound_to(value, old_groups)
            ]
            process_group.destroy_groups(old_groups)
        self.report.seconds = time.monotonic() - began
        return self.report

    def _rebuild(self) -> None:
        """Rebuild the engines; gradients of the interrupted step are dropped."""
        model_cleanup.release_unused_models()
        trained = prepared_models.all_models()
        steps = collectives.all_gather_values([prepared.num_steps for prepared in trained])
        if any(counts != steps[0] for counts in steps):
            described = ", ".join(
                f"rank {rank}: {max(counts)}" for rank, counts in enumerate(steps) if counts
            )
            message = (
                f"The ranks were interrupted at different optimizer steps ({described}), so their"
                " weights are inconsistent. Load the last checkpoint."
            )
            raise SwitchError(message)
        for prepared in trained:
            drop_gradients(prepared)
        if not trained:
            return
        options = accelerators.current_config().options
        change = EngineSwitch(options, self._names, on_phase=self._tell, reason=STALE_REASON)
        self.report.bound = change.run().bound


def _is_in_pieces(prepared: prepared_models.PreparedModel) -> bool:
    """Return whether the engine must be rebuilt; a collective."""
    # An interrupted forward leaves FSDP with gathered weights only, which can be resharded.
    engine = is_deepspeed_engine(unwrap_compiled(prepared.model))
    together = collectives.all_gather_values((prepared.interrupted_pass, engine))
    return any(cut == "backward" or (cut and deepspeed) for cut, deepspeed in together)


def drop_gradients(prepared: prepared_models.PreparedModel) -> None:
    """Drop the gradients of an interrupted step."""
    for parameter in prepared.model.parameters():
        parameter.grad = None
    prepared.num_pending_micro_batches = 0


def is_bound_to(value: object, groups: list[Any]) -> bool:
    """Return whether a value is one of these process groups or was created on one."""
    with contextlib.suppress(Exception):  # attribute access on an invalidated object raises
        group = value if isinstance(value, torch.distributed.ProcessGroup) else None
        group = group or getattr(value, "process_group", None)
        return group is not None and any(group is other for other in groups)
    return False
