"""Collectives of a window, put together from what c10d, gloo, NCCL and our own meeting saw.

Runs on a rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import TYPE_CHECKING

from nbdist.worker.profiling.intervals import Span, union
from nbdist.worker.profiling.kineto import WORLD
from nbdist.worker.profiling.step_breakdown import Collective

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from nbdist.worker.profiling.instrumentation import Met
    from nbdist.worker.profiling.kineto import Comms, Seen

_COLLECTIVES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "barrier": "barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
"""Operators of c10d in torch 2.13 -> what torch.distributed calls them. Names of gloo's own
events do not tell: it does a reduce_scatter as an all_reduce."""
_KERNELS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "SendRecv": "send",
}
"""Part of the name of NCCL's kernels."""


def collectives(seen: Seen, met: Iterable[Met]) -> list[Collective]:
    """Put together what c10d, gloo and our own meeting saw of each collective.

    gloo works them off in the order in which they were called.
    """
    moved, meetings = iter(sorted(seen.moved)), sorted(met, key=lambda one: one.span)
    moving, k = next(moved, None), 0
    found = []
    for begin, end, called in sorted(seen.called):
        if (name := _COLLECTIVES.get(called)) is None:
            continue
        while moving is not None and moving[0] < begin:
            moving = next(moved, None)  # it was called before the window
        span, moving = (moving, next(moved, None)) if moving is not None else ((begin, end), None)
        ours = None
        while k < len(meetings) and meetings[k].span[1] <= begin:
            ours, k = meetings[k], k + 1
        found.append(
            Collective(
                name=name,
                group=ours.group if ours else WORLD,
                begin=ours.span[0] if ours else begin,
                moving=span,
                bytes=ours.bytes if ours else 0,
                meeting=ours.span if ours else None,
            )
        )
    return found


def of_device(
    seen: Seen, marks: Mapping[str, Sequence[Span]], *, offloads: bool
) -> tuple[list[Collective], dict[str, list[Span]]]:
    """Tell a GPU's collectives, computing by phase, and copies apart."""
    phases = {name: union(marks.get(name, ())) for name in ("optimizer", "backward", "forward")}
    kernels: dict[str, list[Span]] = {name: [] for name in (*phases, "copies", "offload")}
    for one in seen.device:
        if "nccl" in one.name:
            continue
        phase = next((name for name, spans in phases.items() if _within(one.launched, spans)), "")
        host = one.kind == "gpu_memcpy" and ("HtoD" in one.name or "DtoH" in one.name)
        if host:
            kernels["offload" if phase and offloads else "copies"].append(one.span)
        else:
            kernels[phase or "forward"].append(one.span)
    return list(_of_nccl(seen)), kernels


def _of_nccl(seen: Seen) -> Iterator[Collective]:
    """Find the call that launched each of NCCL's kernels.

    It is the innermost call around the launch. Coalesced calls launch one kernel after the last
    of them, so that it has what all of them move.
    """
    kernels = sorted((one for one in seen.device if "nccl" in one.name), key=lambda k: k.launched)
    calls = deque(sorted((call for call in seen.comms if call.bytes), key=lambda c: c.span))
    waiting: list[Comms] = []
    last: Comms | None = None
    for kernel in kernels:
        while calls and calls[0].span[0] <= kernel.launched:
            waiting.append(calls.popleft())
        around = [call for call in waiting if call.span[1] >= kernel.launched]
        launched = around[-1:] or waiting
        waiting = around[:-1]
        if launched:
            last = launched[-1]
        elif last is not None and last.span[1] < kernel.launched:
            last = None  # else it is a further kernel of the same call
        yield Collective(
            name=next(
                (ours for theirs, ours in _KERNELS.items() if theirs in kernel.name), "other"
            ),
            group=last.group if last is not None else WORLD,
            begin=kernel.span[0],
            moving=kernel.span,
            bytes=sum(call.bytes for call in launched),
        )


def _within(moment: int, spans: Sequence[Span]) -> bool:
    place = bisect_right(spans, (moment, 1 << 63)) - 1
    return place >= 0 and spans[place][1] >= moment
