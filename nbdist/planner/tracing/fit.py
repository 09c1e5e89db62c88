"""From recordings of two batch sizes to the figures of a plan; no torch.

Bytes are affine in the batch size, moment by moment: casts of weights and buffers are
constant, activations grow. Two batch sizes whose micro-batches ran the same operations give
both coefficients of every moment; where they did not (a batch of one may skip a copy), all
is taken as proportional to the batch size that was asked for.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nbdist.planner.tracing.tracer import Moment, Recording

Line = tuple[float, float]
"""Bytes: a constant, and a slope by sample."""
Front = list[tuple[Line, int]]
"""Moments that no other one exceeds: bytes, and elements of own gradients."""


class Part(NamedTuple):
    """One group in one micro-batch, as it was recorded."""

    place: int
    saved: int
    passing: int
    """Bytes that its forward leaves until the model returns."""
    gradient: int
    """Bytes of the gradient that its backward hands to the group before."""
    forward: list[tuple[int, int]]
    """Bytes on top of what the groups before it have saved; 0 gradient elements."""
    backward: list[tuple[int, int]]
    """The same, and elements of own gradients."""
    flops: float


class Parts(NamedTuple):
    """A recording, by group in the order of the forward."""

    groups: list[Part]
    inside: list[tuple[int, int]]
    """Head, logits and loss until the model returns; bytes on top of all that is saved."""
    loss: list[tuple[int, int]]
    """From then on; on top of the model's output as well."""
    outputs: int


def parts(recording: Recording) -> Parts:
    """Cut a recording into the parts of its groups and its loss."""
    spans, flops = _spans(recording)
    groups: list[Part] = []
    before = 0
    for place in (mark.place for mark in recording.marks if mark.kind == "forward"):
        forward = _on_top(spans.get(("forward", place), []), before)
        backward = _on_top(spans.get(("backward", place), []), before + recording.outputs)
        saved, passing = recording.saved[place], recording.passing[place]
        # The gradient that the group before finds when it begins.
        handed = max(0, groups[-1].backward[0][0] - groups[-1].saved) if _goes_on(groups) else 0
        groups.append(Part(place, saved, passing, handed, forward, backward, flops.get(place, 0.0)))
        before += saved
    inside = _on_top(spans.get(("exit", 0), []), before)
    loss = _on_top(spans.get(("returned", 0), []), before + recording.outputs)
    return Parts(groups, inside, loss, recording.outputs)


def _goes_on(groups: Sequence[Part]) -> bool:
    """Whether the backward goes on in the last of the groups."""
    return bool(groups and groups[-1].backward)


def _on_top(moments: Iterable[tuple[int, int]], before: int) -> list[tuple[int, int]]:
    """Moments without the bytes that were saved before."""
    return [(held - before, grads) for held, grads in moments]


def _spans(
    recording: Recording,
) -> tuple[dict[tuple[str, int], list[Moment]], dict[int, float]]:
    """Moments by what went on and in which group, and operations by group.

    A group's forward lasts until the next one begins; after the last one comes the loss.
    """
    marks = recording.marks
    last = max((n for n, mark in enumerate(marks) if mark.kind == "exit"), default=-1)
    spans: dict[tuple[str, int], list[Moment]] = {}
    flops: dict[int, float] = {}
    kind, place = "forward", 0
    for number, (mark, following) in enumerate(itertools.pairwise(marks)):
        if mark.kind in {"forward", "backward"}:
            kind, place = mark.kind, mark.place
        elif mark.kind == "returned" or number == last:
            kind, place = mark.kind, 0
        moments = recording.moments[mark.moment : following.moment]
        spans.setdefault((kind, place), []).extend(moments)
        flops[place] = flops.get(place, 0.0) + following.flops - mark.flops
    return spans, flops


def fit(one: Parts, batch: int, other: Parts, other_batch: int) -> dict[str, Any]:
    """Figures of one micro-batch for any batch size: every byte count as a `Line`."""
    return {
        "groups": [
            {
                "place": a.place,
                "saved": line(a.saved, batch, b.saved, other_batch),
                "gradient": line(a.gradient, batch, b.gradient, other_batch),
                "passing": line(a.passing, batch, b.passing, other_batch),
                "forward": front(a.forward, batch, b.forward, other_batch),
                "backward": front(a.backward, batch, b.backward, other_batch),
                "flops": a.flops / batch,
            }
            for a, b in zip(one.groups, other.groups, strict=True)
        ],
        "inside": front(one.inside, batch, other.inside, other_batch),
        "loss": front(one.loss, batch, other.loss, other_batch),
        "outputs": line(one.outputs, batch, other.outputs, other_batch),
    }


def deepened(run: dict[str, Any], times: Sequence[int]) -> dict[str, Any]:
    """Return a run's figures for a model of full depth.

    What groups leave until the model returns adds up over those that were not traced: it is
    held in the forward of the later groups, and in the part of the loss that the model
    computes itself.

    Args:
        run: from `fit`.
        times: for each group, how often it occurs in the model.
    """
    constant = slope = 0.0
    groups = []
    for group in run["groups"]:
        count = times[group["place"]]
        passing = group["passing"]
        constant, slope = constant + (count - 1) * passing[0], slope + (count - 1) * passing[1]
        forward = [(_plus(bytes_, constant, slope), grads) for bytes_, grads in group["forward"]]
        kept = {name: value for name, value in group.items() if name != "passing"}
        groups.append(kept | {"forward": forward})
    inside = [(_plus(bytes_, constant, slope), grads) for bytes_, grads in run["inside"]]
    return {
        "groups": groups,
        "loss": pareto([*inside, *run["loss"]]),
        "outputs": run["outputs"],
    }


def _plus(bytes_: Line, constant: float, slope: float) -> Line:
    return (bytes_[0] + constant, bytes_[1] + slope)


def line(value: int, batch: int, other: int, other_batch: int) -> Line:
    """The line through two values."""
    slope = (other - value) / (other_batch - batch)
    return (value - slope * batch, slope)


def front(
    moments: Sequence[tuple[int, int]],
    batch: int,
    others: Sequence[tuple[int, int]],
    other_batch: int,
) -> Front:
    """The moments that are the worst for some batch size and some weight of gradients."""
    if [grads for _, grads in moments] == [grads for _, grads in others]:
        pairs = zip(moments, others, strict=True)
        lines = {(line(a, batch, b, other_batch), grads) for (a, grads), (b, _) in pairs}
    else:
        lines = {((0.0, held / batch), grads) for held, grads in moments}
    return pareto(lines)


def pareto(lines: Iterable[tuple[Line, int]]) -> Front:
    """Leave out what another moment exceeds for every batch size from 1 on."""
    left: Front = []
    for one in sorted(lines, key=_worst_first):
        if not any(_exceeds(other, one) for other in left):
            left.append(one)
    return left


def _worst_first(moment: tuple[Line, int]) -> tuple[float, float, int]:
    """Order by bytes for a batch of one, slope, gradients; the largest first."""
    (constant, slope), grads = moment
    return (-constant - slope, -slope, -grads)


def _exceeds(one: tuple[Line, int], other: tuple[Line, int]) -> bool:
    """Whether a moment holds at least as much of everything."""
    (a, b), grads = one
    (c, d), fewer = other
    return a + b >= c + d and b >= d and grads >= fewer
