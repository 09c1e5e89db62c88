"""What decoder-only language models share: groups of parameters, and a micro-batch of a tape.

A family (`closed`) says which parameters a block has and writes the block's operations on a
`Tape`; here they become a `ModelSpec`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from nbdist.plan.spec import Group, Instant, MicroBatch, Pass
from nbdist.plan.tape import BATCH, FULL, HALF, Tape, Tensor, worst

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nbdist.plan.spec import Compute, Workload

Attention = Literal["sdpa", "eager"]
_INDEX = 8
"""Bytes of a token's number, and of a label."""


class Weight(NamedTuple):
    """A parameter of a model."""

    rows: int
    elements: int
    trainable: bool = True


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Sizes that every decoder has; a family adds its own and the operations."""

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

    depth: ClassVar[Literal["closed form"]] = "closed form"

    # -- what a family says ----------------------------------------------------------------

    def embeddings(self) -> list[Weight]:
        """Tables beside the token embedding, used by no other group."""
        raise NotImplementedError

    def block_weights(self) -> list[Weight]:
        """Parameters of one block, adapters left out."""
        raise NotImplementedError

    def norm_weights(self) -> list[Weight]:
        """Parameters of the final norm."""
        raise NotImplementedError

    def linears(self) -> list[tuple[int, int]]:
        """(out, in) features of the linear layers of one block."""
        raise NotImplementedError

    def write_embedding(self, tape: Tape, work: Workload) -> Tensor:
        """From tokens to the first block's input."""
        raise NotImplementedError

    def write_block(self, tape: Tape, work: Workload, x: Tensor) -> Tensor:
        """One block."""
        raise NotImplementedError

    def write_norm(self, tape: Tape, work: Workload, x: Tensor) -> Tensor:
        """The final norm."""
        raise NotImplementedError

    def shared(self, tape: Tape, work: Workload) -> int:
        """Bytes that all blocks use and that live as long as any of them."""
        raise NotImplementedError

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

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """Positions (where there are any), embedding, blocks, tail."""
        return _groups(self)

    def micro_batch(self, workload: Workload) -> MicroBatch:
        """Bytes of one micro-batch."""
        # A single sample's views differ from those of several (`_math`).
        batch = 1 if workload.batch_size == 1 else BATCH
        layout = replace(workload, batch_size=batch)
        if layout not in self._known:
            self._known[layout] = _micro_batch(self, layout)
        return _at(self._known[layout], workload.batch_size)

    @functools.cached_property
    def _known(self) -> dict[Workload, MicroBatch]:
        """Micro-batches of any batch size, sizes in powers of `BATCH`."""
        return {}

    def flops(self, workload: Workload) -> float:
        """Forward 2, backward 2 for the input and 2 for the weight, per parameter and token.

        Attention adds 4 h S a token and layer forward, half of it when causal, and twice that
        backward; recomputation a forward of the blocks (Narayanan et al. 2021, appendix).
        """
        again = 2 if workload.activation_checkpointing else 0
        block = sum(out * into for out, into in self.linears())
        weight = 2 if self.base_trainable else 0
        per_token = self.layers * block * (4 + weight + again)
        per_token += self.layers * self._adapters() * (6 + again)
        per_token += self.vocab * self.hidden * (4 + weight)
        attention = 2 * self.layers * self.heads * self.head_dim * workload.seq_len
        return float(workload.tokens * (per_token + attention * (3 + again / 2)))

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
        return cls(**{one.name: given[one.name] for one in fields(cls)})

    # -- for families ----------------------------------------------------------------------

    @property
    def wide_q(self) -> int:
        """Features of all query heads."""
        return self.heads * self.head_dim

    @property
    def wide_kv(self) -> int:
        """Features of all key heads."""
        return self.kv_heads * self.head_dim

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

    def scores(self, work: Workload) -> int:
        """Elements of the attention scores of one layer."""
        return work.batch_size * self.heads * work.seq_len**2

    def mask(self, tape: Tape, work: Workload, *, made: bool) -> int:
        """Bytes of the attention mask that checkpointed blocks hold among their arguments."""
        if not work.activation_checkpointing or not (made or self.attention == "eager"):
            return 0
        return work.batch_size * work.seq_len**2 * tape.width

    def attend(self, tape: Tape, work: Workload, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention by the kernel that torch chooses; its output is contiguous."""
        if self.attention == "eager":
            return self.eager(tape, work, q, k, v)
        if self._fused(tape, q):
            return tape.flash_attention(q, k, v, work.tokens * self.heads)
        return self._math(tape, work, q, k, v)

    def eager(self, tape: Tape, work: Workload, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention as transformers writes it out; families differ."""
        raise NotImplementedError

    def _fused(self, tape: Tape, q: Tensor) -> bool:
        """Whether torch 2.13 has a fused kernel.

        The CPU's takes no dropout; a GPU's fp32 kernel no grouped heads.
        """
        if tape.device == "cpu":
            return not self.attention_dropout
        return q.width == HALF or tape.autocast is not None or self.kv_heads == self.heads

    def _math(self, tape: Tape, work: Workload, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """scaled_dot_product_attention without a fused kernel: in fp32, scores kept."""
        scores = self.scores(work)
        width = HALF if tape.autocast else q.width
        q, k, v = (tape.cast(tape.cast(t, width), FULL) for t in (q, k, v))
        if k.elements != q.elements:
            k, v = (tape.copy(t, q.elements // t.elements) for t in (k, v))
        q, k = (tape.copy(tape.unary(t)) for t in (q, k))
        probabilities = tape.softmax(tape.unary(tape.fp32_matmul(q, k, scores)))
        dropped = tape.dropout(probabilities, self.attention_dropout)
        # Heads of one sample, or one head of samples, are a view that a product takes as it is.
        v = v if 1 in {work.batch_size, self.heads} else tape.copy(v)
        out = tape.fp32_matmul(dropped, v, q.elements)
        return tape.cast(out, width)

    def _adapters(self) -> int:
        """Elements of one block's adapters."""
        return sum(self.lora_rank * (out + into) for out, into in self.linears())

    def all_block_weights(self) -> list[Weight]:
        """Parameters of one block with its adapters."""
        base = [one._replace(trainable=self.base_trainable) for one in self.block_weights()]
        if not self.lora_rank:
            return base
        low = [Weight(self.lora_rank, self.lora_rank * into) for _, into in self.linears()]
        return base + low + [Weight(out, out * self.lora_rank) for out, _ in self.linears()]


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


def _groups(model: Decoder) -> tuple[Group, ...]:
    trained = model.base_trainable
    table = Weight(model.vocab, model.vocab * model.hidden, trained)
    positions = [one._replace(trainable=trained) for one in model.embeddings()]
    norm = [one._replace(trainable=trained) for one in model.norm_weights()]
    found = (
        group("positions", "root", positions),
        group("embedding", "embedding", [] if model.tied else [table]),
        group("block", "block", model.all_block_weights(), model.layers),
        group("tail", "tail", [*norm, table]),
    )
    return found if positions else found[1:]


def _micro_batch(model: Decoder, work: Workload) -> MicroBatch:
    embedding, stream = _embedding(model, work)
    block = _block(model, work, stream)
    tail, logits = _tail(model, work, stream)
    places = [Pass(saved=0, forward=0, backward=(Instant(0, 0),))] if model.embeddings() else []
    passes = (*places, embedding, block, tail)
    float_copy = FULL * work.tokens * model.vocab
    # Log-softmax's output and two gradients in fp32, beside the logits that the model returns.
    return MicroBatch(passes=passes, loss=3 * float_copy, outputs=logits)


def _tape(model: Decoder, work: Workload) -> Tape:
    return tape_of(work.compute, work.kind, model.element)


def _embedding(model: Decoder, work: Workload) -> tuple[Pass, Tensor]:
    """Tokens to the residual stream; returns one tensor of it as well."""
    tape = _tape(model, work)
    out = model.write_embedding(tape, work)
    # Gradients of positions are there already; a tied table's second gradient waits beside the
    # first, and their sum.
    beside = sum(one.elements for one in model.embeddings())
    beside += 2 * model.vocab * model.hidden if model.tied else 0
    beside *= tape.width if model.base_trainable else 0
    kept = _INDEX * work.tokens + model.shared(tape, work)
    backward = worst(Instant(one.held + beside, one.grads) for one in tape.backward(out.bytes))
    saved = tape.saved() + kept
    return Pass(saved=saved, forward=tape.forward() + kept, backward=backward), out


def _block(model: Decoder, work: Workload, stream: Tensor) -> Pass:
    tape = _tape(model, work)
    x = Tensor(stream.elements, stream.width)
    out = model.write_block(tape, work, x)
    if not work.activation_checkpointing:
        return Pass(
            saved=tape.saved(),
            forward=tape.forward(first=x),
            backward=tape.backward(out.bytes),
            gradient=x.bytes,
        )
    again = Instant(tape.forward(first=x) + out.bytes, 0)
    backward = tape.backward(out.bytes, held=0 if tape.keeps(x) else x.bytes)
    return Pass(
        saved=x.bytes,
        forward=tape.forward_only(first=x),
        backward=worst([again, *backward]),
        gradient=x.bytes,
    )


def _tail(model: Decoder, work: Workload, stream: Tensor) -> tuple[Pass, int]:
    """Final norm, head and the forward of the loss; returns the bytes of the logits as well."""
    tape = _tape(model, work)
    x = Tensor(stream.elements, stream.width)
    normed = model.write_norm(tape, work, x)
    head = tape.linear(
        normed, work.tokens, model.vocab, narrow=model.hidden, trainable=model.base_trainable
    )
    labels = _INDEX * work.tokens
    saved = tape.saved() + labels
    # A copy in fp32 where they are not, and the log-softmax of it.
    copies = (1 if head.width == FULL else 2) * FULL * head.elements
    forward = saved + head.bytes + copies
    returned = FULL * head.elements if tape.autocast else head.bytes
    backward = tape.backward(head.bytes)
    return Pass(saved=saved, forward=forward, backward=backward, gradient=x.bytes), returned
