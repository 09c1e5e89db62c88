"""The backends in one table, the options of a session, and users' own config files; pure.

table   Options, Hardware, and a Strategy for each backend
files   --fsdp-config and --deepspeed-config
"""

from __future__ import annotations

from nbdist.strategies.backends import (
    ALIASES,
    BACKENDS,
    OFFLOADS,
    PRECISIONS,
    REPLICATIONS,
    STRATEGIES,
    Hardware,
    Options,
    Strategy,
    canonical,
)
from nbdist.strategies.config_files import load_config

__all__ = [
    "ALIASES",
    "BACKENDS",
    "OFFLOADS",
    "PRECISIONS",
    "REPLICATIONS",
    "STRATEGIES",
    "Hardware",
    "Options",
    "Strategy",
    "canonical",
    "load_config",
]
