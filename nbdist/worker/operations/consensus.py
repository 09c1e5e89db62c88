"""What the ranks agree on before they save or load; collectives, runs on a rank."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from nbdist.errors import CheckpointError, NbdistError
from nbdist.state import collectives

if TYPE_CHECKING:
    from collections.abc import Callable


_NO_ROOM = frozenset({errno.EDQUOT, errno.EFBIG, errno.ENOSPC})


def words(error: BaseException | None) -> str | None:
    """An error in one sentence."""
    if error is None:
        return None
    if isinstance(error, OSError) and error.errno is not None:
        where = f" at {error.filename}" if error.filename else ""
        advice = "; free room there, or give another folder." if error.errno in _NO_ROOM else ""
        return f"{error.strerror} ({errno.errorcode.get(error.errno, error.errno)}){where}{advice}"
    text = " ".join(str(error).split()) or "no reason given"
    return text if isinstance(error, NbdistError) else f"{type(error).__name__}: {text}"


def attempt(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What a call returned, or raised."""
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001 - told to all ranks
        return None, error


def agree(error: Exception | None) -> None:
    """Fail on all ranks where one of them failed; a collective.

    Raises:
        CheckpointError: at least one did, this one or another; the same words on all.
    """
    everyone = collectives.everyones(words(error))
    if failed := {rank: one for rank, one in enumerate(everyone) if one is not None}:
        raise CheckpointError(said(failed, len(everyone))) from error


def said(failed: dict[int, str], world_size: int) -> str:
    """The errors of ranks as one sentence."""
    reasons = " / ".join(dict.fromkeys(failed.values()))
    if len(failed) == world_size:
        return reasons
    ranks = ", ".join(map(str, failed))
    return f"rank {ranks}: {reasons}"
