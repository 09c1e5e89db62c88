"""What the planner knows of a model: groups of parameters, and the bytes of one micro-batch.

Pure arithmetic. A `ModelSpec` is made by `closed` (formulas of known architectures) or by
`traced` (a trace of any module); the engines of `ddp`, `fsdp` and `zero` ask it for a
`MicroBatch` and add what they themselves hold.

Sizes are in bytes, parameters in elements. T = batch_size * seq_len tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Iterator

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

    def micro_batch(self, workload: Workload) -> MicroBatch:
        """Bytes of one micro-batch.

        Raises:
            PlanError: the workload is outside of what this spec knows (a traced one knows one
                sequence length).
        """

    def flops(self, workload: Workload) -> float:
        """Floating point operations of one micro-batch, forward and backward."""

    def to_json(self) -> dict[str, Any]:
        """Return plain fields, from which `plan.spec_from_json` makes it again."""


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
    """One moment of a micro-batch, before an engine adds what it holds."""

    name: str
    """For a reader: "backward of block 3"."""
    phase: Literal["forward", "loss", "backward"]
    group: int
    """Index of the group at work; of the last one in the loss."""
    nth: int = 0
    """Which of its `count`."""
    activations: int = 0
    """Bytes saved by the groups before it (and by itself, in the loss)."""
    inside: int = 0
    """Bytes inside the group at work, or of the loss."""
    grads: int = 0
    """Elements of the group's own gradients that exist by then."""
    outputs: int = 0
    """Bytes of logits that the cell's variable keeps."""


def steps(model: ModelSpec, run: MicroBatch) -> tuple[Step, ...]:
    """Walk through a micro-batch of a model: forward, loss, backward.

    Of a group that repeats, only the first two and the last two are visited: in between
    every engine's bytes are affine in the index, so that no peak is missed. All engines that
    compute alike walk the same steps, which are kept as long as the micro-batch is.
    """
    if run not in _walked:
        _walked[run] = tuple(_walk(model, run))
    return _walked[run]


_walked: WeakKeyDictionary[MicroBatch, tuple[Step, ...]] = WeakKeyDictionary()


def _walk(model: ModelSpec, run: MicroBatch) -> Iterator[Step]:
    before = _saved_before(model, run)
    for number, (group, part) in enumerate(zip(model.groups, run.passes, strict=True)):
        for index in ends(group.count):
            # The variable still holds the logits of the micro-batch before.
            yield Step(
                name=_name("forward", group, index),
                phase="forward",
                group=number,
                nth=index,
                activations=before[number] + index * part.saved,
                inside=part.forward,
                outputs=run.outputs,
            )
    last = len(model.groups) - 1
    yield Step(
        name="loss",
        phase="loss",
        group=last,
        activations=before[-1],
        inside=run.loss,
        outputs=run.outputs,
    )
    for number in range(last, -1, -1):
        group, part = model.groups[number], run.passes[number]
        for index in reversed(ends(group.count)):
            for instant in part.backward:
                yield Step(
                    name=_name("backward", group, index),
                    phase="backward",
                    group=number,
                    nth=index,
                    activations=before[number] + index * part.saved,
                    inside=instant.held,
                    grads=instant.grads,
                    outputs=run.outputs,
                )


def _name(phase: str, group: Group, nth: int) -> str:
    return f"{phase} of {group.name}{f' {nth}' if group.count > 1 else ''}"


def ends(count: int) -> list[int]:
    """The first two and the last two of `count` indices."""
    return sorted({0, min(1, count - 1), max(0, count - 2), count - 1})


def _saved_before(model: ModelSpec, run: MicroBatch) -> list[int]:
    """Bytes saved before each group, and after the last."""
    sums = [0]
    for group, part in zip(model.groups, run.passes, strict=True):
        sums.append(sums[-1] + group.count * part.saved)
    return sums
