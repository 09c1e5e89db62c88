"""Backends, session options, and the user's FSDP and DeepSpeed config files.

backends       Options, Hardware, and a Strategy for each backend
config_files   --fsdp-config and --deepspeed-config
"""

from __future__ import annotations

from nbdist.strategies.backends import (
    ALIASES,
    BACKENDS,
    OFFLOADS,
    PRECISIONS,
    REPLICATE_ACROSS,
    STRATEGIES,
    Hardware,
    Options,
    Strategy,
    canonical_backend,
)
from nbdist.strategies.config_files import load_config

__all__ = [
    "ALIASES",
    "BACKENDS",
    "OFFLOADS",
    "PRECISIONS",
    "REPLICATE_ACROSS",
    "STRATEGIES",
    "Hardware",
    "Options",
    "Strategy",
    "canonical_backend",
    "load_config",
]
