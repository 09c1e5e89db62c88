"""Collectives of a window, combined from events of c10d, gloo, NCCL and the collective check."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import TYPE_CHECKING

from nbdist.worker.profiling.intervals import Span, union
from nbdist.worker.profiling.kineto import WORLD
from nbdist.worker.profiling.step_breakdown import CollectiveSpans

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from nbdist.worker.profiling.instrumentation import CollectiveCall
    from nbdist.worker.profiling.kineto import Comms, TraceEvents

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
"""c10d operators in torch 2.13 -> names in torch.distributed. The names of gloo's own events are
not used, since gloo runs a reduce_scatter as an all_reduce."""
_KERNELS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "SendRecv": "send",
}
"""Part of the name of an NCCL kernel -> name in torch.distributed."""


def merge_collectives(
    events: TraceEvents, calls: Iterable[CollectiveCall]
) -> list[CollectiveSpans]:
    """Combine the events of c10d, gloo and the collective check for each collective.

    Args:
        events: events of the profiler.
        calls: calls recorded by the collective check.
    """
    # gloo executes collectives in the order of the calls.
    moved, meetings = iter(sorted(events.moved)), sorted(calls, key=lambda call: call.span)
    moving, k = next(moved, None), 0
    merged = []
    for begin, end, called in sorted(events.collective_calls):
        if (name := _COLLECTIVES.get(called)) is None:
            continue
        while moving is not None and moving[0] < begin:
            moving = next(moved, None)  # called before the window
        span, moving = (moving, next(moved, None)) if moving is not None else ((begin, end), None)
        ours = None
        while k < len(meetings) and meetings[k].span[1] <= begin:
            ours, k = meetings[k], k + 1
        merged.append(
            CollectiveSpans(
                name=name,
                group=ours.group if ours else WORLD,
                begin_ns=ours.span[0] if ours else begin,
                transfer=span,
                size_bytes=ours.size_bytes if ours else 0,
                barrier=ours.span if ours else None,
            )
        )
    return merged


def split_device_events(
    events: TraceEvents, marks: Mapping[str, Sequence[Span]], *, offloads: bool
) -> tuple[list[CollectiveSpans], dict[str, list[Span]]]:
    """Split the events of a GPU into collectives, computation by phase, and copies.

    Args:
        events: events of the profiler.
        marks: spans of the main thread by phase.
        offloads: whether copies inside of a phase are offload traffic.
    """
    phases = {name: union(marks.get(name, ())) for name in ("optimizer", "backward", "forward")}
    kernels: dict[str, list[Span]] = {name: [] for name in (*phases, "copies", "offload")}
    for event in events.device_events:
        if "nccl" in event.name:
            continue
        phase = next((name for name, spans in phases.items() if _within(event.launched, spans)), "")
        host = event.kind == "gpu_memcpy" and ("HtoD" in event.name or "DtoH" in event.name)
        if host:
            kernels["offload" if phase and offloads else "copies"].append(event.span)
        else:
            kernels[phase or "forward"].append(event.span)
    return list(_of_nccl(events)), kernels


def _of_nccl(events: TraceEvents) -> Iterator[CollectiveSpans]:
    """Find the call that launched each NCCL kernel: the innermost call around the launch."""
    kernels = sorted(
        (event for event in events.device_events if "nccl" in event.name), key=lambda k: k.launched
    )
    calls = deque(sorted((call for call in events.comms if call.bytes), key=lambda c: c.span))
    waiting: list[Comms] = []
    last: Comms | None = None
    for kernel in kernels:
        while calls and calls[0].span[0] <= kernel.launched:
            waiting.append(calls.popleft())
        around = [call for call in waiting if call.span[1] >= kernel.launched]
        # Coalesced calls launch one kernel after the last call, with the bytes of all of them.
        launched = around[-1:] or waiting
        waiting = around[:-1]
        if launched:
            last = launched[-1]
        elif last is not None and last.span[1] < kernel.launched:
            last = None  # otherwise it is another kernel of the same call
        yield CollectiveSpans(
            name=next(
                (ours for theirs, ours in _KERNELS.items() if theirs in kernel.name), "other"
            ),
            group=last.group if last is not None else WORLD,
            begin_ns=kernel.span[0],
            transfer=kernel.span,
            size_bytes=sum(call.bytes for call in launched),
        )


def _within(moment: int, spans: Sequence[Span]) -> bool:
    index = bisect_right(spans, (moment, 1 << 63)) - 1
    return index >= 0 and spans[index][1] >= moment
