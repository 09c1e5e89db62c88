"""A window of steps told apart: arithmetic on spans, no rank."""

from __future__ import annotations

import random

import pytest

from nbdist.worker.profiling import kineto
from nbdist.worker.profiling.instrumentation import CollectiveCall
from nbdist.worker.profiling.kineto import DeviceEvent, NcclCall, TraceEvents
from nbdist.worker.profiling.step_breakdown import (
    CollectiveSpans,
    Span,
    WindowTrace,
    break_down_step,
    difference,
    intersection,
    overlapping,
    total_ns,
    union,
)

MS = 1_000_000


def at(begin_ms: float, end_ms: float) -> Span:
    return int(begin_ms * MS), int(end_ms * MS)


def moments(spans: list[Span]) -> set[int]:
    return {moment for begin, end in spans for moment in range(begin, end)}


def test_spans_are_sets_of_moments() -> None:
    chance = random.Random(0)  # noqa: S311 - no secret
    for _ in range(200):
        one, other = (
            [(begin, begin + chance.randrange(9)) for begin in chance.choices(range(60), k=6)]
            for _ in range(2)
        )
        assert moments(union(one)) == moments(one)
        assert moments(intersection(one, other)) == moments(one) & moments(other)
        assert moments(difference(one, other)) == moments(one) - moments(other)
        assert total_ns(union(one)) == len(moments(one))
        for span in union(other):
            expected = [each for each in union(one) if moments([each]) & moments([span])]
            assert overlapping(union(one), span) == expected


def recorded(**changes: object) -> WindowTrace:
    """Two steps of 100 ms each: data, forward, backward with an all_reduce, optimizer."""
    usual: dict[str, object] = {
        "window": at(0, 200),
        "num_steps": 2,
        "marks": {
            "data": [at(0, 20), at(100, 120)],
            "forward": [at(20, 50), at(120, 150)],
            "backward": [at(55, 85), at(155, 185)],
            "optimizer": [at(85, 95), at(185, 195)],
        },
        "operators": [at(21, 52), at(56, 75), at(86, 94), at(121, 152), at(156, 175), at(186, 194)],
        "collectives": [
            CollectiveSpans(
                name="all_reduce", group="0", begin_ns=70 * MS, transfer=at(70, 84), size_bytes=8
            ),
            CollectiveSpans(name="all_reduce", group="0", begin_ns=170 * MS, transfer=at(170, 184)),
        ],
    }
    return WindowTrace(**(usual | changes))  # type: ignore[arg-type]


def test_the_parts_of_a_step_sum_up_to_it() -> None:
    breakdown = break_down_step(recorded())
    assert sum(breakdown.parts.values()) == pytest.approx(0.1)
    assert breakdown.parts["data"] == pytest.approx(0.020)
    assert breakdown.parts["forward"] == pytest.approx(0.032)  # with the loss
    assert breakdown.parts["optimizer"] == pytest.approx(0.010)
    assert breakdown.parts["python"] == pytest.approx(0.008)


def test_a_forward_without_a_mark_is_what_is_computed_before_the_backward() -> None:
    marks = {**recorded().marks, "forward": []}
    breakdown = break_down_step(recorded(marks=marks))
    assert breakdown.parts["forward"] == pytest.approx(0.031)  # from 21 to 52 ms
    assert breakdown.parts["python"] == pytest.approx(0.009)


def test_a_forward_of_which_parts_are_marked_is_all_that_is_computed() -> None:
    marks = {**recorded().marks, "forward": [at(30, 40), at(130, 140)]}
    breakdown = break_down_step(recorded(marks=marks))
    assert breakdown.parts["forward"] == pytest.approx(0.022)  # from 30 to 52 ms
    breakdown = break_down_step(recorded(marks=marks, has_whole_forwards=False))
    assert breakdown.parts["forward"] == pytest.approx(0.031)


def test_a_collective_is_exposed_where_nothing_is_computed_beside_it() -> None:
    breakdown = break_down_step(recorded())
    assert breakdown.parts["communication"] == pytest.approx(0.009)  # from 75 to 84 ms
    assert breakdown.parts["backward"] == pytest.approx(0.021)
    assert breakdown.overlapped_s == pytest.approx(0.005)
    (traffic,) = breakdown.traffic
    assert (traffic.name, traffic.count, traffic.bytes) == ("all_reduce", 1, 4)
    assert traffic.seconds == pytest.approx(0.014)
    assert traffic.exposed_s == pytest.approx(0.009)
    spans = [0.005, 0.014]
    assert breakdown.collective_begins == {
        "0": [[0.07, 0.009, 0.014, *spans], [0.17, 0.009, 0.014, *spans]]
    }


def test_waiting_for_other_ranks_before_a_collective_is_communication() -> None:
    ours = CollectiveSpans(
        name="all_gather", group="0", begin_ns=22 * MS, transfer=at(32, 36), barrier=at(22, 31)
    )
    breakdown = break_down_step(recorded(collectives=[ours], wait_spans=[at(33, 36)]))
    assert breakdown.parts["communication"] == pytest.approx(0.012 / 2)
    assert breakdown.collective_begins == {"0": [[0.022, 0.012, 0.013, 0.0, 0.009, 0.011, 0.014]]}


def test_waiting_for_a_core_outside_of_everything_is_idle() -> None:
    breakdown = break_down_step(recorded(idle_s=0.006))
    assert breakdown.parts["idle"] == pytest.approx(0.003)
    assert breakdown.parts["python"] == pytest.approx(0.005)


def test_on_a_gpu_the_device_decides_and_its_pauses_are_explained() -> None:
    kernels = {
        "forward": [at(25, 60)],
        "backward": [at(60, 80)],
        "optimizer": [at(90, 95)],
        "copies": [at(22, 25)],
        "offload": [],
    }
    breakdown = break_down_step(
        recorded(
            window=at(0, 100),
            num_steps=1,
            kernels=kernels,
            collectives=[
                CollectiveSpans(
                    name="all_reduce", group="0", begin_ns=75 * MS, transfer=at(75, 88)
                ),
            ],
        )
    )
    assert breakdown.parts["forward"] == pytest.approx(0.035)
    assert breakdown.parts["communication"] == pytest.approx(0.008)  # from 80 to 88 ms
    assert breakdown.parts["data"] == pytest.approx(0.020)
    assert breakdown.parts["copies"] == pytest.approx(0.003)
    assert breakdown.parts["idle"] == pytest.approx(0.002 + 0.002)  # launching, no kernel
    assert breakdown.parts["python"] == pytest.approx(0.005)
    assert sum(breakdown.parts.values()) == pytest.approx(0.1)


def test_what_gloo_moved_belongs_to_what_was_called_in_that_order() -> None:
    seen = TraceEvents(
        collective_calls=[(*at(10, 11), "_reduce_scatter_base_"), (*at(20, 21), "allreduce_")],
        moved=[at(1, 2), at(10.5, 14), at(20.5, 29)],
    )
    scattered, reduced = kineto.merge_collectives(seen, [CollectiveCall("1", at(5, 9), 64)])
    assert (scattered.name, scattered.group, scattered.size_bytes) == ("reduce_scatter", "1", 64)
    assert (scattered.begin_ns, scattered.transfer, scattered.barrier) == (
        5 * MS,
        at(10.5, 14),
        at(5, 9),
    )
    assert (reduced.name, reduced.transfer, reduced.barrier) == ("all_reduce", at(20.5, 29), None)


def test_kernels_belong_to_the_phase_that_launched_them() -> None:
    seen = TraceEvents(
        device_events=[
            kernel("gemm", 5 * MS),
            kernel("gemm", 15 * MS),
            kernel("multi_tensor_apply", 25 * MS),
            kernel("Memcpy HtoD (Pinned -> Device)", 1 * MS, "gpu_memcpy"),
            kernel("Memcpy DtoH (Device -> Pinned)", 26 * MS, "gpu_memcpy"),
            kernel("ncclDevKernel_AllGather_RING_LL", 6 * MS),
        ],
        comms=[NcclCall(span=at(5.5, 6.5), group="1", bytes=40)],
    )
    marks = {"forward": [at(4, 10)], "backward": [at(12, 20)], "optimizer": [at(22, 30)]}
    (moved,), kernels = kineto.split_device_events(seen, marks, offloads=True)
    assert {phase: len(spans) for phase, spans in kernels.items()} == {
        "forward": 1,
        "backward": 1,
        "optimizer": 1,
        "copies": 1,
        "offload": 1,
    }
    assert (moved.name, moved.group, moved.size_bytes) == ("all_gather", "1", 40)


def kernel(name: str, launched: int, kind: str = "kernel") -> DeviceEvent:
    span = (launched + 100 * MS, launched + 101 * MS)  # the device is far behind
    return DeviceEvent(name=name, kind=kind, span=span, launched=launched)


def test_nccl_kernels_have_bytes_and_group_of_the_call_that_launched_them() -> None:
    ring = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    seen = TraceEvents(
        device_events=[kernel(ring, ms * MS) for ms in (6, 8, 15, 16, 22, 30)],
        comms=[
            NcclCall(span=at(0, 10), group="0", bytes=100),  # of the main thread, at 8
            NcclCall(span=at(5, 9), group="1", bytes=200),  # of autograd's, at 6
            NcclCall(span=at(11, 12), group="2", bytes=1),  # coalesced: one kernel at 15
            NcclCall(span=at(13, 14), group="2", bytes=2),
            NcclCall(span=at(14.5, 15.5), group="2", bytes=0),
            NcclCall(span=at(21, 23), group="0", bytes=300),
        ],
    )
    moved, _ = kineto.split_device_events(seen, {}, offloads=False)
    assert [(one.group, one.size_bytes) for one in moved] == [
        ("1", 200),
        ("0", 100),
        ("2", 3),
        ("0", 0),  # nothing says what launched it, as in a CUDA graph
        ("0", 300),
        ("0", 0),
    ]


def test_begins_are_matched_in_each_group_by_itself() -> None:
    ring = "ncclDevKernel_AllGather_RING_LL"
    seen = TraceEvents(
        device_events=[kernel(ring, 6 * MS), kernel(ring, 8 * MS)],
        comms=[
            NcclCall(span=at(5, 7), group="shards", bytes=100),
            NcclCall(span=at(7.5, 9), group="replicas", bytes=200),
        ],
    )
    moved, kernels = kineto.split_device_events(seen, {}, offloads=False)
    breakdown = break_down_step(
        WindowTrace(
            window=at(0, 200),
            num_steps=1,
            marks={},
            operators=[],
            collectives=moved,
            kernels=kernels,
        )
    )
    assert {group: len(begins) for group, begins in breakdown.collective_begins.items()} == {
        "shards": 1,
        "replicas": 1,
    }
