"""Memory timeline of DDP: every rank holds everything, and the gradients twice.

torch 2.13 and accelerate 1.15 leave `gradient_as_bucket_view` off, so the reducer's buckets are a
second copy of all gradients for the lifetime of the model. On one GPU, accelerate 1.15 does not
wrap the model in DDP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.planner import model_spec, optimizers
from nbdist.planner.memory import zero_partitioning
from nbdist.planner.memory.timeline import NonActivationMemory, StepTimeline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.planner.memory.timeline import BytesByPart, TrainingSetup
    from nbdist.planner.model_spec import MicroBatchStep, ModelSpec


class DdpTimeline(StepTimeline):
    """A training step under DDP; of several micro-batches the last one, which uses the most."""

    def __init__(self, model: ModelSpec, setup: TrainingSetup) -> None:
        super().__init__(model)
        self._setup = setup
        elements, width = model_spec.num_trainable_params(model), model.trainable_element
        shapes = optimizers.trained_shapes(model)
        is_wrapped = setup.world_size > 1 or setup.kind == "cpu"
        self._kept = NonActivationMemory(
            {
                "parameters": elements * width
                + model_spec.num_frozen_params(model) * model.element
                + model_spec.quantized_param_bytes(model),
                "buffers": elements * width * is_wrapped,
                "optimizer": setup.optimizer.state_bytes(elements, element=width, shapes=shapes),
            }
        )
        scratch = setup.optimizer.num_temporaries(
            elements, zero_partitioning.largest_trainable_size(*model.groups), shapes
        )
        update = {"gradients": elements * width, "temporaries": width * scratch}
        self._update = NonActivationMemory(update, besides=self._kept)

    def walk_allocations(
        self, steps: tuple[MicroBatchStep, ...]
    ) -> Iterator[tuple[int, NonActivationMemory]]:
        """Gradients, and weights cast to 16 bits."""
        for at, step in enumerate(steps):
            if step.phase not in {"before", "after"}:
                casts = {"activations": _casts(self.model, step, self._setup)}
                gradients = _gradients(self.model, step, self._setup)
                yield at, NonActivationMemory(gradients, casts, besides=self._kept)


def _gradients(model: ModelSpec, step: MicroBatchStep, setup: TrainingSetup) -> BytesByPart:
    """Bytes of gradients; those of earlier micro-batches accumulate the new ones one by one."""
    if setup.options.accumulate > 1:
        elements, new = (
            model_spec.num_trainable_params(model),
            zero_partitioning.num_pending_gradients(model, step),
        )
    elif step.phase == "backward":
        elements, new = zero_partitioning.num_finished_gradients(model, step) + step.num_grads, 0
    else:
        elements, new = 0, 0
    width = model.trainable_element
    return {"gradients": elements * width, "temporaries": new * width}


def _casts(model: ModelSpec, step: MicroBatchStep, setup: TrainingSetup) -> int:
    """Bytes of the 16-bit weights that autocast caches until the forward ends.

    Without checkpointing they are saved for the backward and counted as activations, as they are
    in a trace.
    """
    if (
        step.phase != "forward"
        or model.depth == "traced"
        or not setup.options.activation_checkpointing
        or not setup.is_half_precision
    ):
        return 0
    *earlier, own = model.groups[: step.group_index + 1]
    blocks = sum(group.trainable * group.count for group in earlier if group.role == "block")
    return 2 * (blocks + (step.block_index * own.trainable if own.role == "block" else 0))
