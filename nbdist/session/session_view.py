"""Protocol of the session attributes that the planner and the profiler read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Literal

    from nbdist.hardware.discovery import SessionNode
    from nbdist.hardware.telemetry import UsageSnapshot
    from nbdist.planner.validation import MeasuredMemory
    from nbdist.profiler.report import Profile
    from nbdist.protocol import messages
    from nbdist.strategies import Hardware, Options


class SessionView(Protocol):
    """Session, as far as plans and profiles need it."""

    @property
    def options(self) -> Options:
        """Options of the engine, validated."""

    @property
    def hardware(self) -> Hardware:
        """Hardware that the ranks run on."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def nodes(self) -> Sequence[SessionNode]:
        """Nodes of the ranks; empty on one machine."""

    @property
    def profiles(self) -> Sequence[Profile]:
        """Profiles of this session, the last one at the end."""

    def status(self) -> dict[str, Any]:
        """State of the session and of each rank."""

    def nodes_now(self) -> dict[str, UsageSnapshot]:
        """Use of each node now, by name."""

    def measured(self) -> Mapping[int, MeasuredMemory | None]:
        """Memory that each rank has measured."""

    def model_spec(
        self,
        name: str | None = None,
        *,
        batch_size: int | None = None,
        seq_len: int | None = None,
        kind: Literal["cuda", "cpu"] = "cuda",
        quick: bool = False,
    ) -> messages.ModelReply:
        """Model of the ranks, as the planner takes it."""
