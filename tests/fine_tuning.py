"""A tiny instruction model and data sets for the trainers of TRL and PEFT, made without a download.

Ranks import this module by name, since they have the kernel's `sys.path`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, set_seed

from tests.models import llama

if TYPE_CHECKING:
    from pathlib import Path

NUM_ROWS = 32
WORDS = (
    ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "user", "assistant", "what", "is", "plus"]
    + ["good", "bad"]
    + [str(number) for number in range(40)]
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|> ' + message['role'] + ' ' }}"
    "{{ message['content'] + ' <|im_end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words, with a chat template."""
    words = {word: index for index, word in enumerate(WORDS)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106 - a token of text
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<|im_end|>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=CHAT_TEMPLATE, model_max_length=64, **special
    )


def save_model(folder: Path) -> str:
    """Save a Llama of 2 blocks and its tokenizer, as `from_pretrained` loads them."""
    set_seed(3)
    llama(
        vocab_size=len(WORDS),
        hidden_size=32,
        max_position_embeddings=64,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=0,
    ).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def _question(row: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"what is {row % 7} plus {row % 5}"}]


def _answer(number: int) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": str(number)}]


def conversations() -> Dataset:
    """Return rows for SFTTrainer."""
    rows = range(NUM_ROWS)
    return Dataset.from_list(
        [{"messages": _question(row) + _answer(row % 7 + row % 5)} for row in rows]
    )


def preferences() -> Dataset:
    """Return rows for DPOTrainer and RewardTrainer."""
    return Dataset.from_list(
        [
            {
                "prompt": _question(row),
                "chosen": _answer(row % 7 + row % 5),
                "rejected": _answer(39 - row % 3),
            }
            for row in range(NUM_ROWS)
        ]
    )


def prompts() -> Dataset:
    """Return rows for GRPOTrainer."""
    return Dataset.from_list(
        [{"prompt": _question(row), "sum": row % 7 + row % 5} for row in range(NUM_ROWS)]
    )
