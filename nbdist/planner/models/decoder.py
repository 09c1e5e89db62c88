"""Llama-like and GPT-2-like decoders as model specs, without torch.

A family gives the parameters of a block and records the operations of its forward, as transformers
5.23 runs them, on an `AutogradTape`; `DecoderSpec` derives parameter groups and bytes from both.
"""

from __future__ import annotations

import contextlib
import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from nbdist.errors import PlanError
from nbdist.number_formatting import format_count
from nbdist.planner.model_spec import (
    AUTOCAST_MODES,
    HALF_MODES,
    BackwardPeakCandidate,
    LayerActivations,
    LayerGroup,
    MicroBatchActivations,
    WeightShape,
    num_params,
)
from nbdist.planner.models import fused_loss
from nbdist.planner.models.autograd_tape import (
    FULL_BYTES,
    HALF_BYTES,
    NF4_BLOCK,
    RNG_STATE_BYTES,
    SYMBOLIC_BATCH_SIZE,
    AutogradTape,
    QuantizationMethod,
    TapeTensor,
    worst_moments,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.planner.model_spec import Workload

INDEX_BYTES = 8
"""Bytes of a token id, and of a label."""

_KEEPS_INPUT = frozenset({"silu", "swish", "gelu", "gelu_pytorch_tanh", "quick_gelu"})
"""Activation functions that are a single operation which saves its input."""
ACTIVATIONS = _KEEPS_INPUT | {"gelu_new", "relu", "sigmoid", "tanh"}
"""All activation functions with a closed formula."""


class LinearShape(NamedTuple):
    """A linear layer of a block."""

    name: str
    """Its name in the block, as in transformers: "self_attn.q_proj"."""
    out: int
    into: int


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
    residual_dropout: float = 0.0
    """Rate of the dropout at the end of a block."""
    element: int = FULL_BYTES
    """Bytes of one parameter as loaded."""
    lora_rank: int = 0
    """Rank of PEFT's adapters on linear layers of the blocks; if set, the rest is frozen."""
    lora_targets: tuple[str, ...] = ()
    """Names of the linear layers with an adapter."""
    quantization: QuantizationMethod | None = None
    shards_quantized: bool = False
    """bitsandbytes' storage of the linear layers of the blocks; head and embedding stay as they
    are."""
    loss: fused_loss.Loss = "logits"
    """How the loss is computed from the last hidden states."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Sentences for the user."""

    depth: ClassVar[Literal["closed form"]] = "closed form"
    softmax_in_fp32: ClassVar[bool]
    """True if attention without a fused kernel casts its scores to fp32; otherwise only a GPU's
    autocast does."""
    default_targets: ClassVar[tuple[str, ...]]
    """PEFT 0.21's `target_modules` for the model's type."""

    # -- defined by a family ---------------------------------------------------------------

    @abstractmethod
    def linear_shapes(self) -> list[LinearShape]:
        """Return the linear layers of one block."""

    @abstractmethod
    def block_weights(self) -> list[WeightShape]:
        """Return the parameters of one block in the module's order."""

    @abstractmethod
    def norm_weights(self) -> list[WeightShape]:
        """Return the parameters of the final norm."""

    @abstractmethod
    def shared_bytes(self, tape: AutogradTape, work: Workload) -> int:
        """Return the bytes that all blocks share, alive as long as any block."""

    @abstractmethod
    def record_block(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """Record one block."""

    @abstractmethod
    def record_norm(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """Record a norm of the residual stream."""

    # -- ModelSpec -------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Model type and size."""
        return f"{self.model_type}, {format_count(num_params(self))} parameters"

    @functools.cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Position embeddings (if any), embedding, blocks, tail."""
        head = WeightShape(self.vocab, self.vocab * self.hidden)
        # A tied weight counts in the tail.
        embedding = () if self.tied else self._base_weights([head])
        tail = self._base_weights([*self.norm_weights(), head])
        block = self._block_group()
        blocks = [block]
        if not self.trains_base:
            blocks = [replace(block, name="first block", count=1)]
            blocks += [replace(block, count=self.layers - 1)] if self.layers > 1 else []
        groups = (
            LayerGroup(name="embedding", role="embedding", tensors=embedding),
            *blocks,
            LayerGroup(name="tail", role="tail", tensors=tail),
        )
        positions = self._base_weights(self.position_weights())
        root = LayerGroup(name="positions", role="root", tensors=positions)
        return (root, *groups) if positions else groups

    def _block_group(self) -> LayerGroup:
        """All blocks, with adapters after the weights that they adapt."""
        shapes = self.linear_shapes()
        layers = iter(shapes)
        kept: list[WeightShape] = []
        for weight in self._base_weights(self.block_weights()):
            shape = None if weight.is_vector else next(layers)
            kept += [] if shape and self.quantization else [weight]
            if shape and shape.name in self.lora_targets:
                kept.append(WeightShape(self.lora_rank, self.lora_rank * shape.into))
                kept.append(WeightShape(shape.out, shape.out * self.lora_rank))
        group = LayerGroup(
            name="block",
            role="block",
            count=self.layers,
            tensors=tuple(kept),
            ends_with_dropout=self.residual_dropout > 0,
        )
        if self.quantization is None:
            return group
        return replace(
            group,
            quantized=sum(shape.out * shape.into for shape in shapes),
            quantized_bytes=sum(sum(self._quantized_bytes(shape)) for shape in shapes),
            quantized_tensors=tuple(self._quantized_bytes(shape)[0] for shape in shapes),
            shards_quantized=self.shards_quantized,
        )

    def _quantized_bytes(self, shape: LinearShape) -> tuple[int, int]:
        """Bytes of a quantized weight, and of its scales, as bitsandbytes 0.50 stores them."""
        elements = shape.out * shape.into
        if self.quantization == "int8":
            return elements, FULL_BYTES * shape.out
        # Two values per byte, and with double quantization one byte per 64 of them, which share an
        # fp32 scale by 256; tables of 16 and 256 values and an offset.
        blocks = -(-elements // NF4_BLOCK)
        return -(-elements // 2), blocks + FULL_BYTES * (-(-blocks // 256) + 16 + 256 + 1)

    def micro_batch_activations(self, workload: Workload) -> MicroBatchActivations:
        """Return the activations of one micro-batch."""
        run = self._runs.get(workload)
        if run is None:
            # Views of a single sample differ from those of several (see `_math_attention`); all
            # larger batch sizes are read off one tape with a symbolic batch size.
            # A fused loss has a maximum number of tokens at once, and restored weights may be
            # larger than all activations of a small batch; neither is linear in the tokens.
            exact = self.loss != "logits" or self.quantization is not None
            if exact or workload.batch_size in {1, SYMBOLIC_BATCH_SIZE}:
                run = self._compute_activations(workload)
            else:
                symbolic = replace(workload, batch_size=SYMBOLIC_BATCH_SIZE)
                run = _at(self.micro_batch_activations(symbolic), workload.batch_size)
            self._runs[workload] = run
        return run

    @functools.cached_property
    def _runs(self) -> dict[Workload, MicroBatchActivations]:
        return {}

    def flops(self, workload: Workload) -> float:
        """Return FLOPs: forward 2, backward 2 for input and weight each, per parameter and token.

        Attention has no weights: forward 2 and backward 4 per multiplication; recomputation
        is a forward of the blocks (Narayanan et al. 2021, appendix).
        """
        recompute = 2 if workload.activation_checkpointing else 0
        weight = 2 if self.trains_base else 0
        shapes = self.linear_shapes()
        weights = self.layers * sum(shape.out * shape.into for shape in shapes)
        features = self.layers * sum(
            shape.out + shape.into for shape in shapes if shape.name in self.lora_targets
        )
        per_token = weights * (4 + weight + recompute) + self.lora_rank * features * (6 + recompute)
        head = workload.num_tokens * self.vocab * self.hidden
        # The causal mask halves both matrix products of attention.
        attention = workload.num_tokens * self.layers * self.heads * self.head_dim
        attention *= workload.seq_len
        total = workload.num_tokens * per_token + head * (4 + weight) + attention * (6 + recompute)
        return float(total)

    @property
    def trainable_element(self) -> int:
        """Bytes of one trainable parameter as loaded."""
        # PEFT 0.21 makes adapters fp32 (autocast_adapter_dtype).
        return self.element if self.trains_base else FULL_BYTES

    def with_lora(self, rank: int, target_modules: str | Iterable[str] | None = None) -> Self:
        """Return the model frozen, with adapters of a rank as PEFT's `LoraConfig` makes them.

        Args:
            rank: rank of the adapters.
            target_modules: names or ends of names of linear layers of the blocks, one regular
                expression, or "all-linear". Default: PEFT's for this type of model.

        Raises:
            PlanError: an invalid rank, or a name that is not a linear layer of the blocks.
        """
        if rank < 1:
            raise PlanError(
                f"lora must be a rank of at least 1, got {rank}. Omit it to train everything."
            )
        return replace(self, lora_rank=rank, lora_targets=self._find_targets(target_modules))

    def _find_targets(self, given: str | Iterable[str] | None) -> tuple[str, ...]:
        """Names of the linear layers that PEFT would adapt."""
        names = [shape.name for shape in self.linear_shapes()]
        if given == "all-linear":
            return tuple(names)
        with contextlib.suppress(re.error):  # then it is a name, which is not found
            if isinstance(given, str) and (found := [n for n in names if re.fullmatch(given, n)]):
                return tuple(found)
        if not isinstance(given, str | Iterable | None):
            raise PlanError(f"target_modules must be names or a regular expression, got {given!r}.")
        ends = (
            [given]
            if isinstance(given, str)
            else [*(self.default_targets if given is None else given)]
        )
        matches = {end: [n for n in names if n == end or n.endswith(f".{end}")] for end in ends}
        unknown = [end for end, found in matches.items() if not found]
        if unknown or not ends:
            short = dict.fromkeys(name.rpartition(".")[2] for name in names)
            raise PlanError(
                f"target_modules {', '.join(map(repr, unknown)) or 'are empty'}: the blocks of"
                f" {self.model_type} have the linear layers {', '.join(short)}. Use these or"
                ' "all-linear", or plan the PEFT model itself.'
            )
        return tuple(name for name in names if any(name in found for found in matches.values()))

    def to_json(self) -> dict[str, Any]:
        """Return plain fields."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return {"depth": self.depth, "family": type(self).__name__} | plain

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Restore from `to_json()`."""
        known = {each.name: values[each.name] for each in fields(cls)}
        lists = {name: tuple(values[name]) for name in ("notes", "lora_targets")}
        return cls(**known | lists)

    # -- the usual case of families --------------------------------------------------------

    def position_weights(self) -> list[WeightShape]:
        """Return the embedding of positions, which no other group uses; none if rotary."""
        return []

    def record_embedding(self, tape: AutogradTape, work: Workload) -> TapeTensor:
        """Record the operations from tokens to the first block's input: a lookup."""
        return tape.embedding(
            work.num_tokens,
            self.vocab,
            self.hidden,
            counted=self.trains_base and not self.tied,
            tied=self.trains_base and self.tied,
            trainable=self.trains_base,
        )

    # -- helpers for families --------------------------------------------------------------

    @property
    def trains_base(self) -> bool:
        """True if parameters other than adapters are trained."""
        return not (self.lora_rank or self.quantization)

    def record_linear(
        self,
        tape: AutogradTape,
        work: Workload,
        x: TapeTensor,
        shape: LinearShape,
        *,
        bias: bool = False,
    ) -> TapeTensor:
        """Record a linear layer of a block, with its adapter: W x + B A x (Hu et al. 2021)."""
        tokens, out, into = work.num_tokens, shape.out, shape.into
        if self.quantization is None:
            y = tape.linear(x, tokens, out, narrow=into, trainable=self.trains_base, bias=bias)
        else:
            # The compute dtype of nf4 is that of the model.
            own = tape.cast(x, self.element) if self.quantization == "nf4" else x
            y = tape.quantized_linear(own, tokens, out, narrow=into, method=self.quantization)
            y = tape.cast(y, x.width)
        if shape.name not in self.lora_targets:
            return y
        half = work.compute in HALF_MODES  # these engines cast the adapters too
        width = HALF_BYTES if half else self.trainable_element
        if self.quantization == "nf4":
            y = tape.unary(y)  # peft/tuners/lora/bnb.py clones it
        # peft/tuners/lora/bnb.py asks for a GPU's autocast only
        converts = not (self.quantization and tape.autocast == "cuda")
        own = tape.cast(x, width) if converts else x
        low = tape.linear(own, tokens, self.lora_rank, narrow=into, element_bytes=width)
        high = tape.linear(low, tokens, out, narrow=self.lora_rank, element_bytes=width)
        high = tape.unary(high)  # the scaling
        high = tape.cast(high, y.width) if self.quantization and converts else high
        total = tape.add(y, high)
        tape.keep_alive(x, own)  # the module's argument, and PEFT's variable for its cast
        return tape.cast(total, y.width)

    def record_activation(self, tape: AutogradTape, x: TapeTensor) -> TapeTensor:
        """Record the activation function; "gelu_new" consists of single operations."""
        if self.activation != "gelu_new":
            return tape.unary(x, keeps="input" if self.activation in _KEEPS_INPUT else "output")
        half = tape.unary(x)
        cubed = tape.unary(tape.power(x))
        activated = tape.unary(tape.unary(tape.add(x, cubed)), keeps="output")
        return tape.multiply(half, tape.unary(activated))

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
            return self._eager_attention(tape, work, q, k, v)
        if tape.device == "cpu":
            has_fused_kernel = not self.attention_dropout
        else:
            # The GPU's fp32 kernel does not support grouped heads.
            is_half = q.width == HALF_BYTES or tape.autocast is not None
            has_fused_kernel = is_half or self.kv_heads == self.heads
        if has_fused_kernel:
            return tape.flash_attention(q, k, v, work.num_tokens * self.heads)
        return self._math_attention(tape, work, q, k, v)

    def _eager_attention(
        self, tape: AutogradTape, work: Workload, q: TapeTensor, k: TapeTensor, v: TapeTensor
    ) -> TapeTensor:
        """Record attention without a fused kernel, with scores in the compute dtype."""
        if self.heads != self.kv_heads:
            k, v = (tape.copy(t, self.heads // self.kv_heads) for t in (k, v))
        raw = tape.unary(tape.matmul(q, k, self.num_attention_scores(work)))
        # plus the mask, of the embedding's dtype
        scores = tape.unary(raw, width=tape.element_bytes)
        scores = tape.cast(scores, FULL_BYTES) if self.softmax_in_fp32 else scores
        width = q.width if self.softmax_in_fp32 else v.width
        probabilities = tape.dropout(tape.cast(tape.softmax(scores), width), self.attention_dropout)
        return tape.copy(tape.matmul(probabilities, v, q.elements))

    def _math_attention(
        self, tape: AutogradTape, work: Workload, q: TapeTensor, k: TapeTensor, v: TapeTensor
    ) -> TapeTensor:
        """Record scaled_dot_product_attention without a fused kernel: in fp32, scores kept.

        torch 2.13 (aten/src/ATen/native/transformers/attention.cpp) holds the fp32 copies and the
        causal mask until the end, and returns the scores, in the queries' dtype; the module's
        forward holds its inputs.
        """
        inputs = (q, k, v)
        width = HALF_BYTES if tape.autocast else q.width
        q, k, v = copies = tuple(tape.cast(tape.cast(t, width), FULL_BYTES) for t in inputs)
        if k.elements != q.elements:
            k, v = (tape.copy(t, q.elements // t.elements) for t in (k, v))
        scaled = tape.unary(q)
        q, k = tape.copy(scaled), tape.copy(tape.unary(k))
        raw = tape.unary(tape.matmul(q, k, self.num_attention_scores(work), in_kernel=True))
        mask = TapeTensor(work.seq_len**2, FULL_BYTES)
        tape.keep_alive(mask)
        dropped = tape.dropout(tape.softmax(raw), self.attention_dropout)
        # Heads of one sample, or samples of one head, are a view that a product accepts directly.
        v = v if 1 in {work.batch_size, self.heads} else tape.copy(v)
        out = tape.matmul(dropped, v, copies[0].elements, in_kernel=True)
        returned = tape.cast(dropped, width)
        out = tape.cast(out, width)
        tape.keep_alive(scaled)
        out = tape.copy(out)
        tape.keep_alive(returned, mask, *copies, *inputs)
        return out

    # -- implementation --------------------------------------------------------------------

    def _base_weights(self, weights: Iterable[WeightShape]) -> tuple[WeightShape, ...]:
        """Parameters other than adapters, frozen or not."""
        return tuple(weight._replace(trainable=self.trains_base) for weight in weights)

    def _new_tape(self, work: Workload) -> AutogradTape:
        half = work.compute in HALF_MODES
        autocast = work.kind if work.compute in AUTOCAST_MODES else None
        element_bytes = HALF_BYTES if half else self.element
        return AutogradTape(
            element_bytes=element_bytes,
            autocast=autocast,
            device=work.kind,
            frozen_saves=work.frozen_saves,
        )

    def _compute_activations(self, work: Workload) -> MicroBatchActivations:
        """Compute the activations of one micro-batch, whose batch size may be symbolic."""
        tape = self._new_tape(work)
        stream = self.record_embedding(tape, work)
        saved_bytes = INDEX_BYTES * work.num_tokens + self.shared_bytes(tape, work)
        # Gradients of position embeddings exist already when the embedding's are made.
        positions = sum(weight.num_elements for weight in self.position_weights())
        position_bytes = positions * tape.element_bytes if self.trains_base else 0
        embedding = LayerActivations(
            saved_bytes=tape.saved_bytes() + saved_bytes,
            forward_peaks=(max(tape.forward_peaks()) + saved_bytes,),
            backward_moments=worst_moments(
                moment._replace(held_bytes=moment.held_bytes + position_bytes)
                for moment in tape.run_backward(stream.size_bytes).peaks
            ),
        )
        nothing = LayerActivations(
            saved_bytes=0, forward_peaks=(0,), backward_moments=(BackwardPeakCandidate(0, 0),)
        )
        if not self.trains_base:  # nothing before the first adapter has a backward
            embedding = replace(embedding, backward_moments=())
            nothing = replace(nothing, backward_moments=())
        root = [nothing] if positions else []
        x = TapeTensor(stream.elements, stream.width, needs_grad=True)
        # transformers 5.23 makes the embedding's output require a gradient for checkpointing.
        stream.needs_grad |= work.activation_checkpointing
        counts = [group.count for group in self.groups if group.role == "block"]
        # The first block of a frozen model gets an input without a gradient.
        inputs = [x] if self.trains_base else [stream, x]
        blocks = [
            self._block_activations(work, block_input, is_first=number == 0 and count == 1)
            for number, (block_input, count) in enumerate(zip(inputs, counts, strict=False))
        ]
        tail, loss_bytes, output_bytes = self._tail_activations(work, x)
        kept_bytes = sum(n * block.kept_bytes for n, block in zip(counts, blocks, strict=True))
        if not self.trains_base and stream.needs_grad:
            kept_bytes += 2 * stream.size_bytes  # a leaf of the graph, and its gradient
        return MicroBatchActivations(
            layers=(*root, embedding, *blocks, tail),
            loss_bytes=loss_bytes,
            output_bytes=output_bytes if work.keep_outputs else 0,
            kept_bytes=kept_bytes,
        )

    def _block_activations(
        self, work: Workload, x: TapeTensor, *, is_first: bool
    ) -> LayerActivations:
        """Compute the activations of a block with an input."""
        tape = self._new_tape(work)
        out = self.record_block(tape, work, x)
        held = 0  # embeddings of tokens and positions, which the model's forward holds in variables
        if self.position_weights():
            held = tape.element_bytes * self.hidden * (work.num_tokens + work.seq_len)
        elif not is_first and not work.activation_checkpointing:
            held = 0 if self.trains_base and tape.is_saved(x) else x.size_bytes
        kept, saved_bytes = tape.attribute_bytes(), x.size_bytes
        if not work.activation_checkpointing:
            saved_bytes = tape.saved_bytes() - kept
        elif work.kind == "cpu":
            saved_bytes += RNG_STATE_BYTES
        peaks = tape.forward_peaks(x, is_recomputed=work.activation_checkpointing)
        backward = tape.run_backward(
            out.size_bytes, checkpointed=x if work.activation_checkpointing else None
        )
        return LayerActivations(
            saved_bytes=saved_bytes,
            kept_bytes=kept,
            input_bytes=x.size_bytes + held,
            forward_peaks=tuple(peak + held for peak in peaks),
            backward_moments=backward.peaks,
            input_grad_bytes=x.size_bytes if x.needs_grad else 0,
            gradient_moments=backward.gradients,
        )

    def _tail_activations(self, work: Workload, x: TapeTensor) -> tuple[LayerActivations, int, int]:
        """Final norm, head and the loss's forward; bytes of the loss, and of the output."""
        tape = self._new_tape(work)
        normed = self.record_norm(tape, work, x)
        if self.loss != "logits":
            return self._fused_tail(tape, work, x, normed)
        logits = tape.linear(
            normed, work.num_tokens, self.vocab, narrow=self.hidden, trainable=self.trains_base
        )
        saved = tape.saved_bytes() + INDEX_BYTES * work.num_tokens
        # The loss casts the logits to fp32 (transformers' `loss_utils`) and takes a log-softmax.
        copies = (1 if logits.width == FULL_BYTES else 2) * FULL_BYTES * logits.elements
        # A frozen head does not save its input, but the model's forward holds it in a variable.
        copies += 0 if tape.is_saved(normed) else normed.size_bytes
        backward = tape.run_backward(logits.size_bytes)
        tail = LayerActivations(
            saved_bytes=saved,
            forward_peaks=(saved + logits.size_bytes + copies,),
            backward_moments=backward.peaks,
            input_grad_bytes=x.size_bytes,
            gradient_moments=backward.gradients,
        )
        # Log-softmax's output and two gradients, in addition to the logits that the model returns.
        loss_bytes = 3 * FULL_BYTES * logits.elements
        output_bytes = FULL_BYTES * logits.elements if tape.autocast else logits.size_bytes
        return tail, loss_bytes, output_bytes

    def _fused_tail(
        self, tape: AutogradTape, work: Workload, x: TapeTensor, normed: TapeTensor
    ) -> tuple[LayerActivations, int, int]:
        """The tail under a loss that computes the logits of a few tokens at a time."""
        tokens = work.num_tokens
        normed = tape.cast(normed, HALF_BYTES) if tape.autocast else normed
        sizes = fused_loss.sizes(
            self.loss, work, hidden=self.hidden, vocab=self.vocab, trainable=self.trains_base
        )
        out = fused_loss.record(
            tape, normed, sizes, weights=self.vocab * self.hidden if self.trains_base else 0
        )
        saved = tape.saved_bytes() + INDEX_BYTES * tokens
        backward = tape.run_backward(out.size_bytes)
        tail = LayerActivations(
            saved_bytes=saved,
            forward_peaks=(max(tape.forward_peaks()) + INDEX_BYTES * tokens,),
            backward_moments=backward.peaks,
            input_grad_bytes=x.size_bytes,
            gradient_moments=backward.gradients,
        )
        return tail, 0, sizes.outputs


def _at(run: MicroBatchActivations, batch_size: int) -> MicroBatchActivations:
    """Substitute a batch size for the symbolic one."""

    def at(size: int) -> int:
        each, fixed = divmod(size, SYMBOLIC_BATCH_SIZE)
        return each * batch_size + fixed

    def moments(
        symbolic: tuple[BackwardPeakCandidate, ...],
    ) -> tuple[BackwardPeakCandidate, ...]:
        return tuple(each._replace(held_bytes=at(each.held_bytes)) for each in symbolic)

    layers = tuple(
        LayerActivations(
            saved_bytes=at(part.saved_bytes),
            kept_bytes=at(part.kept_bytes),
            input_bytes=at(part.input_bytes),
            forward_peaks=tuple(map(at, part.forward_peaks)),
            backward_moments=moments(part.backward_moments),
            input_grad_bytes=at(part.input_grad_bytes),
            gradient_moments=moments(part.gradient_moments),
        )
        for part in run.layers
    )
    return MicroBatchActivations(
        layers=layers,
        loss_bytes=at(run.loss_bytes),
        output_bytes=at(run.output_bytes),
        kept_bytes=at(run.kept_bytes),
    )


# -- families --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LlamaSpec(DecoderSpec):
    """Llama, Mistral, Qwen2, Qwen3: RMSNorm, rotary positions, grouped heads, gated MLP."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """True if queries and keys are normalized per head."""
    window: int | None = None
    """Sliding window in tokens."""

    softmax_in_fp32 = True
    default_targets = ("q_proj", "v_proj")

    def linear_shapes(self) -> list[LinearShape]:
        """Return q, k, v, o, gate, up, down."""
        h, ff = self.hidden, self.ff
        q_features, kv_features = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            LinearShape("self_attn.q_proj", q_features, h),
            LinearShape("self_attn.k_proj", kv_features, h),
            LinearShape("self_attn.v_proj", kv_features, h),
            LinearShape("self_attn.o_proj", h, q_features),
            LinearShape("mlp.gate_proj", ff, h),
            LinearShape("mlp.up_proj", ff, h),
            LinearShape("mlp.down_proj", h, ff),
        ]

    def block_weights(self) -> list[WeightShape]:
        """Return attention with the norms of its heads, MLP, and norms."""
        biased = [self.qkv_bias] * 3 + [self.out_bias] + [self.mlp_bias] * 3
        weights: list[WeightShape] = []
        for number, (shape, bias) in enumerate(zip(self.linear_shapes(), biased, strict=True)):
            if number == 4 and self.qk_norm:  # noqa: PLR2004 - after q, k, v, o
                weights += [WeightShape(self.head_dim, self.head_dim)] * 2
            elements = shape.out * shape.into
            # The MLP itself is called before gate_proj, the activation before up_proj.
            weights.append(WeightShape(shape.out, elements, num_calls_before=int(number in {4, 5})))
            weights += [WeightShape(shape.out, shape.out, is_bias=True)] * bias
        return weights + [WeightShape(self.hidden, self.hidden)] * 2

    def norm_weights(self) -> list[WeightShape]:
        """Return the scale."""
        return [WeightShape(self.hidden, self.hidden)]

    def shared_bytes(self, tape: AutogradTape, work: Workload) -> int:
        """Return the bytes of cosines and sines, and of the mask if one is kept."""
        rotary = 2 * work.seq_len * self.head_dim * tape.element_bytes
        return rotary + self.attention_mask_bytes(tape, work, made=self._needs_mask(work))

    def record_norm(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """Record an RMSNorm."""
        return tape.rms_norm(x, work.num_tokens, self.hidden, trainable=self.trains_base)

    def record_block(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """Record LlamaDecoderLayer.forward."""
        q_shape, k_shape, v_shape, o_shape, gate, up, down = self.linear_shapes()
        normed = self.record_norm(tape, work, x)
        q, k, v = (
            self.record_linear(tape, work, normed, shape, bias=self.qkv_bias)
            for shape in (q_shape, k_shape, v_shape)
        )
        if self.qk_norm:
            q, k = (
                tape.rms_norm(
                    t, t.elements // self.head_dim, self.head_dim, trainable=self.trains_base
                )
                for t in (q, k)
            )
        q, k = (_record_rotation(tape, tape.view(t)) for t in (q, k))
        if self._needs_mask(work) and self.attention == "sdpa":
            k, v = (tape.copy(t, self.heads // self.kv_heads) for t in (k, v))
            tape.save_for_backward(TapeTensor(work.seq_len**2, q.width))
        attended = self.record_attention(tape, work, q, k, v)
        attended = self.record_linear(tape, work, attended, o_shape, bias=self.out_bias)
        tape.keep_alive(normed)  # transformers' block holds the argument of a submodule
        x = tape.add(x, attended)
        normed = self.record_norm(tape, work, x)
        gated = self.record_linear(tape, work, normed, gate, bias=self.mlp_bias)
        opened = tape.unary(gated, keeps="input")
        raised = self.record_linear(tape, work, normed, up, bias=self.mlp_bias)
        product = tape.multiply(opened, raised)
        out = self.record_linear(tape, work, product, down, bias=self.mlp_bias)
        tape.keep_alive(normed)
        return tape.add(x, out)

    def _needs_mask(self, work: Workload) -> bool:
        """True if samples are longer than the sliding window, which needs an explicit mask."""
        return self.window is not None and work.seq_len > self.window


def _record_rotation(tape: AutogradTape, x: TapeTensor) -> TapeTensor:
    """Record `x * cos + rotate_half(x) * sin`; cosines have the residual stream's dtype."""
    straight = tape.unary(x, width=tape.element_bytes)
    crossed = tape.unary(tape.unary(x), width=tape.element_bytes)
    return tape.add(straight, crossed)


@dataclass(frozen=True, kw_only=True)
class Gpt2Spec(DecoderSpec):
    """GPT-2: layer norms, learned positions, one projection for q, k and v, dropout."""

    positions: int = 1024
    embedding_dropout: float = 0.1
    residual_dropout: float = 0.1

    softmax_in_fp32 = False
    default_targets = ("c_attn",)

    def position_weights(self) -> list[WeightShape]:
        """Return the position embedding."""
        return [WeightShape(self.positions, self.positions * self.hidden)]

    def linear_shapes(self) -> list[LinearShape]:
        """Return qkv, o, up, down."""
        h, ff = self.hidden, self.ff
        return [
            LinearShape("attn.c_attn", 3 * h, h),
            LinearShape("attn.c_proj", h, h),
            LinearShape("mlp.c_fc", ff, h),
            LinearShape("mlp.c_proj", h, ff),
        ]

    def block_weights(self) -> list[WeightShape]:
        """Return norm and attention, norm and MLP."""
        norm = [WeightShape(self.hidden, self.hidden)] * 2
        weights: list[WeightShape] = []
        for number, shape in enumerate(self.linear_shapes()):
            weights += [] if number % 2 else norm
            # The weight of Conv1D is transposed: rows are input features. The MLP itself is called
            # before c_fc, the activation before c_proj.
            elements, calls = shape.out * shape.into, int(number > 1)
            weights.append(WeightShape(shape.into, elements, num_calls_before=calls))
            weights.append(WeightShape(shape.out, shape.out, is_bias=True))
        return weights

    def norm_weights(self) -> list[WeightShape]:
        """Return scale and shift."""
        return [WeightShape(self.hidden, self.hidden)] * 2

    def shared_bytes(self, tape: AutogradTape, work: Workload) -> int:
        """Return the bytes of position numbers, and of the mask if one is kept."""
        return 8 * work.seq_len + self.attention_mask_bytes(tape, work, made=False)

    def record_embedding(self, tape: AutogradTape, work: Workload) -> TapeTensor:
        """Record token plus position embedding, with dropout."""
        tokens = super().record_embedding(tape, work)
        positions = tape.embedding(
            work.seq_len,
            self.positions,
            self.hidden,
            counted=False,
            trainable=self.trains_base,
        )
        return tape.dropout(tape.add(tokens, positions), self.embedding_dropout)

    def record_norm(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """Record a LayerNorm."""
        return tape.layer_norm(x, work.num_tokens, self.hidden, trainable=self.trains_base)

    def record_block(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """Record GPT2Block.forward."""
        qkv, out, up, down = self.linear_shapes()
        normed = self.record_norm(tape, work, x)
        joined = self.record_linear(tape, work, normed, qkv, bias=True)
        q, k, v = (tape.view(part) for part in tape.split(joined, 3))
        attended = self.record_attention(tape, work, q, k, v)
        attended = self.record_linear(tape, work, attended, out, bias=True)
        tape.keep_alive(normed)  # transformers' block holds the argument of a submodule
        x = tape.add(tape.dropout(attended, self.residual_dropout), x)
        normed = self.record_norm(tape, work, x)
        raised = self.record_linear(tape, work, normed, up, bias=True)
        active = self.record_activation(tape, raised)
        lowered = self.record_linear(tape, work, active, down, bias=True)
        tape.keep_alive(normed)
        return tape.add(x, tape.dropout(lowered, self.residual_dropout))
