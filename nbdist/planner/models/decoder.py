"""What decoder-only language models share: groups of parameters, and a micro-batch of a tape.

A family (`closed_decoder`) says which parameters a block has and writes the block's operations
on a `Tape`; here they become a `ModelSpec`.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nbdist.planner.model_spec import Group, MicroBatch
from nbdist.planner.models import transformer
from nbdist.planner.models.autograd_tape import Tensor
from nbdist.planner.models.transformer import INDEX, NOTHING, Family, Weight, group

if TYPE_CHECKING:
    from nbdist.planner.model_spec import Pass, Workload
    from nbdist.planner.models.autograd_tape import Tape


@dataclass(frozen=True, kw_only=True)
class Decoder(Family):
    """A stack of causal blocks between an embedding and a head."""

    causal: ClassVar[bool] = True

    # -- what a family says ----------------------------------------------------------------

    @abstractmethod
    def embeddings(self) -> list[Weight]:
        """Tables beside the token embedding, used by no other group."""

    @abstractmethod
    def block_weights(self) -> list[Weight]:
        """Parameters of one block, adapters left out."""

    @abstractmethod
    def norm_weights(self) -> list[Weight]:
        """Parameters of the final norm."""

    @abstractmethod
    def write_embedding(self, tape: Tape, work: Workload) -> Tensor:
        """From tokens to the first block's input."""

    @abstractmethod
    def write_block(self, tape: Tape, work: Workload, x: Tensor) -> Tensor:
        """One block."""

    @abstractmethod
    def write_norm(self, tape: Tape, work: Workload, x: Tensor) -> Tensor:
        """The final norm."""

    @abstractmethod
    def shared(self, tape: Tape, work: Workload) -> int:
        """Bytes that all blocks use and that live as long as any of them."""

    # -- a ModelSpec -----------------------------------------------------------------------

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """Positions (where there are any), embedding, blocks, tail."""
        positions = self.base(self.embeddings())
        block = self.adapted(self.block_weights(), self.linears())
        found = (
            group("positions", "root", positions),
            group("embedding", "embedding", [] if self.tied else self.base([self.table])),
            group("block", "block", block, self.layers),
            group("tail", "tail", self.base([*self.norm_weights(), self.table])),
        )
        return found if positions else found[1:]

    def products(self, work: Workload) -> tuple[int, int]:
        """Half of the products of queries with keys, and of scores with values, are masked."""
        attended = self.layers * self.heads * self.head_dim * work.seq_len
        return work.tokens * self.vocab * self.hidden, work.tokens * attended

    def passes(self, work: Workload) -> MicroBatch:
        """Bytes of one micro-batch."""
        embedding, stream = self._embedding(work)
        tail = self._tail(work, stream)
        places = [NOTHING] if self.embeddings() else []
        passes = (*places, embedding, self._block(work, stream), tail.last)
        return MicroBatch(passes=passes, loss=tail.loss, outputs=tail.outputs)

    # -- how -------------------------------------------------------------------------------

    def looked_up(self, tape: Tape, work: Workload) -> Tensor:
        """The tokens' rows of the embedding."""
        trained = self.base_trainable
        return tape.embedding(
            work.tokens,
            self.vocab,
            self.hidden,
            counted=trained and not self.tied,
            tied=trained and self.tied,
        )

    def mask(self, tape: Tape, work: Workload, *, made: bool) -> int:
        """Bytes of the attention mask that checkpointed blocks hold among their arguments."""
        if not work.activation_checkpointing or not (made or self.attention == "eager"):
            return 0
        return work.batch_size * work.seq_len**2 * tape.width

    def _embedding(self, work: Workload) -> tuple[Pass, Tensor]:
        """Tokens to the residual stream; returns one tensor of it as well."""
        tape = self.tape(work)
        out = self.write_embedding(tape, work)
        # Gradients of positions are there already.
        beside = sum(one.elements for one in self.embeddings())
        beside *= tape.width if self.base_trainable else 0
        kept = INDEX * work.tokens + self.shared(tape, work)
        return transformer.embedding_pass(tape, out, kept=kept, beside=beside), out

    def _block(self, work: Workload, stream: Tensor) -> Pass:
        tape = self.tape(work)
        x = Tensor(stream.elements, stream.width)
        out = self.write_block(tape, work, x)
        return transformer.block_pass(tape, x, out, checkpointed=work.activation_checkpointing)

    def _tail(self, work: Workload, stream: Tensor) -> transformer.Tail:
        """Final norm, head, loss."""
        tape = self.tape(work)
        x = Tensor(stream.elements, stream.width)
        normed = self.write_norm(tape, work, x)
        logits = tape.linear(
            normed, work.tokens, self.vocab, narrow=self.hidden, trainable=self.base_trainable
        )
        return transformer.tail_pass(tape, x, logits, labels=INDEX * work.tokens, in_fp32=True)
