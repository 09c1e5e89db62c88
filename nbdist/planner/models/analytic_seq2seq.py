"""T5-like encoder-decoders, operation by operation as transformers 5.23 runs them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from nbdist.planner.model_spec import LayerGroup, MicroBatchActivations
from nbdist.planner.models import transformer
from nbdist.planner.models.autograd_tape import FULL_BYTES, HALF_BYTES, AutogradTape, TapeTensor
from nbdist.planner.models.config import (
    MAX_LAYERS,
    attention_implementation,
    param_dtype_bytes,
    read_dropout_rate,
    read_size,
)
from nbdist.planner.models.transformer import (
    INDEX_BYTES,
    NO_ACTIVATIONS,
    AttentionBias,
    TransformerSpec,
    WeightShape,
    build_layer_group,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.planner.model_spec import LayerActivations, ModelSpec, Workload


@dataclass(frozen=True, kw_only=True)
class T5(TransformerSpec):
    """T5: two stacks, RMSNorm, a learned bias of relative positions, dropout everywhere.

    A workload's sequence length is that of the source and that of the target. `layers` are the
    encoder's. transformers 5.23 always ties encoder, decoder and head to one table, which is
    the root's, since torch 2.13's FSDP2 refuses a parameter that two groups see;
    `tie_word_embeddings` says only whether the decoder's output is scaled.

    The bias needs a gradient, so that a CPU's attention takes the kernel that keeps the scores. A
    GPU is taken to do the same, as in a trace; its memory-efficient kernel, where torch chooses
    it, keeps less.
    """

    decoder_layers: int
    gated: bool = False
    """The MLP has a gate."""
    buckets: int = 32
    """Rows of the table of relative positions, which the first block of a stack has."""
    scaled: bool = True
    """The decoder's output is scaled before the head."""

    causal: ClassVar[bool] = False

    # -- parameters ------------------------------------------------------------------------

    @functools.cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Root, embedding and tail (empty: the root has theirs), both stacks in between."""
        return (
            build_layer_group("root", "root", self.base_weights(self._root())),
            build_layer_group("embedding", "embedding", []),
            *self._stack("encoder", self.layers, self.linear_shapes()),
            *self._stack("decoder", self.decoder_layers, self._decoder_linears()),
            build_layer_group("tail", "tail", []),
        )

    def linear_shapes(self) -> list[tuple[int, int]]:
        """Linear layers of an encoder block: q, k, v, o, one or two up, down."""
        return self._attention_linears() + self._mlp_linears()

    def all_linear_shapes(self) -> list[tuple[int, int]]:
        """Linear layers of both stacks."""
        return self.linear_shapes() * self.layers + self._decoder_linears() * self.decoder_layers

    def num_multiplications(self, work: Workload) -> tuple[int, int]:
        """Every kernel computes all scores, masked ones too."""
        attended = 2 * (self.layers + 2 * self.decoder_layers) * self.num_q_features * work.seq_len
        return work.num_tokens * self.vocab * self.hidden, work.num_tokens * attended

    def _attention_linears(self) -> list[tuple[int, int]]:
        return [(self.num_q_features, self.hidden)] * 3 + [(self.hidden, self.num_q_features)]

    def _mlp_linears(self) -> list[tuple[int, int]]:
        return [(self.ff, self.hidden)] * (1 + self.gated) + [(self.hidden, self.ff)]

    def _decoder_linears(self) -> list[tuple[int, int]]:
        return self._attention_linears() * 2 + self._mlp_linears()

    def _root(self) -> list[WeightShape]:
        """The table and the norms that end the stacks."""
        return [
            self.embedding_weight,
            WeightShape(self.hidden, self.hidden),
            WeightShape(self.hidden, self.hidden),
        ]

    def _stack(self, name: str, layers: int, linears: list[tuple[int, int]]) -> list[LayerGroup]:
        """The first block, which has the table of relative positions, and the others."""
        norms = [WeightShape(self.hidden, self.hidden)] * (2 if name == "encoder" else 3)
        weights = [*(WeightShape(out, out * into) for out, into in linears), *norms]
        first = [*weights, WeightShape(self.buckets, self.buckets * self.heads)]
        found = [
            build_layer_group(f"first {name} block", "block", self.add_adapters(first, linears))
        ]
        if layers > 1:
            others = self.add_adapters(weights, linears)
            found.append(build_layer_group(f"{name} block", "block", others, layers - 1))
        return found

    # -- a micro-batch ---------------------------------------------------------------------

    def compute_activations(self, work: Workload) -> MicroBatchActivations:
        """Bytes of one micro-batch."""
        embedding, stream = self._embedding_pass(work)
        encoder = self._encoder_passes(work, stream)
        decoder = self._decoder_passes(work, stream)
        tail = self._tail_pass(work, stream)
        passes = (NO_ACTIVATIONS, embedding, *encoder, *decoder, tail.head)
        # The model returns the encoder's output as well.
        return MicroBatchActivations(
            layers=passes,
            loss_bytes=tail.loss_bytes,
            output_bytes=tail.output_bytes + stream.size_bytes,
        )

    def _embedding_pass(
        self, work: Workload, waiting: int = 0
    ) -> tuple[LayerActivations, TapeTensor]:
        """Tokens to a residual stream; returns one tensor of it as well.

        Args:
            work: the micro-batch.
            waiting: bytes of gradients that others wait for meanwhile.
        """
        tape, trained = self.new_tape(work), self.has_trainable_base
        rows = tape.embedding(work.num_tokens, self.vocab, self.hidden, counted=False, tied=trained)
        out = tape.dropout(rows, self.attention_dropout)
        beside, kept = self._after_decoder(work) + waiting, INDEX_BYTES * work.num_tokens
        return transformer.embedding_activations(tape, out, kept=kept, beside=beside), out

    def _encoder_passes(self, work: Workload, stream: TapeTensor) -> list[LayerActivations]:
        """Blocks whose bias gets its gradient from all of them."""
        tape, x = self.new_tape(work), TapeTensor(stream.elements, stream.width)
        out = self._write_block(tape, work, x, None)
        again, bias = work.activation_checkpointing, self._bias(work)
        beside = self._after_decoder(work) + bias
        value = transformer.block_activations(tape, x, out, checkpointed=again, beside=beside)
        return self._stack_passes(work, value, self.layers, biases=bias, kept=0)

    def _decoder_passes(self, work: Workload, stream: TapeTensor) -> list[LayerActivations]:
        """Blocks that read the encoder's output; its end comes before the first of them."""
        source = TapeTensor(stream.elements, stream.width, elsewhere=True)
        tape, x = self.new_tape(work), TapeTensor(stream.elements, stream.width)
        out = self._write_block(tape, work, x, source)
        again, bias = work.activation_checkpointing, self._bias(work)
        beside = self._in_root(work) + bias + self._cross_gradient(work) + source.size_bytes
        value = transformer.block_activations(tape, x, out, checkpointed=again, beside=beside)
        value = replace(value, forward_peak_bytes=value.forward_peak_bytes + source.size_bytes)
        zeros = self._zeros(work)
        kept = zeros if self._fused_cross(tape, work) else 0
        first, *others = self._stack_passes(
            work, value, self.decoder_layers, biases=bias + zeros, kept=kept
        )
        between = transformer.join_activations(*self._between_passes(work, source))
        return [transformer.join_activations(between, first), *others]

    def _stack_passes(
        self, work: Workload, layer: LayerActivations, layers: int, *, biases: int, kept: int
    ) -> list[LayerActivations]:
        """The passes of a stack's first block and of the others.

        Args:
            work: the micro-batch.
            layer: pass of a block by itself.
            layers: blocks of the stack.
            biases: bytes of the biases that live until the stack's forward is over; recomputed
                blocks hold them as their arguments, and the first one creates them again.
            kept: bytes of them that are kept for the backward otherwise.
        """
        buckets = INDEX_BYTES * work.seq_len**2
        again = work.activation_checkpointing
        other = replace(
            layer, forward_peak_bytes=layer.forward_peak_bytes + (0 if again else biases - kept)
        )
        saved = layer.saved_bytes + (biases if again else buckets + kept)
        backward = transformer.add_held_bytes(
            layer.backward_moments, biases + buckets if again else 0
        )
        first = replace(
            layer,
            saved_bytes=saved,
            forward_peak_bytes=layer.forward_peak_bytes + biases + buckets,
            backward_moments=backward,
        )
        return [first, other] if layers > 1 else [first]

    def _between_passes(
        self, work: Workload, source: TapeTensor
    ) -> tuple[LayerActivations, LayerActivations]:
        """The encoder's end, and the decoder's embedding."""
        tape, x = self.new_tape(work), TapeTensor(source.elements, source.width)
        out = self._write_end(tape, work, x)
        beside = self._after_decoder(work)
        end = transformer.block_activations(tape, x, out, checkpointed=False, beside=beside)
        return end, self._embedding_pass(work, waiting=source.size_bytes)[0]

    def _tail_pass(self, work: Workload, stream: TapeTensor) -> transformer.HeadActivations:
        """The decoder's end, head and loss."""
        tape, x = self.new_tape(work), TapeTensor(stream.elements, stream.width)
        out = self._write_end(tape, work, x)
        out = tape.unary(out) if self.scaled else out
        logits = tape.linear(
            out, work.num_tokens, self.vocab, narrow=self.hidden, trainable=self.has_trainable_base
        )
        return transformer.head_activations(
            tape, x, logits, labels=INDEX_BYTES * work.num_tokens, in_fp32=False
        )

    def _in_root(self, work: Workload) -> int:
        """Bytes of gradients that wait in the root."""
        elements = (
            sum(value.num_elements for value in self._root()) if self.has_trainable_base else 0
        )
        return elements * self.new_tape(work).element_bytes

    def _after_decoder(self, work: Workload) -> int:
        """The same, and the zeros and their gradient, which live until the backward is over."""
        return self._in_root(work) + 2 * self._cross_gradient(work)

    def _bias(self, work: Workload) -> int:
        """Bytes of a bias, the same for all samples, and of its gradient."""
        return self.heads * work.seq_len**2 * self.new_tape(work).element_bytes

    def _zeros(self, work: Workload) -> int:
        """Bytes of what is added to the scores where the decoder reads the source."""
        tape = self.new_tape(work)
        return self.heads * work.seq_len**2 * (HALF_BYTES if tape.autocast else tape.element_bytes)

    def _cross_gradient(self, work: Workload) -> int:
        """Bytes of its gradient, which it has where transformers recomputes the blocks."""
        return self._zeros(work) if work.activation_checkpointing else 0

    def _fused_cross(self, tape: AutogradTape, work: Workload) -> bool:
        """Return whether cross-attention uses a fused kernel, which keeps the zeros."""
        if self.attention == "eager" or self._cross_gradient(work):
            return False
        return tape.device != "cpu" or not self.attention_dropout

    # -- operations ------------------------------------------------------------------------

    def _write_block(
        self, tape: AutogradTape, work: Workload, x: TapeTensor, source: TapeTensor | None
    ) -> TapeTensor:
        """T5Block.forward."""
        normed = self._norm(tape, work, x)
        x = self._added(tape, self._attention(tape, work, normed, normed, self._bias(work)), x)
        if source:
            if self.attention == "sdpa":
                tape.save_for_backward(
                    TapeTensor(work.seq_len**2, 1)
                )  # which scores of the target are masked
            normed, bias = self._norm(tape, work, x), self._cross_gradient(work)
            x = self._added(tape, self._attention(tape, work, normed, source, bias), x)
        return self._added(tape, self._mlp(tape, work, self._norm(tape, work, x)), x)

    def _added(self, tape: AutogradTape, x: TapeTensor, stream: TapeTensor) -> TapeTensor:
        out = tape.add(stream, tape.dropout(x, self.attention_dropout))
        tape.keep_alive(x)
        return out

    def _attention(
        self, tape: AutogradTape, work: Workload, x: TapeTensor, source: TapeTensor, bias: int
    ) -> TapeTensor:
        """Queries of x, keys and values of a source."""
        *shapes, out = self._attention_linears()
        q, k, v = (
            tape.view(self.record_linear(tape, work, given, shape))
            for given, shape in zip((x, source, source), shapes, strict=True)
        )
        if self.attention == "eager":
            wide = tape.element_bytes if source is x else q.width
            attended = self._eager(tape, work, (q, k, v), bias, wide)
        elif source is not x and self._fused_cross(tape, work):
            attended = tape.flash_attention(q, k, v, work.num_tokens * self.heads)
        else:
            attended = self.record_math_attention(tape, work, (q, k, v), AttentionBias(bias))
        return self.record_linear(tape, work, attended, out)

    def _eager(
        self,
        tape: AutogradTape,
        work: Workload,
        qkv: tuple[TapeTensor, TapeTensor, TapeTensor],
        bias: int,
        wide: int,
    ) -> TapeTensor:
        """Softmax in the type of the bias, or in fp32 under a GPU's autocast."""
        q, k, v = qkv
        raw = tape.unary(tape.matmul(q, k, self.num_attention_scores(work)))
        raw = tape.unary(tape.add_shared_bias(raw, bias), width=wide)
        dropped = tape.dropout(tape.softmax(raw), self.attention_dropout)
        return tape.copy(tape.matmul(dropped, v, q.elements))

    def _mlp(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """T5DenseActDense or T5DenseGatedActDense.forward."""
        *ups, down = self._mlp_linears()
        raised = self.record_activation(tape, self.record_linear(tape, work, x, ups[0]))
        if self.gated:
            raised = tape.multiply(raised, self.record_linear(tape, work, x, ups[1]))
        # Cast to the type of the weights, which keep fp32 under autocast.
        lowered = tape.cast(tape.dropout(raised, self.attention_dropout), tape.element_bytes)
        return self.record_linear(tape, work, lowered, down)

    def _write_end(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """The norm and the dropout at the end of a stack."""
        return tape.dropout(self._norm(tape, work, x), self.attention_dropout)

    def _norm(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """T5LayerNorm.forward: x itself is scaled, in fp32."""
        squares = tape.mean(tape.power(tape.cast(x, FULL_BYTES)), work.num_tokens)
        inverse = tape.unary(tape.unary(squares), keeps="output")
        normed = tape.multiply(x, inverse)
        if tape.element_bytes == HALF_BYTES:
            normed = tape.cast(normed, HALF_BYTES)
        return tape.scale_by_weight(normed, self.hidden, trainable=self.has_trainable_base)


def _t5(config: Mapping[str, Any]) -> T5:
    heads, layers = read_size(config, "num_heads"), read_size(config, "num_layers", most=MAX_LAYERS)
    gate, _, activation = str(config.get("feed_forward_proj", "relu")).rpartition("-")
    gated = gate == "gated"
    return T5(
        model_type="t5",
        hidden=read_size(config, "d_model"),
        ff=read_size(config, "d_ff"),
        layers=layers,
        decoder_layers=read_size(config, "num_decoder_layers", default=layers, most=MAX_LAYERS),
        heads=heads,
        kv_heads=heads,
        head_dim=read_size(config, "d_kv"),
        vocab=read_size(config, "vocab_size"),
        activation="gelu_new" if gated and activation == "gelu" else activation,
        attention=attention_implementation(config),
        attention_dropout=read_dropout_rate(config, "dropout_rate", 0.1),
        element=param_dtype_bytes(config),
        gated=gated,
        buckets=read_size(config, "relative_attention_num_buckets", default=32),
        scaled=config.get(
            "scale_decoder_outputs", config.get("tie_word_embeddings", True) is not False
        ),
    )


SPEC_BUILDERS: Mapping[str, Callable[[Mapping[str, Any]], ModelSpec]] = {"t5": _t5}
"""model_type -> reader of its config."""
SUPPORTED_MODEL_CLASSES: Mapping[str, frozenset[str]] = {
    # The second is what the first was called when T5's configs were published.
    "t5": frozenset({"T5ForConditionalGeneration", "T5WithLMHeadModel"}),
}
"""model_type -> classes of transformers that are written down here."""
SPEC_CLASSES: Mapping[str, Any] = {"T5": T5}
