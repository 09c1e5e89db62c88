"""Backends, session options, and the user's FSDP and DeepSpeed config files.

backends         Options, Hardware, and a Strategy for each backend
session_options  every option of a session, declared once
arguments        how an option is written on a line
config_files     --fsdp-config and --deepspeed-config
accelerate_config  Accelerate's config file, read for --config and written by %nbdist script
"""

from __future__ import annotations

from nbdist.strategies.accelerate_config import (
    load_accelerate_config,
    merge_config_file,
    write_accelerate_config,
    write_deepspeed_config,
)
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
    backend_of,
    canonical_backend,
    merge_configs,
)
from nbdist.strategies.config_files import load_config, micro_batch_size
from nbdist.strategies.option_arguments import Argument
from nbdist.strategies.session_options import ARGUMENTS, SessionOptions

__all__ = [
    "ALIASES",
    "ARGUMENTS",
    "BACKENDS",
    "OFFLOADS",
    "PRECISIONS",
    "REPLICATE_ACROSS",
    "STRATEGIES",
    "Argument",
    "Hardware",
    "Options",
    "SessionOptions",
    "Strategy",
    "backend_of",
    "canonical_backend",
    "load_accelerate_config",
    "load_config",
    "merge_config_file",
    "merge_configs",
    "micro_batch_size",
    "write_accelerate_config",
    "write_deepspeed_config",
]
