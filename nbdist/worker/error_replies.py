"""Replies to the kernel's requests, with an error reply if the work fails.

Without a reply the kernel would wait for its whole timeout.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from nbdist.errors import NbdistError
from nbdist.protocol import messages
from nbdist.worker.operations.transaction import error_text

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)


def reply_to(work: Callable[[Any], Any], request: Any) -> Any:
    """Do the work and return its reply, or an error reply if it raises anything."""
    try:
        return work(request)
    except BaseException as error:  # noqa: BLE001 - a model's own code may even call sys.exit
        return error_reply(error)


def error_reply(error: BaseException) -> messages.ErrorReply:
    """Return the error reply for an exception; unexpected exceptions are logged in full."""
    text = error_text(error) or ""
    if isinstance(error, NbdistError):
        text = str(error)
    else:
        log.error("a request of the kernel failed", exc_info=error)
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted before it finished"
    return messages.ErrorReply(status="error", error=text, ename=type(error).__name__)
