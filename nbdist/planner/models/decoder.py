"""Base class of decoder-only language models: groups of parameters, and a micro-batch.

A family (`analytic_decoder`) defines the parameters of a block and records its operations on an
`AutogradTape`; this class turns them into a `ModelSpec`.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nbdist.planner.model_spec import LayerGroup, MicroBatchActivations
from nbdist.planner.models import transformer
from nbdist.planner.models.autograd_tape import TapeTensor
from nbdist.planner.models.transformer import (
    INDEX_BYTES,
    NO_ACTIVATIONS,
    TransformerSpec,
    WeightShape,
    build_layer_group,
)

if TYPE_CHECKING:
    from nbdist.planner.model_spec import LayerActivations, Workload
    from nbdist.planner.models.autograd_tape import AutogradTape


@dataclass(frozen=True, kw_only=True)
class DecoderSpec(TransformerSpec):
    """A stack of causal blocks between an embedding and a head."""

    causal: ClassVar[bool] = True

    # -- defined by a family ---------------------------------------------------------------

    @abstractmethod
    def extra_embeddings(self) -> list[WeightShape]:
        """Return embedding tables other than the token embedding, used by no other group."""

    @abstractmethod
    def block_weights(self) -> list[WeightShape]:
        """Return the parameters of one block without adapters."""

    @abstractmethod
    def norm_weights(self) -> list[WeightShape]:
        """Return the parameters of the final norm."""

    @abstractmethod
    def record_embedding(self, tape: AutogradTape, work: Workload) -> TapeTensor:
        """Record the operations from tokens to the first block's input."""

    @abstractmethod
    def record_block(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """Record one block."""

    @abstractmethod
    def record_norm(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """Record the final norm."""

    @abstractmethod
    def shared_bytes(self, tape: AutogradTape, work: Workload) -> int:
        """Return the bytes that all blocks share, alive as long as any block."""

    # -- ModelSpec -------------------------------------------------------------------------

    @functools.cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Position embeddings (if any), embedding, blocks, tail."""
        positions = self.base_weights(self.extra_embeddings())
        block = self.add_adapters(self.block_weights(), self.linear_shapes())
        groups = (
            build_layer_group("positions", "root", positions),
            build_layer_group(
                "embedding",
                "embedding",
                [] if self.tied else self.base_weights([self.embedding_weight]),
            ),
            build_layer_group("block", "block", block, self.layers),
            build_layer_group(
                "tail", "tail", self.base_weights([*self.norm_weights(), self.embedding_weight])
            ),
        )
        return groups if positions else groups[1:]

    def num_multiplications(self, work: Workload) -> tuple[int, int]:
        """Return the multiplications of a forward: in the head, and of attention."""
        # The causal mask halves both matrix products of attention.
        attended = self.layers * self.heads * self.head_dim * work.seq_len
        return work.num_tokens * self.vocab * self.hidden, work.num_tokens * attended

    def compute_activations(self, work: Workload) -> MicroBatchActivations:
        """Compute the activations of one micro-batch."""
        embedding, stream = self._embedding(work)
        tail = self._tail(work, stream)
        positions = [NO_ACTIVATIONS] if self.extra_embeddings() else []
        passes = (*positions, embedding, self._block(work, stream), tail.head)
        return MicroBatchActivations(
            layers=passes, loss_bytes=tail.loss_bytes, output_bytes=tail.output_bytes
        )

    # -- implementation --------------------------------------------------------------------

    def embed_tokens(self, tape: AutogradTape, work: Workload) -> TapeTensor:
        """Record the lookup of the tokens in the embedding."""
        trained = self.has_trainable_base
        return tape.embedding(
            work.num_tokens,
            self.vocab,
            self.hidden,
            counted=trained and not self.tied,
            tied=trained and self.tied,
        )

    def attention_mask_bytes(self, tape: AutogradTape, work: Workload, *, made: bool) -> int:
        """Return the bytes of the attention mask that checkpointed blocks hold as argument."""
        if not work.activation_checkpointing or not (made or self.attention == "eager"):
            return 0
        return work.batch_size * work.seq_len**2 * tape.element_bytes

    def _embedding(self, work: Workload) -> tuple[LayerActivations, TapeTensor]:
        """Tokens to the residual stream; returns a tensor of its size as well."""
        tape = self.new_tape(work)
        out = self.record_embedding(tape, work)
        # Gradients of position embeddings exist already.
        beside = sum(weight.num_elements for weight in self.extra_embeddings())
        beside *= tape.element_bytes if self.has_trainable_base else 0
        kept = INDEX_BYTES * work.num_tokens + self.shared_bytes(tape, work)
        return transformer.embedding_activations(tape, out, kept=kept, beside=beside), out

    def _block(self, work: Workload, stream: TapeTensor) -> LayerActivations:
        tape = self.new_tape(work)
        x = TapeTensor(stream.elements, stream.width)
        out = self.record_block(tape, work, x)
        return transformer.block_activations(
            tape, x, out, checkpointed=work.activation_checkpointing
        )

    def _tail(self, work: Workload, stream: TapeTensor) -> transformer.HeadActivations:
        """Final norm, head, loss."""
        tape = self.new_tape(work)
        x = TapeTensor(stream.elements, stream.width)
        normed = self.record_norm(tape, work, x)
        logits = tape.linear(
            normed,
            work.num_tokens,
            self.vocab,
            narrow=self.hidden,
            trainable=self.has_trainable_base,
        )
        return transformer.head_activations(
            tape, x, logits, labels=INDEX_BYTES * work.num_tokens, in_fp32=True
        )
