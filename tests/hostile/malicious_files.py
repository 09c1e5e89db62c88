"""Files of a stranger, each of which tries to make a folder `marker`; made where they are needed.

None is committed: what a scanner or a person finds in the repository is this script.
"""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from tests.doubles.foreign_checkpoints import Bomb

if TYPE_CHECKING:
    from pathlib import Path


def custom_checkpoint(folder: Path, marker: Path) -> None:
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    (folder / "custom_checkpoint_0.pkl").write_bytes(pickle.dumps(Bomb(marker)))
    (folder / "scheduler.bin").write_bytes(pickle.dumps(Bomb(marker)))
    (folder / "random_states_0.pkl").write_bytes(pickle.dumps(Bomb(marker)))


# -- configs

YAML = """
fsdp_config: !!python/object/apply:os.mkdir ["{marker}"]
"""
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 9)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
MODELING = """
import os
os.mkdir({marker!r})
class Config: pass
class Model: pass
"""


def remote_code(folder: Path, marker: Path, model_type: str) -> None:
    """Write a model's folder whose config names code beside it."""
    config = {
        "model_type": model_type,
        "architectures": ["EvilForCausalLM"],
        "auto_map": {"AutoConfig": "modeling_evil.Config", "AutoModel": "modeling_evil.Model"},
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100,
        "max_position_embeddings": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("modeling_evil.py", "configuration_evil.py"):
        (folder / name).write_text(MODELING.format(marker=str(marker)))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
