"""DDP's training step: every rank holds everything, and the gradients a second time.

What torch 2.13 and accelerate 1.15 do: `gradient_as_bucket_view` is off, so that the
reducer's buckets are a copy of all gradients for as long as the model lives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.planner import model_spec
from nbdist.planner.memory import partitioning
from nbdist.planner.memory.timeline import Held, Story

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.planner.memory.timeline import Parts
    from nbdist.planner.memory_model import Setup
    from nbdist.planner.model_spec import Group, MicroBatch, ModelSpec, Step


class Whole(Story):
    """A training step under DDP; of several micro-batches the last, which has the most."""

    def __init__(self, model: ModelSpec, setup: Setup) -> None:
        """Count what stays."""
        super().__init__(model)
        self._setup = setup
        elements = model_spec.trainable(model)
        self._kept = {
            "parameters": model_spec.params(model) * model.element,
            "buffers": elements * model.element,
            "optimizer": setup.optimizer.state_bytes(elements, element=model.element),
        }
        scratch = setup.optimizer.scratch(elements, model_spec.largest(model))
        update = {
            "gradients": elements * model.element,
            "temporaries": model.element * scratch,
        }
        self._update = Held(self._kept, update)

    def during(self, steps: tuple[Step, ...]) -> Iterator[tuple[int, Held]]:
        """Gradients, and copies of weights in 16 bits."""
        for at, step in enumerate(steps):
            if step.phase not in {"before", "after"}:
                casts = {"activations": _casts(self.model, step, self._setup)}
                gradients = _gradients(self.model, step, self._setup)
                yield at, Held(self._kept, gradients, casts)

    def between(self, run: MicroBatch) -> Iterator[tuple[str, Held, int]]:  # noqa: ARG002
        """The optimizer's step."""
        yield "optimizer step", self._update, 0


def _gradients(model: ModelSpec, step: Step, setup: Setup) -> Parts:
    """Bytes of the gradients; those of earlier micro-batches take the new ones in, one by one."""
    if setup.options.accumulate > 1:
        elements, new = model_spec.trainable(model), partitioning.coming(model, step)
    elif step.phase == "backward":
        elements, new = partitioning.finished(model, step) + step.grads, 0
    else:
        elements, new = 0, 0
    return {"gradients": elements * model.element, "temporaries": new * model.element}


def _casts(model: ModelSpec, step: Step, setup: Setup) -> int:
    """Bytes of the 16-bit weights that autocast keeps until a forward ends.

    Without checkpointing they are saved for the backward, and are among the activations.
    """
    if step.phase != "forward" or not setup.options.activation_checkpointing or not setup.half:
        return 0
    blocks = [one.trainable * one.count for one in model.groups[: step.group] if _again(one)]
    own = model.groups[step.group]
    return 2 * (sum(blocks) + (step.nth * own.trainable if _again(own) else 0))


def _again(group: Group) -> bool:
    """Whether its forward runs again in the backward."""
    return group.role == "block"
