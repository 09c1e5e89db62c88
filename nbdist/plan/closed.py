"""Closed forms of known architectures: what transformers' own code keeps and makes, exactly.

From a config's fields alone; no torch. A family is a `Decoder` (or an encoder, see
`closed_encoder`) whose operations are written down as transformers 5.23 runs them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist.errors import PlanError
from nbdist.plan.decoder import Attention, Decoder, Weight
from nbdist.plan.tape import FULL, HALF, Tape, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.plan.spec import ModelSpec, Workload

_KEEPS_INPUT = frozenset({"silu", "swish", "gelu", "gelu_pytorch_tanh", "quick_gelu"})
"""Activations that are one operation which saves its input."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
        """Cosines and sines; the mask where one is made and kept for recomputation."""
        rotary = 2 * work.seq_len * self.head_dim * tape.width
        masked = self.attention == "eager" or self._masked(work)
        return rotary + (work.seq_len**2 * tape.width if masked else 0)

    def write_embedding(self, tape: Tape, work: Workload) -> Tensor:
        """Look the tokens up."""
        return tape.embedding(
            work.tokens, self.vocab, self.hidden, counted=not self.tied and self.base_trainable
        )

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
        scores = work.batch_size * self.heads * work.seq_len**2
        if self.heads != self.kv_heads:
            k, v = (tape.copy(t, self.heads // self.kv_heads) for t in (k, v))
        raw = tape.unary(tape.matmul(q, k, scores))
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
        return tape.rms_norm(
            x, work.tokens * heads, self.head_dim, trainable=self.base_trainable
        )

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


@dataclass(frozen=True, slots=True, kw_only=True)
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
        """Position numbers; the mask where one is made."""
        mask = work.seq_len**2 * tape.width if self.attention == "eager" else 0
        return 8 * work.seq_len + mask

    def write_embedding(self, tape: Tape, work: Workload) -> Tensor:
        """Token plus position, dropped out."""
        trained = self.base_trainable
        tokens = tape.embedding(
            work.tokens, self.vocab, self.hidden, counted=trained and not self.tied
        )
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
        lowered = self.linear(tape, work, self._activated(tape, raised), down, bias=True)
        return tape.add(x, tape.dropout(lowered, self.residual_dropout))

    def write_norm(self, tape: Tape, work: Workload, x: Tensor) -> Tensor:
        """LayerNorm."""
        return tape.layer_norm(x, work.tokens, self.hidden, trainable=self.base_trainable)

    def eager(self, tape: Tape, work: Workload, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Softmax in the type of the scores, or in fp32 under a GPU's autocast."""
        scores = work.batch_size * self.heads * work.seq_len**2
        raw = tape.unary(tape.matmul(q, k, scores))
        probabilities = tape.cast(tape.softmax(_masked(tape, raw)), v.width)
        dropped = tape.dropout(probabilities, self.attention_dropout)
        return tape.copy(tape.matmul(dropped, v, q.elements))

    def _activated(self, tape: Tape, x: Tensor) -> Tensor:
        """Activation; "gelu_new" is written out in single operations."""
        if self.activation != "gelu_new":
            return tape.unary(x, keeps="input" if self.activation in _KEEPS_INPUT else "output")
        half = tape.unary(x)
        cubed = tape.unary(tape.power(x))
        bent = tape.unary(tape.unary(tape.add(x, cubed)), keeps="output")
        return tape.multiply(half, tape.unary(bent))


# -- from a config ---------------------------------------------------------------------------

def knows(config: Mapping[str, Any]) -> bool:
    """Whether there is a closed form for a transformers config."""
    return config.get("model_type") in FAMILIES


def from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Return the closed form of a transformers config.

    Raises:
        PlanError: another architecture, or a field that is missing or absurd.
    """
    if not knows(config):
        message = (
            f"model_type {config.get('model_type')!r} has no closed form; these have one: "
            f"{', '.join(sorted(FAMILIES))}."
        )
        raise PlanError(message)
    return FAMILIES[config["model_type"]](config)


def from_json(fields: Mapping[str, Any]) -> ModelSpec:
    """Rebuild a spec from its `to_json()`."""
    return _CLASSES[fields["family"]].from_json(fields)


def size(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """A whole number above zero under the first of the names that the config has.

    Raises:
        PlanError: none of the names, or no such number.
    """
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if type(value) is not int or value < 1:
        message = (
            f"the config's {names[0]} is {value!r}; it must be a whole number above 0: "
            "complete the config."
        )
        raise PlanError(message)
    return value


def rate(config: Mapping[str, Any], name: str, default: float) -> float:
    """A dropout rate.

    Raises:
        PlanError: not between 0 and 1.
    """
    value = config.get(name, default)
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        message = f"the config's {name} is {value!r}; a dropout rate is between 0 and 1."
        raise PlanError(message)
    return float(value)


_ELEMENTS = {"float32": FULL, "float16": HALF, "bfloat16": HALF, "None": FULL}


def element(config: Mapping[str, Any]) -> int:
    """Bytes of a parameter in the type that the config names; fp32 where it names none.

    Raises:
        PlanError: a type that is not trained in.
    """
    given = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    if given not in _ELEMENTS:
        allowed = ", ".join(name for name in _ELEMENTS if name != "None")
        message = f"the config's dtype is {given!r}; known ones are {allowed}."
        raise PlanError(message)
    return _ELEMENTS[given]


def attention(config: Mapping[str, Any]) -> Attention:
    """Which attention the config asks for: eager by name, sdpa otherwise."""
    return "eager" if config.get("_attn_implementation") == "eager" else "sdpa"


def _llama(config: Mapping[str, Any]) -> Llama:
    model_type = config["model_type"]
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    kv_heads = size(config, "num_key_value_heads", default=_KV_HEADS.get(model_type, heads))
    _check_divides(heads, kv_heads, "num_attention_heads", "num_key_value_heads")
    biases = bool(config.get("attention_bias", False))
    layered = model_type == "mistral" or config.get("use_sliding_window")
    return Llama(
        model_type=model_type,
        hidden=hidden,
        ff=size(config, "intermediate_size"),
        layers=size(config, "num_hidden_layers"),
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


def _check_divides(whole: int, part: int, whole_name: str, part_name: str) -> None:
    if whole % part:
        message = (
            f"{whole_name} {whole} is not a multiple of {part_name} {part}; "
            "attention needs heads in equal shares: correct the config."
        )
        raise PlanError(message)


def _gpt2(config: Mapping[str, Any]) -> Gpt2:
    hidden = size(config, "n_embd", "hidden_size")
    heads = size(config, "n_head", "num_attention_heads")
    _check_divides(hidden, heads, "n_embd", "n_head")
    return Gpt2(
        model_type="gpt2",
        hidden=hidden,
        ff=size(config, "n_inner", default=4 * hidden),
        layers=size(config, "n_layer", "num_hidden_layers"),
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
_CLASSES: Mapping[str, Any] = {"Llama": Llama, "Gpt2": Gpt2}


# -- from a size -----------------------------------------------------------------------------

_PUBLISHED: Mapping[str, tuple[int, int, int, int, int, int, bool]] = {
    # hidden, ff, layers, heads, kv heads, vocab, tied
    "0.5b": (896, 4864, 24, 14, 2, 151_936, True),  # Qwen2-0.5B
    "1b": (2048, 8192, 16, 32, 8, 128_256, True),  # Llama-3.2-1B
    "1.1b": (2048, 5632, 22, 32, 4, 32_000, False),  # TinyLlama-1.1B
    "1.5b": (1536, 8960, 28, 12, 2, 151_936, True),  # Qwen2-1.5B
    "3b": (3072, 8192, 28, 24, 8, 128_256, True),  # Llama-3.2-3B
    "7b": (4096, 11_008, 32, 32, 32, 32_000, False),  # Llama-2-7B
    "8b": (4096, 14_336, 32, 32, 8, 128_256, False),  # Llama-3-8B
    "13b": (5120, 13_824, 40, 40, 40, 32_000, False),  # Llama-2-13B
    "34b": (8192, 22_016, 48, 64, 8, 32_000, False),  # Code Llama 34B
    "65b": (8192, 22_016, 80, 64, 64, 32_000, False),  # LLaMA-65B
    "70b": (8192, 28_672, 80, 64, 8, 128_256, False),  # Llama-3-70B
    "405b": (16_384, 53_248, 126, 128, 8, 128_256, False),  # Llama-3.1-405B
}
_SCALE = {"m": 1e6, "b": 1e9}
_LARGEST = 10_000e9
_HEAD_DIM = 128
_VOCAB = 32_000


def with_size(text: str) -> ModelSpec:
    """Return a Llama of about so many parameters: "7b", "1.3b", "350m".

    Published shapes where one has that size; else width 128 times depth (Kaplan et al. 2020
    find loss flat around it), Llama-2's MLP and vocabulary.

    Raises:
        PlanError: not a size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([bm])", text.strip().lower())
    count = float(found[1]) * _SCALE[found[2]] if found else 0
    if not 1e6 <= count <= _LARGEST:
        message = f'size {text!r} is not known; write one between "1m" and "10000b", as "7b".'
        raise PlanError(message)
    shape = _PUBLISHED.get(f"{count / 1e9:g}b") or _shape(count)
    hidden, ff, layers, heads, kv_heads, vocab, tied = shape
    return Llama(
        model_type="llama", hidden=hidden, ff=ff, layers=layers, heads=heads, kv_heads=kv_heads,
        head_dim=hidden // heads, vocab=vocab, activation="silu", tied=tied,
    )


def _shape(count: float) -> tuple[int, int, int, int, int, int, bool]:
    """A shape with the closest number of parameters, near width = 128 depth."""
    ideal = (count * 128 / 12) ** (1 / 3)
    step = 128 if ideal > 1024 else 64  # noqa: PLR2004
    centre = max(1, round(ideal / step))
    widths = [step * one for one in range(max(1, centre - 3), centre + 4)]
    return min((_at_width(count, width) for width in widths), key=lambda s: abs(_count(s) - count))


def _at_width(count: float, hidden: int) -> tuple[int, int, int, int, int, int, bool]:
    ff = 64 * math.ceil(hidden * 8 / 3 / 64)
    heads = max(1, hidden // _HEAD_DIM) if hidden % _HEAD_DIM == 0 else hidden // 64
    tied = 2 * _VOCAB * hidden > count / 4
    tables = (1 if tied else 2) * _VOCAB * hidden
    layers = max(1, round((count - tables) / (4 * hidden**2 + 3 * hidden * ff)))
    return hidden, ff, layers, heads, heads, _VOCAB, tied


def _count(shape: tuple[int, int, int, int, int, int, bool]) -> int:
    hidden, ff, layers, _, _, vocab, tied = shape
    block = 4 * hidden**2 + 3 * hidden * ff + 2 * hidden
    return layers * block + (1 if tied else 2) * vocab * hidden + hidden
