"""What ranks answer when they are asked where they are."""

from __future__ import annotations

from typing import Any

from nbdist.protocol import messages


def answer(
    line: int = 0,
    *,
    collective: str = "",
    called: str = "",
    source: str = "",
    count: int = 5,
    **standing: Any,
) -> messages.RankActivityReply:
    stands: messages.MainThreadStatus = {
        "waits_for": "",
        "missing": [],
        "still_s": 0.0,
        "sleeps": False,
        "failed": "",
        "counts": {"0": count},
        "midway": "",
    }
    stands.update(standing)  # type: ignore[typeddict-item]
    return messages.RankActivityReply(
        cell="In[3]",
        line=line,
        source=source,
        script="",
        called=called,
        collective=collective,
        standing=stands,
    )


def waits(line: int, *missing: int, seconds: float = 4.0) -> messages.RankActivityReply:
    return answer(
        line,
        collective="all_reduce",
        waits_for="all_reduce (SUM) of float32[4]",
        missing=list(missing),
        still_s=seconds,
    )
