"""Time of one optimizer step: compute, communication, optimizer, offload.

Pure arithmetic, about 30 us. All times are those of one rank in seconds, sizes are in bytes. An
optimizer step has `accumulate` micro-batches; gradients are reduced in the last one if the engine
can defer it.

Compute is a roofline: matrix products at the device's sustained speed, elementwise kernels at its
memory bandwidth, with the kernel launches as a lower bound. Communication follows nbdist's
settings: DDP and FSDP reduce gradients in fp32, DeepSpeed in the 16-bit type; ZeRO-1 and 2 do not
overlap it with the backward (DeepSpeed's overlap_comm is off for them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from nbdist.planner import prediction_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.planner.cluster_spec import ClusterSpec, CollectiveScope
    from nbdist.planner.measurement_store import Collective
    from nbdist.planner.memory.timeline import TrainingSetup
    from nbdist.planner.model_spec import ModelSpec, Workload

StepBound = Literal["compute", "communication", "optimizer", "offload"]

_CONTENTION = 1.15
"""Slowdown of communication while kernels run concurrently (Galvatron: 1.1 to 1.3)."""
_MIN_EXPOSED_FRACTION = 0.1
"""Fraction of overlapping communication that is always exposed: the first gather, the last
reduction (PyTorch/IBM 2024)."""
_BACKWARD = 2 / 3
"""Fraction of a micro-batch's time spent in the backward."""
_RECOMPUTE = 1 / 3
"""Fraction of a micro-batch's work that is recomputed: its forward."""
_ACTIVATION_PASSES = 10
"""Memory passes per saved byte in forward and backward, by elementwise kernels and the operands of
matrix products; fitted together with the catalogue's `compute_efficiency`."""
_LOSS_PASSES = 3
_CPU_WEIGHT_PASSES = 6
"""Memory passes over weights and gradients in forward and backward on CPUs, where the matrix
products of few tokens are limited by memory; fitted to measured changes of the micro-batch."""
_COMPILED = 0.5
"""Fraction of the passes that remains when torch.compile has fused elementwise kernels."""
_ATTENTION_SHARE = 0.6
"""Speed of fused attention relative to large matrix products: its inner products are small."""
_LAUNCHES = 155
"""Kernels launched by a transformer block, forward and backward."""
_LAUNCH_S, _CPU_LAUNCH_S = 8e-6, 16e-6
"""Time to launch a kernel; on CPUs fitted together with `cpu_hooks`."""
_SMOOTHNESS = 0.8
"""Exponent of how a collective approaches full speed with size; see `ClusterSpec.ramp_s`."""
_FOREACH_PASSES = 80 / 28
"""Memory traffic of a foreach optimizer relative to a fused one: AdamW in foreach kernels reads and
writes 80 bytes per element, in one kernel 28."""
_STEP_S: Mapping[str, float] = {"ddp": 1e-3, "fsdp": 1e-3, "deepspeed": 3e-3}
"""Fixed time of an optimizer step. DeepSpeed copies the gradient norm and the overflow flag to the
host before it steps (0.19.8), so that launches fall behind; the time that takes on a GPU is
estimated, not measured."""
_CPU_STEP_S = 0.01
"""The same on CPU ranks, under all engines."""

_ONE_PERCENT = 0.01

_LINK_DOUBT, _MEASURED_LINK_DOUBT, _REST_DOUBT = 0.4, 0.25, 0.4
"""Relative uncertainty of the parts of a step: exposed communication by the catalogue, or as
measured on this machine; optimizer and offload."""

_BUCKET = 25 << 20
"""Bytes of DDP's buckets."""
_ZERO_BUCKET = 500_000_000
"""Elements of DeepSpeed's reduce and all-gather buckets."""
_PREFETCH = 50_000_000
"""Elements that ZeRO-3 gathers at once."""
_REUSED_ELEMENTS = 500_000_000
"""Elements that ZeRO-3 does not gather again for the backward: half of its reuse distance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Time of one optimizer step."""

    step_time_s: float
    compute_s: float
    """Forward and backward of all micro-batches, including recomputation."""
    communication_s: float
    """All communication, hidden or not."""
    exposed_communication_s: float
    """Communication that compute does not hide."""
    optimizer_s: float
    """On the GPU, or on the CPU if offloaded."""
    offload_s: float
    """Copies between device, host and NVMe, none of them hidden."""
    tokens_per_s: float
    """Over all ranks."""
    bytes_on_wire: float
    """Bytes that one rank sends in a step."""
    mfu: float
    """Model FLOP/s, without recomputation, as a fraction of the device's peak."""
    threshold_tokens: float
    """T*: tokens of a rank's micro-batch at which compute and communication take equally long;
    above it communication can be hidden. 0 on one device."""
    uncertainty: float
    """Relative uncertainty by the sources of the parts, before it is scaled to measured errors."""
    range_s: prediction_errors.Interval
    """Measured step times are expected in this range."""

    @property
    def bound(self) -> StepBound:
        """The part that takes most of the step."""
        parts: dict[StepBound, float] = {
            "compute": self.compute_s,
            "communication": self.exposed_communication_s,
            "optimizer": self.optimizer_s,
            "offload": self.offload_s,
        }
        return max(parts, key=lambda name: parts[name])


def step_cost(
    model: ModelSpec, setup: TrainingSetup, cluster: ClusterSpec, workload: Workload
) -> StepCost:
    """Return the cost of an optimizer step of such micro-batches of a model on a cluster."""
    shape, strategy, device = _ModelSize.of(model), setup.options.strategy, cluster.slowest_device
    traffic_of = _replicated if setup.num_replicas > 1 else _TRAFFIC[strategy.name]
    traffic = traffic_of(shape, setup)
    each, last = _seconds(traffic.each, setup, cluster), _seconds(traffic.last, setup, cluster)
    optimizer_s, offload_s = _update(shape, setup, cluster)
    steps, precision = setup.options.accumulate, setup.options.precision or "no"
    micro_s, flops = _micro_batch_time(model, workload, setup, cluster, traffic)
    # Communication that the compute of the micro-batches does not hide.
    window = traffic.window * micro_s
    if traffic.last_window:
        exposed = steps * each.exposed(window) + last.exposed(traffic.last_window * micro_s)
    else:
        exposed = (steps - 1) * each.exposed(window) + (each + last).exposed(window)
    compute = steps * micro_s
    communication = (steps - 1) * each.total + (each + last).total
    rest = optimizer_s + offload_s
    total = compute + exposed + optimizer_s + offload_s
    tokens = steps * workload.num_tokens
    link_doubt = _LINK_DOUBT if cluster.comm_speed is None else _MEASURED_LINK_DOUBT
    doubt = device.uncertainty(precision) * compute + link_doubt * exposed + _REST_DOUBT * rest
    is_measured = bool(device.measured_date(precision))
    error = prediction_errors.interval(
        "step time", cluster.kind, doubt / total, measured=is_measured
    )
    return StepCost(
        step_time_s=total,
        compute_s=compute,
        communication_s=communication,
        exposed_communication_s=exposed,
        optimizer_s=optimizer_s,
        offload_s=offload_s,
        tokens_per_s=tokens * setup.world_size / total,
        bytes_on_wire=_bytes_sent(traffic.each, setup) * steps + _bytes_sent(traffic.last, setup),
        mfu=steps * flops / total / device.peak_flops(precision),
        threshold_tokens=workload.num_tokens * _CONTENTION * communication / compute,
        uncertainty=doubt / total,
        range_s=prediction_errors.Interval(error.low * total, error.high * total),
    )


def threshold_text(cost: StepCost, tokens: int) -> str:
    """Explain T* for a micro-batch of this many tokens in one sentence."""
    threshold = cost.threshold_tokens
    if not threshold:
        return "A single device does not communicate, so the batch size does not affect the links."
    rounded = f"{float(f'{threshold:.2g}'):,.0f}"  # the accuracy of a threshold
    comparison = (
        f"Communication takes as long as compute at T* = {rounded} tokens per GPU "
        f"and micro-batch; yours has {tokens:,}"
    )
    fraction = cost.exposed_communication_s / cost.step_time_s
    percent = f"{fraction:.0%}" if fraction >= _ONE_PERCENT else "less than 1%"
    waiting = f"{percent} of the time is waiting"
    if tokens > threshold:
        return f"{comparison}, {tokens / threshold:.1f} times that: {waiting}."
    return (
        f"{comparison}, so communication limits the speed and {waiting}: more tokens, accumulation "
        "or a strategy that moves less would help."
    )


# ---------------------------------------------------------------------------- compute


class _ModelSize(NamedTuple):
    """Sizes of a model, in elements."""

    params: int
    trainable: int
    unit: int
    """Largest repeated group, which FSDP gathers at once."""
    tail: int
    element: int
    """Bytes of one parameter as loaded."""

    @classmethod
    def of(cls, model: ModelSpec) -> _ModelSize:
        """Sum up a model's groups."""
        groups = model.groups
        params = sum(group.count * group.num_params for group in groups)
        blocks = [group.num_params for group in groups if group.role == "block"]
        return cls(
            params=params,
            trainable=sum(group.count * group.trainable for group in groups),
            unit=max(blocks, default=params),
            tail=sum(group.count * group.num_params for group in groups if group.role == "tail"),
            element=model.element,
        )


def _micro_batch_time(
    model: ModelSpec,
    workload: Workload,
    setup: TrainingSetup,
    cluster: ClusterSpec,
    traffic: _EngineTraffic,
) -> tuple[float, float]:
    """Seconds of one micro-batch's forward and backward, and its FLOPs without recomputation."""
    options, device, groups = setup.options, cluster.slowest_device, model.groups
    checkpointed = workload.activation_checkpointing
    plain = replace(workload, activation_checkpointing=False) if checkpointed else workload
    run, flops, attention = model.micro_batch_activations(plain), model.flops(plain), 0.0
    if model.depth == "closed form":
        # What grows with the square of the length: the same tokens as samples of one token each
        # have none of it.
        attention = flops - model.flops(replace(plain, batch_size=plain.num_tokens, seq_len=1))
    parts = zip(groups, run.layers, strict=True)
    saved = sum(group.count * part.saved_bytes for group, part in parts)
    passes = _ACTIVATION_PASSES * (_COMPILED if options.is_compiled else 1)
    precision = options.precision or "no"
    bandwidth = device.sustained_memory_bandwidth(precision)
    repeats = 1 + _RECOMPUTE if checkpointed else 1
    linear_s = (flops - attention) / device.sustained_flops(precision)
    reached = _ATTENTION_SHARE * device.sustained_flops("bf16" if precision == "fp8" else precision)
    blocks_s = linear_s + attention / reached + passes * saved / bandwidth
    num_blocks = sum(group.count for group in groups if group.role == "block")
    launches = repeats * _LAUNCHES * num_blocks * (_COMPILED if options.is_compiled else 1)
    rest_s = (_LOSS_PASSES * run.loss_bytes + traffic.copied) / bandwidth
    if cluster.kind == "cpu":  # which does not compute while it launches
        launch_s = launches * traffic.cpu_hooks * _CPU_LAUNCH_S
        weights_s = _CPU_WEIGHT_PASSES * _ModelSize.of(model).params * model.element / bandwidth
        return repeats * blocks_s + launch_s + weights_s + rest_s, flops
    return max(repeats * blocks_s, launches * traffic.hooks * _LAUNCH_S) + rest_s, flops


# ---------------------------------------------------------------------- communication


class _CollectiveTraffic(NamedTuple):
    """Collectives of one kind."""

    collective: Collective
    size: float
    """Bytes of the full tensors of all messages."""
    message: float
    """Bytes of one message's full tensor, or of all if they are fewer."""
    overlaps: bool = True
    """True if it runs concurrently with compute."""
    ring: CollectiveScope = "all"
    """Ranks that take part."""


class _EngineTraffic(NamedTuple):
    """Communication of an engine."""

    each: tuple[_CollectiveTraffic, ...] = ()
    """In each micro-batch."""
    last: tuple[_CollectiveTraffic, ...] = ()
    """In addition in the last micro-batch before the optimizer step."""
    window: float = 1
    """Fraction of a micro-batch's compute that can hide overlapping communication."""
    last_window: float = 0
    """The same for `last` if it runs at another time than `each`; 0 if they share a window."""
    hooks: float = 1
    """Python time to launch a block's kernels, relative to the plain model."""
    cpu_hooks: float = 1
    """The same on CPU ranks, with the fixed time of the collectives."""
    copied: float = 0
    """Bytes that the device copies into and out of buffers in a micro-batch."""


# `hooks`: time of forward and backward relative to DDP, measured on a Llama of six small blocks in
# a fake process group of four ranks, torch 2.13, deepspeed 0.19.8. `cpu_hooks`: fitted to 18 models
# on two ranks with gloo.
_FSDP_HOOKS: Mapping[int, float] = {1: 1.4, 2: 1.7}
_CPU_SHARDED_HOOKS = 4.5
"""Of FSDP and ZeRO-3."""
_GATHERED = 6
"""Extra bytes per gathered element: written, then copied out of a flat buffer."""
_REDUCED = 10
"""Extra bytes per reduced element: copied in, cast, read."""
_BUCKETED = 8
"""Extra bytes per element reduced through a bucket: copied in and out, in the 16-bit type."""


def _ddp(shape: _ModelSize, setup: TrainingSetup) -> _EngineTraffic:
    """Gradients in the parameters' data type, once per step, overlapping the backward."""
    size = shape.element * shape.trainable
    return _EngineTraffic(
        last=(_CollectiveTraffic("all_reduce", size, _BUCKET),),
        window=_BACKWARD,
        copied=4 * size if setup.world_size > 1 else 0,
    )


def _fsdp(shape: _ModelSize, setup: TrainingSetup) -> _EngineTraffic:
    """Parameters for each forward and, if resharded, each backward; gradients once per step."""
    used, reduced = (2, 4) if setup.is_half_precision else (shape.element, shape.element)
    resharded = setup.options.reshard_after_forward
    gathered = shape.params + (shape.params - shape.tail if resharded else 0)
    return _EngineTraffic(
        each=(_CollectiveTraffic("all_gather", used * gathered, used * shape.unit),),
        last=(
            _CollectiveTraffic("reduce_scatter", reduced * shape.trainable, reduced * shape.unit),
        ),
        # If kept gathered, all gathers run in the forward and all reductions in the backward.
        window=1 if resharded else 1 - _BACKWARD,
        last_window=0 if resharded else _BACKWARD,
        hooks=_FSDP_HOOKS[setup.options.strategy.level],
        cpu_hooks=_CPU_SHARDED_HOOKS,
        copied=_GATHERED * gathered + _REDUCED * shape.trainable,
    )


def _replicated(shape: _ModelSize, setup: TrainingSetup) -> _EngineTraffic:
    """FSDP inside each node; then nodes sum their gradient shards (HSDP)."""
    usual = _fsdp(shape, setup)
    (gather,), (reduce,) = usual.each, usual.last
    share = reduce.size / setup.num_shards, reduce.message / setup.num_shards
    return usual._replace(
        each=(gather._replace(ring="node"),),
        last=(reduce._replace(ring="node"), _CollectiveTraffic("all_reduce", *share, ring="nodes")),
        # The network is idle during gathers, so the reductions have the whole backward.
        last_window=_BACKWARD,
    )


def _zero1(shape: _ModelSize, setup: TrainingSetup) -> _EngineTraffic:
    """All-reduce of gradients once per step, then all-gather of the updated parameters."""
    used = 2 if setup.is_half_precision else shape.element
    size, bucket = used * shape.trainable, used * _ZERO_BUCKET
    reduce = _CollectiveTraffic("all_reduce", size, bucket, overlaps=False)
    return _EngineTraffic(
        last=(reduce, _CollectiveTraffic("all_gather", size, bucket, overlaps=False)),
        copied=_BUCKETED * shape.trainable,
    )


def _zero2(shape: _ModelSize, setup: TrainingSetup) -> _EngineTraffic:
    """ZeRO-1 with gradients reduced in each micro-batch."""
    # DeepSpeed 0.19 all-reduces a bucket that spans several ranks' partitions.
    once = _zero1(shape, setup)
    reduce, gather = once.last
    return once._replace(each=(reduce,), last=(gather,), hooks=1.05)


def _zero3(shape: _ModelSize, setup: TrainingSetup) -> _EngineTraffic:
    """Parameters for each forward and backward, gradients in each micro-batch.

    A bucket is reduced when it is full, the last one after the backward.
    """
    used = 2 if setup.is_half_precision else shape.element
    gathered = shape.params + max(0, shape.params - _REUSED_ELEMENTS)
    rest = used * (shape.trainable % _ZERO_BUCKET)
    full = used * shape.trainable - rest
    return _EngineTraffic(
        each=(
            _CollectiveTraffic("all_gather", used * gathered, used * _PREFETCH),
            _CollectiveTraffic("reduce_scatter", full, used * _ZERO_BUCKET),
            _CollectiveTraffic("reduce_scatter", rest, used * _ZERO_BUCKET, overlaps=False),
        ),
        hooks=3,
        cpu_hooks=_CPU_SHARDED_HOOKS,
        copied=_GATHERED * gathered + _REDUCED * shape.trainable,
    )


_TRAFFIC: Mapping[str, Callable[[_ModelSize, TrainingSetup], _EngineTraffic]] = {
    "ddp": _ddp,
    "fsdp1": _fsdp,
    "fsdp2": _fsdp,
    "zero1": _zero1,
    "zero2": _zero2,
    "zero3": _zero3,
}


def _bytes_sent(transfers: tuple[_CollectiveTraffic, ...], setup: TrainingSetup) -> float:
    ranks = {"all": setup.world_size, "node": setup.num_shards, "nodes": setup.num_replicas}
    sent = {ring: (count - 1) / count for ring, count in ranks.items()}
    return sum(sent[each.ring] * each.size * _ROUNDS[each.collective] for each in transfers)


_ROUNDS: Mapping[Collective, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Number of times a ring sends each byte past every rank."""


@dataclass(frozen=True, slots=True)
class _CommunicationTime:
    """Communication time in one micro-batch, in seconds."""

    overlapping: float
    """Communication that overlaps with compute."""
    blocking: float
    """Communication that does not overlap."""

    def __add__(self, other: _CommunicationTime) -> _CommunicationTime:
        return _CommunicationTime(
            self.overlapping + other.overlapping, self.blocking + other.blocking
        )

    @property
    def total(self) -> float:
        """Total time."""
        return self.overlapping + self.blocking

    def exposed(self, window: float) -> float:
        """Time that `window` seconds of compute do not hide."""
        late_s = max(0.0, _CONTENTION * self.overlapping - window)
        return self.blocking + late_s + _MIN_EXPOSED_FRACTION * self.overlapping


def _seconds(
    transfers: tuple[_CollectiveTraffic, ...], setup: TrainingSetup, cluster: ClusterSpec
) -> _CommunicationTime:
    total = overlapping = 0.0
    for transfer in transfers if setup.world_size > 1 else ():
        if transfer.size:
            message = min(transfer.message, transfer.size)
            ranks = cluster.subcluster(transfer.ring)
            one_s = collective_time_s(transfer.collective, message, ranks)
            seconds = transfer.size / message * one_s
            total += seconds
            overlapping += seconds if transfer.overlaps else 0.0
    return _CommunicationTime(overlapping, total - overlapping)


def collective_time_s(collective: Collective, size: float, cluster: ClusterSpec) -> float:
    """Return the time of one collective over all ranks in seconds, measured or by the catalogue.

    Args:
        collective: kind of collective.
        size: bytes of the full tensor.
        cluster: the ranks; at least two.
    """
    curve = (cluster.comm_speed or {}).get(collective)
    if curve is not None and (measured_s := curve.collective_time_s(size)) is not None:
        return measured_s
    share = (cluster.world_size - 1) / cluster.world_size
    ideal = share * _ROUNDS[collective] * size / cluster.link_bytes_per_s(collective)
    # Small messages are far from a link's full speed.
    slowed = ideal * (1 + math.pow(cluster.ramp_s / ideal, _SMOOTHNESS))
    return cluster.latency_s + slowed


# --------------------------------------------------------------- optimizer and offload


def _update(shape: _ModelSize, setup: TrainingSetup, cluster: ClusterSpec) -> tuple[float, float]:
    """Seconds of the optimizer, and of the copies of an offload."""
    options, strategy = setup.options, setup.options.strategy
    is_offloaded = options.offload_device != "none"
    # Trainable elements whose optimizer state is on this rank.
    sharded = "optimizer" in strategy.shards
    owned = shape.trainable / (setup.num_shards if sharded else 1)
    # Bytes per element that the optimizer reads and writes: parameter, gradient, state. DeepSpeed's
    # own Adam on the CPU makes one pass through memory, torch's loops several.
    width = 4 if setup.is_half_precision else shape.element
    touched = 3 * width + 2 * setup.optimizer.state_bytes_per_element * width / 4
    has_cpu_adam = is_offloaded and strategy.engine == "deepspeed"
    if setup.optimizer.implementation != "fused" and not has_cpu_adam:
        touched *= _FOREACH_PASSES
    fixed_s = _CPU_STEP_S if cluster.kind == "cpu" else _STEP_S[strategy.engine]
    if not is_offloaded:
        device = cluster.slowest_device
        bandwidth = device.sustained_memory_bandwidth(options.precision or "no")
        return fixed_s + owned * touched / bandwidth, 0.0
    # A node's ranks share the bandwidth of its memory and of its disk.
    optimizer_s = fixed_s + owned * touched * cluster.ranks_per_node / cluster.host_bandwidth
    copies_s = _copied_bytes(shape, setup, owned) / cluster.slowest_device.host_link
    if options.offload_device != "nvme":
        return optimizer_s, copies_s
    # Master copy and state are read and written once; offloaded parameters are read for each
    # forward and backward and written once.
    disk_bytes = 2 * (4 + setup.optimizer.state_bytes_per_element) * owned
    if options.offload_params:
        used = 2 if setup.is_half_precision else shape.element
        disk_bytes += (2 * options.accumulate + 1) * used * shape.params / setup.world_size
    return optimizer_s, copies_s + disk_bytes * cluster.ranks_per_node / cluster.nvme_bandwidth


def _copied_bytes(shape: _ModelSize, setup: TrainingSetup, owned: float) -> float:
    options, strategy, steps = setup.options, setup.options.strategy, setup.options.accumulate
    shard = shape.params / setup.num_shards
    if strategy.engine == "fsdp":
        # FSDP copies the fp32 shard and casts it on the device, before each gather.
        gathers = 2 if options.reshard_after_forward else 1
        return shape.element * (steps * gathers * shard + owned)
    # DeepSpeed casts gradients to fp32 on the device and copies updated parameters back.
    used = 2 if setup.is_half_precision else shape.element
    reductions = steps if "gradients" in strategy.shards else 1
    params: float = 2 * steps * used * shard if options.offload_params else used * owned
    return 4 * reductions * owned + params
