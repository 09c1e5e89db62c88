"""Signed messages between the kernel and the ranks; both sides use it.

jupyter_client signs with HMAC-SHA256 and refuses a signature that it has seen before. Who can
reach a socket could still do harm without the key, which is mended here.
"""

from __future__ import annotations

import logging
from typing import Any

from jupyter_client.session import DELIM, Session

KEY_BYTES = 32
"""Randomness of a key; as text it is twice as long."""


class Signer(Session):
    """Signs, checks, and is not confused by what others send."""

    def feed_identities(self, msg_list: Any, copy: bool = True) -> tuple[list[bytes], Any]:  # noqa: FBT001, FBT002 - jupyter_client's own
        """Split off the identities; what has no delimiter is an empty message.

        ipykernel 7.4 calls this where an exception would end up nowhere; an empty message is
        refused like any other that is not signed.
        """
        if DELIM not in map(bytes, msg_list):
            return [], []
        identities, message = super().feed_identities(msg_list, copy)
        return identities, message

    def deserialize(self, msg_list: Any, content: bool = True, copy: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002 - jupyter_client's own
        """Check a message and unpack it.

        jupyter_client 8.10 remembers a signature before it has checked it and forgets others for
        want of room: 65,536 forged messages, and one that was recorded is taken again.

        Raises:
            Exception: of any kind; it is none of ours.
        """
        if not msg_list:
            msg = "nothing is signed"
            raise ValueError(msg)
        signature = bytes(msg_list[0])
        seen = signature in self.digest_history
        try:
            return super().deserialize(msg_list, content, copy)
        except Exception:
            if not seen:
                self.digest_history.discard(signature)
            raise

    def opened(self, frames: list[bytes]) -> dict[str, Any] | None:
        """The message in `frames`; None where nobody with the key has written it, or long ago."""
        _, message = self.feed_identities(frames)
        try:
            return self.deserialize(message)
        except Exception:  # noqa: BLE001 - frames of a stranger may fail in any way
            return None


class Briefly(logging.Filter):
    """Lets through one of ipykernel's complaints about refused messages, of each kind.

    ipykernel 7.4 logs a traceback for every one of them: whoever sends junk would push all that
    matters out of the log.
    """

    def __init__(self) -> None:
        """Nothing was said yet."""
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log it."""
        kind = str(record.msg)
        again = kind in self._said
        if kind.startswith("Invalid"):
            self._said.add(kind)
        return not again
