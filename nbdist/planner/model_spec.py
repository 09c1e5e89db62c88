"""What the planner knows of a model: groups of parameters, and the bytes of one micro-batch.

Pure arithmetic. A `ModelSpec` is made by `closed` (formulas of known architectures) or by
`traced` (a trace of any module); the engines of `ddp`, `fsdp` and `zero` ask it for a
`MicroBatch` and add what they themselves hold.

Sizes are in bytes, parameters in elements. T = batch_size * seq_len tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Iterable

Compute = Literal["full", "half", "autocast", "half_autocast"]
"""How an engine computes.

full: in the parameters' own type, no casts (precision "no").
half: parameters are bf16 or fp16 when used and no autocast runs (FSDP2, DeepSpeed).
autocast: fp32 parameters under torch.autocast, outputs back in fp32 (DDP).
half_autocast: both (FSDP1 through accelerate 1.15, which also returns fp32 outputs).
"""

COMPUTES: tuple[Compute, ...] = ("full", "half", "autocast", "half_autocast")

Role = Literal["embedding", "block", "tail", "root"]
"""tail: final norm and head. root: what belongs to no other group and is used all along."""

Phase = Literal["before", "forward", "loss", "backward", "after"]
"""Of a group in a micro-batch. before: its forward has not begun; after: its backward is over,
and what it hands to the group before is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One micro-batch on one rank, and how it is computed."""

    batch_size: int = 1
    seq_len: int = 2048
    compute: Compute = "half"
    activation_checkpointing: bool = False
    kind: Literal["cuda", "cpu"] = "cuda"
    """Whose autocast: on a GPU layer norms and softmax come out in fp32, on a CPU not."""

    @property
    def tokens(self) -> int:
        """T: tokens of the micro-batch."""
        return self.batch_size * self.seq_len


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parameters that are used together, `count` times with equal shapes."""

    name: str
    """For a reader: "embedding", "block", "encoder block", "tail"."""
    role: Role
    count: int = 1
    trainable: int = 0
    """Trainable parameters of one, in elements."""
    frozen: int = 0
    largest: int = 0
    """Largest single parameter of one, in elements."""
    tensors: tuple[tuple[int, int], ...] = ()
    """(rows, elements) of each parameter of one, where known: FSDP2 shards whole rows."""

    @property
    def params(self) -> int:
        """All parameters of one, in elements."""
        return self.trainable + self.frozen


class Instant(NamedTuple):
    """One moment inside a group's backward that may be its worst."""

    held: int
    """Bytes inside the group: what is left of `saved`, recomputed activations, temporaries."""
    grads: int
    """Elements of the group's own parameter gradients that exist by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What one group does to the activations of a micro-batch, in bytes."""

    saved: int
    """Kept from its forward until its backward."""
    forward: int
    """Most that is alive inside its forward, what it has saved by then included."""
    backward: tuple[Instant, ...]
    """The moments of its backward that no other one exceeds in both fields."""
    gradient: int = 0
    """Bytes of the gradient that it hands to the group before."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class MicroBatch:
    """Activations of one micro-batch; each one is only equal to itself."""

    passes: tuple[Pass, ...]
    """For each group of the model, in forward order, of one of its `count`."""
    loss: int
    """Most bytes of the loss and its gradients at one moment, on top of all `saved` and of
    `outputs`."""
    outputs: int
    """Bytes of the model's output (logits) that the cell's own variable keeps."""


class ModelSpec(Protocol):
    """A model as the planner sees it."""

    @property
    def name(self) -> str:
        """What it is called in the plan: "llama, 8.03B parameters"."""

    @property
    def depth(self) -> Literal["closed form", "traced"]:
        """Where its figures come from."""

    @property
    def groups(self) -> tuple[Group, ...]:
        """Groups in forward order; their parameters sum up to the model's."""

    @property
    def tied(self) -> bool:
        """The embedding's weight is the head's: it is counted in the tail."""

    @property
    def element(self) -> int:
        """Bytes of one parameter as the model was loaded: 4 for fp32, 2 for bf16."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the reader: how the model was taken, what was left out."""

    def micro_batch(self, workload: Workload) -> MicroBatch:
        """Bytes of one micro-batch.

        Raises:
            PlanError: the workload is outside of what this spec knows (a traced one knows one
                sequence length, and the ways of computing in which the model works).
        """

    def flops(self, workload: Workload) -> float:
        """Floating point operations of one micro-batch, forward and backward."""

    def to_json(self) -> dict[str, Any]:
        """Return plain fields, from which `plan.spec_from_json` makes it again."""


def noted(model: ModelSpec, notes: Iterable[str]) -> ModelSpec:
    """The same model with further sentences for the reader."""
    known: Any = model  # all specs are dataclasses, which a Protocol cannot say
    same: ModelSpec = replace(known, notes=(*model.notes, *notes))
    return same


def trainable(model: ModelSpec) -> int:
    """Trainable parameters of a model, in elements."""
    return sum(group.count * group.trainable for group in model.groups)


def frozen(model: ModelSpec) -> int:
    """Frozen parameters of a model, in elements."""
    return sum(group.count * group.frozen for group in model.groups)


def params(model: ModelSpec) -> int:
    """All parameters of a model, in elements."""
    return trainable(model) + frozen(model)


def largest(model: ModelSpec) -> int:
    """The largest single parameter, in elements."""
    return max(group.largest for group in model.groups)


class Step(NamedTuple):
    """One step of a micro-batch's walk, whatever the micro-batch's size."""

    name: str
    """For a reader: "backward of block 3"."""
    phase: Phase
    group: int
    """Index of the group at work; of the last one in the loss."""
    nth: int = 0
    """Which of its `count`."""
    grads: int = 0
    """Elements of the group's own gradients that exist by then."""


Visits = tuple[tuple[int, ...], ...]
"""For each group of a model, which of its `count` a walk goes to."""


class Walk(NamedTuple):
    """Through a micro-batch: forward, loss, backward; in bytes, before an engine adds its own."""

    steps: tuple[Step, ...]
    """The same object for all micro-batches of a model that only differ in size."""
    activations: list[int]
    """At each step: saved by the groups before, and inside the group at work."""
    logits: list[int]
    """At each step: what the cell's variable keeps; in the loss, what that makes of it too."""


def ends(groups: tuple[Group, ...]) -> Visits:
    """The first two and the last two of each group.

    Where an engine's bytes are affine in the index in between, no peak is missed.
    """
    return tuple(
        tuple(sorted({0, min(1, one.count - 1), max(0, one.count - 2), one.count - 1}))
        for one in groups
    )


def last_and(groups: tuple[Group, ...], others: Iterable[tuple[int, int]]) -> Visits:
    """The last of each group, which has the most activations, and others as (group, index)."""
    found = [{one.count - 1} for one in groups]
    for number, nth in others:
        found[number].add(nth)
    return tuple(tuple(sorted(one)) for one in found)


def walk(model: ModelSpec, run: MicroBatch, visited: Visits | None = None) -> Walk:
    """Walk through a micro-batch of a model; without more said, to the `ends` of its groups.

    Engines that compute alike and visit the same walk the same way, which is kept as long as
    the micro-batch is.
    """
    walks = _walked.setdefault(run, {})
    visited = visited or ends(model.groups)
    if visited not in walks:
        grads = tuple(tuple(one.grads for one in part.backward) for part in run.passes)
        walks[visited] = Walk(_steps(model.groups, grads, visited), *_alive(model, run, visited))
    return walks[visited]


_walked: WeakKeyDictionary[MicroBatch, dict[Visits, Walk]] = WeakKeyDictionary()


@lru_cache(maxsize=64)
def _steps(
    groups: tuple[Group, ...], grads: tuple[tuple[int, ...], ...], visited: Visits
) -> tuple[Step, ...]:
    """The steps of a walk; `grads` has each group's `Instant.grads`."""
    steps: list[Step] = []
    for number, group in enumerate(groups):
        for nth in visited[number]:
            name = _name("forward", group, nth)
            steps += [Step(name, "before", number, nth), Step(name, "forward", number, nth)]
    steps.append(Step("loss", "loss", len(groups) - 1))
    for number, group in reversed([*enumerate(groups)]):
        for nth in reversed(visited[number]) if grads[number] else ():
            name = _name("backward", group, nth)
            steps += [Step(name, "backward", number, nth, made) for made in grads[number]]
            steps.append(Step(name, "after", number, nth))
    return tuple(steps)


def _alive(model: ModelSpec, run: MicroBatch, visited: Visits) -> tuple[list[int], list[int]]:
    """Bytes of activations and of logits at each of `_steps`."""
    before = saved_before(model, run)
    activations: list[int] = []
    for indices, part, base in zip(visited, run.passes, before, strict=False):
        for nth in indices:
            saved = base + nth * part.saved
            activations += [saved, saved + part.forward]
    # The variable still holds the logits of the micro-batch before.
    logits = [run.outputs] * len(activations) + [run.outputs + run.loss]
    activations.append(before[-1])
    for indices, part, base in reversed([*zip(visited, run.passes, before, strict=False)]):
        for nth in reversed(indices) if part.backward else ():
            saved = base + nth * part.saved
            activations += [saved + one.held for one in part.backward]
            activations.append(saved + part.gradient)
    return activations, logits + [run.outputs] * (len(activations) - len(logits))


def _name(phase: str, group: Group, nth: int) -> str:
    return f"{phase} of {group.name}{f' {nth}' if group.count > 1 else ''}"


def saved_before(model: ModelSpec, run: MicroBatch) -> list[int]:
    """Bytes saved before each group, and after the last."""
    sums = [0]
    for group, part in zip(model.groups, run.passes, strict=True):
        sums.append(sums[-1] + group.count * part.saved)
    return sums
