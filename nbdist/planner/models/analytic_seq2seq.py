"""T5-like encoder-decoders, operation by operation as transformers 5.23 runs them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from nbdist.planner.model_spec import Group, MicroBatch
from nbdist.planner.models import transformer
from nbdist.planner.models.autograd_tape import FULL, HALF, Tape, Tensor
from nbdist.planner.models.config import MOST_LAYERS, attention, element, rate, size
from nbdist.planner.models.transformer import INDEX, NOTHING, Bias, Family, Weight, group

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.planner.model_spec import ModelSpec, Pass, Workload


@dataclass(frozen=True, kw_only=True)
class T5(Family):
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
    def groups(self) -> tuple[Group, ...]:
        """Root, embedding and tail (empty: the root has theirs), both stacks in between."""
        return (
            group("root", "root", self.base(self._root())),
            group("embedding", "embedding", []),
            *self._stack("encoder", self.layers, self.linears()),
            *self._stack("decoder", self.decoder_layers, self._decoder_linears()),
            group("tail", "tail", []),
        )

    def linears(self) -> list[tuple[int, int]]:
        """Of an encoder block: q, k, v, o, one or two up, down."""
        return self._attention_linears() + self._mlp_linears()

    def all_linears(self) -> list[tuple[int, int]]:
        """Those of both stacks."""
        return self.linears() * self.layers + self._decoder_linears() * self.decoder_layers

    def products(self, work: Workload) -> tuple[int, int]:
        """Every kernel computes all scores, masked ones too."""
        attended = 2 * (self.layers + 2 * self.decoder_layers) * self.wide_q * work.seq_len
        return work.tokens * self.vocab * self.hidden, work.tokens * attended

    def _attention_linears(self) -> list[tuple[int, int]]:
        return [(self.wide_q, self.hidden)] * 3 + [(self.hidden, self.wide_q)]

    def _mlp_linears(self) -> list[tuple[int, int]]:
        return [(self.ff, self.hidden)] * (1 + self.gated) + [(self.hidden, self.ff)]

    def _decoder_linears(self) -> list[tuple[int, int]]:
        return self._attention_linears() * 2 + self._mlp_linears()

    def _root(self) -> list[Weight]:
        """The table and the norms that end the stacks."""
        return [self.table, Weight(self.hidden, self.hidden), Weight(self.hidden, self.hidden)]

    def _stack(self, name: str, layers: int, linears: list[tuple[int, int]]) -> list[Group]:
        """The first block, which has the table of relative positions, and the others."""
        norms = [Weight(self.hidden, self.hidden)] * (2 if name == "encoder" else 3)
        weights = [*(Weight(out, out * into) for out, into in linears), *norms]
        first = [*weights, Weight(self.buckets, self.buckets * self.heads)]
        found = [group(f"first {name} block", "block", self.adapted(first, linears))]
        if layers > 1:
            others = self.adapted(weights, linears)
            found.append(group(f"{name} block", "block", others, layers - 1))
        return found

    # -- a micro-batch ---------------------------------------------------------------------

    def passes(self, work: Workload) -> MicroBatch:
        """Bytes of one micro-batch."""
        embedding, stream = self._embedding_pass(work)
        encoder = self._encoder_passes(work, stream)
        decoder = self._decoder_passes(work, stream)
        tail = self._tail_pass(work, stream)
        passes = (NOTHING, embedding, *encoder, *decoder, tail.last)
        # The model returns the encoder's output as well.
        return MicroBatch(passes=passes, loss=tail.loss, outputs=tail.outputs + stream.bytes)

    def _embedding_pass(self, work: Workload, waiting: int = 0) -> tuple[Pass, Tensor]:
        """Tokens to a residual stream; returns one tensor of it as well.

        Args:
            work: the micro-batch.
            waiting: bytes of gradients that others wait for meanwhile.
        """
        tape, trained = self.tape(work), self.base_trainable
        rows = tape.embedding(work.tokens, self.vocab, self.hidden, counted=False, tied=trained)
        out = tape.dropout(rows, self.attention_dropout)
        beside, kept = self._after_decoder(work) + waiting, INDEX * work.tokens
        return transformer.embedding_pass(tape, out, kept=kept, beside=beside), out

    def _encoder_passes(self, work: Workload, stream: Tensor) -> list[Pass]:
        """Blocks whose bias gets its gradient from all of them."""
        tape, x = self.tape(work), Tensor(stream.elements, stream.width)
        out = self._write_block(tape, work, x, None)
        again, bias = work.activation_checkpointing, self._bias(work)
        beside = self._after_decoder(work) + bias
        one = transformer.block_pass(tape, x, out, checkpointed=again, beside=beside)
        return self._stack_passes(work, one, self.layers, biases=bias, kept=0)

    def _decoder_passes(self, work: Workload, stream: Tensor) -> list[Pass]:
        """Blocks that read the encoder's output; its end comes before the first of them."""
        source = Tensor(stream.elements, stream.width, elsewhere=True)
        tape, x = self.tape(work), Tensor(stream.elements, stream.width)
        out = self._write_block(tape, work, x, source)
        again, bias = work.activation_checkpointing, self._bias(work)
        beside = self._in_root(work) + bias + self._cross_gradient(work) + source.bytes
        one = transformer.block_pass(tape, x, out, checkpointed=again, beside=beside)
        one = replace(one, forward=one.forward + source.bytes)
        zeros = self._zeros(work)
        kept = zeros if self._fused_cross(tape, work) else 0
        first, *others = self._stack_passes(
            work, one, self.decoder_layers, biases=bias + zeros, kept=kept
        )
        between = transformer.joined(*self._between_passes(work, source))
        return [transformer.joined(between, first), *others]

    def _stack_passes(
        self, work: Workload, one: Pass, layers: int, *, biases: int, kept: int
    ) -> list[Pass]:
        """The passes of a stack's first block and of the others.

        Args:
            work: the micro-batch.
            one: pass of a block by itself.
            layers: blocks of the stack.
            biases: bytes of the biases that live until the stack's forward is over; recomputed
                blocks hold them as their arguments, and the first one makes them anew.
            kept: bytes of them that are kept for the backward otherwise.
        """
        buckets = INDEX * work.seq_len**2
        again = work.activation_checkpointing
        other = replace(one, forward=one.forward + (0 if again else biases - kept))
        saved = one.saved + (biases if again else buckets + kept)
        backward = transformer.held_beside(one.backward, biases + buckets if again else 0)
        first = replace(one, saved=saved, forward=one.forward + biases + buckets, backward=backward)
        return [first, other] if layers > 1 else [first]

    def _between_passes(self, work: Workload, source: Tensor) -> tuple[Pass, Pass]:
        """The encoder's end, and the decoder's embedding."""
        tape, x = self.tape(work), Tensor(source.elements, source.width)
        out = self._write_end(tape, work, x)
        beside = self._after_decoder(work)
        end = transformer.block_pass(tape, x, out, checkpointed=False, beside=beside)
        return end, self._embedding_pass(work, waiting=source.bytes)[0]

    def _tail_pass(self, work: Workload, stream: Tensor) -> transformer.Tail:
        """The decoder's end, head and loss."""
        tape, x = self.tape(work), Tensor(stream.elements, stream.width)
        out = self._write_end(tape, work, x)
        out = tape.unary(out) if self.scaled else out
        logits = tape.linear(
            out, work.tokens, self.vocab, narrow=self.hidden, trainable=self.base_trainable
        )
        return transformer.tail_pass(tape, x, logits, labels=INDEX * work.tokens, in_fp32=False)

    def _in_root(self, work: Workload) -> int:
        """Bytes of gradients that wait in the root."""
        elements = sum(one.elements for one in self._root()) if self.base_trainable else 0
        return elements * self.tape(work).width

    def _after_decoder(self, work: Workload) -> int:
        """The same, and the zeros and their gradient, which live until the backward is over."""
        return self._in_root(work) + 2 * self._cross_gradient(work)

    def _bias(self, work: Workload) -> int:
        """Bytes of a bias, the same for all samples, and of its gradient."""
        return self.heads * work.seq_len**2 * self.tape(work).width

    def _zeros(self, work: Workload) -> int:
        """Bytes of what is added to the scores where the decoder reads the source."""
        tape = self.tape(work)
        return self.heads * work.seq_len**2 * (HALF if tape.autocast else tape.width)

    def _cross_gradient(self, work: Workload) -> int:
        """Bytes of its gradient, which it has where transformers recomputes the blocks."""
        return self._zeros(work) if work.activation_checkpointing else 0

    def _fused_cross(self, tape: Tape, work: Workload) -> bool:
        """Whether a fused kernel, which keeps the zeros, lets the decoder read the source."""
        if self.attention == "eager" or self._cross_gradient(work):
            return False
        return tape.device != "cpu" or not self.attention_dropout

    # -- operations ------------------------------------------------------------------------

    def _write_block(self, tape: Tape, work: Workload, x: Tensor, source: Tensor | None) -> Tensor:
        """T5Block.forward."""
        normed = self._norm(tape, work, x)
        x = self._added(tape, self._attention(tape, work, normed, normed, self._bias(work)), x)
        if source:
            if self.attention == "sdpa":
                tape.hold(Tensor(work.seq_len**2, 1))  # which scores of the target are masked
            normed, bias = self._norm(tape, work, x), self._cross_gradient(work)
            x = self._added(tape, self._attention(tape, work, normed, source, bias), x)
        return self._added(tape, self._mlp(tape, work, self._norm(tape, work, x)), x)

    def _added(self, tape: Tape, x: Tensor, stream: Tensor) -> Tensor:
        out = tape.add(stream, tape.dropout(x, self.attention_dropout))
        tape.linger(x)
        return out

    def _attention(
        self, tape: Tape, work: Workload, x: Tensor, source: Tensor, bias: int
    ) -> Tensor:
        """Queries of x, keys and values of a source."""
        *shapes, out = self._attention_linears()
        q, k, v = (
            tape.view(self.linear(tape, work, given, shape))
            for given, shape in zip((x, source, source), shapes, strict=True)
        )
        if self.attention == "eager":
            wide = tape.width if source is x else q.width
            attended = self._eager(tape, work, (q, k, v), bias, wide)
        elif source is not x and self._fused_cross(tape, work):
            attended = tape.flash_attention(q, k, v, work.tokens * self.heads)
        else:
            attended = self.math(tape, work, (q, k, v), Bias(bias))
        return self.linear(tape, work, attended, out)

    def _eager(
        self, tape: Tape, work: Workload, qkv: tuple[Tensor, Tensor, Tensor], bias: int, wide: int
    ) -> Tensor:
        """Softmax in the type of the bias, or in fp32 under a GPU's autocast."""
        q, k, v = qkv
        raw = tape.unary(tape.matmul(q, k, self.scores(work)))
        raw = tape.unary(tape.biased(raw, bias), width=wide)
        dropped = tape.dropout(tape.softmax(raw), self.attention_dropout)
        return tape.copy(tape.matmul(dropped, v, q.elements))

    def _mlp(self, tape: Tape, work: Workload, x: Tensor) -> Tensor:
        """T5DenseActDense or T5DenseGatedActDense.forward."""
        *ups, down = self._mlp_linears()
        raised = self.activated(tape, self.linear(tape, work, x, ups[0]))
        if self.gated:
            raised = tape.multiply(raised, self.linear(tape, work, x, ups[1]))
        # Cast to the type of the weights, which keep fp32 under autocast.
        lowered = tape.cast(tape.dropout(raised, self.attention_dropout), tape.width)
        return self.linear(tape, work, lowered, down)

    def _write_end(self, tape: Tape, work: Workload, x: Tensor) -> Tensor:
        """What ends a stack."""
        return tape.dropout(self._norm(tape, work, x), self.attention_dropout)

    def _norm(self, tape: Tape, work: Workload, x: Tensor) -> Tensor:
        """T5LayerNorm.forward: x itself is scaled, in fp32."""
        squares = tape.mean(tape.power(tape.cast(x, FULL)), work.tokens)
        inverse = tape.unary(tape.unary(squares), keeps="output")
        normed = tape.multiply(x, inverse)
        if tape.width == HALF:
            normed = tape.cast(normed, HALF)
        return tape.scale_by_weight(normed, self.hidden, trainable=self.base_trainable)


def _t5(config: Mapping[str, Any]) -> T5:
    heads, layers = size(config, "num_heads"), size(config, "num_layers", most=MOST_LAYERS)
    gate, _, activation = str(config.get("feed_forward_proj", "relu")).rpartition("-")
    gated = gate == "gated"
    return T5(
        model_type="t5",
        hidden=size(config, "d_model"),
        ff=size(config, "d_ff"),
        layers=layers,
        decoder_layers=size(config, "num_decoder_layers", default=layers, most=MOST_LAYERS),
        heads=heads,
        kv_heads=heads,
        head_dim=size(config, "d_kv"),
        vocab=size(config, "vocab_size"),
        activation="gelu_new" if gated and activation == "gelu" else activation,
        attention=attention(config),
        attention_dropout=rate(config, "dropout_rate", 0.1),
        element=element(config),
        gated=gated,
        buckets=size(config, "relative_attention_num_buckets", default=32),
        scaled=config.get(
            "scale_decoder_outputs", config.get("tie_word_embeddings", True) is not False
        ),
    )


FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], ModelSpec]] = {"t5": _t5}
"""model_type -> reader of its config."""
TRAINED: Mapping[str, frozenset[str]] = {
    # The second is what the first was called when T5's configs were published.
    "t5": frozenset({"T5ForConditionalGeneration", "T5WithLMHeadModel"}),
}
"""model_type -> classes of transformers that are written down here."""
CLASSES: Mapping[str, Any] = {"T5": T5}
