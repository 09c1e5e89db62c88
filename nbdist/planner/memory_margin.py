"""The margin of free memory that a plan needs to fit, from measured errors.

The benchmark `plan_memory` writes `SHORTFALLS`: how far the allocator's peak exceeded the
plan, over the cases of a run. On a GPU, the step from tensors to device memory adds its own error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Shortfall(NamedTuple):
    """Measured errors of one backend."""

    num_cases: int
    share: float
    """By how much the peak exceeded the plan in at most 1 of 20 cases, relative to the plan."""


SHORTFALLS: Mapping[tuple[str, str], Shortfall] = {
    # written by benchmarks/plan_memory.py --write
    ("", "traced"): Shortfall(32, 0.1211),
    ("ddp", "closed form"): Shortfall(42, 0.0046),
    ("fsdp1", "closed form"): Shortfall(30, 0.0004),
    ("fsdp2", "closed form"): Shortfall(42, 0.0070),
    ("zero1", "closed form"): Shortfall(26, 0.0001),
    ("zero2", "closed form"): Shortfall(26, 0.0088),
    ("zero3", "closed form"): Shortfall(30, 0.0112),
    # end
}
"""By backend and depth of the model; "" stands for all backends."""
UNKNOWN = Shortfall(0, 0.02)
"""A backend without measured cases."""
DEVICE_SHARE = 0.04
"""From tensors to device memory: the median error of the published runs in docs/planner.md."""
CALIBRATED_DEVICE_SHARE = 0.02
"""The same after a measured session on this machine: the allocator's rounding between models."""


class Margin(NamedTuple):
    """Shares of a row's memory that must stay free."""

    tensors: Shortfall = UNKNOWN
    device: float = DEVICE_SHARE
    is_calibrated: bool = False

    @property
    def total(self) -> float:
        """The whole margin, relative to the row's memory."""
        return self.tensors.share + self.device

    def describe(self) -> str:
        """Return what the margin is made of, in one line."""
        count, share = self.tensors
        source = f"covers 95% of {count} measured cases" if count else "not measured"
        device = "measured here" if self.is_calibrated else "error of published runs"
        return (
            f"margin that must stay free: {self.total:.1%}; {share:.1%} for tensors ({source}),"
            f" {self.device:.0%} for allocator and context ({device})"
        )


UNMEASURED = Margin()
"""The margin of a backend without measured cases."""


def margin_of(backend: str, depth: Literal["closed form", "traced"], *, calibrated: bool) -> Margin:
    """Return the margin of a backend; calibrated: device memory was measured on this machine."""
    device = CALIBRATED_DEVICE_SHARE if calibrated else DEVICE_SHARE
    tensors = SHORTFALLS.get((backend, depth)) or SHORTFALLS.get(("", depth), UNKNOWN)
    return Margin(tensors, device, calibrated)
