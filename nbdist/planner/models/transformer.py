"""What families of language models share: parameters, attention, passes read off a tape.

A family says which parameters its groups have and writes its operations on a `Tape`;
`decoder`, `closed_encoder` and `closed_seq2seq` make a `ModelSpec` of them.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from nbdist.planner.model_spec import Group, Instant, MicroBatch, Pass
from nbdist.planner.models.autograd_tape import BATCH, FULL, HALF, Tape, Tensor, worst

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nbdist.planner.model_spec import Compute, Workload

Attention = Literal["sdpa", "eager"]
INDEX = 8
"""Bytes of a token's number, and of a label."""

_KEEPS_INPUT = frozenset({"silu", "swish", "gelu", "gelu_pytorch_tanh", "quick_gelu"})
"""Activations that are one operation which saves its input."""


class Weight(NamedTuple):
    """A parameter of a model."""

    rows: int
    elements: int
    trainable: bool = True


class Bias(NamedTuple):
    """What is added to the scores of attention, the same for all samples."""

    size: int
    """Bytes of its gradient; 0 where it has none."""


@dataclass(frozen=True, kw_only=True)
class Family(ABC):
    """Sizes that every language model has; a family adds its own and the operations."""

    model_type: str
    hidden: int
    """h: width of the residual stream."""
    ff: int
    """Width of the MLP."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    activation: str
    tied: bool = False
    attention: Attention = "sdpa"
    attention_dropout: float = 0.0
    element: int = FULL
    """Bytes of one parameter as loaded."""
    lora_rank: int = 0
    """Rank of adapters on all linear layers of the blocks; the rest is frozen then."""
    frozen: bool = False
    """No parameter but adapters is trained."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Sentences for the reader."""

    depth: ClassVar[Literal["closed form"]] = "closed form"
    causal: ClassVar[bool]
    """Tokens attend to those before them only."""

    # -- what a family says ----------------------------------------------------------------

    @property
    @abstractmethod
    def groups(self) -> tuple[Group, ...]:
        """Groups in forward order."""

    @abstractmethod
    def passes(self, work: Workload) -> MicroBatch:
        """Bytes of one micro-batch, whose batch size may be `BATCH`."""

    @abstractmethod
    def linears(self) -> list[tuple[int, int]]:
        """(out, in) features of the linear layers of one block."""

    def all_linears(self) -> list[tuple[int, int]]:
        """Those of all blocks."""
        return self.linears() * self.layers

    @abstractmethod
    def products(self, work: Workload) -> tuple[int, int]:
        """Multiplications of a forward: in the head, and of attention."""

    def eager(self, tape: Tape, work: Workload, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention as transformers writes it out; families differ."""
        raise NotImplementedError  # of a family with an attention of its own, which never asks

    # -- a ModelSpec -----------------------------------------------------------------------

    @property
    def base_trainable(self) -> bool:
        """Whether other parameters than adapters are trained."""
        return not (self.frozen or self.lora_rank)

    @property
    def name(self) -> str:
        """Model type and size."""
        count = sum(group.count * group.params for group in self.groups)
        size = f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"  # noqa: PLR2004
        return f"{self.model_type}, {size} parameters"

    def micro_batch(self, workload: Workload) -> MicroBatch:
        """Bytes of one micro-batch."""
        if workload not in self._known:
            # A single sample's views differ from those of several (`math`).
            alone = workload.batch_size in {1, BATCH}
            self._known[workload] = (
                self.passes(workload)
                if alone
                else _at(self.micro_batch(replace(workload, batch_size=BATCH)), workload.batch_size)
            )
        return self._known[workload]

    @functools.cached_property
    def _known(self) -> dict[Workload, MicroBatch]:
        """Micro-batches that were asked for; those of `BATCH` have sizes in powers of it."""
        return {}

    def flops(self, workload: Workload) -> float:
        """Forward 2, backward 2 for the input and 2 for the weight, per parameter and token.

        Attention has no weights: forward 2 and backward 4 per multiplication; recomputation
        is a forward of the blocks (Narayanan et al. 2021, appendix).
        """
        again = 2 if workload.activation_checkpointing else 0
        weight = 2 if self.base_trainable else 0
        weights, features = self._linears
        per_token = weights * (4 + weight + again) + self.lora_rank * features * (6 + again)
        head, attention = self.products(workload)
        total = workload.tokens * per_token + head * (4 + weight) + attention * (6 + again)
        return float(total)

    @functools.cached_property
    def _linears(self) -> tuple[int, int]:
        """Elements of all linear layers, and the sum of their input and output features."""
        shapes = self.all_linears()
        return sum(out * into for out, into in shapes), sum(map(sum, shapes))

    def with_lora(self, rank: int) -> Self:
        """The same model frozen, with adapters of a rank on all linear layers."""
        return replace(self, lora_rank=rank)

    def to_json(self) -> dict[str, Any]:
        """Return plain fields."""
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        return {"depth": self.depth, "family": type(self).__name__} | plain

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """Rebuild from `to_json()`."""
        known = {one.name: given[one.name] for one in fields(cls)}
        return cls(**known | {"notes": tuple(given["notes"])})

    # -- for families ----------------------------------------------------------------------

    @property
    def wide_q(self) -> int:
        """Features of all query heads."""
        return self.heads * self.head_dim

    @property
    def wide_kv(self) -> int:
        """Features of all key heads."""
        return self.kv_heads * self.head_dim

    @property
    def table(self) -> Weight:
        """The token embedding, or the head that is tied to it."""
        return Weight(self.vocab, self.vocab * self.hidden)

    def tape(self, work: Workload) -> Tape:
        """An empty tape with the casts of a workload."""
        return tape_of(work.compute, work.kind, self.element)

    def base(self, weights: Iterable[Weight]) -> list[Weight]:
        """Parameters that are no adapters: frozen or not."""
        return [one._replace(trainable=self.base_trainable) for one in weights]

    def adapted(
        self, weights: Iterable[Weight], linears: Iterable[tuple[int, int]]
    ) -> list[Weight]:
        """Parameters of one block with the adapters of its linear layers."""
        base = self.base(weights)
        if not self.lora_rank:
            return base
        shapes = list(linears)
        low = [Weight(self.lora_rank, self.lora_rank * into) for _, into in shapes]
        return base + low + [Weight(out, out * self.lora_rank) for out, _ in shapes]

    def linear(
        self, tape: Tape, work: Workload, x: Tensor, shape: tuple[int, int], *, bias: bool = False
    ) -> Tensor:
        """A linear layer of a block, with its adapter: W x + B A x (Hu et al. 2021)."""
        out, into = shape
        trained = self.base_trainable
        y = tape.linear(x, work.tokens, out, narrow=into, trainable=trained, bias=bias)
        if not self.lora_rank:
            return y
        low = tape.linear(x, work.tokens, self.lora_rank, narrow=into)
        high = tape.linear(low, work.tokens, out, narrow=self.lora_rank)
        return tape.add(y, tape.unary(high))

    def activated(self, tape: Tape, x: Tensor) -> Tensor:
        """Activation; "gelu_new" is written out in single operations."""
        if self.activation != "gelu_new":
            return tape.unary(x, keeps="input" if self.activation in _KEEPS_INPUT else "output")
        half = tape.unary(x)
        cubed = tape.unary(tape.power(x))
        bent = tape.unary(tape.unary(tape.add(x, cubed)), keeps="output")
        return tape.multiply(half, tape.unary(bent))

    def scores(self, work: Workload) -> int:
        """Elements of the attention scores of one layer."""
        return work.batch_size * self.heads * work.seq_len**2

    def attend(self, tape: Tape, work: Workload, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention by the kernel that torch chooses; its output is contiguous."""
        if self.attention == "eager":
            return self.eager(tape, work, q, k, v)
        if self._fused(tape, q):
            return tape.flash_attention(q, k, v, work.tokens * self.heads)
        return self.math(tape, work, (q, k, v), None)

    def _fused(self, tape: Tape, q: Tensor) -> bool:
        """Whether torch 2.13 has a fused kernel.

        The CPU's takes no dropout; a GPU's fp32 kernel no grouped heads.
        """
        if tape.device == "cpu":
            return not self.attention_dropout
        return q.width == HALF or tape.autocast is not None or self.kv_heads == self.heads

    def math(
        self, tape: Tape, work: Workload, qkv: tuple[Tensor, Tensor, Tensor], bias: Bias | None
    ) -> Tensor:
        """scaled_dot_product_attention without a fused kernel: in fp32, scores kept.

        torch 2.13 (aten/src/ATen/native/transformers/attention.cpp) holds the fp32 copies until
        it is over, and returns the scores as well, in the type of the queries; the module's
        forward holds what it gave.
        """
        width = HALF if tape.autocast else qkv[0].width
        q, k, v = copies = tuple(tape.cast(tape.cast(t, width), FULL) for t in qkv)
        if k.elements != q.elements:
            k, v = (tape.copy(t, q.elements // t.elements) for t in (k, v))
        scaled = tape.unary(q)
        q, k = tape.copy(scaled), tape.copy(tape.unary(k))
        raw = tape.fp32_matmul(q, k, self.scores(work))
        if bias:
            raw = tape.biased(raw, bias.size)
        elif self.causal:
            raw = tape.unary(raw)
        dropout = self.attention_dropout if bias is None or tape.device == "cpu" else 0
        dropped = tape.dropout(tape.softmax(raw), dropout)
        # Heads of one sample, or one head of samples, are a view that a product takes as it is.
        v = v if 1 in {work.batch_size, self.heads} else tape.copy(v)
        out = tape.fp32_matmul(dropped, v, copies[0].elements)
        returned = tape.cast(dropped, width)
        out = tape.cast(out, width)
        tape.linger(scaled)
        out = tape.copy(out)
        tape.linger(returned, *copies, *qkv)
        return out


def _at(run: MicroBatch, batch_size: int) -> MicroBatch:
    """Put a batch size in."""

    def at(size: int) -> int:
        each, fixed = divmod(size, BATCH)
        return each * batch_size + fixed

    passes = tuple(
        Pass(
            saved=at(one.saved),
            forward=at(one.forward),
            backward=tuple(Instant(at(held), grads) for held, grads in one.backward),
            gradient=at(one.gradient),
        )
        for one in run.passes
    )
    return MicroBatch(passes=passes, loss=at(run.loss), outputs=at(run.outputs))


def tape_of(compute: Compute, kind: Literal["cuda", "cpu"], element: int) -> Tape:
    """An empty tape with the casts of a way to compute."""
    half = compute in {"half", "half_autocast"}
    autocast = kind if compute in {"autocast", "half_autocast"} else None
    return Tape(width=HALF if half else element, autocast=autocast, device=kind)


def group(name: str, role: Any, weights: Iterable[Weight], count: int = 1) -> Group:
    """A group of given parameters."""
    weights = tuple(weights)
    trainable = sum(one.elements for one in weights if one.trainable)
    return Group(
        name=name,
        role=role,
        count=count,
        trainable=trainable,
        frozen=sum(one.elements for one in weights) - trainable,
        largest=max((one.elements for one in weights), default=0),
        tensors=tuple((one.rows, one.elements) for one in weights),
    )


NOTHING = Pass(saved=0, forward=0, backward=(Instant(0, 0),))
"""What a group of parameters does that other groups' passes use."""


def held_beside(instants: Iterable[Instant], size: int) -> tuple[Instant, ...]:
    """Moments with bytes held all along besides."""
    return worst(Instant(one.held + size, one.grads) for one in instants)


def embedding_pass(tape: Tape, out: Tensor, *, kept: int, beside: int) -> Pass:
    """Tokens to the residual stream.

    Args:
        tape: of the embedding's operations.
        out: what they come to.
        kept: bytes of numbers and masks that live as long as the blocks.
        beside: bytes of gradients of other groups' parameters, or of a tied table.
    """
    return Pass(
        saved=tape.saved() + kept,
        forward=tape.forward() + kept,
        backward=held_beside(tape.backward(out.bytes), beside),
    )


def block_pass(tape: Tape, x: Tensor, out: Tensor, *, checkpointed: bool, beside: int = 0) -> Pass:
    """One block, from its input to its output, recomputed in the backward or not.

    Args:
        tape: of the block's operations.
        x: its input.
        out: its output.
        checkpointed: only the input is saved.
        beside: bytes of gradients of other groups' parameters that exist by then.
    """
    if not checkpointed:
        return Pass(
            saved=tape.saved(),
            forward=tape.forward(first=x),
            backward=held_beside(tape.backward(out.bytes), beside),
            gradient=x.bytes,
        )
    again = Instant(tape.forward(first=x) + out.bytes, 0)
    backward = tape.backward(out.bytes, held=0 if tape.keeps(x) else x.bytes)
    return Pass(
        saved=x.bytes,
        forward=tape.forward_only(first=x),
        backward=held_beside([again, *backward], beside),
        gradient=x.bytes,
    )


def joined(first: Pass, second: Pass) -> Pass:
    """Two passes as one, the second right after the first."""
    grads = max(one.grads for one in second.backward)
    backward = [Instant(one.held + first.saved, one.grads) for one in second.backward]
    backward += [Instant(one.held, one.grads + grads) for one in first.backward]
    return Pass(
        saved=first.saved + second.saved,
        forward=max(first.forward, first.saved + second.forward),
        backward=worst(backward),
        gradient=first.gradient,
    )


class Tail(NamedTuple):
    """The end of a micro-batch."""

    last: Pass
    """The head and the forward of the loss."""
    loss: int
    outputs: int
    """Bytes of the logits as the model returns them."""


def tail_pass(tape: Tape, x: Tensor, logits: Tensor, *, labels: int, in_fp32: bool) -> Tail:
    """The head, and a cross entropy of its logits.

    Args:
        tape: of the head's operations.
        x: output of the last block.
        logits: what the head makes of it.
        labels: bytes of the labels.
        in_fp32: the loss casts the logits to fp32, as those of transformers' `loss_utils` do;
            else autocast alone does.
    """
    saved = tape.saved() + labels
    width = FULL if in_fp32 or tape.autocast else logits.width
    # A copy in the loss's type where they have another, and the log-softmax of it.
    copies = (1 if logits.width == width else 2) * width * logits.elements
    last = Pass(
        saved=saved,
        forward=saved + logits.bytes + copies,
        backward=tape.backward(logits.bytes),
        gradient=x.bytes,
    )
    # Log-softmax's output and two gradients, beside the logits that the model returns.
    loss = 3 * width * logits.elements
    return Tail(last, loss, FULL * logits.elements if tape.autocast else logits.bytes)
