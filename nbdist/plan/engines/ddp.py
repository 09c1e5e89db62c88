"""DDP's training step: every rank holds everything, and the gradients a second time.

What torch 2.13 and accelerate 1.15 do: `gradient_as_bucket_view` is off, so that the
reducer's buckets are a copy of all gradients for as long as the model lives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.plan import spec
from nbdist.plan.engines import layout
from nbdist.plan.memory import Moment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.plan.memory import Parts, Setup
    from nbdist.plan.spec import Group, ModelSpec, Step, Workload


def moments(model: ModelSpec, workload: Workload, setup: Setup) -> Iterator[Moment]:
    """The moments of a training step; of several micro-batches the last, which has the most."""
    run = model.micro_batch(workload)
    held = _held(model, setup)
    for step in spec.steps(model, run):
        parts = _gradients(model, step, setup) | {
            "activations": step.activations
            + (0 if step.phase == "loss" else step.inside)
            + _casts(model, step, workload),
            "logits": step.outputs + (step.inside if step.phase == "loss" else 0),
        }
        yield Moment(name=step.name, parts={**held, **parts})
    elements = spec.trainable(model)
    yield Moment(
        name="optimizer step",
        parts={
            **held,
            "gradients": elements * model.element,
            "logits": run.outputs,
            "temporaries": model.element * setup.optimizer.scratch(elements, spec.largest(model)),
        },
    )


def _held(model: ModelSpec, setup: Setup) -> Parts:
    """Bytes that stay: parameters as they were loaded, buckets and optimizer state."""
    elements = spec.trainable(model)
    return {
        "parameters": spec.params(model) * model.element,
        "buffers": elements * model.element,
        "optimizer": setup.optimizer.state_bytes(elements, element=model.element),
    }


def _gradients(model: ModelSpec, step: Step, setup: Setup) -> dict[str, int]:
    """Bytes of the gradients; those of earlier micro-batches take the new ones in, one by one."""
    if setup.options.accumulate > 1:
        elements = spec.trainable(model)
        new = min(step.grads, model.groups[step.group].largest)
    elif step.phase == "backward":
        elements, new = layout.finished(model, step) + step.grads, 0
    else:
        elements, new = 0, 0
    return {"gradients": elements * model.element, "temporaries": new * model.element}


def _casts(model: ModelSpec, step: Step, workload: Workload) -> int:
    """Bytes of the 16-bit weights that autocast keeps until a forward ends.

    Without checkpointing they are saved for the backward, and are among the activations.
    """
    if step.phase != "forward" or not workload.activation_checkpointing:
        return 0
    if workload.compute != "autocast":
        return 0
    blocks = [one.trainable * one.count for one in model.groups[: step.group] if _again(one)]
    own = model.groups[step.group]
    return 2 * (sum(blocks) + (step.nth * own.trainable if _again(own) else 0))


def _again(group: Group) -> bool:
    """Whether its forward runs again in the backward."""
    return group.role == "block"
