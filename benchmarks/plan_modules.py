"""Modules and batches for the planner's benchmark that are not causal language models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import ImageClassifierOutput


class PlainCnn(nn.Module):
    """Convolutions, batch norms and two linear layers; nothing in it repeats."""

    def __init__(self, widths: tuple[int, ...], picture: int, classes: int, hidden: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in zip((3, *widths), widths, strict=False):
            layers += [
                nn.Conv2d(before, after, 3, padding=1),
                nn.GroupNorm(8, after),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
        self.features = nn.Sequential(*layers)
        side = picture >> len(widths)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(widths[-1] * side**2, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> ImageClassifierOutput:
        # DeepSpeed leaves inputs as they are.
        logits = self.classifier(self.features(pixel_values.to(self.features[0].weight.dtype)))
        loss = nn.functional.cross_entropy(logits.float(), labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


def own(config: dict[str, Any]) -> nn.Module | None:
    """The module that a config of the benchmark's own kind means."""
    if config["model_type"] != "plain_cnn":
        return None
    return PlainCnn(
        tuple(config["widths"]), config["image_size"], config["num_labels"], config["hidden_size"]
    )


def batch_for(config: dict[str, Any], model: Any, batch_size: int, seq_len: int) -> dict[str, Any]:
    """Pictures or tokens, and labels."""
    picture = config.get("image_size") or getattr(getattr(model, "config", None), "image_size", 0)
    if picture:
        pixels = torch.zeros(batch_size, 3, picture, picture)
        return {"pixel_values": pixels, "labels": torch.zeros(batch_size, dtype=torch.long)}
    ids = torch.randint(0, model.config.vocab_size, (batch_size, seq_len))
    return {"input_ids": ids, "labels": ids}
