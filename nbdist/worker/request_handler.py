"""A reply to whatever the kernel asks, also where the work fails; runs on a rank.

The kernel waits for it, and a request without a reply would cost the whole of its patience.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from nbdist.errors import NbdistError
from nbdist.protocol import messages
from nbdist.worker.operations import consensus

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)


def answered(work: Callable[[Any], Any], request: Any) -> Any:
    """Do the work and return its reply; where it raises anything, one that says what."""
    try:
        return work(request)
    except BaseException as error:  # noqa: BLE001 - a model's own code may even call sys.exit
        return failed(error)


def failed(error: BaseException) -> messages.Failed:
    """The reply that tells an error; what nbdist did not raise on purpose is logged in full."""
    words = consensus.words(error) or ""
    if isinstance(error, NbdistError):
        words = str(error)
    else:
        log.error("a request of the kernel failed", exc_info=error)
    if isinstance(error, KeyboardInterrupt):
        words = "stopped before it was done"
    return messages.Failed(status="error", error=words, ename=type(error).__name__)
