"""Forwards comm messages of widgets on the ranks to the front end, merging state updates.

A front end handles about 500 messages per second and a `tqdm.notebook` bar sends three per step.
Between two flushes the state updates of a widget are merged; the newest value of each key wins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbdist.output.sink import MimeBundle, OutputSink


class CommRelay:
    """Forwards comm messages, in order for each widget."""

    def __init__(self, screen: OutputSink) -> None:
        self.sink = screen
        self._updates: dict[str, tuple[MimeBundle, MimeBundle]] = {}

    def add_message(
        self, msg_type: str, content: MimeBundle, metadata: MimeBundle, buffers: list[Any]
    ) -> None:
        """Add a message. Plain state updates are merged; all others are sent immediately."""
        comm_id = str(content.get("comm_id"))
        if not (msg_type == "comm_msg" and _is_state(content) and not buffers):
            self._send(comm_id)
            self.sink.relay_comm(msg_type, content, metadata, buffers)
            return
        earlier = self._updates.pop(comm_id, None)
        if earlier is not None:
            state = {**earlier[0]["data"]["state"], **content["data"]["state"]}
            content = {**content, "data": {**content["data"], "state": state}}
        self._updates[comm_id] = content, metadata

    def flush(self) -> None:
        """Send the pending updates."""
        for comm_id in list(self._updates):
            self._send(comm_id)

    def _send(self, comm_id: str) -> None:
        update = self._updates.pop(comm_id, None)
        if update is not None:
            content, metadata = update
            self.sink.relay_comm("comm_msg", content, metadata, [])


def _is_state(content: MimeBundle) -> bool:
    data = content.get("data")
    return (
        isinstance(data, dict)
        and data.get("method") == "update"
        and isinstance(data.get("state"), dict)
        and not data.get("buffer_paths")
    )
