"""Comm messages of widgets that live on ranks, on their way to the front end.

Runs in the notebook's kernel; used by the renderer alone. A front end takes about 500
messages a second, a `tqdm.notebook` bar sends three for each step: state updates of one
widget between two flushes are put together, the newest value of each key wins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbdist.output.sink import Bundle, Screen


class Relay:
    """Passes comm messages on, in order for each widget."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self._updates: dict[str, tuple[Bundle, Bundle]] = {}

    def take(self, msg_type: str, content: Bundle, metadata: Bundle, buffers: list[Any]) -> None:
        """Take one message; all but plain state updates are sent at once."""
        comm_id = str(content.get("comm_id"))
        if not (msg_type == "comm_msg" and _is_state(content) and not buffers):
            self._send(comm_id)
            self.screen.relay(msg_type, content, metadata, buffers)
            return
        earlier = self._updates.pop(comm_id, None)
        if earlier is not None:
            state = {**earlier[0]["data"]["state"], **content["data"]["state"]}
            content = {**content, "data": {**content["data"], "state": state}}
        self._updates[comm_id] = content, metadata

    def flush(self) -> None:
        """Send the updates that wait."""
        for comm_id in list(self._updates):
            self._send(comm_id)

    def _send(self, comm_id: str) -> None:
        waiting = self._updates.pop(comm_id, None)
        if waiting is not None:
            content, metadata = waiting
            self.screen.relay("comm_msg", content, metadata, [])


def _is_state(content: Bundle) -> bool:
    data = content.get("data")
    return (
        isinstance(data, dict)
        and data.get("method") == "update"
        and isinstance(data.get("state"), dict)
        and not data.get("buffer_paths")
    )
