"""The result of a plan: its rows, the best one, and their display."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist import strategies
from nbdist.display import plan
from nbdist.errors import PlanError
from nbdist.planner.plan_types import PlanRow, PlanTable

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class Plan(PlanTable):
    """Memory and speed of every strategy on a cluster, and which one to use.

    Displayed as a table with bars against the device's memory; `rows` holds every variant.
    """

    def row(self, backend: str, *, batch_size: int | None = None, **options: Any) -> PlanRow:
        """Return the row of a backend with these options; others are at their default.

        Args:
            backend: any name of the backend.
            batch_size: default: the first planned one.
            options: session options, such as offload="cpu", reshard_after_forward=False for FSDP2
                that keeps parameters gathered, or replicate_across="nodes" for FSDP2 with shards
                inside each node (HSDP).

        Raises:
            OptionError: an unknown option.
            PlanError: the plan has no such row.
        """
        plain = {key: value for key, value in options.items() if key != "reshard_after_forward"}
        strategies.Options.from_fields(plain)  # raises for an unknown name
        name = strategies.canonical_backend(backend)
        fixed = self.question.fixed_options
        # As fixed by the user, or the default.
        config = fixed.get("fsdp_config")
        resharded = strategies.Options(backend=name, fsdp_config=config).reshard_after_forward
        requested = {
            "offload": "none",
            "offload_params": False,
            "activation_checkpointing": False,
            "replicate_across": "none",
            "reshard_after_forward": resharded,
            **{key: value for key, value in fixed.items() if key in _DISTINCT},
            **options,
        }
        size = self.question.batch_sizes[0] if batch_size is None else batch_size
        for row in self.rows:
            if (row.backend, row.batch_size) == (name, size) and _has(row, requested):
                return row
        shown = ", ".join(f"{key}={value!r}" for key, value in options.items())
        variants = sorted({row.variant for row in self.rows if row.backend == name})
        raise PlanError(
            f"The plan has no row {name} with batch_size={size}{shown and f', {shown}'}."
            f" It has {'; '.join(variants) or 'no row of this backend'}."
        )

    def explanation(self) -> list[str]:
        """Return the choice and its reasons, in at most eight lines."""
        return plan.explanation(self)

    def to_pandas(self) -> Any:
        """Return all rows as a pandas.DataFrame.

        Raises:
            PlanError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise PlanError(
                "to_pandas() needs pandas, which is not installed. Install it with"
                " %pip install pandas, or use plan.rows."
            ) from None
        return pd.DataFrame([row.to_dict() for row in self.rows])

    def __str__(self) -> str:
        return plan.render_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return str(plan.render_html(self))


_DISTINCT = ("offload", "offload_params", "activation_checkpointing", "replicate_across")
"""Options that distinguish rows of one backend."""


def _has(row: PlanRow, requested: Mapping[str, Any]) -> bool:
    options = row.options
    return all(
        value in {getattr(options, key), options.offload_device}
        if key == "offload"
        else getattr(options, key) == value
        for key, value in requested.items()
    )
