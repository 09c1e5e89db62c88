"""Llama-like and GPT-2-like decoders as model specs, without torch.

A family gives the parameters of a block and records the operations of its forward, as transformers
5.23 runs them, on an `AutogradTape`; `DecoderSpec` derives parameter groups and bytes from both.
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

    from nbdist.planner.model_spec import LayerRole, Workload

INDEX_BYTES = 8
"""Bytes of a token id, and of a label."""

_KEEPS_INPUT = frozenset({"silu", "swish", "gelu", "gelu_pytorch_tanh", "quick_gelu"})
"""Activation functions that are a single operation which saves its input."""


class WeightShape(NamedTuple):
    """Shape of a parameter."""

    rows: int
    num_elements: int
    trainable: bool = True


@dataclass(frozen=True, kw_only=True)
class DecoderSpec(ABC):
    """A stack of causal blocks between an embedding and a head; a `ModelSpec`."""

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
    attention: Literal["sdpa", "eager"] = "sdpa"
    attention_dropout: float = 0.0
    element: int = FULL_BYTES
    """Bytes of one parameter as loaded."""
    lora_rank: int = 0
    """Rank of adapters on all linear layers of the blocks; if set, the rest is frozen."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Sentences for the user."""

    depth: ClassVar[Literal["closed form"]] = "closed form"

    # -- defined by a family ---------------------------------------------------------------

    @abstractmethod
    def linear_shapes(self) -> list[tuple[int, int]]:
        """Return the (out, in) features of the linear layers of one block."""

    @abstractmethod
    def block_weights(self) -> list[WeightShape]:
        """Return the parameters of one block without adapters."""

    @abstractmethod
    def norm_weights(self) -> list[WeightShape]:
        """Return the parameters of the final norm."""

    @abstractmethod
    def position_weights(self) -> list[WeightShape]:
        """Return the embedding of positions, which no other group uses."""

    @abstractmethod
    def shared_bytes(self, tape: AutogradTape, work: Workload) -> int:
        """Return the bytes that all blocks share, alive as long as any block."""

    @abstractmethod
    def record_embedding(self, tape: AutogradTape, work: Workload) -> TapeTensor:
        """Record the operations from tokens to the first block's input."""

    @abstractmethod
    def record_block(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """Record one block."""

    @abstractmethod
    def record_norm(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """Record a norm of the residual stream."""

    @abstractmethod
    def record_eager_attention(
        self, tape: AutogradTape, work: Workload, q: TapeTensor, k: TapeTensor, v: TapeTensor
    ) -> TapeTensor:
        """Record attention without a fused kernel, as implemented by the family in transformers."""

    # -- ModelSpec -------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Model type and size."""
        count = sum(group.count * group.num_params for group in self.groups)
        size = f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"  # noqa: PLR2004
        return f"{self.model_type}, {size} parameters"

    @functools.cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Position embeddings (if any), embedding, blocks, tail."""
        head = WeightShape(self.vocab, self.vocab * self.hidden)
        blocks = self._base_weights(self.block_weights())
        if self.lora_rank:
            shapes, rank = self.linear_shapes(), self.lora_rank
            blocks += [WeightShape(rank, rank * into) for _, into in shapes]
            blocks += [WeightShape(out, out * rank) for out, _ in shapes]
        # A tied weight counts in the tail.
        embedding = [] if self.tied else self._base_weights([head])
        tail = self._base_weights([*self.norm_weights(), head])
        groups = (
            _layer_group("embedding", "embedding", embedding),
            _layer_group("block", "block", blocks, self.layers),
            _layer_group("tail", "tail", tail),
        )
        positions = self._base_weights(self.position_weights())
        return (_layer_group("positions", "root", positions), *groups) if positions else groups

    def micro_batch_activations(self, workload: Workload) -> MicroBatchActivations:
        """Return the activations of one micro-batch."""
        if workload not in self._known:
            # Views of a single sample differ from those of several (see `_math_attention`); all
            # larger batch sizes are read off one tape with a symbolic batch size.
            if workload.batch_size in {1, SYMBOLIC_BATCH_SIZE}:
                run = self._compute_activations(workload)
            else:
                symbolic = replace(workload, batch_size=SYMBOLIC_BATCH_SIZE)
                run = _at(self.micro_batch_activations(symbolic), workload.batch_size)
            self._known[workload] = run
        return self._known[workload]

    @functools.cached_property
    def _known(self) -> dict[Workload, MicroBatchActivations]:
        return {}

    def flops(self, workload: Workload) -> float:
        """Return FLOPs: forward 2, backward 2 for input and weight each, per parameter and token.

        Attention has no weights: forward 2 and backward 4 per multiplication; recomputation
        is a forward of the blocks (Narayanan et al. 2021, appendix).
        """
        recompute = 2 if workload.activation_checkpointing else 0
        weight = 0 if self.lora_rank else 2
        shapes = self.linear_shapes()
        weights = self.layers * sum(out * into for out, into in shapes)
        features = self.layers * sum(map(sum, shapes))
        per_token = weights * (4 + weight + recompute) + self.lora_rank * features * (6 + recompute)
        head = workload.num_tokens * self.vocab * self.hidden
        # The causal mask halves both matrix products of attention.
        attention = workload.num_tokens * self.layers * self.heads * self.head_dim
        attention *= workload.seq_len
        total = workload.num_tokens * per_token + head * (4 + weight) + attention * (6 + recompute)
        return float(total)

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
    def trains_base(self) -> bool:
        """True if parameters other than adapters are trained."""
        return not self.lora_rank

    def embed_tokens(self, tape: AutogradTape, work: Workload) -> TapeTensor:
        """Record the lookup of the tokens in the embedding."""
        return tape.embedding(
            work.num_tokens,
            self.vocab,
            self.hidden,
            counted=self.trains_base and not self.tied,
            tied=self.trains_base and self.tied,
        )

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
        y = tape.linear(x, work.num_tokens, out, narrow=into, trainable=self.trains_base, bias=bias)
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

    def attention_mask_bytes(self, tape: AutogradTape, work: Workload, *, made: bool) -> int:
        """Return the bytes of the attention mask that checkpointed blocks hold as argument."""
        if not work.activation_checkpointing or not (made or self.attention == "eager"):
            return 0
        return work.batch_size * work.seq_len**2 * tape.element_bytes

    def record_attention(
        self, tape: AutogradTape, work: Workload, q: TapeTensor, k: TapeTensor, v: TapeTensor
    ) -> TapeTensor:
        """Record attention with the kernel that torch 2.13 chooses; its output is contiguous."""
        if self.attention == "eager":
            return self.record_eager_attention(tape, work, q, k, v)
        if tape.device == "cpu":
            has_fused_kernel = not self.attention_dropout
        else:
            # The GPU's fp32 kernel does not support grouped heads.
            is_half = q.width == HALF_BYTES or tape.autocast is not None
            has_fused_kernel = is_half or self.kv_heads == self.heads
        if has_fused_kernel:
            return tape.flash_attention(q, k, v, work.num_tokens * self.heads)
        return self._math_attention(tape, work, q, k, v)

    def _math_attention(
        self, tape: AutogradTape, work: Workload, q: TapeTensor, k: TapeTensor, v: TapeTensor
    ) -> TapeTensor:
        """Record scaled_dot_product_attention without a fused kernel: in fp32, scores kept.

        torch 2.13 (aten/src/ATen/native/transformers/attention.cpp) holds the fp32 copies until the
        end, and returns the scores, in the queries' dtype; the module's forward holds its inputs.
        """
        inputs = (q, k, v)
        width = HALF_BYTES if tape.autocast else q.width
        q, k, v = copies = tuple(tape.cast(tape.cast(t, width), FULL_BYTES) for t in inputs)
        if k.elements != q.elements:
            k, v = (tape.copy(t, q.elements // t.elements) for t in (k, v))
        scaled = tape.unary(q)
        q, k = tape.copy(scaled), tape.copy(tape.unary(k))
        raw = tape.unary(tape.fp32_matmul(q, k, self.num_attention_scores(work)))
        dropped = tape.dropout(tape.softmax(raw), self.attention_dropout)
        # Heads of one sample, or samples of one head, are a view that a product accepts directly.
        v = v if 1 in {work.batch_size, self.heads} else tape.copy(v)
        out = tape.fp32_matmul(dropped, v, copies[0].elements)
        returned = tape.cast(dropped, width)
        out = tape.cast(out, width)
        tape.keep_alive(scaled)
        out = tape.copy(out)
        tape.keep_alive(returned, *copies, *inputs)
        return out

    # -- implementation --------------------------------------------------------------------

    def _base_weights(self, weights: Iterable[WeightShape]) -> list[WeightShape]:
        """Parameters other than adapters, frozen or not."""
        return [weight._replace(trainable=self.trains_base) for weight in weights]

    def _new_tape(self, work: Workload) -> AutogradTape:
        half = work.compute in {"half", "half_autocast"}
        autocast = work.kind if work.compute in {"autocast", "half_autocast"} else None
        element_bytes = HALF_BYTES if half else self.element
        return AutogradTape(element_bytes=element_bytes, autocast=autocast, device=work.kind)

    def _compute_activations(self, work: Workload) -> MicroBatchActivations:
        """Compute the activations of one micro-batch, whose batch size may be symbolic."""
        tape = self._new_tape(work)
        stream = self.record_embedding(tape, work)
        kept = INDEX_BYTES * work.num_tokens + self.shared_bytes(tape, work)
        # Gradients of position embeddings exist already when the embedding's are made.
        positions = sum(weight.num_elements for weight in self.position_weights())
        beside = positions * tape.element_bytes if self.trains_base else 0
        embedding = LayerActivations(
            saved_bytes=tape.saved_bytes() + kept,
            forward_peak_bytes=tape.forward_peak_bytes() + kept,
            backward_moments=worst_moments(
                BackwardMoment(moment.held_bytes + beside, moment.num_grads)
                for moment in tape.backward_moments(stream.size_bytes)
            ),
        )
        nothing = LayerActivations(
            saved_bytes=0, forward_peak_bytes=0, backward_moments=(BackwardMoment(0, 0),)
        )
        root = [nothing] if positions else []
        block = self._block_activations(work, TapeTensor(stream.elements, stream.width))
        tail, loss_bytes, output_bytes = self._tail_activations(
            work, TapeTensor(stream.elements, stream.width)
        )
        return MicroBatchActivations(
            layers=(*root, embedding, block, tail), loss_bytes=loss_bytes, output_bytes=output_bytes
        )

    def _block_activations(self, work: Workload, x: TapeTensor) -> LayerActivations:
        tape = self._new_tape(work)
        out = self.record_block(tape, work, x)
        if not work.activation_checkpointing:
            return LayerActivations(
                saved_bytes=tape.saved_bytes(),
                forward_peak_bytes=tape.forward_peak_bytes(first=x),
                backward_moments=tape.backward_moments(out.size_bytes),
                input_grad_bytes=x.size_bytes,
            )
        # Only the input is saved; the backward begins with another forward.
        recomputed = BackwardMoment(tape.forward_peak_bytes(first=x) + out.size_bytes, 0)
        held = 0 if tape.is_saved(x) else x.size_bytes
        backward = tape.backward_moments(out.size_bytes, held=held)
        return LayerActivations(
            saved_bytes=x.size_bytes,
            forward_peak_bytes=tape.inference_peak_bytes(first=x),
            backward_moments=worst_moments([recomputed, *backward]),
            input_grad_bytes=x.size_bytes,
        )

    def _tail_activations(self, work: Workload, x: TapeTensor) -> tuple[LayerActivations, int, int]:
        """Final norm, head and the loss's forward; bytes of the loss, and of the output."""
        tape = self._new_tape(work)
        normed = self.record_norm(tape, work, x)
        logits = tape.linear(
            normed, work.num_tokens, self.vocab, narrow=self.hidden, trainable=self.trains_base
        )
        saved = tape.saved_bytes() + INDEX_BYTES * work.num_tokens
        # The loss casts the logits to fp32 (transformers' `loss_utils`) and takes a log-softmax.
        copies = (1 if logits.width == FULL_BYTES else 2) * FULL_BYTES * logits.elements
        tail = LayerActivations(
            saved_bytes=saved,
            forward_peak_bytes=saved + logits.size_bytes + copies,
            backward_moments=tape.backward_moments(logits.size_bytes),
            input_grad_bytes=x.size_bytes,
        )
        # Log-softmax's output and two gradients, in addition to the logits that the model returns.
        loss_bytes = 3 * FULL_BYTES * logits.elements
        output_bytes = FULL_BYTES * logits.elements if tape.autocast else logits.size_bytes
        return tail, loss_bytes, output_bytes


def _layer_group(
    name: str, role: LayerRole, weights: list[WeightShape], count: int = 1
) -> LayerGroup:
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


def _at(run: MicroBatchActivations, batch_size: int) -> MicroBatchActivations:
    """Substitute a batch size for the symbolic one."""

    def at(size: int) -> int:
        each, fixed = divmod(size, SYMBOLIC_BATCH_SIZE)
        return each * batch_size + fixed

    layers = tuple(
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
        layers=layers, loss_bytes=at(run.loss_bytes), output_bytes=at(run.output_bytes)
    )


# -- families --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Llama(DecoderSpec):
    """Llama, Mistral, Qwen2, Qwen3: RMSNorm, rotary positions, grouped heads, gated MLP."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """True if queries and keys are normalized per head."""
    window: int | None = None
    """Sliding window in tokens."""

    def position_weights(self) -> list[WeightShape]:
        """Return no weights: positions are rotary."""
        return []

    def linear_shapes(self) -> list[tuple[int, int]]:
        """Return the shapes of q, k, v, o, gate, up, down."""
        h, ff = self.hidden, self.ff
        q_features, kv_features = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = [(q_features, h), (kv_features, h), (kv_features, h), (h, q_features)]
        return [*attention, (ff, h), (ff, h), (h, ff)]

    def block_weights(self) -> list[WeightShape]:
        """Return linear layers, their biases, and norms."""
        biased = [self.qkv_bias] * 3 + [self.out_bias] + [self.mlp_bias] * 3
        shapes = self.linear_shapes()
        weights = [WeightShape(out, out * into) for out, into in shapes]
        biases = [WeightShape(o, o) for (o, _), bias in zip(shapes, biased, strict=True) if bias]
        norms = [WeightShape(self.hidden, self.hidden)] * 2
        head_norms = [WeightShape(self.head_dim, self.head_dim)] * (2 if self.qk_norm else 0)
        return weights + biases + norms + head_norms

    def norm_weights(self) -> list[WeightShape]:
        """Return the scale."""
        return [WeightShape(self.hidden, self.hidden)]

    def shared_bytes(self, tape: AutogradTape, work: Workload) -> int:
        """Return the bytes of cosines and sines, and of the mask if one is kept."""
        rotary = 2 * work.seq_len * self.head_dim * tape.element_bytes
        return rotary + self.attention_mask_bytes(tape, work, made=self._needs_mask(work))

    def record_embedding(self, tape: AutogradTape, work: Workload) -> TapeTensor:
        """Record the embedding lookup."""
        return self.embed_tokens(tape, work)

    def record_norm(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """Record an RMSNorm."""
        return tape.rms_norm(x, work.num_tokens, self.hidden, trainable=self.trains_base)

    def record_block(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """Record LlamaDecoderLayer.forward."""
        q_shape, k_shape, v_shape, o_shape, *mlp = self.linear_shapes()
        normed = self.record_norm(tape, work, x)
        q, k, v = (
            self.record_linear(tape, work, normed, shape, bias=self.qkv_bias)
            for shape in (q_shape, k_shape, v_shape)
        )
        if self.qk_norm:
            q, k = (self._record_head_norm(tape, work, t) for t in (q, k))
        q, k = (_record_rotation(tape, tape.view(t)) for t in (q, k))
        if self._needs_mask(work) and self.attention == "sdpa":
            k, v = (tape.copy(t, self.heads // self.kv_heads) for t in (k, v))
            tape.save_for_backward(TapeTensor(work.seq_len**2, q.width))
        attended = self.record_attention(tape, work, q, k, v)
        attended = self.record_linear(tape, work, attended, o_shape, bias=self.out_bias)
        x = tape.add(x, attended)
        return tape.add(x, self._record_mlp(tape, work, self.record_norm(tape, work, x), mlp))

    def record_eager_attention(
        self, tape: AutogradTape, work: Workload, q: TapeTensor, k: TapeTensor, v: TapeTensor
    ) -> TapeTensor:
        """Record attention with scores in the compute dtype and softmax in fp32."""
        if self.heads != self.kv_heads:
            k, v = (tape.copy(t, self.heads // self.kv_heads) for t in (k, v))
        raw = tape.unary(tape.matmul(q, k, self.num_attention_scores(work)))
        probabilities = tape.softmax(tape.cast(tape.add_mask(raw), FULL_BYTES))
        probabilities = tape.dropout(tape.cast(probabilities, q.width), self.attention_dropout)
        return tape.copy(tape.matmul(probabilities, v, q.elements))

    def _needs_mask(self, work: Workload) -> bool:
        """True if samples are longer than the sliding window, which needs an explicit mask."""
        return self.window is not None and work.seq_len > self.window

    def _record_head_norm(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        heads = x.elements // self.head_dim // work.num_tokens
        return tape.rms_norm(x, work.num_tokens * heads, self.head_dim, trainable=self.trains_base)

    def _record_mlp(
        self, tape: AutogradTape, work: Workload, x: TapeTensor, shapes: list[tuple[int, int]]
    ) -> TapeTensor:
        gate, up, down = shapes
        gated = self.record_linear(tape, work, x, gate, bias=self.mlp_bias)
        opened = tape.unary(gated, keeps="input")
        raised = self.record_linear(tape, work, x, up, bias=self.mlp_bias)
        product = tape.multiply(opened, raised)
        return self.record_linear(tape, work, product, down, bias=self.mlp_bias)


def _record_rotation(tape: AutogradTape, x: TapeTensor) -> TapeTensor:
    """Record `x * cos + rotate_half(x) * sin`; cosines have the residual stream's dtype."""
    straight = tape.unary(x, width=tape.element_bytes)
    crossed = tape.unary(tape.unary(x), width=tape.element_bytes)
    return tape.add(straight, crossed)


@dataclass(frozen=True, kw_only=True)
class Gpt2(DecoderSpec):
    """GPT-2: layer norms, learned positions, one projection for q, k and v, dropout."""

    positions: int = 1024
    embedding_dropout: float = 0.1
    residual_dropout: float = 0.1

    def position_weights(self) -> list[WeightShape]:
        """Return the position embedding."""
        return [WeightShape(self.positions, self.positions * self.hidden)]

    def linear_shapes(self) -> list[tuple[int, int]]:
        """Return the shapes of qkv, o, up, down."""
        h, ff = self.hidden, self.ff
        return [(3 * h, h), (h, h), (ff, h), (h, ff)]

    def block_weights(self) -> list[WeightShape]:
        """Return linear layers, their biases, and norms."""
        # The weight of Conv1D is transposed: rows are input features.
        weights = [WeightShape(into, out * into) for out, into in self.linear_shapes()]
        biases = [WeightShape(out, out) for out, _ in self.linear_shapes()]
        return weights + biases + [WeightShape(self.hidden, self.hidden)] * 4

    def norm_weights(self) -> list[WeightShape]:
        """Return scale and shift."""
        return [WeightShape(self.hidden, self.hidden)] * 2

    def shared_bytes(self, tape: AutogradTape, work: Workload) -> int:
        """Return the bytes of position numbers, and of the mask if one is kept."""
        return 8 * work.seq_len + self.attention_mask_bytes(tape, work, made=False)

    def record_embedding(self, tape: AutogradTape, work: Workload) -> TapeTensor:
        """Record token plus position embedding, with dropout."""
        tokens = self.embed_tokens(tape, work)
        positions = tape.embedding(work.seq_len, self.positions, self.hidden, counted=False)
        return tape.dropout(tape.add(tokens, positions), self.embedding_dropout)

    def record_norm(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """Record a LayerNorm."""
        return tape.layer_norm(x, work.num_tokens, self.hidden, trainable=self.trains_base)

    def record_block(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """Record GPT2Block.forward."""
        qkv, out, up, down = self.linear_shapes()
        joined = self.record_linear(tape, work, self.record_norm(tape, work, x), qkv, bias=True)
        q, k, v = (tape.view(part) for part in tape.split(joined, 3))
        attended = self.record_attention(tape, work, q, k, v)
        attended = self.record_linear(tape, work, attended, out, bias=True)
        x = tape.add(tape.dropout(attended, self.residual_dropout), x)
        raised = self.record_linear(tape, work, self.record_norm(tape, work, x), up, bias=True)
        active = self.record_activation(tape, raised)
        lowered = self.record_linear(tape, work, active, down, bias=True)
        return tape.add(x, tape.dropout(lowered, self.residual_dropout))

    def record_eager_attention(
        self, tape: AutogradTape, work: Workload, q: TapeTensor, k: TapeTensor, v: TapeTensor
    ) -> TapeTensor:
        """Record attention with softmax in the scores' dtype, or in fp32 under a GPU's autocast."""
        raw = tape.unary(tape.matmul(q, k, self.num_attention_scores(work)))
        probabilities = tape.cast(tape.softmax(tape.add_mask(raw)), v.width)
        dropped = tape.dropout(probabilities, self.attention_dropout)
        return tape.copy(tape.matmul(dropped, v, q.elements))
