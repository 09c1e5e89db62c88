"""What a plan says: its rows, the best one, and how it reads in a notebook."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nbdist import strategies
from nbdist.display import plan
from nbdist.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.planner.search import Question
    from nbdist.planner.step_time import Cost
    from nbdist.strategies import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One strategy with its options at one micro-batch. Bytes are of the fullest rank."""

    options: Options
    batch_size: int
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the device by part; "context" and "margin" are what is no tensor."""
    allocated_bytes: int = 0
    """Peak of tensors."""
    device_bytes: int = 0
    """Peak of the device: tensors, the allocator's margin, context and communicator."""
    host: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the host's memory by part, for one rank."""
    host_bytes: int = 0
    nvme_bytes: int = 0
    peak_moment: str = ""
    """When the device is fullest: "loss", "backward of block 3", "optimizer step"."""
    fits: bool = False
    learned: str = ""
    """Day on which the step from tensors to the device was last measured here; "" for defaults."""
    cost: Cost | None = None
    """None for a row that its backend refuses."""
    why: str = ""
    """Why this row was taken, or why not."""

    @property
    def backend(self) -> str:
        """Canonical name."""
        return self.options.backend

    @property
    def step_time_s(self) -> float:
        """Seconds of one optimizer step."""
        return self.cost.step_time_s if self.cost else float("inf")

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all ranks together; samples for a model that takes no tokens."""
        return self.cost.tokens_per_s if self.cost else 0.0

    @property
    def bound(self) -> str:
        """What the step waits for: compute, communication, offload or optimizer."""
        return self.cost.bound if self.cost else ""

    @property
    def variant(self) -> str:
        """Backend and options in a few words: "zero3, offload cpu, activation checkpointing"."""
        return replace(self.options, precision=None, accumulate=1, clip=None).describe()

    @property
    def command(self) -> str:
        """The line to paste."""
        options = self.options
        words = ["%%distribute --backend", options.backend]
        words += ["--offload", options.offload] if options.offload != "none" else []
        words += ["--offload-params"] if options.offload_params else []
        words += ["--activation-checkpointing"] if options.activation_checkpointing else []
        across = options.replicate_across
        words += ["--replicate-across", across] if across != "none" else []
        words += ["--accumulate", str(options.accumulate)] if options.accumulate != 1 else []
        if options.fsdp_config:
            words += ["--fsdp-config", f"'{json.dumps(options.fsdp_config)}'"]
        return " ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """One flat record, parts in columns "memory.optimizer", ...; for a data frame."""
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
            "nvme_bytes": self.nvme_bytes,
            "peak_moment": self.peak_moment,
            "step_time_s": self.step_time_s,
            "tokens_per_s": self.tokens_per_s,
            "why": self.why,
        }
        return plain | {f"memory.{part}": size for part, size in self.memory.items()}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every strategy needs on a machine, and which one to take.

    Shown as a table with bars against the device's memory; `rows` has every variant.
    """

    question: Question
    rows: tuple[Row, ...]
    best: Row | None
    """The fastest row that fits, simplest within 3 %; None where nothing fits."""
    advice: tuple[str, ...] = ()
    """Where nothing fits: the smallest changes that would, a sentence each."""

    def row(self, backend: str, *, batch_size: int | None = None, **options: Any) -> Row:
        """The row of a backend whose options are these; what is not named is at its default.

        Args:
            backend: any of its names.
            batch_size: default: the first that was planned.
            options: fields of the session's options, as offload="cpu", and
                reshard_after_forward=False for FSDP2 that keeps parameters gathered, or
                replicate_across="nodes" for FSDP2 with shards inside each node (HSDP).

        Raises:
            PlanError: the plan has no such row.
        """
        name = strategies.canonical(backend)
        wanted = {
            "offload": "none",
            "offload_params": False,
            "activation_checkpointing": False,
            "replicate_across": "none",
            "reshard_after_forward": _resharded(name, self.question.fixed),
            **{key: value for key, value in self.question.fixed.items() if key in _DISTINCT},
            **options,
        }
        size = self.question.batch_sizes[0] if batch_size is None else batch_size
        for row in self.rows:
            if (row.backend, row.batch_size) == (name, size) and _has(row, wanted):
                return row
        words = ", ".join(f"{key}={value!r}" for key, value in options.items())
        there = sorted({one.variant for one in self.rows if one.backend == name})
        message = (
            f"the plan has no row {name} with batch_size={size}{words and f', {words}'};"
            f" it has {'; '.join(there) or 'no row of this backend'}."
        )
        raise PlanError(message)

    def sorted_by(self, key: str) -> Plan:
        """The same plan with its rows in the order of a field: "device_bytes", "tokens_per_s".

        Speed is sorted from the fastest, everything else from the smallest.

        Raises:
            PlanError: rows have no such field.
        """
        fields = self.rows[0].to_dict()
        if key not in fields:
            message = f"{key!r} is no field of a row; use one of {', '.join(fields)}."
            raise PlanError(message)
        rows = sorted(self.rows, key=lambda row: row.to_dict()[key], reverse=key == "tokens_per_s")
        return replace(self, rows=tuple(rows))

    def explanation(self) -> list[str]:
        """The choice and why, in at most eight lines."""
        return plan.explanation(self)

    def to_pandas(self) -> Any:
        """All rows as a pandas.DataFrame; pandas is imported here.

        Raises:
            PlanError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            message = (
                "to_pandas() needs pandas, which is not installed here; install it with"
                " %pip install pandas, or use plan.rows."
            )
            raise PlanError(message) from None
        return pd.DataFrame([row.to_dict() for row in self.rows])

    def __str__(self) -> str:
        """The table as text."""
        return plan.text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The table with bars against the device's memory."""
        return plan.html(self)


_DISTINCT = ("offload", "offload_params", "activation_checkpointing", "replicate_across")
"""Options that tell rows of one backend apart."""


def _resharded(backend: str, fixed: Mapping[str, Any]) -> bool:
    """What is fixed of it, or the default."""
    config = fixed.get("fsdp_config")
    return strategies.Options(backend=backend, fsdp_config=config).reshard_after_forward


def _has(row: Row, wanted: Mapping[str, Any]) -> bool:
    """Whether a row has the options; offload "nvme" names any folder."""
    options = row.options
    return all(
        value in {getattr(options, key), options.offload_device}
        if key == "offload"
        else getattr(options, key) == value
        for key, value in wanted.items()
    )
