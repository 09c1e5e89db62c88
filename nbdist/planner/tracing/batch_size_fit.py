"""Fits figures for any batch size to recordings of two batch sizes; no torch.

Bytes are affine in the batch size, moment by moment: casts of weights and buffers are constant,
activations grow. Two batch sizes whose micro-batches ran the same operations yield both
coefficients of every moment; otherwise (a batch of one may skip a copy), all bytes are taken as
proportional to the requested batch size.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from nbdist.planner.tracing.micro_batch_tracer import MemoryTracePoint, MicroBatchMemoryTrace

LinearFit = tuple[float, float]
"""Bytes: a constant, and a slope per sample."""
ParetoFront = list[tuple[LinearFit, int]]
"""Moments that no other one exceeds: bytes, and elements of own gradients."""


class ParameterGroupMemoryTrace(NamedTuple):
    """Recording of one group in one micro-batch."""

    group_index: int
    saved: int
    passing: int
    """Bytes that stay from its forward until the model returns."""
    gradient: int
    """Bytes of its input gradient."""
    forward: list[tuple[int, int]]
    """Bytes on top of those saved by earlier groups, and how many of its matrices are used."""
    backward: list[tuple[int, int]]
    """The same bytes, with elements of own gradients."""
    gradients: list[tuple[int, int]]
    """The same, when each of its gradients is complete."""
    flops: float


class MemoryTraceByGroup(NamedTuple):
    """A recording, by group in forward order."""

    groups: list[ParameterGroupMemoryTrace]
    head_moments: list[tuple[int, int]]
    """Head, logits and loss until the model returns; bytes on top of everything saved."""
    loss_moments: list[tuple[int, int]]
    """After the model has returned; bytes on top of the model's output as well."""
    output_bytes: int
    batch_bytes: int


def split_by_group(recording: MicroBatchMemoryTrace) -> MemoryTraceByGroup:
    """Split a recording into its groups and the loss."""
    spans, flops = _spans(recording)
    groups: list[ParameterGroupMemoryTrace] = []
    before = 0
    for place in (mark.group_index for mark in recording.marks if mark.kind == "forward"):
        forward = _subtract_saved(spans.get(("forward", place), []), before)
        end = before + recording.output_bytes
        backward = _subtract_saved(spans.get(("backward", place), []), end)
        gradients = _subtract_saved(recording.gradients.get(place, []), end)
        saved, passing = recording.saved_bytes[place], recording.forward_only_bytes[place]
        # The gradient that exists when the previous group's backward begins.
        handed = (
            max(0, groups[-1].backward[0][0] - groups[-1].saved)
            if groups and groups[-1].backward
            else 0
        )
        groups.append(
            ParameterGroupMemoryTrace(
                place, saved, passing, handed, forward, backward, gradients, flops.get(place, 0.0)
            )
        )
        before += saved
    inside = _subtract_saved(spans.get(("exit", 0), []), before)
    loss = _subtract_saved(spans.get(("returned", 0), []), before + recording.output_bytes)
    return MemoryTraceByGroup(groups, inside, loss, recording.output_bytes, recording.batch_bytes)


def _subtract_saved(moments: Iterable[tuple[int, int]], before: int) -> list[tuple[int, int]]:
    return [(held - before, grads) for held, grads in moments]


def _spans(
    recording: MicroBatchMemoryTrace,
) -> tuple[dict[tuple[str, int], list[MemoryTracePoint]], dict[int, float]]:
    """Moments by kind and group, and operations by group.

    A group's forward lasts until the next one begins; the last one is followed by the loss.
    """
    marks = recording.marks
    last = max((n for n, mark in enumerate(marks) if mark.kind == "exit"), default=-1)
    spans: dict[tuple[str, int], list[MemoryTracePoint]] = {}
    flops: dict[int, float] = {}
    kind, place = "forward", 0
    for number, (mark, following) in enumerate(itertools.pairwise(marks)):
        if mark.kind in {"forward", "backward"}:
            kind, place = mark.kind, mark.group_index
        elif mark.kind == "returned" or number == last:
            kind, place = mark.kind, 0
        moments = recording.moments[mark.moment_index : following.moment_index]
        spans.setdefault((kind, place), []).extend(moments)
        flops[place] = flops.get(place, 0.0) + following.flops - mark.flops
    return spans, flops


def fit_two_batch_sizes(
    recording: MemoryTraceByGroup, doubled: MemoryTraceByGroup, batch: int
) -> dict[str, Any]:
    """Return figures of one micro-batch for any batch size, with byte counts as a `LinearFit`.

    Args:
        recording: of a micro-batch of `batch` samples.
        doubled: of twice as many.
    """

    def line(value: int, other: int) -> LinearFit:
        slope = (other - value) / batch
        return (value - slope * batch, slope)

    def lines(
        moments: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]
    ) -> list[tuple[LinearFit, int]]:
        if [grads for _, grads in moments] == [grads for _, grads in others]:
            pairs = zip(moments, others, strict=True)
            return [(line(a, b), grads) for (a, grads), (b, _) in pairs]
        return [((0.0, held / batch), grads) for held, grads in moments]

    return {
        "groups": [
            {
                "place": a.group_index,
                "saved": line(a.saved, b.saved),
                "gradient": line(a.gradient, b.gradient),
                "passing": line(a.passing, b.passing),
                "input": line(a.forward[0][0], b.forward[0][0]),
                "forward": pareto_fronts(lines(a.forward, b.forward)),
                "backward": pareto_front(lines(a.backward, b.backward)),
                "gradients": lines(a.gradients, b.gradients),
                "flops": a.flops / batch,
            }
            for a, b in zip(recording.groups, doubled.groups, strict=True)
        ],
        "inside": pareto_front(lines(recording.head_moments, doubled.head_moments)),
        "loss": pareto_front(lines(recording.loss_moments, doubled.loss_moments)),
        "outputs": line(recording.output_bytes, doubled.output_bytes),
        "batch": line(recording.batch_bytes, doubled.batch_bytes),
    }


def extend_to_full_depth(run: dict[str, Any], times: Sequence[int]) -> dict[str, Any]:
    """Return a run's figures for a model of full depth.

    Bytes that groups hold until the model returns also accumulate over groups that were not
    traced: they are held in the forward of later groups, and in the part of the loss that the
    model computes itself.

    Args:
        run: figures from `fit_two_batch_sizes`.
        times: for each group, its number of occurrences in the model.
    """
    constant = slope = 0.0
    groups = []
    for group in run["groups"]:
        count = times[group["place"]]
        passing = group["passing"]
        constant, slope = constant + (count - 1) * passing[0], slope + (count - 1) * passing[1]
        forward = [(_plus(bytes_, constant, slope), grads) for bytes_, grads in group["forward"]]
        figures = {name: value for name, value in group.items() if name != "passing"}
        figures["input"] = _plus(group["input"], constant, slope)
        groups.append(figures | {"forward": forward})
    inside = [(_plus(bytes_, constant, slope), grads) for bytes_, grads in run["inside"]]
    return {
        "groups": groups,
        "loss": pareto_front([*inside, *run["loss"]]),
        "outputs": run["outputs"],
        "batch": run["batch"],
    }


def _plus(bytes_: LinearFit, constant: float, slope: float) -> LinearFit:
    return (bytes_[0] + constant, bytes_[1] + slope)


def pareto_fronts(lines: Collection[tuple[LinearFit, int]]) -> ParetoFront:
    """Drop moments that another one with the same number exceeds."""
    numbers = sorted({number for _, number in lines})
    return [each for n in numbers for each in pareto_front(line for line in lines if line[1] == n)]


def pareto_front(lines: Iterable[tuple[LinearFit, int]]) -> ParetoFront:
    """Drop moments that another one exceeds for every batch size >= 1."""
    # Bytes for a batch of one, slope and gradients, each in descending order.
    moments = sorted(lines, key=lambda each: (-sum(each[0]), -each[0][1], -each[1]))
    best: ParetoFront = []
    for (constant, slope), grads in moments:
        if not any(
            a + b >= constant + slope and b >= slope and more >= grads for (a, b), more in best
        ):
            best.append(((constant, slope), grads))
    return best
