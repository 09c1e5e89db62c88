"""The request of a plan, and its rows: memory and speed of each strategy."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nbdist import strategies
from nbdist.planner.prediction_errors import UNMEASURED, Margin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.planner.cluster_spec import ClusterSpec
    from nbdist.planner.model_spec import ModelSpec
    from nbdist.planner.optimizers import OptimizerSpec
    from nbdist.planner.step_time import StepCost
    from nbdist.strategies import Options

OFFLOAD_TARGETS = ("none", "cpu", "nvme:PATH")
"""Offload targets that are searched unless the user fixed one."""
_CONFIGS = ("fsdp_config", "deepspeed_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """Input of a plan: a model, a cluster, and the options that the user fixed."""

    model: ModelSpec
    cluster: ClusterSpec
    """One device per rank; the least free memory is the limit."""
    batch_sizes: tuple[int, ...]
    """Samples per micro-batch and rank."""
    seq_len: int
    """Tokens per sample."""
    precision: str
    """One of strategies.PRECISIONS."""
    optimizer: OptimizerSpec
    fixed_options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `strategies.Options` fixed by the user; the rest is searched."""
    keep_outputs: bool = True
    """True if the training loop holds the model's output from one micro-batch to the next."""
    offload_candidates: tuple[str, ...] = OFFLOAD_TARGETS
    """Offload targets to search if `fixed_options` names none."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user: assumptions, limiting devices, unsupported precision."""
        device = self.cluster.smallest_device
        configs = {name: self.fixed_options.get(name) for name in _CONFIGS}
        unplanned = strategies.Options.from_fields(configs).unplanned_note
        known = (*self.model.notes, *self.cluster.notes, *([f"{unplanned}."] if unplanned else ()))
        config = configs["deepspeed_config"] or {}
        if {"train_batch_size", "train_micro_batch_size_per_gpu"} & config.keys():
            accumulate = self.fixed_options.get("accumulate", 1)
            filed = strategies.micro_batch_size(config, accumulate, self.world_size) or '"auto"'
            sizes = ", ".join(map(str, self.batch_sizes))
            sentence = f"Planned with batch_size {sizes}; the deepspeed_config has {filed}, and a"
            known = (*known, f"{sentence} session takes your DataLoader's.")
        if self.cluster.kind == "cpu" or self.precision in {"no", *device.flops}:
            return known
        supported = ", ".join(sorted({"fp16", "bf16", "fp8"} & set(device.flops)))
        lacking = (
            f"{device.name} does not support {self.precision}, so speeds are those of fp32. It"
            f" supports {supported}."
        )
        return (*known, lacking)

    @property
    def world_size(self) -> int:
        """Number of ranks, one per device."""
        return self.cluster.world_size


def hardware_for_cluster(cluster: ClusterSpec) -> strategies.Hardware:
    """Return the hardware that options are checked against: fully capable GPUs on the nodes."""
    return strategies.Hardware(
        kind="cuda",
        bf16=True,
        fp8=True,
        world_size=cluster.world_size,
        nodes=cluster.num_nodes,
        deepspeed=cluster.has_deepspeed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One strategy with its options at one micro-batch. Bytes are those of the fullest rank."""

    options: Options
    batch_size: int
    memory: Mapping[str, int] = field(default_factory=dict)
    """Device bytes by part; "context" and "margin" are not tensors."""
    allocated_bytes: int = 0
    """Peak of all tensors."""
    device_bytes: int = 0
    """Peak of the device: tensors, allocator margin, context and communicator."""
    host: Mapping[str, int] = field(default_factory=dict)
    """Host memory of one rank in bytes, by part."""
    host_bytes: int = 0
    load_bytes: int = 0
    """Host memory of all ranks of one node while they load the model, in the dtype of the load."""
    nvme_bytes: int = 0
    output_bytes: int = 0
    """Bytes of the model's output that the loop keeps from one micro-batch to the next."""
    peak_moment: str = ""
    """When the peak occurs: "loss", "backward of block 3", "optimizer step"."""
    fits: bool = False
    learned: str = ""
    """Date of the latest memory calibration on this machine; "" for the defaults."""
    margin: Margin = UNMEASURED
    """Shares of `device_bytes` that must stay free in addition."""
    cost: StepCost | None = None
    """None for a row that its backend refuses."""
    why: str = ""
    """Why this row was chosen or not."""

    @property
    def backend(self) -> str:
        """Canonical name of the backend."""
        return self.options.backend

    @property
    def step_time_s(self) -> float:
        """Seconds per optimizer step."""
        return self.cost.step_time_s if self.cost else float("inf")

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over all ranks; samples for a model without tokens."""
        return self.cost.tokens_per_s if self.cost else 0.0

    @property
    def bound(self) -> str:
        """The limiting resource: compute, communication, offload or optimizer."""
        return self.cost.bound if self.cost else ""

    @property
    def variant(self) -> str:
        """Backend and options in short: "zero3, offload cpu, activation checkpointing"."""
        return replace(self.options, precision=None, accumulate=1, clip=None).describe()

    @property
    def command(self) -> str:
        """The magic line that starts a session with these options."""
        options = self.options
        words = ["%%distribute --backend", options.backend]
        words += ["--offload", options.offload] if options.offload != "none" else []
        words += ["--offload-params"] if options.offload_params else []
        words += ["--activation-checkpointing"] if options.activation_checkpointing else []
        across = options.replicate_across
        words += ["--replicate-across", across] if across != "none" else []
        words += ["--accumulate", str(options.accumulate)] if options.accumulate != 1 else []
        words += ["--clip", f"{options.clip:g}"] if options.clip else []
        for name in _CONFIGS:
            if config := getattr(options, name):
                words += [f"--{name.replace('_', '-')}", f"'{json.dumps(config)}'"]
        return " ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Return a flat record for a data frame; parts are columns like "memory.optimizer"."""
        plain = {
            "backend": self.backend,
            "batch_size": self.batch_size,
            "offload": self.options.offload_device,
            "offload_params": self.options.offload_params,
            "activation_checkpointing": self.options.activation_checkpointing,
            "reshard_after_forward": self.options.reshard_after_forward,
            "replicate_across": self.options.replicate_across,
            "fits": self.fits,
            "device_bytes": self.device_bytes,
            "allocated_bytes": self.allocated_bytes,
            "host_bytes": self.host_bytes,
            "load_bytes": self.load_bytes,
            "nvme_bytes": self.nvme_bytes,
            "output_bytes": self.output_bytes,
            "peak_moment": self.peak_moment,
            "step_time_s": self.step_time_s,
            "tokens_per_s": self.tokens_per_s,
            "why": self.why,
        }
        return plain | {f"memory.{part}": size for part, size in self.memory.items()}
