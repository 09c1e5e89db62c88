"""Llama-like and GPT-2-like models, operation by operation as transformers 5.23 runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist.planner.models.autograd_tape import FULL, Tape, Tensor
from nbdist.planner.models.config import MOST_LAYERS, attention, check_divides, element, rate, size
from nbdist.planner.models.decoder import Decoder
from nbdist.planner.models.transformer import Weight

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.planner.model_spec import ModelSpec, Workload


@dataclass(frozen=True, kw_only=True)
class Llama(Decoder):
    """Llama, Mistral, Qwen2, Qwen3: RMSNorm, rotary positions, grouped heads, gated MLP."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normed per head."""
    window: int | None = None
    """Sliding window, in tokens."""

    def embeddings(self) -> list[Weight]:
        """None: positions are rotations."""
        return []

    def linears(self) -> list[tuple[int, int]]:
        """q, k, v, o, gate, up, down."""
        h, ff = self.hidden, self.ff
        heads = [(self.wide_q, h), (self.wide_kv, h), (self.wide_kv, h), (h, self.wide_q)]
        return [*heads, (ff, h), (ff, h), (h, ff)]

    def block_weights(self) -> list[Weight]:
        """Linear layers, their biases, two norms."""
        biased = [self.qkv_bias] * 3 + [self.out_bias] + [self.mlp_bias] * 3
        shapes = self.linears()
        weights = [Weight(out, out * into) for out, into in shapes]
        biases = [Weight(o, o) for (o, _), bias in zip(shapes, biased, strict=True) if bias]
        norms = [Weight(self.hidden, self.hidden)] * 2
        head_norms = [Weight(self.head_dim, self.head_dim)] * (2 if self.qk_norm else 0)
        return weights + biases + norms + head_norms

    def norm_weights(self) -> list[Weight]:
        """The scale."""
        return [Weight(self.hidden, self.hidden)]

    def shared(self, tape: Tape, work: Workload) -> int:
        """Cosines and sines, and the mask where one is kept."""
        rotary = 2 * work.seq_len * self.head_dim * tape.width
        return rotary + self.mask(tape, work, made=self._masked(work))

    def write_embedding(self, tape: Tape, work: Workload) -> Tensor:
        """Look the tokens up."""
        return self.looked_up(tape, work)

    def write_block(self, tape: Tape, work: Workload, x: Tensor) -> Tensor:
        """LlamaDecoderLayer.forward."""
        attended = self._attention(tape, work, self.write_norm(tape, work, x))
        x = tape.add(x, attended)
        return tape.add(x, self._mlp(tape, work, self.write_norm(tape, work, x)))

    def write_norm(self, tape: Tape, work: Workload, x: Tensor) -> Tensor:
        """RMSNorm."""
        return tape.rms_norm(x, work.tokens, self.hidden, trainable=self.base_trainable)

    def eager(self, tape: Tape, work: Workload, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Scores in the compute type, softmax in fp32, probabilities back."""
        if self.heads != self.kv_heads:
            k, v = (tape.copy(t, self.heads // self.kv_heads) for t in (k, v))
        raw = tape.unary(tape.matmul(q, k, self.scores(work)))
        probabilities = tape.softmax(tape.cast(_masked(tape, raw), FULL))
        probabilities = tape.dropout(tape.cast(probabilities, q.width), self.attention_dropout)
        return tape.copy(tape.matmul(probabilities, v, q.elements))

    def _masked(self, work: Workload) -> bool:
        """Whether sequences are longer than the sliding window, which takes an explicit mask."""
        return self.window is not None and work.seq_len > self.window

    def _attention(self, tape: Tape, work: Workload, x: Tensor) -> Tensor:
        shapes = self.linears()
        q, k, v = (self.linear(tape, work, x, s, bias=self.qkv_bias) for s in shapes[:3])
        if self.qk_norm:
            q, k = (self._head_norm(tape, work, t) for t in (q, k))
        q, k = (_rotated(tape, tape.view(t)) for t in (q, k))
        if self._masked(work) and self.attention == "sdpa":
            k, v = (tape.copy(t, self.heads // self.kv_heads) for t in (k, v))
            tape.hold(Tensor(work.seq_len**2, q.width))
        out = self.attend(tape, work, q, k, v)
        return self.linear(tape, work, out, shapes[3], bias=self.out_bias)

    def _head_norm(self, tape: Tape, work: Workload, x: Tensor) -> Tensor:
        heads = x.elements // self.head_dim // work.tokens
        return tape.rms_norm(x, work.tokens * heads, self.head_dim, trainable=self.base_trainable)

    def _mlp(self, tape: Tape, work: Workload, x: Tensor) -> Tensor:
        gate, up, down = self.linears()[4:]
        opened = tape.unary(self.linear(tape, work, x, gate, bias=self.mlp_bias), keeps="input")
        raised = self.linear(tape, work, x, up, bias=self.mlp_bias)
        return self.linear(tape, work, tape.multiply(opened, raised), down, bias=self.mlp_bias)


def _masked(tape: Tape, scores: Tensor) -> Tensor:
    """Scores plus the mask, which has the embedding's type."""
    return tape.unary(scores, width=tape.width)


def _rotated(tape: Tape, x: Tensor) -> Tensor:
    """`x * cos + rotate_half(x) * sin`; cosines have the residual stream's type."""
    straight = tape.unary(x, width=tape.width)
    crossed = tape.unary(tape.unary(x), width=tape.width)
    return tape.add(straight, crossed)


@dataclass(frozen=True, kw_only=True)
class Gpt2(Decoder):
    """GPT-2: layer norms, learned positions, one projection for q, k and v, dropout."""

    positions: int = 1024
    embedding_dropout: float = 0.1
    residual_dropout: float = 0.1

    def embeddings(self) -> list[Weight]:
        """The positions' table."""
        return [Weight(self.positions, self.positions * self.hidden)]

    def linears(self) -> list[tuple[int, int]]:
        """qkv, o, up, down."""
        h, ff = self.hidden, self.ff
        return [(3 * h, h), (h, h), (ff, h), (h, ff)]

    def block_weights(self) -> list[Weight]:
        """Conv1D has its weight transposed: rows are the input's features."""
        weights = [Weight(into, out * into) for out, into in self.linears()]
        biases = [Weight(out, out) for out, _ in self.linears()]
        return weights + biases + [Weight(self.hidden, self.hidden)] * 4

    def norm_weights(self) -> list[Weight]:
        """Scale and shift."""
        return [Weight(self.hidden, self.hidden)] * 2

    def shared(self, tape: Tape, work: Workload) -> int:
        """Position numbers, and the mask where one is kept."""
        return 8 * work.seq_len + self.mask(tape, work, made=False)

    def write_embedding(self, tape: Tape, work: Workload) -> Tensor:
        """Token plus position, dropped out."""
        tokens = self.looked_up(tape, work)
        places = tape.embedding(work.seq_len, self.positions, self.hidden, counted=False)
        return tape.dropout(tape.add(tokens, places), self.embedding_dropout)

    def write_block(self, tape: Tape, work: Workload, x: Tensor) -> Tensor:
        """GPT2Block.forward."""
        qkv, out, up, down = self.linears()
        joined = self.linear(tape, work, self.write_norm(tape, work, x), qkv, bias=True)
        q, k, v = (tape.view(part) for part in tape.split(joined, 3))
        attended = self.linear(tape, work, self.attend(tape, work, q, k, v), out, bias=True)
        x = tape.add(tape.dropout(attended, self.residual_dropout), x)
        raised = self.linear(tape, work, self.write_norm(tape, work, x), up, bias=True)
        lowered = self.linear(tape, work, self.activated(tape, raised), down, bias=True)
        return tape.add(x, tape.dropout(lowered, self.residual_dropout))

    def write_norm(self, tape: Tape, work: Workload, x: Tensor) -> Tensor:
        """LayerNorm."""
        return tape.layer_norm(x, work.tokens, self.hidden, trainable=self.base_trainable)

    def eager(self, tape: Tape, work: Workload, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Softmax in the type of the scores, or in fp32 under a GPU's autocast."""
        raw = tape.unary(tape.matmul(q, k, self.scores(work)))
        probabilities = tape.cast(tape.softmax(_masked(tape, raw)), v.width)
        dropped = tape.dropout(probabilities, self.attention_dropout)
        return tape.copy(tape.matmul(dropped, v, q.elements))


def _llama(config: Mapping[str, Any]) -> Llama:
    model_type = config["model_type"]
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    kv_heads = size(config, "num_key_value_heads", default=_KV_HEADS.get(model_type, heads))
    check_divides(heads, kv_heads, "num_attention_heads", "num_key_value_heads")
    biases = bool(config.get("attention_bias", False))
    layered = model_type == "mistral" or config.get("use_sliding_window")
    return Llama(
        model_type=model_type,
        hidden=hidden,
        ff=size(config, "intermediate_size"),
        layers=size(config, "num_hidden_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size(config, "head_dim", default=_head_dim(model_type, hidden, heads)),
        vocab=size(config, "vocab_size"),
        activation=str(config.get("hidden_act", "silu")),
        tied=bool(config.get("tie_word_embeddings", False)),
        attention=attention(config),
        attention_dropout=rate(config, "attention_dropout", 0.0),
        element=element(config),
        qkv_bias=biases or model_type == "qwen2",
        out_bias=biases and model_type != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=model_type == "qwen3",
        window=config.get("sliding_window") if layered else None,
    )


_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
"""Defaults of transformers' config classes; Llama's is the number of heads."""


def _head_dim(model_type: str, hidden: int, heads: int) -> int:
    return 128 if model_type == "qwen3" else hidden // heads


def _gpt2(config: Mapping[str, Any]) -> Gpt2:
    hidden = size(config, "n_embd", "hidden_size")
    heads = size(config, "n_head", "num_attention_heads")
    check_divides(hidden, heads, "n_embd", "n_head")
    return Gpt2(
        model_type="gpt2",
        hidden=hidden,
        ff=size(config, "n_inner", default=4 * hidden),
        layers=size(config, "n_layer", "num_hidden_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=size(config, "vocab_size"),
        positions=size(config, "n_positions", "max_position_embeddings", default=1024),
        activation=str(config.get("activation_function", "gelu_new")),
        tied=bool(config.get("tie_word_embeddings", True)),
        attention=attention(config),
        attention_dropout=rate(config, "attn_pdrop", 0.1),
        embedding_dropout=rate(config, "embd_pdrop", 0.1),
        residual_dropout=rate(config, "resid_pdrop", 0.1),
        element=element(config),
    )


FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], ModelSpec]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
}
"""model_type -> reader of its config."""
TRAINED: Mapping[str, frozenset[str]] = {
    "gpt2": frozenset({"GPT2LMHeadModel"}),
    "llama": frozenset({"LlamaForCausalLM"}),
    "mistral": frozenset({"MistralForCausalLM"}),
    "qwen2": frozenset({"Qwen2ForCausalLM"}),
    "qwen3": frozenset({"Qwen3ForCausalLM"}),
}
"""model_type -> classes of transformers that are written down here."""
CLASSES: Mapping[str, Any] = {"Llama": Llama, "Gpt2": Gpt2}
