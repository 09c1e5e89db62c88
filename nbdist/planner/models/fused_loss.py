"""Losses that compute the logits of a few tokens at a time, from the last hidden states.

TRL 1.16's trainers patch the model's forward (`trl.trainer.utils.add_fused_lm_head`), Liger 0.8
replaces it (`fused_linear_cross_entropy`). Both hold one tile of logits instead of all of them.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from nbdist.planner.models.autograd_tape import FULL_BYTES, TapeNode, TapeTensor

if TYPE_CHECKING:
    from nbdist.planner.model_spec import Workload
    from nbdist.planner.models.autograd_tape import AutogradTape

Loss = Literal["logits", "trl", "liger"]
"""logits: transformers' own, which holds all logits."""
ADVICE = (
    'a fused loss instead of all logits (TRL\'s SFTTrainer with its default loss_type="nll", or'
    " TrainingArguments(use_liger_kernel=True))"
)
"""What to set, in trl 1.16 and transformers 5.23."""
_TILE_TOKENS, _TILE_VOCAB = 4096, 32_768
"""Tile of logits (trl/kernels/chunked_logprob.py, trl/trainer/utils.py)."""
_CPU_FORWARD, _CPU_BACKWARD = 13, 29
"""Bytes per logit of a tile without Triton: torch operations in fp32, one after the other."""


class LossSizes(NamedTuple):
    """Memory of a fused loss, in bytes."""

    forward: int
    """Temporaries of its forward."""
    saved: int
    """Kept for its backward, besides the hidden states."""
    backward: int
    """Temporaries of its backward, besides the gradient of the hidden states."""
    outputs: int
    """What the model returns."""
    copies_input: bool
    """True if it makes its own copy of the hidden states."""


def find_loss(module: Any) -> Loss:
    """Return the loss of a transformers model, by the forward that a library gave it."""
    forward = vars(module).get("forward")
    if forward is None:
        return "logits"
    if "fused_lm_head" in inspect.signature(forward, follow_wrapped=False).parameters:
        return "trl"
    return "liger" if forward.__module__.startswith("liger_kernel.") else "logits"


def sizes(loss: Loss, work: Workload, *, hidden: int, vocab: int, trainable: bool) -> LossSizes:
    """Return the memory of a fused loss over a micro-batch; `trainable`: whether the head is."""
    tokens, width = work.num_tokens, 2 if work.compute != "full" else FULL_BYTES
    head_grad = vocab * hidden if trainable else 0
    if loss == "liger":
        # Liger makes the gradients in the forward, in the dtypes of hidden states and head.
        count = -(-vocab // hidden)
        chunk = min(tokens, 1 << (-(-tokens // count) - 1).bit_length())
        saved = width * (tokens * hidden + head_grad)
        return LossSizes(saved + width * chunk * vocab, saved, 0, FULL_BYTES, copies_input=False)
    tile = min(tokens, _TILE_TOKENS)
    logits = tile * min(vocab, _TILE_VOCAB)
    buffer = width * tile * _TILE_VOCAB
    in_torch = logits if work.kind == "cpu" else 0
    # On a CPU, trl 1.16 multiplies fp32 copies of the tile and its weights (_addmm_fp32).
    copies = FULL_BYTES * (logits + min(vocab, _TILE_VOCAB) * hidden)
    in_backward = max(_CPU_BACKWARD * in_torch, copies if work.kind == "cpu" else 0)
    # Log-normalizer and entropy of each token, and the labels, as fp32 and int64.
    return LossSizes(
        forward=buffer + _CPU_FORWARD * in_torch,
        saved=(2 * FULL_BYTES + 8) * tokens,
        backward=buffer + in_backward + FULL_BYTES * (tokens * hidden + head_grad),
        outputs=(2 * FULL_BYTES + 2) * tokens,
        copies_input=work.batch_size > 1 or work.kind == "cuda",
    )


def record(tape: AutogradTape, x: TapeTensor, sizes: LossSizes, *, weights: int) -> TapeTensor:
    """Record a fused loss of hidden states; `weights`: elements of the head's gradient."""
    x = tape.unary(x) if sizes.copies_input else x
    temporary, saved = TapeTensor(sizes.forward, 1), TapeTensor(sizes.saved, 1)
    out = TapeTensor(sizes.outputs, 1, needs_grad=True)
    node = TapeNode(
        out,
        (x, temporary, saved),
        keeps=(x, saved),
        sends=(x,),
        weights=weights,
        workspace=sizes.backward,
    )
    return tape.add_node(node)
