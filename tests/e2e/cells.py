"""Cells that several modules of tests run: models to prepare, and a Trainer."""

from __future__ import annotations

import textwrap

MODELS = textwrap.dedent(
    """
    import copy
    from tests.models import bert, gpt2, llama, t5
    from torch import nn
    from transformers import (
        BartConfig, BartForConditionalGeneration, MixtralConfig, MixtralForCausalLM,
        PreTrainedTokenizerFast, ResNetConfig, ResNetForImageClassification,
    )

    SIZES = dict(vocab_size=211, bos_token_id=0, eos_token_id=0)
    NARROW = dict(num_hidden_layers=2, num_attention_heads=2, hidden_size=36, intermediate_size=70)

    def untied():
        return llama(tied=False)

    def mixtral():
        return MixtralForCausalLM(MixtralConfig(
            num_key_value_heads=1, num_local_experts=4, max_position_embeddings=24, **SIZES,
            **NARROW))

    def resnet():
        return ResNetForImageClassification(ResNetConfig(
            embedding_size=7, hidden_sizes=[7, 14], depths=[1, 1], layer_type="basic"))

    class Plain(nn.Module):
        '''Of no library: tied, with a buffer of each kind.'''

        def __init__(self):
            super().__init__()
            self.first = nn.Linear(7, 5)
            self.second = nn.Linear(7, 5)
            self.second.weight = self.first.weight
            self.register_buffer("seen", torch.arange(3.0))
            self.register_buffer("count", torch.tensor(7))
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

        def forward(self, x):
            return self.first(x) + self.second(x)

    def build(make, **options):
        torch.manual_seed(3)
        bare = make()
        before = copy.deepcopy(bare)
        optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3)
        return before, *accelerator.prepare(bare, optimizer)

    def step():
        loss = model(input_ids=torch.arange(24)[None], labels=torch.arange(24)[None]).loss
        accelerator.backward(loss); optimizer.step(); optimizer.zero_grad()
    """
)
TRAINER = textwrap.dedent(
    """
    import nbdist, tempfile
    from transformers import Trainer, TrainingArguments
    rows = [{{"input_ids": row, "labels": row}} for row in tokens]
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps={steps},
        logging_steps=1, learning_rate=3e-3, report_to="none", save_strategy="no", seed=3,
        disable_tqdm=True, {arguments}
    )
    class OwnTrainer(Trainer):
        pass
    trainer = OwnTrainer(model=build(), args=args, train_dataset=rows)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    (type(trainer.model_wrapped).__name__, losses)
    """
)
