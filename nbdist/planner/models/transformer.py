"""Base class of analytic specs: parameters, attention, activations computed from a tape.

A family defines the parameters of its groups and records its operations on an `AutogradTape`;
`decoder`, `analytic_encoder` and `analytic_seq2seq` turn them into a `ModelSpec`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from nbdist.planner.model_spec import (
    BackwardMoment,
    LayerActivations,
    LayerGroup,
    MicroBatchActivations,
)
from nbdist.planner.models.autograd_tape import (
    FULL_BYTES,
    HALF_BYTES,
    SYMBOLIC_BATCH_SIZE,
    AutogradTape,
    TapeTensor,
    worst_moments,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nbdist.planner.model_spec import ComputeMode, Workload

AttentionImplementation = Literal["sdpa", "eager"]
INDEX_BYTES = 8
"""Bytes of a token id, and of a label."""

_KEEPS_INPUT = frozenset({"silu", "swish", "gelu", "gelu_pytorch_tanh", "quick_gelu"})
"""Activation functions that are a single operation which saves its input."""


class WeightShape(NamedTuple):
    """Shape of a parameter."""

    rows: int
    num_elements: int
    trainable: bool = True


class AttentionBias(NamedTuple):
    """Bias added to attention scores, the same for all samples."""

    grad_bytes: int
    """Bytes of its gradient; 0 if it has none."""


@dataclass(frozen=True, kw_only=True)
class TransformerSpec(ABC):
    """Sizes common to all language models; families add their own sizes and the operations."""

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
    attention: AttentionImplementation = "sdpa"
    attention_dropout: float = 0.0
    element: int = FULL_BYTES
    """Bytes of one parameter as loaded."""
    lora_rank: int = 0
    """Rank of adapters on all linear layers of the blocks; if set, the rest is frozen."""
    frozen: bool = False
    """True if only adapters are trained."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Sentences for the user."""

    depth: ClassVar[Literal["closed form"]] = "closed form"
    causal: ClassVar[bool]
    """True if tokens attend only to earlier tokens."""

    # -- defined by a family ---------------------------------------------------------------

    @property
    @abstractmethod
    def groups(self) -> tuple[LayerGroup, ...]:
        """Groups in forward order."""

    @abstractmethod
    def compute_activations(self, work: Workload) -> MicroBatchActivations:
        """Compute the activations of one micro-batch, whose batch size may be symbolic."""

    @abstractmethod
    def linear_shapes(self) -> list[tuple[int, int]]:
        """Return the (out, in) features of the linear layers of one block."""

    def all_linear_shapes(self) -> list[tuple[int, int]]:
        """Return the linear layers of all blocks."""
        return self.linear_shapes() * self.layers

    @abstractmethod
    def num_multiplications(self, work: Workload) -> tuple[int, int]:
        """Return the multiplications of a forward: in the head, and of attention."""

    def record_eager_attention(
        self, tape: AutogradTape, work: Workload, q: TapeTensor, k: TapeTensor, v: TapeTensor
    ) -> TapeTensor:
        """Record attention without a fused kernel, as implemented by the family in transformers."""
        raise NotImplementedError  # families with their own attention never call it

    # -- ModelSpec -------------------------------------------------------------------------

    @property
    def has_trainable_base(self) -> bool:
        """True if parameters other than adapters are trained."""
        return not (self.frozen or self.lora_rank)

    @property
    def name(self) -> str:
        """Model type and size."""
        count = sum(group.count * group.num_params for group in self.groups)
        size = f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"  # noqa: PLR2004
        return f"{self.model_type}, {size} parameters"

    def micro_batch_activations(self, workload: Workload) -> MicroBatchActivations:
        """Return the activations of one micro-batch."""
        if workload not in self._known:
            # Views of a single sample differ from those of several (see `record_math_attention`).
            alone = workload.batch_size in {1, SYMBOLIC_BATCH_SIZE}
            self._known[workload] = (
                self.compute_activations(workload)
                if alone
                else _at(
                    self.micro_batch_activations(replace(workload, batch_size=SYMBOLIC_BATCH_SIZE)),
                    workload.batch_size,
                )
            )
        return self._known[workload]

    @functools.cached_property
    def _known(self) -> dict[Workload, MicroBatchActivations]:
        """Cache of micro-batches; those with the symbolic batch size have sizes in powers of it."""
        return {}

    def flops(self, workload: Workload) -> float:
        """Return FLOPs: forward 2, backward 2 for input and weight each, per parameter and token.

        Attention has no weights: forward 2 and backward 4 per multiplication; recomputation
        is a forward of the blocks (Narayanan et al. 2021, appendix).
        """
        recompute = 2 if workload.activation_checkpointing else 0
        weight = 2 if self.has_trainable_base else 0
        weights, features = self._linears
        per_token = weights * (4 + weight + recompute) + self.lora_rank * features * (6 + recompute)
        head, attention = self.num_multiplications(workload)
        total = workload.num_tokens * per_token + head * (4 + weight) + attention * (6 + recompute)
        return float(total)

    @functools.cached_property
    def _linears(self) -> tuple[int, int]:
        """Elements of all linear layers, and the sum of their input and output features."""
        shapes = self.all_linear_shapes()
        return sum(out * into for out, into in shapes), sum(map(sum, shapes))

    def with_lora(self, rank: int) -> Self:
        """Return the model frozen, with adapters of a rank on all linear layers."""
        return replace(self, lora_rank=rank)

    def to_json(self) -> dict[str, Any]:
        """Return plain fields."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return {"depth": self.depth, "family": type(self).__name__} | plain

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """Restore from `to_json()`."""
        known = {each.name: given[each.name] for each in fields(cls)}
        return cls(**known | {"notes": tuple(given["notes"])})

    # -- helpers for families --------------------------------------------------------------

    @property
    def num_q_features(self) -> int:
        """Features of all query heads."""
        return self.heads * self.head_dim

    @property
    def num_kv_features(self) -> int:
        """Features of all key heads."""
        return self.kv_heads * self.head_dim

    @property
    def embedding_weight(self) -> WeightShape:
        """Weight of the token embedding, or of the head tied to it."""
        return WeightShape(self.vocab, self.vocab * self.hidden)

    def new_tape(self, work: Workload) -> AutogradTape:
        """Return an empty tape with the casts of a workload."""
        return new_tape(work.compute, work.kind, self.element)

    def base_weights(self, weights: Iterable[WeightShape]) -> list[WeightShape]:
        """Return parameters other than adapters, frozen or not."""
        return [weight._replace(trainable=self.has_trainable_base) for weight in weights]

    def add_adapters(
        self, weights: Iterable[WeightShape], linears: Iterable[tuple[int, int]]
    ) -> list[WeightShape]:
        """Return the parameters of one block with the adapters of its linear layers."""
        base = self.base_weights(weights)
        if not self.lora_rank:
            return base
        shapes = list(linears)
        low = [WeightShape(self.lora_rank, self.lora_rank * into) for _, into in shapes]
        return base + low + [WeightShape(out, out * self.lora_rank) for out, _ in shapes]

    def record_linear(
        self,
        tape: AutogradTape,
        work: Workload,
        x: TapeTensor,
        shape: tuple[int, int],
        *,
        bias: bool = False,
    ) -> TapeTensor:
        """Record a linear layer of a block, with its adapter: W x + B A x (Hu et al. 2021)."""
        out, into = shape
        trained = self.has_trainable_base
        y = tape.linear(x, work.num_tokens, out, narrow=into, trainable=trained, bias=bias)
        if not self.lora_rank:
            return y
        low = tape.linear(x, work.num_tokens, self.lora_rank, narrow=into)
        high = tape.linear(low, work.num_tokens, out, narrow=self.lora_rank)
        return tape.add(y, tape.unary(high))

    def record_activation(self, tape: AutogradTape, x: TapeTensor) -> TapeTensor:
        """Record the activation function; "gelu_new" consists of single operations."""
        if self.activation != "gelu_new":
            return tape.unary(x, keeps="input" if self.activation in _KEEPS_INPUT else "output")
        half = tape.unary(x)
        cubed = tape.unary(tape.power(x))
        bent = tape.unary(tape.unary(tape.add(x, cubed)), keeps="output")
        return tape.multiply(half, tape.unary(bent))

    def num_attention_scores(self, work: Workload) -> int:
        """Return the elements of the attention scores of one layer."""
        return work.batch_size * self.heads * work.seq_len**2

    def record_attention(
        self, tape: AutogradTape, work: Workload, q: TapeTensor, k: TapeTensor, v: TapeTensor
    ) -> TapeTensor:
        """Record attention with the kernel that torch chooses; its output is contiguous."""
        if self.attention == "eager":
            return self.record_eager_attention(tape, work, q, k, v)
        if self._fused(tape, q):
            return tape.flash_attention(q, k, v, work.num_tokens * self.heads)
        return self.record_math_attention(tape, work, (q, k, v), None)

    def _fused(self, tape: AutogradTape, q: TapeTensor) -> bool:
        """Return whether torch 2.13 has a fused kernel."""
        # The CPU kernel does not support dropout; the GPU's fp32 kernel no grouped heads.
        if tape.device == "cpu":
            return not self.attention_dropout
        return q.width == HALF_BYTES or tape.autocast is not None or self.kv_heads == self.heads

    def record_math_attention(
        self,
        tape: AutogradTape,
        work: Workload,
        qkv: tuple[TapeTensor, TapeTensor, TapeTensor],
        bias: AttentionBias | None,
    ) -> TapeTensor:
        """Record scaled_dot_product_attention without a fused kernel: in fp32, scores kept.

        torch 2.13 (aten/src/ATen/native/transformers/attention.cpp) holds the fp32 copies until the
        end, and returns the scores, in the queries' dtype; the module's forward holds its inputs.
        """
        width = HALF_BYTES if tape.autocast else qkv[0].width
        q, k, v = copies = tuple(tape.cast(tape.cast(t, width), FULL_BYTES) for t in qkv)
        if k.elements != q.elements:
            k, v = (tape.copy(t, q.elements // t.elements) for t in (k, v))
        scaled = tape.unary(q)
        q, k = tape.copy(scaled), tape.copy(tape.unary(k))
        raw = tape.fp32_matmul(q, k, self.num_attention_scores(work))
        if bias:
            raw = tape.add_shared_bias(raw, bias.grad_bytes)
        elif self.causal:
            raw = tape.unary(raw)
        dropout = self.attention_dropout if bias is None or tape.device == "cpu" else 0
        dropped = tape.dropout(tape.softmax(raw), dropout)
        # Heads of one sample, or samples of one head, are a view that a product accepts directly.
        v = v if 1 in {work.batch_size, self.heads} else tape.copy(v)
        out = tape.fp32_matmul(dropped, v, copies[0].elements)
        returned = tape.cast(dropped, width)
        out = tape.cast(out, width)
        tape.keep_alive(scaled)
        out = tape.copy(out)
        tape.keep_alive(returned, *copies, *qkv)
        return out


def _at(run: MicroBatchActivations, batch_size: int) -> MicroBatchActivations:
    """Substitute a batch size for the symbolic one."""

    def at(size: int) -> int:
        each, fixed = divmod(size, SYMBOLIC_BATCH_SIZE)
        return each * batch_size + fixed

    passes = tuple(
        LayerActivations(
            saved_bytes=at(part.saved_bytes),
            forward_peak_bytes=at(part.forward_peak_bytes),
            backward_moments=tuple(
                BackwardMoment(at(held), grads) for held, grads in part.backward_moments
            ),
            input_grad_bytes=at(part.input_grad_bytes),
        )
        for part in run.layers
    )
    return MicroBatchActivations(
        layers=passes, loss_bytes=at(run.loss_bytes), output_bytes=at(run.output_bytes)
    )


def new_tape(compute: ComputeMode, kind: Literal["cuda", "cpu"], element: int) -> AutogradTape:
    """Return an empty tape with the casts of a compute mode."""
    half = compute in {"half", "half_autocast"}
    autocast = kind if compute in {"autocast", "half_autocast"} else None
    return AutogradTape(
        element_bytes=HALF_BYTES if half else element, autocast=autocast, device=kind
    )


def build_layer_group(
    name: str, role: Any, weights: Iterable[WeightShape], count: int = 1
) -> LayerGroup:
    """Return a group of parameters."""
    weights = tuple(weights)
    trainable = sum(weight.num_elements for weight in weights if weight.trainable)
    return LayerGroup(
        name=name,
        role=role,
        count=count,
        trainable=trainable,
        frozen=sum(weight.num_elements for weight in weights) - trainable,
        largest=max((weight.num_elements for weight in weights), default=0),
        tensors=tuple((weight.rows, weight.num_elements) for weight in weights),
    )


NO_ACTIVATIONS = LayerActivations(
    saved_bytes=0, forward_peak_bytes=0, backward_moments=(BackwardMoment(0, 0),)
)
"""Activations of a parameter group that runs inside other groups."""


def add_held_bytes(instants: Iterable[BackwardMoment], size: int) -> tuple[BackwardMoment, ...]:
    """Return moments with additional bytes that are held throughout."""
    return worst_moments(
        BackwardMoment(moment.held_bytes + size, moment.num_grads) for moment in instants
    )


def embedding_activations(
    tape: AutogradTape, out: TapeTensor, *, kept: int, beside: int
) -> LayerActivations:
    """Return the activations from tokens to the residual stream.

    Args:
        tape: the embedding's operations.
        out: its output.
        kept: bytes of indices and masks that live as long as the blocks.
        beside: bytes of gradients of other groups' parameters, or of a tied table.
    """
    return LayerActivations(
        saved_bytes=tape.saved_bytes() + kept,
        forward_peak_bytes=tape.forward_peak_bytes() + kept,
        backward_moments=add_held_bytes(tape.backward_moments(out.size_bytes), beside),
    )


def block_activations(
    tape: AutogradTape, x: TapeTensor, out: TapeTensor, *, checkpointed: bool, beside: int = 0
) -> LayerActivations:
    """Return the activations of one block, recomputed in the backward if checkpointed.

    Args:
        tape: the block's operations.
        x: its input.
        out: its output.
        checkpointed: True if only the input is saved.
        beside: bytes of gradients of other groups' parameters that exist at that time.
    """
    if not checkpointed:
        return LayerActivations(
            saved_bytes=tape.saved_bytes(),
            forward_peak_bytes=tape.forward_peak_bytes(first=x),
            backward_moments=add_held_bytes(tape.backward_moments(out.size_bytes), beside),
            input_grad_bytes=x.size_bytes,
        )
    recomputed = BackwardMoment(tape.forward_peak_bytes(first=x) + out.size_bytes, 0)
    backward = tape.backward_moments(out.size_bytes, held=0 if tape.is_saved(x) else x.size_bytes)
    return LayerActivations(
        saved_bytes=x.size_bytes,
        forward_peak_bytes=tape.inference_peak_bytes(first=x),
        backward_moments=add_held_bytes([recomputed, *backward], beside),
        input_grad_bytes=x.size_bytes,
    )


def join_activations(first: LayerActivations, second: LayerActivations) -> LayerActivations:
    """Return the activations of two consecutive groups as one."""
    grads = max(moment.num_grads for moment in second.backward_moments)
    backward = [
        BackwardMoment(moment.held_bytes + first.saved_bytes, moment.num_grads)
        for moment in second.backward_moments
    ]
    backward += [
        BackwardMoment(moment.held_bytes, moment.num_grads + grads)
        for moment in first.backward_moments
    ]
    return LayerActivations(
        saved_bytes=first.saved_bytes + second.saved_bytes,
        forward_peak_bytes=max(
            first.forward_peak_bytes, first.saved_bytes + second.forward_peak_bytes
        ),
        backward_moments=worst_moments(backward),
        input_grad_bytes=first.input_grad_bytes,
    )


class HeadActivations(NamedTuple):
    """Activations of the head and the loss."""

    head: LayerActivations
    """The head and the forward of the loss."""
    loss_bytes: int
    output_bytes: int
    """Bytes of the logits as the model returns them."""


def head_activations(
    tape: AutogradTape, x: TapeTensor, logits: TapeTensor, *, labels: int, in_fp32: bool
) -> HeadActivations:
    """Return the activations of the head and a cross entropy loss.

    Args:
        tape: the head's operations.
        x: output of the last block.
        logits: output of the head.
        labels: bytes of the labels.
        in_fp32: True if the loss casts the logits to fp32, as in transformers' `loss_utils`;
            otherwise only autocast does.
    """
    saved = tape.saved_bytes() + labels
    width = FULL_BYTES if in_fp32 or tape.autocast else logits.width
    # A copy in the loss's dtype if it differs, and the log-softmax of it.
    copies = (1 if logits.width == width else 2) * width * logits.elements
    last = LayerActivations(
        saved_bytes=saved,
        forward_peak_bytes=saved + logits.size_bytes + copies,
        backward_moments=tape.backward_moments(logits.size_bytes),
        input_grad_bytes=x.size_bytes,
    )
    # Log-softmax's output and two gradients, in addition to the logits that the model returns.
    loss = 3 * width * logits.elements
    return HeadActivations(
        last, loss, FULL_BYTES * logits.elements if tape.autocast else logits.size_bytes
    )
