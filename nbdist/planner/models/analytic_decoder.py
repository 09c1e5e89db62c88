"""Analytic specs of Llama-like and GPT-2-like models, following transformers 5.23."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist.planner.models.autograd_tape import FULL_BYTES, AutogradTape, TapeTensor
from nbdist.planner.models.config import (
    MAX_LAYERS,
    attention_implementation,
    check_divides,
    param_dtype_bytes,
    read_dropout_rate,
    read_size,
)
from nbdist.planner.models.decoder import DecoderSpec
from nbdist.planner.models.transformer import WeightShape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.planner.model_spec import ModelSpec, Workload


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

    def extra_embeddings(self) -> list[WeightShape]:
        """Return no weights: positions are rotary."""
        return []

    def linear_shapes(self) -> list[tuple[int, int]]:
        """Return the shapes of q, k, v, o, gate, up, down."""
        h, ff = self.hidden, self.ff
        heads = [
            (self.num_q_features, h),
            (self.num_kv_features, h),
            (self.num_kv_features, h),
            (h, self.num_q_features),
        ]
        return [*heads, (ff, h), (ff, h), (h, ff)]

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
        return rotary + self.attention_mask_bytes(tape, work, made=self._masked(work))

    def record_embedding(self, tape: AutogradTape, work: Workload) -> TapeTensor:
        """Record the embedding lookup."""
        return self.embed_tokens(tape, work)

    def record_block(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """Record LlamaDecoderLayer.forward."""
        attended = self._attention(tape, work, self.record_norm(tape, work, x))
        x = tape.add(x, attended)
        return tape.add(x, self._mlp(tape, work, self.record_norm(tape, work, x)))

    def record_norm(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """Record an RMSNorm."""
        return tape.rms_norm(x, work.num_tokens, self.hidden, trainable=self.has_trainable_base)

    def record_eager_attention(
        self, tape: AutogradTape, work: Workload, q: TapeTensor, k: TapeTensor, v: TapeTensor
    ) -> TapeTensor:
        """Record attention with scores in the compute dtype and softmax in fp32."""
        if self.heads != self.kv_heads:
            k, v = (tape.copy(t, self.heads // self.kv_heads) for t in (k, v))
        raw = tape.unary(tape.matmul(q, k, self.num_attention_scores(work)))
        probabilities = tape.softmax(tape.cast(_masked(tape, raw), FULL_BYTES))
        probabilities = tape.dropout(tape.cast(probabilities, q.width), self.attention_dropout)
        return tape.copy(tape.matmul(probabilities, v, q.elements))

    def _masked(self, work: Workload) -> bool:
        """True if samples are longer than the sliding window, which needs an explicit mask."""
        return self.window is not None and work.seq_len > self.window

    def _attention(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        shapes = self.linear_shapes()
        q, k, v = (self.record_linear(tape, work, x, s, bias=self.qkv_bias) for s in shapes[:3])
        if self.qk_norm:
            q, k = (self._head_norm(tape, work, t) for t in (q, k))
        q, k = (_rotated(tape, tape.view(t)) for t in (q, k))
        if self._masked(work) and self.attention == "sdpa":
            k, v = (tape.copy(t, self.heads // self.kv_heads) for t in (k, v))
            tape.save_for_backward(TapeTensor(work.seq_len**2, q.width))
        out = self.record_attention(tape, work, q, k, v)
        return self.record_linear(tape, work, out, shapes[3], bias=self.out_bias)

    def _head_norm(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        heads = x.elements // self.head_dim // work.num_tokens
        return tape.rms_norm(
            x, work.num_tokens * heads, self.head_dim, trainable=self.has_trainable_base
        )

    def _mlp(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        gate, up, down = self.linear_shapes()[4:]
        opened = tape.unary(
            self.record_linear(tape, work, x, gate, bias=self.mlp_bias), keeps="input"
        )
        raised = self.record_linear(tape, work, x, up, bias=self.mlp_bias)
        return self.record_linear(
            tape, work, tape.multiply(opened, raised), down, bias=self.mlp_bias
        )


def _masked(tape: AutogradTape, scores: TapeTensor) -> TapeTensor:
    """Scores plus the mask, which has the embedding's dtype."""
    return tape.unary(scores, width=tape.element_bytes)


def _rotated(tape: AutogradTape, x: TapeTensor) -> TapeTensor:
    """`x * cos + rotate_half(x) * sin`; cosines have the residual stream's dtype."""
    straight = tape.unary(x, width=tape.element_bytes)
    crossed = tape.unary(tape.unary(x), width=tape.element_bytes)
    return tape.add(straight, crossed)


@dataclass(frozen=True, kw_only=True)
class Gpt2(DecoderSpec):
    """GPT-2: layer norms, learned positions, one projection for q, k and v, dropout."""

    positions: int = 1024
    embedding_dropout: float = 0.1
    residual_dropout: float = 0.1

    def extra_embeddings(self) -> list[WeightShape]:
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
        position_embedding = tape.embedding(
            work.seq_len, self.positions, self.hidden, counted=False
        )
        return tape.dropout(tape.add(tokens, position_embedding), self.embedding_dropout)

    def record_block(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """Record GPT2Block.forward."""
        qkv, out, up, down = self.linear_shapes()
        joined = self.record_linear(tape, work, self.record_norm(tape, work, x), qkv, bias=True)
        q, k, v = (tape.view(part) for part in tape.split(joined, 3))
        attended = self.record_linear(
            tape, work, self.record_attention(tape, work, q, k, v), out, bias=True
        )
        x = tape.add(tape.dropout(attended, self.residual_dropout), x)
        raised = self.record_linear(tape, work, self.record_norm(tape, work, x), up, bias=True)
        lowered = self.record_linear(
            tape, work, self.record_activation(tape, raised), down, bias=True
        )
        return tape.add(x, tape.dropout(lowered, self.residual_dropout))

    def record_norm(self, tape: AutogradTape, work: Workload, x: TapeTensor) -> TapeTensor:
        """Record a LayerNorm."""
        return tape.layer_norm(x, work.num_tokens, self.hidden, trainable=self.has_trainable_base)

    def record_eager_attention(
        self, tape: AutogradTape, work: Workload, q: TapeTensor, k: TapeTensor, v: TapeTensor
    ) -> TapeTensor:
        """Record attention with softmax in the scores' dtype, or in fp32 under a GPU's autocast."""
        raw = tape.unary(tape.matmul(q, k, self.num_attention_scores(work)))
        probabilities = tape.cast(tape.softmax(_masked(tape, raw)), v.width)
        dropped = tape.dropout(probabilities, self.attention_dropout)
        return tape.copy(tape.matmul(dropped, v, q.elements))


def _llama(config: Mapping[str, Any]) -> Llama:
    model_type = config["model_type"]
    hidden, heads = read_size(config, "hidden_size"), read_size(config, "num_attention_heads")
    kv_heads = read_size(config, "num_key_value_heads", default=_KV_HEADS.get(model_type, heads))
    check_divides(heads, kv_heads, "num_attention_heads", "num_key_value_heads")
    biases = bool(config.get("attention_bias", False))
    layered = model_type == "mistral" or config.get("use_sliding_window")
    return Llama(
        model_type=model_type,
        hidden=hidden,
        ff=read_size(config, "intermediate_size"),
        layers=read_size(config, "num_hidden_layers", most=MAX_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=read_size(config, "head_dim", default=_head_dim(model_type, hidden, heads)),
        vocab=read_size(config, "vocab_size"),
        activation=str(config.get("hidden_act", "silu")),
        tied=bool(config.get("tie_word_embeddings", False)),
        attention=attention_implementation(config),
        attention_dropout=read_dropout_rate(config, "attention_dropout", 0.0),
        element=param_dtype_bytes(config),
        qkv_bias=biases or model_type == "qwen2",
        out_bias=biases and model_type != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=model_type == "qwen3",
        window=config.get("sliding_window") if layered else None,
    )


_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
"""Defaults of transformers' config classes; Llama's default is the number of heads."""


def _head_dim(model_type: str, hidden: int, heads: int) -> int:
    return 128 if model_type == "qwen3" else hidden // heads


def _gpt2(config: Mapping[str, Any]) -> Gpt2:
    hidden = read_size(config, "n_embd", "hidden_size")
    heads = read_size(config, "n_head", "num_attention_heads")
    check_divides(hidden, heads, "n_embd", "n_head")
    return Gpt2(
        model_type="gpt2",
        hidden=hidden,
        ff=read_size(config, "n_inner", default=4 * hidden),
        layers=read_size(config, "n_layer", "num_hidden_layers", most=MAX_LAYERS),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=read_size(config, "vocab_size"),
        positions=read_size(config, "n_positions", "max_position_embeddings", default=1024),
        activation=str(config.get("activation_function", "gelu_new")),
        tied=bool(config.get("tie_word_embeddings", True)),
        attention=attention_implementation(config),
        attention_dropout=read_dropout_rate(config, "attn_pdrop", 0.1),
        embedding_dropout=read_dropout_rate(config, "embd_pdrop", 0.1),
        residual_dropout=read_dropout_rate(config, "resid_pdrop", 0.1),
        element=param_dtype_bytes(config),
    )


SPEC_BUILDERS: Mapping[str, Callable[[Mapping[str, Any]], ModelSpec]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
}
"""model_type -> function that builds a spec from its config."""
SUPPORTED_MODEL_CLASSES: Mapping[str, frozenset[str]] = {
    "gpt2": frozenset({"GPT2LMHeadModel"}),
    "llama": frozenset({"LlamaForCausalLM"}),
    "mistral": frozenset({"MistralForCausalLM"}),
    "qwen2": frozenset({"Qwen2ForCausalLM"}),
    "qwen3": frozenset({"Qwen3ForCausalLM"}),
}
"""model_type -> classes of transformers that have an analytic spec."""
SPEC_CLASSES: Mapping[str, Any] = {"Llama": Llama, "Gpt2": Gpt2}
