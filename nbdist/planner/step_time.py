"""Time of one optimizer step: computing, communication, optimizer, offload.

Pure arithmetic, about 30 us. All times are of one rank and in seconds, sizes in bytes. An
optimizer step is `accumulate` micro-batches, of which the last one reduces gradients where the
engine can wait for it.

Computing is a roofline: matrix products at what the device sustains, elementwise kernels at its
memory's speed, and no less than the launches take. Communication is by nbdist's own settings:
DDP and FSDP reduce gradients in fp32, DeepSpeed in the 16-bit type; ZeRO-1 and 2 do not overlap
it with the backward (DeepSpeed's overlap_comm is off for them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.planner.cluster_spec import Cluster, Ring
    from nbdist.planner.measurements import Collective
    from nbdist.planner.memory_model import Setup
    from nbdist.planner.model_spec import MicroBatch, ModelSpec, Workload

Bound = Literal["compute", "communication", "optimizer", "offload"]

_CONTENTION = 1.15
"""Communication is slower while kernels run beside it (Galvatron: 1.1 to 1.3)."""
_NEVER_HIDDEN = 0.1
"""Of communication that overlaps: the first gather, the last reduction (PyTorch/IBM 2024)."""
_BACKWARD = 2 / 3
"""Of a micro-batch's time."""
_RECOMPUTE = 1 / 3
"""Of a micro-batch's work: its forward."""
_ACTIVATION_PASSES = 10
"""How often each saved byte goes through memory in forward and backward, elementwise kernels and
the operands of matrix products together; fitted with the catalogue's `sustained`."""
_LOSS_PASSES = 3
_COMPILED = 0.5
"""Of the passes that are left when torch.compile has fused elementwise kernels."""
_ATTENTION_SHARE = 0.6
"""Of what large matrix products reach: fused attention's inner products are small."""
_LAUNCHES = 155
"""Kernels of a transformer block, forward and backward."""
_LAUNCH_S = 8e-6
_SMOOTHNESS = 0.8
"""How a collective approaches full speed with size; see `Cluster.ramp_s`."""
_FOREACH_PASSES = 80 / 28
"""Of memory traffic against a fused optimizer: AdamW in foreach kernels reads and writes 80 bytes
an element, in one kernel 28."""
_STEP_S: Mapping[str, float] = MappingProxyType({"ddp": 1e-3, "fsdp": 1e-3, "deepspeed": 3e-3})
"""Of an optimizer's step, whatever the size. DeepSpeed brings the gradients' norm and whether it
overflowed to the host before it steps (0.19.8), so that launches fall behind; how long that takes
on a GPU is estimated, not measured."""

_ONE_PERCENT = 0.01

_LINK_DOUBT, _MEASURED_LINK_DOUBT, _REST_DOUBT = 0.4, 0.25, 0.4
"""Shares by which parts of a step may differ: exposed communication by the catalogue or as measured
on this machine, optimizer and offload."""

_BUCKET = 25 << 20
"""DDP's buckets."""
_ZERO_BUCKET = 500_000_000
"""Elements of DeepSpeed's reduce and allgather buckets."""
_PREFETCH = 50_000_000
"""Elements that ZeRO-3 gathers at once."""
_KEPT_LIVE = 500_000_000
"""Elements that ZeRO-3 does not gather again for the backward: half of its reuse distance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Time of one optimizer step."""

    step_time_s: float
    compute_s: float
    """Forward and backward of all micro-batches, recomputation included."""
    communication_s: float
    """All of it, hidden or not."""
    exposed_communication_s: float
    """What computing does not hide."""
    optimizer_s: float
    """On the GPU, or on the CPU under offload."""
    offload_s: float
    """Copies between device, host and NVMe that nothing hides."""
    tokens_per_s: float
    """Of all ranks together."""
    tokens_per_gpu_s: float
    bytes_on_wire: float
    """That one rank sends in a step."""
    mfu: float
    """Model FLOP/s, without recomputation, as a share of the device's peak."""
    threshold_tokens: float
    """T*: tokens of a rank's micro-batch at which computing takes as long as communicating;
    above it communication can hide. 0 on one device."""
    uncertainty: float
    """Relative: a measured time is expected within this share of `step_time_s`."""

    @property
    def bound(self) -> Bound:
        """What takes most of the step."""
        parts: dict[Bound, float] = {
            "compute": self.compute_s,
            "communication": self.exposed_communication_s,
            "optimizer": self.optimizer_s,
            "offload": self.offload_s,
        }
        return max(parts, key=lambda name: parts[name])


def step_cost(model: ModelSpec, workload: Workload, setup: Setup, cluster: Cluster) -> Cost:
    """Cost of one optimizer step of a model on a cluster.

    Args:
        model: from `closed` or `traced`.
        workload: one rank's micro-batch.
        setup: strategy and options; its `world_size` counts.
        cluster: devices, and what is between them.
    """
    return Costs(model, setup, cluster).of(workload)


class Costs:
    """What optimizer steps of a model cost on a cluster, for micro-batches of any size."""

    def __init__(self, model: ModelSpec, setup: Setup, cluster: Cluster) -> None:
        """Work out what no micro-batch changes: communication, optimizer, offload."""
        self._model, self._setup, self._cluster = model, setup, cluster
        shape, strategy = _Shape.of(model), setup.options.strategy
        tells = _replicated if setup.replicas > 1 else _TRAFFIC[strategy.engine, strategy.level]
        self._traffic = traffic = tells(shape, setup)
        self._each = _seconds(traffic.each, setup, cluster)
        self._last = _seconds(traffic.last, setup, cluster)
        self._optimizer, self._offload = _update(shape, setup, cluster)
        self._steps = setup.options.accumulate
        self._wire = _wire(traffic.each, setup) * self._steps + _wire(traffic.last, setup)

    def of(self, workload: Workload) -> Cost:
        """Cost of an optimizer step of micro-batches like this one."""
        setup, cluster, each, last = self._setup, self._cluster, self._each, self._last
        work = _work(self._model, workload, setup, cluster, self._traffic)
        steps = self._steps
        exposed = self._exposed(work.seconds)
        optimizer, offload = self._optimizer, self._offload
        compute = steps * work.seconds
        communication = (steps - 1) * each.total + (each + last).total
        total = compute + exposed + optimizer + offload
        tokens = steps * workload.tokens
        return Cost(
            step_time_s=total,
            compute_s=compute,
            communication_s=communication,
            exposed_communication_s=exposed,
            optimizer_s=optimizer,
            offload_s=offload,
            tokens_per_s=tokens * setup.world_size / total,
            tokens_per_gpu_s=tokens / total,
            bytes_on_wire=self._wire,
            mfu=steps * work.flops / total / cluster.slowest.peak(setup.options.precision or "no"),
            threshold_tokens=workload.tokens * _CONTENTION * communication / compute,
            uncertainty=self._uncertainty(compute, exposed, optimizer + offload) / total,
        )

    def _uncertainty(self, compute: float, exposed: float, rest: float) -> float:
        """Seconds by which a step may differ: each part by its own share."""
        known = self._cluster.slowest.doubt(self._setup.options.precision or "no")
        link = _LINK_DOUBT if self._cluster.links is None else _MEASURED_LINK_DOUBT
        return known * compute + link * exposed + _REST_DOUBT * rest

    def _exposed(self, seconds: float) -> float:
        """What micro-batches of so many seconds do not hide of communication."""
        steps, traffic, each, last = self._steps, self._traffic, self._each, self._last
        window = traffic.window * seconds
        if traffic.last_window:
            return steps * each.exposed(window) + last.exposed(traffic.last_window * seconds)
        return (steps - 1) * each.exposed(window) + (each + last).exposed(window)


def threshold_sentence(cost: Cost, workload: Workload) -> str:
    """T*, and what it means for this micro-batch, in one sentence."""
    threshold, tokens = cost.threshold_tokens, workload.tokens
    if not threshold:
        return "One device communicates with nobody, so any batch is as good for the links."
    says = (
        f"Communication takes as long as computing at T* = {_rounded(threshold)} tokens per GPU "
        f"and micro-batch; yours has {tokens:,}"
    )
    waiting = f"{_percent(cost.exposed_communication_s / cost.step_time_s)} of the time is waiting"
    if tokens > threshold:
        return f"{says}, {tokens / threshold:.1f} times that: {waiting}."
    return (
        f"{says}, so the links bind and {waiting}: more tokens, accumulation or a strategy that "
        "moves less would help."
    )


def _percent(share: float) -> str:
    """A share for a reader, who would take 0 % for nothing at all."""
    return f"{share:.0%}" if share >= _ONE_PERCENT else "less than 1%"


def _rounded(number: float) -> str:
    """Two digits: a threshold is no more exact."""
    return f"{float(f'{number:.2g}'):,.0f}"


# -------------------------------------------------------------------------- computing


class _Shape(NamedTuple):
    """A model's parameters, in elements."""

    params: int
    trainable: int
    unit: int
    """Largest group that repeats: what FSDP gathers at once."""
    tail: int
    element: int
    """Bytes of one parameter as it was loaded."""

    @classmethod
    def of(cls, model: ModelSpec) -> _Shape:
        """Sum up a model's groups."""
        groups = model.groups
        params = sum(group.count * group.params for group in groups)
        blocks = [group.params for group in groups if group.role == "block"]
        return cls(
            params=params,
            trainable=sum(group.count * group.trainable for group in groups),
            unit=max(blocks, default=params),
            tail=sum(group.count * group.params for group in groups if group.role == "tail"),
            element=model.element,
        )


class _Work(NamedTuple):
    """Computing of one micro-batch."""

    seconds: float
    flops: float
    """Without recomputation."""


def _work(
    model: ModelSpec, workload: Workload, setup: Setup, cluster: Cluster, traffic: _Traffic
) -> _Work:
    """Roofline of one micro-batch's forward and backward."""
    options, device = setup.options, cluster.slowest
    recomputes = workload.activation_checkpointing
    plain = replace(workload, activation_checkpointing=False) if recomputes else workload
    load = _load(model, plain)
    passes = _ACTIVATION_PASSES * (_COMPILED if options.compile else 1)
    precision = options.precision or "no"
    bandwidth = device.memory_reached(precision)
    again = 1 + _RECOMPUTE if recomputes else 1
    linear_s = (load.flops - load.attention) / device.reached(precision)
    reached = _ATTENTION_SHARE * device.reached("bf16" if precision == "fp8" else precision)
    blocks = linear_s + load.attention / reached + passes * load.saved / bandwidth
    launches = again * _LAUNCHES * load.blocks
    floor = launches * traffic.hooks * _LAUNCH_S * (_COMPILED if options.compile else 1)
    rest = _LOSS_PASSES * load.loss + traffic.copied
    return _Work(max(again * blocks, floor) + rest / bandwidth, load.flops)


class _Load(NamedTuple):
    """What a micro-batch without recomputation makes a device do; the same for all engines."""

    flops: float
    attention: float
    """Of the FLOPs, those that grow with the square of the sequence."""
    saved: int
    """Bytes of activations."""
    loss: int
    """Bytes of the loss."""
    blocks: int
    """How many the model has."""


def _load(model: ModelSpec, workload: Workload) -> _Load:
    """The load of a micro-batch, worked out once for as long as that is kept."""
    run = model.micro_batch(workload)
    if run not in _loads:
        groups = model.groups
        flops = model.flops(workload)
        _loads[run] = _Load(
            flops=flops,
            attention=_attention(model, workload, flops),
            saved=sum(one.count * part.saved for one, part in zip(groups, run.passes, strict=True)),
            loss=run.loss,
            blocks=sum(one.count for one in groups if one.role == "block"),
        )
    return _loads[run]


_loads: WeakKeyDictionary[MicroBatch, _Load] = WeakKeyDictionary()


def _attention(model: ModelSpec, workload: Workload, flops: float) -> float:
    """What of the FLOPs grows with the square of the sequence, where a closed form tells."""
    if model.depth != "closed form":
        return 0.0
    apart = replace(workload, batch_size=workload.tokens, seq_len=1)
    return flops - model.flops(apart)


# ---------------------------------------------------------------------- communication


class _Transfer(NamedTuple):
    """Collectives of one kind."""

    collective: Collective
    size: float
    """Bytes of the full tensors, of all messages together."""
    message: float
    """Bytes of one message's full tensor, or of all if they are fewer."""
    overlaps: bool = True
    """It runs beside computing."""
    ring: Ring = "all"
    """Who takes part."""


class _Traffic(NamedTuple):
    """What an engine sends."""

    each: tuple[_Transfer, ...] = ()
    """In each micro-batch."""
    last: tuple[_Transfer, ...] = ()
    """In the one before the optimizer's step, besides."""
    window: float = 1
    """Share of a micro-batch's computing that can hide what overlaps."""
    last_window: float = 0
    """The same of `last`, where that is at another time than `each`; 0: they share a window."""
    hooks: float = 1
    """Time in which Python launches a block's kernels, against the plain model's."""
    copied: float = 0
    """Bytes that the device itself moves in and out of buffers, in a micro-batch."""


# `hooks`: measured on a Llama of six small blocks in a fake process group of four ranks, torch
# 2.13, deepspeed 0.19.8: time of forward and backward against DDP's.
_FSDP_HOOKS: Mapping[int, float] = MappingProxyType({1: 1.4, 2: 1.7})
_GATHERED = 6
"""Bytes an element that each gather moves besides: written, then copied out of a flat buffer."""
_REDUCED = 10
"""The same of a reduction: copied in, cast, read."""
_BUCKETED = 8
"""And of one through a bucket: copied in and out, in the 16-bit type."""


def _ddp(shape: _Shape, setup: Setup) -> _Traffic:
    """Gradients in the parameters' own type, once a step, beside the backward."""
    size = shape.element * shape.trainable
    return _Traffic(
        last=(_Transfer("all_reduce", size, _BUCKET),),
        window=_BACKWARD,
        copied=4 * size if setup.world_size > 1 else 0,
    )


def _fsdp(shape: _Shape, setup: Setup) -> _Traffic:
    """Parameters for each forward and, in shards again, backward; gradients once a step."""
    used, reduced = (2, 4) if setup.half else (shape.element, shape.element)
    resharded = setup.options.reshard_after_forward
    gathered = shape.params + (shape.params - shape.tail if resharded else 0)
    return _Traffic(
        each=(_Transfer("all_gather", used * gathered, used * shape.unit),),
        last=(_Transfer("reduce_scatter", reduced * shape.trainable, reduced * shape.unit),),
        # Kept gathered, all is gathered in the forward and all reduced in the backward.
        window=1 if resharded else 1 - _BACKWARD,
        last_window=0 if resharded else _BACKWARD,
        hooks=_FSDP_HOOKS[setup.options.strategy.level],
        copied=_GATHERED * gathered + _REDUCED * shape.trainable,
    )


def _replicated(shape: _Shape, setup: Setup) -> _Traffic:
    """As FSDP inside each node; then nodes sum up their shards of gradients.

    The network is idle while parameters are gathered, and has the whole backward.
    """
    usual = _fsdp(shape, setup)
    (gather,), (reduce,) = usual.each, usual.last
    share = reduce.size / setup.shards, reduce.message / setup.shards
    return usual._replace(
        each=(gather._replace(ring="node"),),
        last=(reduce._replace(ring="node"), _Transfer("all_reduce", *share, ring="nodes")),
        last_window=_BACKWARD,
    )


def _zero1(shape: _Shape, setup: Setup) -> _Traffic:
    """Gradients to all ranks once a step, then the parameters that each rank has updated."""
    used = 2 if setup.half else shape.element
    size, bucket = used * shape.trainable, used * _ZERO_BUCKET
    reduce = _Transfer("all_reduce", size, bucket, overlaps=False)
    return _Traffic(
        last=(reduce, _Transfer("all_gather", size, bucket, overlaps=False)),
        copied=_BUCKETED * shape.trainable,
    )


def _zero2(shape: _Shape, setup: Setup) -> _Traffic:
    """As ZeRO-1, with gradients reduced in each micro-batch.

    DeepSpeed 0.19 all-reduces a bucket that spans several ranks' partitions.
    """
    once = _zero1(shape, setup)
    reduce, gather = once.last
    return once._replace(each=(reduce,), last=(gather,), hooks=1.05)


def _zero3(shape: _Shape, setup: Setup) -> _Traffic:
    """Parameters for each forward and backward, gradients in each micro-batch.

    A bucket is reduced when it is full; the last one after the backward.
    """
    used = 2 if setup.half else shape.element
    gathered = shape.params + max(0, shape.params - _KEPT_LIVE)
    rest = used * (shape.trainable % _ZERO_BUCKET)
    full = used * shape.trainable - rest
    return _Traffic(
        each=(
            _Transfer("all_gather", used * gathered, used * _PREFETCH),
            _Transfer("reduce_scatter", full, used * _ZERO_BUCKET),
            _Transfer("reduce_scatter", rest, used * _ZERO_BUCKET, overlaps=False),
        ),
        hooks=3,
        copied=_GATHERED * gathered + _REDUCED * shape.trainable,
    )


_TRAFFIC: Mapping[tuple[str, int], Callable[[_Shape, Setup], _Traffic]] = MappingProxyType(
    {
        ("ddp", 0): _ddp,
        ("fsdp", 1): _fsdp,
        ("fsdp", 2): _fsdp,
        ("deepspeed", 1): _zero1,
        ("deepspeed", 2): _zero2,
        ("deepspeed", 3): _zero3,
    }
)


def _wire(transfers: tuple[_Transfer, ...], setup: Setup) -> float:
    """Bytes that one rank sends."""
    ranks = {"all": setup.world_size, "node": setup.shards, "nodes": setup.replicas}
    sent = {ring: (count - 1) / count for ring, count in ranks.items()}
    return sum(sent[one.ring] * one.size * _ROUNDS[one.collective] for one in transfers)


_ROUNDS: Mapping[Collective, int] = MappingProxyType(
    {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
)
"""How often a ring carries each byte to every rank."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Seconds of communication in one micro-batch."""

    beside: float
    """Of what overlaps with computing."""
    alone: float

    def __add__(self, other: _Waiting) -> _Waiting:
        """Both."""
        return _Waiting(self.beside + other.beside, self.alone + other.alone)

    @property
    def total(self) -> float:
        """All of it."""
        return self.beside + self.alone

    def exposed(self, window: float) -> float:
        """What computing of `window` seconds does not hide."""
        late = max(0.0, _CONTENTION * self.beside - window)
        return self.alone + late + _NEVER_HIDDEN * self.beside


def _seconds(transfers: tuple[_Transfer, ...], setup: Setup, cluster: Cluster) -> _Waiting:
    """Time of collectives, one after the other."""
    if setup.world_size == 1:
        return _Waiting(0.0, 0.0)
    times = [
        (one.overlaps, _transfer_s(one, cluster.ring(one.ring))) for one in transfers if one.size
    ]
    beside = sum(seconds for overlaps, seconds in times if overlaps)
    return _Waiting(beside, sum(seconds for _, seconds in times) - beside)


def collective_s(collective: Collective, size: float, cluster: Cluster) -> float:
    """Seconds of one collective over all ranks, as measured here or by the catalogue.

    Small ones are far from a link's full speed.

    Args:
        collective: its kind.
        size: bytes of the full tensor.
        cluster: the ranks; at least two.
    """
    if (measured := cluster.measured_s(collective, size)) is not None:
        return measured
    share = (cluster.world_size - 1) / cluster.world_size
    ideal = share * _ROUNDS[collective] * size / cluster.link_bytes_per_s(collective)
    slowed = ideal * (1 + math.pow(cluster.ramp_s / ideal, _SMOOTHNESS))
    return cluster.latency_s + slowed


def _transfer_s(one: _Transfer, cluster: Cluster) -> float:
    """Time of all messages of a transfer."""
    message = min(one.message, one.size)
    return one.size / message * collective_s(one.collective, message, cluster)


# --------------------------------------------------------------- optimizer and offload


def _update(shape: _Shape, setup: Setup, cluster: Cluster) -> tuple[float, float]:
    """Seconds of the optimizer, and of the copies of an offload."""
    options = setup.options
    if options.offload_device == "none":
        return _on_device(shape, setup, cluster), 0.0
    optimizer = _on_host(shape, setup, cluster)
    copies = _copied(shape, setup) / cluster.slowest.host_link
    return optimizer, copies + _nvme_s(shape, setup, cluster)


def _owned(shape: _Shape, setup: Setup) -> float:
    """Trainable elements whose optimizer state is on one rank."""
    sharded = "optimizer" in setup.options.strategy.shards
    return shape.trainable / (setup.shards if sharded else 1)


def _touched(shape: _Shape, setup: Setup, *, in_place: bool) -> float:
    """Bytes an element that the optimizer reads and writes: parameter, gradient, state."""
    width = 4 if setup.half else shape.element
    once = 3 * width + 2 * setup.optimizer.state * width / 4
    return once if in_place else once * _FOREACH_PASSES


def _on_device(shape: _Shape, setup: Setup, cluster: Cluster) -> float:
    """Seconds of an optimizer that is bound by the device's memory."""
    in_place = setup.optimizer.how == "fused"
    size = _owned(shape, setup) * _touched(shape, setup, in_place=in_place)
    bandwidth = cluster.slowest.memory_reached(setup.options.precision or "no")
    return _STEP_S[setup.options.strategy.engine] + size / bandwidth


def _on_host(shape: _Shape, setup: Setup, cluster: Cluster) -> float:
    """Seconds of an optimizer on the CPU; the ranks of a node share its memory's speed.

    DeepSpeed's own Adam goes once through memory, torch's loops do not.
    """
    in_place = setup.options.strategy.engine == "deepspeed" or setup.optimizer.how == "fused"
    size = _owned(shape, setup) * _touched(shape, setup, in_place=in_place)
    return (
        _STEP_S[setup.options.strategy.engine]
        + size * cluster.ranks_per_node / cluster.host_bandwidth
    )


def _copied(shape: _Shape, setup: Setup) -> float:
    """Bytes that one rank copies between device and host in a step."""
    options, strategy = setup.options, setup.options.strategy
    steps, owned = options.accumulate, _owned(shape, setup)
    used = 2 if setup.half else shape.element
    shard = shape.params / setup.shards
    if strategy.engine == "fsdp":
        # FSDP copies the fp32 shard and casts on the device, before each gather.
        gathers = 2 if setup.options.reshard_after_forward else 1
        return shape.element * (steps * gathers * shard + owned)
    # DeepSpeed casts gradients to fp32 on the device and brings updated parameters back.
    reductions = steps if "gradients" in strategy.shards else 1
    params: float = 2 * steps * used * shard if options.offload_params else used * owned
    return 4 * reductions * owned + params


def _nvme_s(shape: _Shape, setup: Setup, cluster: Cluster) -> float:
    """Seconds in which a node's disk is read and written.

    Master copy and state are read and written once; parameters, where they are offloaded too,
    are read for each forward and backward and written once.
    """
    if setup.options.offload_device != "nvme":
        return 0.0
    size = 2 * (4 + setup.optimizer.state) * _owned(shape, setup)
    if setup.options.offload_params:
        used = 2 if setup.half else shape.element
        times = 2 * setup.options.accumulate + 1
        size += times * used * shape.params / setup.world_size
    return size * cluster.ranks_per_node / cluster.nvme_bandwidth
