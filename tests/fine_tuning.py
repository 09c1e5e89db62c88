"""A tiny instruction model and data sets for the trainers of TRL and PEFT, made without a download.

Ranks import this module by name, since they have the kernel's `sys.path`.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

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
        tied=False,  # peft warns about an adapter of a tied head
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


ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4},
    "dora": {"r": 4, "use_dora": True},
    "modules_to_save": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "prompt": {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"},
}
"""Name of an adapter -> arguments of its peft config."""


def sft_trainer(
    folder: str, output: str, adapter: str, quantization_config: Any = None, **arguments: Any
) -> Any:
    """Return an SFTTrainer in fp32 with an adapter, or of the full model if the name is ""."""
    from peft import LoraConfig, PromptTuningConfig
    from trl import SFTConfig, SFTTrainer

    config = PromptTuningConfig if adapter == "prompt" else LoraConfig
    defaults = {
        "max_steps": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,
        "use_cpu": True,
    }
    return SFTTrainer(
        model=folder,
        args=SFTConfig(output_dir=output, **(defaults | arguments)),
        train_dataset=conversations(),
        quantization_config=quantization_config,
        peft_config=config(**ADAPTERS[adapter]) if adapter else None,
    )


if __name__ == "__main__":  # a script in one process, without nbdist
    given = json.loads(sys.argv[1])
    trainer = sft_trainer(**given)
    trainer.train()
    trainer.save_model()
