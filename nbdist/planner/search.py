"""The search: every strategy and variant, what each one needs and costs, and which to take.

`search` makes a row for each backend, offload and activation checkpointing on or off, at each
micro-batch asked for; about 30 rows a micro-batch. The best row is the fastest that fits with
a margin; within 3 % of it the simplest wins. Every row says why it was taken or not.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nbdist import strategies
from nbdist.display.units import GIB, gib, part_words
from nbdist.errors import OptionError, PlanError
from nbdist.planner import memory_model, step_time, suggestions
from nbdist.planner.memory_calibration import Learned
from nbdist.planner.model_spec import Workload
from nbdist.planner.result import Plan, Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nbdist.planner.cluster_spec import Cluster
    from nbdist.planner.model_spec import ModelSpec
    from nbdist.planner.optimizers import Optimizer
    from nbdist.strategies import Options, Strategy

MARGIN = 0.05
"""Share of a row's own bytes that must stay free besides: what the model of memory may miss."""
SIMPLER_WITHIN = 0.03
"""Of the fastest row's speed: a simpler row may give away so much."""
_IN_PERCENT = 1.2
"""Below it a ratio of speeds is said in percent."""
PLACES = ("none", "cpu", "nvme:PATH")
"""Offloads that are searched unless the user fixed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is planned: a model, a machine, and what the user has fixed."""

    model: ModelSpec
    cluster: Cluster
    """One device for each rank; the smallest one's free memory binds."""
    batch_sizes: tuple[int, ...]
    """Micro-batches of one rank, in samples."""
    seq_len: int
    """Tokens of a sample."""
    precision: str
    """One of strategies.PRECISIONS."""
    optimizer: Optimizer
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `strategies.Options` that the user gave; the rest is searched."""
    offloads: tuple[str, ...] = PLACES
    """Places to search where `fixed` names none."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the reader: what was assumed, what binds, what the devices lack."""
        device = self.cluster.smallest
        known = (*self.model.notes, *self.cluster.notes)
        if self.cluster.kind == "cpu" or self.precision in {"no", *device.flops}:
            return known
        able = ", ".join(sorted({"fp16", "bf16", "fp8"} & set(device.flops)))
        lacking = (
            f"{device.name} does not compute in {self.precision}, so speeds are those of fp32; it"
            f" has {able}."
        )
        return (*known, lacking)

    @property
    def world_size(self) -> int:
        """Number of ranks, one for each device."""
        return self.cluster.world_size

    @property
    def hardware(self) -> strategies.Hardware:
        """What options are checked against: GPUs that lack nothing, on these nodes."""
        return able_hardware(self.cluster)


def able_hardware(cluster: Cluster) -> strategies.Hardware:
    """GPUs that lack nothing, on a cluster's nodes."""
    ranks, nodes = cluster.world_size, cluster.nodes
    return strategies.Hardware(kind="cuda", bf16=True, fp8=True, world_size=ranks, nodes=nodes)


def search(question: Question) -> Plan:
    """Make all rows, take the best, and say why not the others.

    Raises:
        PlanError: no row can be planned for this model.
    """
    rows = explored(question)
    _check_planned(rows, question)
    best = _best(rows)
    top = max((row.tokens_per_s for row in rows if row.fits), default=0.0)
    advice = () if best else tuple(suggestions.smallest_changes(question, fastest))
    return Plan(
        question=question,
        rows=tuple(replace(row, why=_why(row, best, question, top)) for row in rows),
        best=None if best is None else replace(best, why=_why(best, best, question, top)),
        advice=advice,
    )


def checked(fixed: Mapping[str, Any], precision: str, cluster: Cluster) -> dict[str, Any]:
    """Look at the options that a user fixed; returns them with canonical names.

    Raises:
        OptionError: an unknown option, or a value that no backend takes on these machines.
    """
    given = {"precision": precision, **fixed}
    if given.get("offload") == "nvme":
        given["offload"] = "nvme:PATH"
    of_fsdp = fixed.get("fsdp_config") is not None or _replicates(fixed)
    able = strategies.canonical("fsdp") if of_fsdp else _ABLE
    asked = strategies.Options.of({"backend": able, **given})
    settled = asked.checked(able_hardware(cluster))
    filed = [name for name in _FILED if getattr(settled, name) != getattr(asked, name)]
    return {name: getattr(settled, name) for name in (*given, *filed)}


_FILED = ("offload", "offload_params", "activation_checkpointing", "accumulate", "clip")
"""Options that a config may name, and that are not searched then."""


_ABLE = max(
    strategies.STRATEGIES.values(), key=lambda one: (len(one.offloads), one.offload_params)
).name
"""The backend that can do the most: what it refuses, all refuse."""


def _replicates(fixed: Mapping[str, Any]) -> bool:
    """Whether replicas across nodes were asked for."""
    return bool(fixed.get("replicate_across", "none") != "none")


def explored(question: Question) -> list[Row]:
    """All rows of a question, unexplained."""
    learned = Learned()
    return [row for options in _variants(question) for row in _rows(question, options, learned)]


def fastest(question: Question) -> Row | None:
    """The best row of a question, or None where nothing fits."""
    return _best(explored(question))


def _variants(question: Question) -> Iterator[Options]:
    """Options of all rows, those that are refused (offload that a backend lacks) included."""
    fixed = question.fixed
    for name in _backends(fixed):
        strategy = strategies.STRATEGIES[name]
        for offload, with_params, checkpointing, across in itertools.product(
            _places(question, strategy),
            (False, True),
            (False, True),
            _replications(question, strategy),
        ):
            searched = {
                "backend": name,
                "precision": question.precision,
                "offload": offload,
                "offload_params": with_params,
                "activation_checkpointing": checkpointing,
                "replicate_across": across,
            }
            options = strategies.Options.of(searched | {**fixed, "backend": name})
            agrees = all(searched[key] == fixed.get(key, searched[key]) for key in _SEARCHED)
            if agrees and _makes_a_difference(strategy, options):
                yield options
                if question.world_size > 1 and _may_keep_gathered(options):
                    yield _kept_gathered(options)


def _backends(fixed: Mapping[str, Any]) -> list[str]:
    """The backends to search; an engine's config is for its own alone, as are replicas."""
    if "backend" in fixed:
        return [strategies.canonical(fixed["backend"])]
    engines = {one for one in ("fsdp", "deepspeed") if fixed.get(f"{one}_config") is not None}
    return [
        name
        for name, one in strategies.STRATEGIES.items()
        if {one.engine} >= engines and (one.may_replicate or not _replicates(fixed))
    ]


def _may_keep_gathered(options: Options) -> bool:
    """Whether it is a choice: with an offload it would bring back what that saves."""
    decided = "reshard_after_forward" in (options.fsdp_config or {})
    return options.strategy.may_keep_gathered and options.offload == "none" and not decided


def _kept_gathered(options: Options) -> Options:
    """The same with parameters gathered from forward to backward."""
    config = {**(options.fsdp_config or {}), "reshard_after_forward": False}
    return replace(options, fsdp_config=config)


_PLACE_NAMES = {"cpu": "host memory", "nvme": "NVMe"}
_SEARCHED = ("offload_params", "activation_checkpointing")


def _places(question: Question, strategy: Strategy) -> list[str]:
    """Where a strategy may put optimizer state in this search.

    CPU ranks have nowhere to go: their own memory is the host's.
    """
    if "offload" in question.fixed:
        return [str(question.fixed["offload"])]
    if question.cluster.kind == "cpu":
        return ["none"]
    return [one for one in question.offloads if one.partition(":")[0] in strategy.offloads]


def _replications(question: Question, strategy: Strategy) -> list[str]:
    """Over which ranks a strategy may keep its shards in this search.

    Nodes of one rank, or of different numbers of ranks, have nothing to share.
    """
    if "replicate_across" in question.fixed:
        return [str(question.fixed["replicate_across"])]
    ranks, nodes = question.world_size, question.cluster.nodes
    several = nodes > 1 and ranks > nodes and ranks % nodes == 0
    return ["none", "nodes"] if strategy.may_replicate and several else ["none"]


def _makes_a_difference(strategy: Strategy, options: Options) -> bool:
    """Whether `offload_params` is a choice: FSDP offloads all or nothing, ZeRO-3 either way."""
    if not options.offload_params:
        return True
    separate = strategy.offload_params and strategy.engine == "deepspeed"
    return separate and options.offload != "none"


# ---------------------------------------------------------------- the rows of a variant


def _rows(question: Question, options: Options, learned: Learned) -> Iterator[Row]:
    """A row for each micro-batch, explained where the backend or the model refuses."""
    refusal, variant = _refusal(options, question), None
    if not refusal:
        try:
            variant = _Variant(question, options, learned)
        except PlanError as error:
            refusal = str(error)
    for batch_size in question.batch_sizes:
        if variant is None:
            yield Row(options=options, batch_size=batch_size, why=refusal)
            continue
        try:
            yield variant.row(batch_size)
        except PlanError as error:  # a model may fail in one engine's way of computing alone
            yield Row(options=options, batch_size=batch_size, why=str(error))


def _check_planned(rows: Sequence[Row], question: Question) -> None:
    """Refuse the plan where every row that its backend allows was refused by the model.

    Raises:
        PlanError: what the first of them says.
    """
    refused = [row.why for row in rows if row.cost is None and not _refusal(row.options, question)]
    if refused and all(row.cost is None for row in rows):
        raise PlanError(refused[0])


class _Variant:
    """Options on a question's machine; what no micro-batch changes is worked out once.

    Raises:
        PlanError: the model cannot be planned in this engine's way of computing; so does `row`.
    """

    def __init__(self, question: Question, options: Options, learned: Learned) -> None:
        cluster = question.cluster
        setup = memory_model.Setup(
            options=options,
            world_size=question.world_size,
            optimizer=question.optimizer,
            kind=cluster.kind,
            nodes=cluster.nodes,
        )
        self._question, self._options = question, options
        self._compute = memory_model.compute_of(setup)
        self._story = memory_model.story(question.model, setup)
        self._costs = step_time.Costs(question.model, setup, cluster)
        self._calibration = learned.known(
            cluster.smallest.name,
            options.backend,
            options.offload_device,
            kind=cluster.kind,
            world_size=question.world_size,
        )

    def row(self, batch_size: int) -> Row:
        """What a micro-batch of so many samples needs and costs."""
        workload = Workload(
            batch_size=batch_size,
            seq_len=self._question.seq_len,
            compute=self._compute,
            activation_checkpointing=self._options.activation_checkpointing,
            kind=self._question.cluster.kind,
        )
        peak = self._story.peak(self._question.model.micro_batch(workload))
        allocated, context = peak.total, self._calibration.context_bytes
        device_bytes = self._calibration.device_bytes(allocated)
        extra = {"context": context, "margin": device_bytes - allocated - context}
        row = Row(
            options=self._options,
            batch_size=batch_size,
            memory={part: peak.parts.get(part, 0) for part in memory_model.PARTS} | extra,
            allocated_bytes=allocated,
            device_bytes=device_bytes,
            host=dict(peak.host),
            host_bytes=sum(peak.host.values()),
            nvme_bytes=peak.nvme,
            peak_moment=peak.name,
            learned=self._calibration.day,
            cost=self._costs.of(workload),
        )
        return replace(row, fits=not _shortage(row, self._question))


def _refusal(options: Options, question: Question) -> str:
    """Why a backend cannot have these options; empty where it can."""
    plain = options.fsdp_config is None and options.replicate_across == "none"
    if options.offload_device in options.strategy.offloads and plain:
        return ""
    try:
        options.checked(question.hardware)
    except OptionError as error:
        return str(error)
    return ""


def _shortage(row: Row, question: Question) -> str:
    """What is too small for a row, in words; empty where it fits."""
    cluster = question.cluster
    free = cluster.smallest.free_bytes
    needed = row.device_bytes + (row.host_bytes if cluster.kind == "cpu" else 0)
    if needed * (1 + MARGIN) > free:
        largest = max(row.memory.items(), key=lambda item: item[1])
        close = " with a margin of 5 %" if needed <= free else ""
        return (
            f"does not fit{close}: {gib(needed)} of {gib(free, unit=True)}, {part_words(*largest)}"
        )
    host = cluster.host_memory_bytes
    on_host = row.host_bytes * cluster.ranks_per_node
    if cluster.kind == "cuda" and host is not None and on_host > host:
        return f"does not fit the host: {gib(on_host)} of {gib(host, unit=True)} of its memory"
    return ""


# ---------------------------------------------------------------------------- the choice


def _best(rows: Sequence[Row]) -> Row | None:
    """The fastest row that fits, or the simplest of those nearly as fast."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return None
    enough = max(row.tokens_per_s for row in fitting) * (1 - SIMPLER_WITHIN)
    near = [row for row in fitting if row.tokens_per_s >= enough]
    return min(near, key=lambda row: (_complexity(row), -row.tokens_per_s))


_ORDER = [
    one.name for one in sorted(strategies.STRATEGIES.values(), key=lambda strategy: strategy.older)
]


def _complexity(row: Row) -> tuple[int, ...]:
    """What a user would rather do without, gravest first; then the order of the table."""
    options = row.options
    return (
        options.offload != "none",
        options.offload_params,
        options.activation_checkpointing,
        _ORDER.index(options.backend),
        options.replicate_across != "none",
        not options.reshard_after_forward,
    )


def _why(row: Row, best: Row | None, question: Question, top: float) -> str:
    """Why a row was taken, or why not; `top` is the speed of the fastest that fits."""
    if row.why:
        return row.why
    if not row.fits or best is None:
        return _shortage(row, question)
    return _comparison(row, best, question, top) + _elsewhere(row, question)


def _comparison(row: Row, best: Row, question: Question, top: float) -> str:
    """A row that fits beside the best one."""
    if row is best:
        near = "" if row.tokens_per_s >= top else f"simplest within {SIMPLER_WITHIN:.0%} of "
        return f"{near}the fastest that fits; {row.bound}-bound"
    slower = best.tokens_per_s / row.tokens_per_s
    if slower < 1 + SIMPLER_WITHIN:
        return "fits, as fast, less simple"
    much = f"{slower - 1:.0%}" if slower < _IN_PERCENT else f"{slower:.1f}x"
    return f"fits, {much} slower: {_reason(row, best, question)}"


def _elsewhere(row: Row, question: Question) -> str:
    """What an offload needs of the host, for all ranks of a node."""
    ranks = question.cluster.ranks_per_node
    needs = {"host memory": ranks * row.host_bytes, "NVMe": ranks * row.nvme_bytes}
    words = [f"{gib(size, unit=True)} of {place}" for place, size in needs.items() if size > GIB]
    if not words or question.cluster.kind == "cpu":
        return ""
    unknown = question.cluster.host_memory_bytes is None
    return f"; takes {' and '.join(words)}{', taken to be there' if unknown else ''}"


def _reason(row: Row, best: Row, question: Question) -> str:
    """Which part of a step takes the most more time than in the best row's."""
    names = {"nvlink": "NVLink", "pcie": "PCIe", "cpu": "the loopback"}
    link = names.get(question.cluster.link, question.cluster.link)
    link = link if question.cluster.nodes == 1 else "the network between nodes"
    options = row.options
    again = options.activation_checkpointing and not best.options.activation_checkpointing
    causes = {
        "compute_s": "recomputes activations" if again else "the engine's own work",
        "exposed_communication_s": f"waits for communication over {link}",
        "optimizer_s": "the optimizer runs on the CPU"
        if row.host_bytes
        else "the optimizer's step",
        "offload_s": f"moves data to and from {_PLACE_NAMES.get(options.offload_device, '')}",
    }
    tokens = {id(one): one.step_time_s * one.tokens_per_s for one in (row, best)}

    def lost(name: str) -> float:
        mine, theirs = getattr(row.cost, name), getattr(best.cost, name)
        return float(mine / tokens[id(row)] - theirs / tokens[id(best)])

    return causes[max(causes, key=lost)]
