"""Signed messages between the kernel and the ranks.

Extends jupyter_client's HMAC-SHA256 signatures and replay check: without these changes a process
that can reach a socket could disturb the session without knowing the key.
"""

from __future__ import annotations

import logging
from typing import Any

from jupyter_client.session import DELIM, Session

KEY_BYTES = 32
"""Random bytes in a key; its text is twice as long."""


class MessageSigner(Session):
    """Signs and verifies messages; safe against unsigned and replayed ones."""

    def feed_identities(self, msg_list: Any, copy: bool = True) -> tuple[list[bytes], Any]:  # noqa: FBT001, FBT002 - jupyter_client's own
        """Split off the identities. A message without a delimiter is returned as empty."""
        # ipykernel 7.4 calls this where an exception would be lost; an empty message is rejected
        # like any other unsigned one
        if DELIM not in map(bytes, msg_list):
            return [], []
        identities, message = super().feed_identities(msg_list, copy)
        return identities, message

    def deserialize(self, msg_list: Any, content: bool = True, copy: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002 - jupyter_client's own
        """Verify a message and decode it.

        Raises:
            Exception: any type, if the message is not valid.
        """
        # jupyter_client 8.10 records a signature before verifying it and evicts old ones: after
        # 65,536 forged messages a recorded message would be accepted again
        if not msg_list:
            raise ValueError("the message is empty")
        signature = bytes(msg_list[0])
        seen = signature in self.digest_history
        try:
            return super().deserialize(msg_list, content, copy)
        except Exception:
            if not seen:
                self.digest_history.discard(signature)
            raise


class RejectedMessageLogFilter(logging.Filter):
    """Passes one ipykernel log record per kind of rejected message.

    ipykernel 7.4 logs a traceback for each of them: invalid messages could flood the log.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logged_kinds: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the record is to be logged."""
        kind = str(record.msg)
        again = kind in self._logged_kinds
        if kind.startswith("Invalid"):
            self._logged_kinds.add(kind)
        return not again
