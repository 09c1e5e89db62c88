"""Tiny models that tests train, in the test process and on ranks.

Sizes are odd, so that every engine has to pad. Ranks import this module by name, since they have
the kernel's `sys.path`.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB_SIZE = 211
LENGTH = 24


def gpt2(dropout: float = 0.0, **options: Any) -> GPT2LMHeadModel:
    """Return a GPT-2 of 2 blocks with tied embeddings."""
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 45,
        "n_head": 3,
        "n_layer": 2,
        "n_positions": LENGTH,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return GPT2LMHeadModel(GPT2Config(**(sizes | rates | options)))


def llama(*, tied: bool = True, **options: Any) -> LlamaForCausalLM:
    """Return a Llama of 2 blocks with grouped-query attention."""
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 36,
        "intermediate_size": 70,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": LENGTH,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=tied, **(sizes | options)))


def bert() -> BertForMaskedLM:
    """Return a BERT of 2 blocks without dropout."""
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=36,
        intermediate_size=70,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    return BertForMaskedLM(config)


def t5() -> T5ForConditionalGeneration:
    """Return a T5 of 2 + 2 blocks without dropout."""
    config = T5Config(
        vocab_size=VOCAB_SIZE,
        d_model=36,
        d_kv=18,
        d_ff=70,
        num_heads=2,
        num_layers=2,
        dropout_rate=0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return T5ForConditionalGeneration(config)
