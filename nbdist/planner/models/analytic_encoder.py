"""BERT-like encoders, operation by operation as transformers 5.23 runs them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nbdist.planner.model_spec import LayerGroup, MicroBatchActivations
from nbdist.planner.models import transformer
from nbdist.planner.models.autograd_tape import AutogradTape, TapeTensor
from nbdist.planner.models.config import (
    MAX_LAYERS,
    attention_implementation,
    check_divides,
    param_dtype_bytes,
    read_dropout_rate,
    read_size,
)
from nbdist.planner.models.transformer import (
    INDEX_BYTES,
    NO_ACTIVATIONS,
    TransformerSpec,
    WeightShape,
    build_layer_group,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.planner.model_spec import LayerActivations, ModelSpec, Workload

HeadTask = Literal["MaskedLM", "SequenceClassification"]


@dataclass(frozen=True, kw_only=True)
class Bert(TransformerSpec):
    """BERT and RoBERTa: learned positions, layer norms after each sum, dropout, one head.

    torch 2.13's FSDP2 refuses a parameter that two groups see, and transformers holds the bias
    of a tied head beside it: embedding and head are then the root's.
    """

    task: HeadTask = "MaskedLM"
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
    def groups(self) -> tuple[LayerGroup, ...]:
        """Root, embedding and tail (empty where the root has theirs), blocks in between."""
        own = [] if self._embedding_in_root else [self.embedding_weight]
        head = (
            [self.embedding_weight, WeightShape(self.vocab, self.vocab)] if self._own_head else []
        )
        block = self.add_adapters(self._block_weights(), self.linear_shapes())
        return (
            build_layer_group(
                "root", "root", self.base_weights([*self._embeddings(), *self._head()])
            ),
            build_layer_group("embedding", "embedding", self.base_weights(own)),
            build_layer_group("encoder block", "block", block, self.layers),
            build_layer_group("tail", "tail", self.base_weights(head)),
        )

    def linear_shapes(self) -> list[tuple[int, int]]:
        """q, k, v, o, up, down."""
        h, ff = self.hidden, self.ff
        return [(h, h)] * 4 + [(ff, h), (h, ff)]

    def num_multiplications(self, work: Workload) -> tuple[int, int]:
        """Every token attends to every token; a class takes the first token alone."""
        attended = 2 * self.layers * self.hidden * work.seq_len
        tokens, wide = work.num_tokens, self.vocab
        if self.task != "MaskedLM":
            tokens, wide = work.batch_size, self.labels
        return tokens * self.hidden * (self.hidden + wide), work.num_tokens * attended

    @property
    def _embedding_in_root(self) -> bool:
        return self.task == "MaskedLM" and self.shares_table

    @property
    def _own_head(self) -> bool:
        return self.task == "MaskedLM" and not self.shares_table

    def _embeddings(self) -> list[WeightShape]:
        """The root's part of the embedding: tables and a norm."""
        h = self.hidden
        tables = [
            WeightShape(self.positions, self.positions * h),
            WeightShape(self.types, self.types * h),
        ]
        return [self.embedding_weight] * self._embedding_in_root + tables + [WeightShape(h, h)] * 2

    def _head(self) -> list[WeightShape]:
        """The root's part of the head."""
        h = self.hidden
        dense = [WeightShape(h, h * h), WeightShape(h, h)]
        if self.task == "MaskedLM":
            # With a table of its own the head has two biases, one of them without a use.
            return [
                WeightShape(self.vocab, self.vocab),
                *dense,
                WeightShape(h, h),
                WeightShape(h, h),
            ]
        return [
            *dense,
            WeightShape(self.labels, self.labels * h),
            WeightShape(self.labels, self.labels),
        ]

    def _block_weights(self) -> list[WeightShape]:
        weights = [WeightShape(out, out * into) for out, into in self.linear_shapes()]
        biases = [WeightShape(out, out) for out, _ in self.linear_shapes()]
        return weights + biases + [WeightShape(self.hidden, self.hidden)] * 4

    # -- a micro-batch ---------------------------------------------------------------------

    def compute_activations(self, work: Workload) -> MicroBatchActivations:
        """Bytes of one micro-batch."""
        embedding, stream = self._embedding_pass(work)
        tail = self._tail_pass(work, stream)
        passes = (NO_ACTIVATIONS, embedding, self._block_pass(work, stream), tail.head)
        return MicroBatchActivations(
            layers=passes, loss_bytes=tail.loss_bytes, output_bytes=tail.output_bytes
        )

    def _gradients(self, work: Workload, weights: list[WeightShape]) -> int:
        """Bytes of gradients that wait in the root."""
        if not self.has_trainable_base:
            return 0
        return self.new_tape(work).element_bytes * sum(value.num_elements for value in weights)

    def _embedding_pass(self, work: Workload) -> tuple[LayerActivations, TapeTensor]:
        """Tokens to the residual stream; returns one tensor of it as well."""
        tape = self.new_tape(work)
        out = self._write_embedding(tape, work)
        beside = self._gradients(work, [*self._embeddings(), *self._head()])
        kept = INDEX_BYTES * work.num_tokens + self._numbers(work)
        return transformer.embedding_activations(tape, out, kept=kept, beside=beside), out

    def _numbers(self, work: Workload) -> int:
        """Bytes of positions and token types: two buffers, and what is read out of them."""
        read = 2 * work.num_tokens if self.padded else work.seq_len
        return INDEX_BYTES * (2 * self.positions + read)

    def _block_pass(self, work: Workload, stream: TapeTensor) -> LayerActivations:
        tape = self.new_tape(work)
        x = TapeTensor(stream.elements, stream.width)
        out = self._write_block(tape, work, x)
        waiting = self._head() + [self.embedding_weight] * self._embedding_in_root
        beside = self._gradients(work, waiting)
        again = work.activation_checkpointing
        return transformer.block_activations(tape, x, out, checkpointed=again, beside=beside)

    def _tail_pass(self, work: Workload, stream: TapeTensor) -> transformer.HeadActivations:
        tape = self.new_tape(work)
        x = TapeTensor(stream.elements, stream.width)
        if self.task == "MaskedLM":
            logits = self._write_words(tape, work, x)
            labels = INDEX_BYTES * work.num_tokens
        else:
            logits = self._write_classes(tape, work, x)
            labels = INDEX_BYTES * work.batch_size
        return transformer.head_activations(tape, x, logits, labels=labels, in_fp32=False)

    # -- operations ------------------------------------------------------------------------

    def _write_embedding(self, tape: AutogradTape, work: Workload) -> TapeTensor:
        """Token plus type plus position, normed; the root's gradients are counted beside."""
        trained, shared = self.has_trainable_base, self._embedding_in_root
        tokens = tape.embedding(
            work.num_tokens,
            self.vocab,
            self.hidden,
            counted=trained and not shared,
            tied=trained and shared,
        )
        types = tape.embedding(work.num_tokens, self.types, self.hidden, counted=False)
        count = work.num_tokens if self.padded else work.seq_len
        places = tape.embedding(count, self.positions, self.hidden, counted=False)
        summed = tape.add(tape.add(tokens, types), places)
        normed = tape.layer_norm(summed, work.num_tokens, self.hidden, trainable=False)
        return tape.dropout(normed, self.dropout_rate)

    def _write_block(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """BertLayer.forward."""
        *qkv, out, up, down = self.linear_shapes()
        q, k, v = (tape.view(self.record_linear(tape, work, x, shape, bias=True)) for shape in qkv)
        attended = self.record_attention(tape, work, q, k, v)
        x = self._summed(tape, work, self.record_linear(tape, work, attended, out, bias=True), x)
        raised = self.record_activation(tape, self.record_linear(tape, work, x, up, bias=True))
        return self._summed(tape, work, self.record_linear(tape, work, raised, down, bias=True), x)

    def _summed(
        self, tape: AutogradTape, work: Workload, x: TapeTensor, stream: TapeTensor
    ) -> TapeTensor:
        """Dropped out, added to the residual stream, normed."""
        return self._norm(tape, work, tape.add(tape.dropout(x, self.dropout_rate), stream))

    def _norm(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        return tape.layer_norm(x, work.num_tokens, self.hidden, trainable=self.has_trainable_base)

    def record_eager_attention(
        self, tape: AutogradTape, work: Workload, q: TapeTensor, k: TapeTensor, v: TapeTensor
    ) -> TapeTensor:
        """Softmax in the type of the scores, or in fp32 under a GPU's autocast."""
        raw = tape.unary(tape.matmul(q, k, self.num_attention_scores(work)))
        dropped = tape.dropout(tape.softmax(raw), self.attention_dropout)
        return tape.copy(tape.matmul(dropped, v, q.elements))

    def _write_words(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """BertLMPredictionHead.forward."""
        dense = self._dense(tape, work.num_tokens, x)
        normed = self._norm(tape, work, self.record_activation(tape, dense))
        return self._projected(tape, work.num_tokens, normed, self.vocab)

    def _write_classes(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """Pooler and classifier, or RobertaClassificationHead.forward."""
        first = tape.slice_rows(x, work.batch_size * self.hidden)
        if self.padded:
            first = tape.dropout(first, self.head_dropout)
        pooled = tape.unary(self._dense(tape, work.batch_size, first), keeps="output")
        dropped = tape.dropout(pooled, self.head_dropout)
        return self._projected(tape, work.batch_size, dropped, self.labels)

    def _dense(self, tape: AutogradTape, tokens: int, x: TapeTensor) -> TapeTensor:
        return self._projected(tape, tokens, x, self.hidden)

    def _projected(self, tape: AutogradTape, tokens: int, x: TapeTensor, wide: int) -> TapeTensor:
        return tape.linear(
            x, tokens, wide, narrow=self.hidden, trainable=self.has_trainable_base, bias=True
        )


def _bert(config: Mapping[str, Any]) -> Bert:
    hidden, heads = read_size(config, "hidden_size"), read_size(config, "num_attention_heads")
    check_divides(hidden, heads, "hidden_size", "num_attention_heads")
    dropout = read_dropout_rate(config, "hidden_dropout_prob", 0.1)
    head_dropout = config.get("classifier_dropout")
    return Bert(
        model_type=config["model_type"],
        hidden=hidden,
        ff=read_size(config, "intermediate_size"),
        layers=read_size(config, "num_hidden_layers", most=MAX_LAYERS),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=read_size(config, "vocab_size"),
        activation=str(config.get("hidden_act", "gelu")),
        attention=attention_implementation(config),
        attention_dropout=read_dropout_rate(config, "attention_probs_dropout_prob", 0.1),
        element=param_dtype_bytes(config),
        task=_task(config),
        labels=read_size(config, "num_labels", default=len(config.get("id2label") or "01")),
        positions=read_size(config, "max_position_embeddings", default=512),
        types=read_size(config, "type_vocab_size", default=2),
        shares_table=bool(config.get("tie_word_embeddings", True)),
        dropout_rate=dropout,
        head_dropout=dropout
        if head_dropout is None
        else read_dropout_rate(config, "classifier_dropout", 0.1),
        padded=config["model_type"] == "roberta",
    )


def _task(config: Mapping[str, Any]) -> HeadTask:
    """Return the task that the config's class trains; a masked language model if it names none."""
    name = str(next(iter(config.get("architectures") or ()), ""))
    return "SequenceClassification" if name.endswith("SequenceClassification") else "MaskedLM"


SPEC_BUILDERS: Mapping[str, Callable[[Mapping[str, Any]], ModelSpec]] = {
    "bert": _bert,
    "roberta": _bert,
}
"""model_type -> reader of its config."""
SUPPORTED_MODEL_CLASSES: Mapping[str, frozenset[str]] = {
    "bert": frozenset({"BertForMaskedLM", "BertForSequenceClassification"}),
    "roberta": frozenset({"RobertaForMaskedLM", "RobertaForSequenceClassification"}),
}
"""model_type -> classes of transformers that are written down here."""
SPEC_CLASSES: Mapping[str, Any] = {"Bert": Bert}
