"""BERT-like encoders, operation by operation as transformers 5.23 runs them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nbdist.planner.model_spec import Group, MicroBatch
from nbdist.planner.models import transformer
from nbdist.planner.models.autograd_tape import Tape, Tensor
from nbdist.planner.models.config import MOST_LAYERS, attention, check_divides, element, rate, size
from nbdist.planner.models.transformer import INDEX, NOTHING, Family, Weight, group

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.planner.model_spec import ModelSpec, Pass, Workload

Task = Literal["MaskedLM", "SequenceClassification"]


@dataclass(frozen=True, kw_only=True)
class Bert(Family):
    """BERT and RoBERTa: learned positions, layer norms after each sum, dropout, one head.

    torch 2.13's FSDP2 refuses a parameter that two groups see, and transformers holds the bias
    of a tied head beside it: embedding and head are then the root's.
    """

    task: Task = "MaskedLM"
    labels: int = 2
    """Classes of a sequence."""
    positions: int = 512
    types: int = 2
    """Rows of the token types' table."""
    shares_table: bool = True
    """The head's weight is the embedding's; both belong to the root."""
    dropout_rate: float = 0.1
    head_dropout: float = 0.1
    padded: bool = False
    """RoBERTa: positions are counted from the padding of each sample, and there is no pooler."""

    causal: ClassVar[bool] = False

    # -- parameters ------------------------------------------------------------------------

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """Root, embedding and tail (empty where the root has theirs), blocks in between."""
        own = [] if self._embedding_in_root else [self.table]
        head = [self.table, Weight(self.vocab, self.vocab)] if self._own_head else []
        block = self.adapted(self._block_weights(), self.linears())
        return (
            group("root", "root", self.base([*self._embeddings(), *self._head()])),
            group("embedding", "embedding", self.base(own)),
            group("encoder block", "block", block, self.layers),
            group("tail", "tail", self.base(head)),
        )

    def linears(self) -> list[tuple[int, int]]:
        """q, k, v, o, up, down."""
        h, ff = self.hidden, self.ff
        return [(h, h)] * 4 + [(ff, h), (h, ff)]

    def products(self, work: Workload) -> tuple[int, int]:
        """Every token attends to every token; a class takes the first token alone."""
        attended = 2 * self.layers * self.hidden * work.seq_len
        tokens, wide = work.tokens, self.vocab
        if self.task != "MaskedLM":
            tokens, wide = work.batch_size, self.labels
        return tokens * self.hidden * (self.hidden + wide), work.tokens * attended

    @property
    def _embedding_in_root(self) -> bool:
        return self.task == "MaskedLM" and self.shares_table

    @property
    def _own_head(self) -> bool:
        return self.task == "MaskedLM" and not self.shares_table

    def _embeddings(self) -> list[Weight]:
        """The root's part of the embedding: tables and a norm."""
        h = self.hidden
        tables = [Weight(self.positions, self.positions * h), Weight(self.types, self.types * h)]
        return [self.table] * self._embedding_in_root + tables + [Weight(h, h)] * 2

    def _head(self) -> list[Weight]:
        """The root's part of the head."""
        h = self.hidden
        dense = [Weight(h, h * h), Weight(h, h)]
        if self.task == "MaskedLM":
            # With a table of its own the head has two biases, one of them without a use.
            return [Weight(self.vocab, self.vocab), *dense, Weight(h, h), Weight(h, h)]
        return [*dense, Weight(self.labels, self.labels * h), Weight(self.labels, self.labels)]

    def _block_weights(self) -> list[Weight]:
        weights = [Weight(out, out * into) for out, into in self.linears()]
        biases = [Weight(out, out) for out, _ in self.linears()]
        return weights + biases + [Weight(self.hidden, self.hidden)] * 4

    # -- a micro-batch ---------------------------------------------------------------------

    def passes(self, work: Workload) -> MicroBatch:
        """Bytes of one micro-batch."""
        embedding, stream = self._embedding_pass(work)
        tail = self._tail_pass(work, stream)
        passes = (NOTHING, embedding, self._block_pass(work, stream), tail.last)
        return MicroBatch(passes=passes, loss=tail.loss, outputs=tail.outputs)

    def _gradients(self, work: Workload, weights: list[Weight]) -> int:
        """Bytes of gradients that wait in the root."""
        if not self.base_trainable:
            return 0
        return self.tape(work).width * sum(one.elements for one in weights)

    def _embedding_pass(self, work: Workload) -> tuple[Pass, Tensor]:
        """Tokens to the residual stream; returns one tensor of it as well."""
        tape = self.tape(work)
        out = self._write_embedding(tape, work)
        beside = self._gradients(work, [*self._embeddings(), *self._head()])
        kept = INDEX * work.tokens + self._numbers(work)
        return transformer.embedding_pass(tape, out, kept=kept, beside=beside), out

    def _numbers(self, work: Workload) -> int:
        """Bytes of positions and token types: two buffers, and what is read out of them."""
        read = 2 * work.tokens if self.padded else work.seq_len
        return INDEX * (2 * self.positions + read)

    def _block_pass(self, work: Workload, stream: Tensor) -> Pass:
        tape = self.tape(work)
        x = Tensor(stream.elements, stream.width)
        out = self._write_block(tape, work, x)
        waiting = self._head() + [self.table] * self._embedding_in_root
        beside = self._gradients(work, waiting)
        again = work.activation_checkpointing
        return transformer.block_pass(tape, x, out, checkpointed=again, beside=beside)

    def _tail_pass(self, work: Workload, stream: Tensor) -> transformer.Tail:
        tape = self.tape(work)
        x = Tensor(stream.elements, stream.width)
        if self.task == "MaskedLM":
            logits = self._write_words(tape, work, x)
            labels = INDEX * work.tokens
        else:
            logits = self._write_classes(tape, work, x)
            labels = INDEX * work.batch_size
        return transformer.tail_pass(tape, x, logits, labels=labels, in_fp32=False)

    # -- operations ------------------------------------------------------------------------

    def _write_embedding(self, tape: Tape, work: Workload) -> Tensor:
        """Token plus type plus position, normed; the root's gradients are counted beside."""
        trained, shared = self.base_trainable, self._embedding_in_root
        tokens = tape.embedding(
            work.tokens,
            self.vocab,
            self.hidden,
            counted=trained and not shared,
            tied=trained and shared,
        )
        types = tape.embedding(work.tokens, self.types, self.hidden, counted=False)
        count = work.tokens if self.padded else work.seq_len
        places = tape.embedding(count, self.positions, self.hidden, counted=False)
        summed = tape.add(tape.add(tokens, types), places)
        normed = tape.layer_norm(summed, work.tokens, self.hidden, trainable=False)
        return tape.dropout(normed, self.dropout_rate)

    def _write_block(self, tape: Tape, work: Workload, x: Tensor) -> Tensor:
        """BertLayer.forward."""
        *qkv, out, up, down = self.linears()
        q, k, v = (tape.view(self.linear(tape, work, x, shape, bias=True)) for shape in qkv)
        attended = self.attend(tape, work, q, k, v)
        x = self._summed(tape, work, self.linear(tape, work, attended, out, bias=True), x)
        raised = self.activated(tape, self.linear(tape, work, x, up, bias=True))
        return self._summed(tape, work, self.linear(tape, work, raised, down, bias=True), x)

    def _summed(self, tape: Tape, work: Workload, x: Tensor, stream: Tensor) -> Tensor:
        """Dropped out, added to the residual stream, normed."""
        return self._norm(tape, work, tape.add(tape.dropout(x, self.dropout_rate), stream))

    def _norm(self, tape: Tape, work: Workload, x: Tensor) -> Tensor:
        return tape.layer_norm(x, work.tokens, self.hidden, trainable=self.base_trainable)

    def eager(self, tape: Tape, work: Workload, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Softmax in the type of the scores, or in fp32 under a GPU's autocast."""
        raw = tape.unary(tape.matmul(q, k, self.scores(work)))
        dropped = tape.dropout(tape.softmax(raw), self.attention_dropout)
        return tape.copy(tape.matmul(dropped, v, q.elements))

    def _write_words(self, tape: Tape, work: Workload, x: Tensor) -> Tensor:
        """BertLMPredictionHead.forward."""
        dense = self._dense(tape, work.tokens, x)
        normed = self._norm(tape, work, self.activated(tape, dense))
        return self._projected(tape, work.tokens, normed, self.vocab)

    def _write_classes(self, tape: Tape, work: Workload, x: Tensor) -> Tensor:
        """Pooler and classifier, or RobertaClassificationHead.forward."""
        first = tape.rows(x, work.batch_size * self.hidden)
        if self.padded:
            first = tape.dropout(first, self.head_dropout)
        pooled = tape.unary(self._dense(tape, work.batch_size, first), keeps="output")
        dropped = tape.dropout(pooled, self.head_dropout)
        return self._projected(tape, work.batch_size, dropped, self.labels)

    def _dense(self, tape: Tape, tokens: int, x: Tensor) -> Tensor:
        return self._projected(tape, tokens, x, self.hidden)

    def _projected(self, tape: Tape, tokens: int, x: Tensor, wide: int) -> Tensor:
        return tape.linear(
            x, tokens, wide, narrow=self.hidden, trainable=self.base_trainable, bias=True
        )


def _bert(config: Mapping[str, Any]) -> Bert:
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    check_divides(hidden, heads, "hidden_size", "num_attention_heads")
    dropout = rate(config, "hidden_dropout_prob", 0.1)
    head_dropout = config.get("classifier_dropout")
    return Bert(
        model_type=config["model_type"],
        hidden=hidden,
        ff=size(config, "intermediate_size"),
        layers=size(config, "num_hidden_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=size(config, "vocab_size"),
        activation=str(config.get("hidden_act", "gelu")),
        attention=attention(config),
        attention_dropout=rate(config, "attention_probs_dropout_prob", 0.1),
        element=element(config),
        task=_task(config),
        labels=size(config, "num_labels", default=len(config.get("id2label") or "01")),
        positions=size(config, "max_position_embeddings", default=512),
        types=size(config, "type_vocab_size", default=2),
        shares_table=bool(config.get("tie_word_embeddings", True)),
        dropout_rate=dropout,
        head_dropout=dropout if head_dropout is None else rate(config, "classifier_dropout", 0.1),
        padded=config["model_type"] == "roberta",
    )


def _task(config: Mapping[str, Any]) -> Task:
    """What the config's class trains; a masked language model where it names none."""
    name = str(next(iter(config.get("architectures") or ()), ""))
    return "SequenceClassification" if name.endswith("SequenceClassification") else "MaskedLM"


FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], ModelSpec]] = {
    "bert": _bert,
    "roberta": _bert,
}
"""model_type -> reader of its config."""
TRAINED: Mapping[str, frozenset[str]] = {
    "bert": frozenset({"BertForMaskedLM", "BertForSequenceClassification"}),
    "roberta": frozenset({"RobertaForMaskedLM", "RobertaForSequenceClassification"}),
}
"""model_type -> classes of transformers that are written down here."""
CLASSES: Mapping[str, Any] = {"Bert": Bert}
