"""Collective error checks: an operation fails on all ranks if it fails on one."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from nbdist.errors import CheckpointError, NbdistError
from nbdist.state import collectives

if TYPE_CHECKING:
    from collections.abc import Callable


_NO_ROOM = frozenset({errno.EDQUOT, errno.EFBIG, errno.ENOSPC})


def error_text(error: BaseException | None) -> str | None:
    """Return an error as one line of text; None for no error."""
    if error is None:
        return None
    if isinstance(error, OSError) and error.errno is not None:
        location = f" at {error.filename}" if error.filename else ""
        advice = ". Free space there or use another folder." if error.errno in _NO_ROOM else ""
        return (
            f"{error.strerror} ({errno.errorcode.get(error.errno, error.errno)}){location}{advice}"
        )
    text = " ".join(str(error).split()) or "no reason given"
    return text if isinstance(error, NbdistError) else f"{type(error).__name__}: {text}"


def try_call(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return a call's result and None, or None and the exception that it raised."""
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001 - sent to all ranks
        return None, error


def raise_if_any_failed(error: Exception | None) -> None:
    """Raise on all ranks if any rank failed; a collective.

    Raises:
        CheckpointError: at least one rank failed. The message is the same on all ranks.
    """
    texts = collectives.all_gather_values(error_text(error))
    if failed := {rank: text for rank, text in enumerate(texts) if text is not None}:
        raise CheckpointError(rank_errors_text(failed, len(texts))) from error


def rank_errors_text(failed: dict[int, str], world_size: int) -> str:
    """Return the errors of several ranks as one line of text."""
    reasons = " / ".join(dict.fromkeys(failed.values()))
    if len(failed) == world_size:
        return reasons
    ranks = ", ".join(map(str, failed))
    return f"rank {ranks}: {reasons}"
