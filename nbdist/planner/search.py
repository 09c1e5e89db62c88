"""Searches all strategies and options: memory and cost of each, and which one to use.

`search` makes a row for each backend and offload, with and without activation checkpointing, at
each requested micro-batch; about 30 rows per micro-batch. The best row is the simplest that fits
with a margin, unless another is faster by more than the uncertainty of the comparison. Every row
explains why it was chosen or not. If nothing fits, single changes are searched that would help.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbdist import strategies
from nbdist.errors import OptionError, PlanError
from nbdist.number_formatting import GIB, format_gib, memory_part_text
from nbdist.planner import memory, prediction_errors, step_time
from nbdist.planner.measurement_store import MeasurementStore, device_overhead
from nbdist.planner.memory.timeline import MEMORY_PARTS, TrainingSetup
from nbdist.planner.model_spec import num_params
from nbdist.planner.models import fused_loss
from nbdist.planner.models.decoder import DecoderSpec
from nbdist.planner.plan_types import PlanInput, PlanRow, hardware_for_cluster
from nbdist.planner.result import Plan

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nbdist.planner.cluster_spec import ClusterSpec
    from nbdist.planner.memory.timeline import StepTimeline
    from nbdist.strategies import Options, Strategy

DROP_OUTPUTS = "del outputs before loss.backward(), or loss = model(**batch).loss"
SAME_BACKEND_TOLERANCE = 0.03
"""Uncertainty of the comparison of two rows of one backend, whose errors are nearly the same."""
PREFERENCE = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "fsdp1")
"""Backends, simplest first. A later one must fit where an earlier one does not, or be faster by
more than the uncertainty of the comparison. fsdp1 is chosen only if the user asks for it."""
MAX_SUGGESTED_RANKS = 1024
SUGGESTED_LORA_RANK = 16
NO_CHANGE_FITS = (
    "a smaller model, a shorter sequence or larger devices. It does not fit with a micro-batch of"
    f" 1, a fused loss, LoRA or {MAX_SUGGESTED_RANKS} of these devices either."
)
_ONE_PERCENT = 0.01
_IN_PERCENT = 1.2
"""Speed ratios below this are shown in percent."""


def search_plan(request: PlanInput) -> Plan:
    """Evaluate all rows, choose the best, and explain the choice.

    Raises:
        PlanError: no row can be planned for this model.
    """
    rows = evaluate_rows(request)
    if all(row.cost is None for row in rows):
        # The model refuses every row that its backend allows.
        refused = [row.why for row in rows if not _refusal(row.options, request)]
        if refused:
            raise PlanError(refused[0])
    best, runner_up = _best_two(rows, request)
    advice = () if best else tuple(suggest_changes(request)) or (NO_CHANGE_FITS,)
    explained = {
        id(row): row if row.why else replace(row, why=_explain_row(row, best, rows, request))
        for row in rows
    }
    return Plan(
        question=request,
        rows=tuple(explained.values()),
        best=explained.get(id(best)),
        runner_up=explained.get(id(runner_up)),
        advice=advice,
    )


def validate_options(
    fixed: Mapping[str, Any], precision: str | None, cluster: ClusterSpec
) -> dict[str, Any]:
    """Validate the options that a user fixed and return them with canonical names.

    Raises:
        OptionError: an unknown option, or a value that no backend accepts on these machines.
    """
    options = {
        "precision": precision,
        **{key: value for key, value in fixed.items() if value is not None},
    }
    if options.get("offload") == "nvme":
        options["offload"] = "nvme:PATH"
    config = options.get("deepspeed_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage", "auto") if isinstance(zero, dict) else "auto"
    if "backend" not in options and stage != "auto":
        options["backend"] = strategies.backend_of("deepspeed", stage)
    needs_fsdp = "fsdp_config" in options or options.get("replicate_across", "none") != "none"
    stand_in = strategies.canonical_backend("fsdp") if needs_fsdp else _MOST_CAPABLE
    requested = strategies.Options.from_fields({"backend": stand_in, **options})
    if not options.get("backend"):  # of the stand-in, only the options are checked
        cluster = replace(cluster, has_deepspeed=True)
    validated = requested.validate(hardware_for_cluster(cluster))
    if validated.deepspeed_config and "backend" not in options:
        validated.deepspeed_config["zero_optimization"].pop("stage")  # that of the stand-in
    from_config = [
        name for name in _FILE_OPTIONS if getattr(validated, name) != getattr(requested, name)
    ]
    return {name: getattr(validated, name) for name in (*options, *from_config)}


_FILE_OPTIONS = ("offload", "offload_params", "activation_checkpointing", "accumulate", "clip")
"""Options that an engine's config file may set, and that are not searched in that case."""


_MOST_CAPABLE = max(
    strategies.STRATEGIES.values(),
    key=lambda strategy: (len(strategy.offloads), strategy.offload_params),
).name
"""The most capable backend: options that it refuses, all refuse."""


def evaluate_rows(request: PlanInput) -> list[PlanRow]:
    """Evaluate all rows of a request; explain those that do not fit or are refused."""
    learned = MeasurementStore()
    rows: list[PlanRow] = []
    for options in _variants(request):
        setup = TrainingSetup(
            options=options,
            world_size=request.world_size,
            optimizer=request.optimizer,
            kind=request.cluster.kind,
            num_nodes=request.cluster.num_nodes,
        )
        refusal, timeline = _refusal(options, request), None
        for batch_size in request.batch_sizes:
            row, why = None, refusal
            if not refusal:
                try:
                    timeline = timeline or memory.build_timeline(request.model, setup)
                    row = _evaluate_row(request, setup, timeline, batch_size, learned)
                except PlanError as error:  # a model may fail in the compute mode of one engine
                    why = str(error)
            rows.append(row or PlanRow(options=options, batch_size=batch_size, why=why))
    return rows


def best_row(request: PlanInput) -> PlanRow | None:
    """Return the best row of a request, or None if nothing fits."""
    return _best_two(evaluate_rows(request), request)[0]


def _variants(request: PlanInput) -> Iterator[Options]:
    """Options of all rows, including those that the backend refuses."""
    fixed = request.fixed_options
    ranks, nodes = request.world_size, request.cluster.num_nodes
    # Nodes with one rank, or with different numbers of ranks, cannot share shards.
    shards_in_nodes = nodes > 1 and ranks > nodes and ranks % nodes == 0
    for name in _backends(fixed):
        strategy = strategies.STRATEGIES[name]
        replications = ["none", "nodes"] if strategy.can_replicate and shards_in_nodes else ["none"]
        if "replicate_across" in fixed:
            replications = [str(fixed["replicate_across"])]
        for offload, with_params, checkpointing, across in itertools.product(
            _offload_targets(request, strategy),
            (False, True),
            (False, True),
            replications,
        ):
            # FSDP offloads all or nothing; ZeRO-3 can keep parameters on the device.
            separate = strategy.offload_params and strategy.engine == "deepspeed"
            if with_params and not (separate and offload != "none"):
                continue
            searched = {
                "backend": name,
                "precision": request.precision,
                "offload": offload,
                "offload_params": with_params,
                "activation_checkpointing": checkpointing,
                "replicate_across": across,
            }
            options = strategies.Options.from_fields(searched | {**fixed, "backend": name})
            if all(searched[key] == fixed.get(key, searched[key]) for key in _SEARCHED_OPTIONS):
                yield options
                config = options.fsdp_config or {}
                # Kept gathered from forward to backward; with an offload that would use the
                # memory that the offload saves.
                if (
                    request.world_size > 1
                    and strategy.can_skip_resharding
                    and offload == "none"
                    and "reshard_after_forward" not in config
                ):
                    yield replace(options, fsdp_config={**config, "reshard_after_forward": False})


def _backends(fixed: Mapping[str, Any]) -> list[str]:
    """The backends to search. An engine's config restricts them, as do replicas."""
    if "backend" in fixed:
        return [strategies.canonical_backend(fixed["backend"])]
    engines = {
        engine for engine in ("fsdp", "deepspeed") if fixed.get(f"{engine}_config") is not None
    }
    replicates = fixed.get("replicate_across", "none") != "none"
    return [
        name
        for name, strategy in strategies.STRATEGIES.items()
        if {strategy.engine} >= engines and (strategy.can_replicate or not replicates)
    ]


_OFFLOAD_NAMES = {"cpu": "host memory", "nvme": "NVMe"}
_SEARCHED_OPTIONS = ("offload_params", "activation_checkpointing")


def _offload_targets(request: PlanInput, strategy: Strategy) -> list[str]:
    if "offload" in request.fixed_options:
        return [str(request.fixed_options["offload"])]
    if request.cluster.kind == "cpu":
        return ["none"]  # CPU ranks already use host memory
    return [
        target
        for target in request.offload_candidates
        if target.partition(":")[0] in strategy.offloads
    ]


# --------------------------------------------------------------------------- one row


def _evaluate_row(
    request: PlanInput,
    setup: TrainingSetup,
    timeline: StepTimeline,
    batch_size: int,
    learned: MeasurementStore,
) -> PlanRow:
    """Evaluate a strategy at a micro-batch.

    Raises:
        PlanError: the model does not support the engine's compute mode.
    """
    model, cluster, options = request.model, request.cluster, setup.options
    workload = setup.workload(model, batch_size, request.seq_len, keep_outputs=request.keep_outputs)
    run = model.micro_batch_activations(workload)
    peak = timeline.peak_memory(run)
    overhead = device_overhead(
        learned,
        cluster.smallest_device.name,
        options.backend,
        options.offload_device,
        kind=cluster.kind,
        world_size=request.world_size,
    )
    allocated, context = peak.device_bytes, overhead.context_bytes
    idle = peak.idle_pool_bytes if cluster.kind == "cuda" else 0
    device_bytes = overhead.device_bytes(allocated, idle)
    extra = {"context": context, "margin": device_bytes - allocated - context}
    load_bytes = num_params(model) * model.element * cluster.ranks_per_node
    if options.sharded_load and "parameters" in options.strategy.shards:  # a part of each rank
        load_bytes = -(-load_bytes // request.world_size)
    calibrated = bool(overhead.day)
    row = PlanRow(
        options=options,
        batch_size=batch_size,
        memory={part: peak.parts.get(part, 0) for part in MEMORY_PARTS} | extra,
        allocated_bytes=allocated,
        device_bytes=device_bytes,
        host=peak.host_parts,
        host_bytes=sum(peak.host_parts.values()),
        load_bytes=load_bytes,
        nvme_bytes=peak.nvme_bytes,
        output_bytes=run.output_bytes,
        peak_moment=peak.name,
        learned=overhead.day,
        margin=prediction_errors.margin_of(options.backend, model.depth, calibrated=calibrated),
        cost=step_time.step_cost(model, setup, cluster, workload),
    )
    shortage = _shortage(row, cluster)
    return replace(row, fits=not shortage, why=shortage)


def _shortage(row: PlanRow, cluster: ClusterSpec) -> str:
    """Describe what is too small for a row, or return "" if it fits."""
    free, margin = cluster.smallest_device.free_bytes, row.margin.total
    needed = row.device_bytes + (row.host_bytes if cluster.kind == "cpu" else 0)
    if needed * (1 + margin) > free:
        largest = max(row.memory.items(), key=lambda item: item[1])
        close = f" with a margin of {margin:.1%}" if needed <= free else ""
        return (
            f"does not fit{close}: {format_gib(needed)} of {format_gib(free, unit=True)},"
            f" {memory_part_text(*largest)}"
        )
    host = cluster.host_memory_bytes
    on_host = row.host_bytes * cluster.ranks_per_node
    if cluster.kind == "cuda" and host is not None and max(on_host, row.load_bytes) > host:
        when = "" if on_host > host else " while it is loaded"
        needed = on_host if on_host > host else row.load_bytes
        return (
            f"does not fit in host memory{when}: {format_gib(needed)} of"
            f" {format_gib(host, unit=True)}"
        )
    nvme, on_nvme = cluster.nvme_bytes, row.nvme_bytes * cluster.ranks_per_node
    if nvme is not None and on_nvme > nvme:
        return f"does not fit on NVMe: {format_gib(on_nvme)} of {format_gib(nvme, unit=True)}"
    return ""


def _refusal(options: Options, request: PlanInput) -> str:
    plain = options.fsdp_config is None and options.replicate_across == "none"
    plain = plain and (request.cluster.has_deepspeed or options.strategy.engine != "deepspeed")
    if options.offload_device in options.strategy.offloads and plain:
        return ""
    try:
        options.validate(hardware_for_cluster(request.cluster))
    except OptionError as error:
        return str(error)
    return ""


# --------------------------------------------------------------------------- best row


def _best_two(rows: Sequence[PlanRow], request: PlanInput) -> tuple[PlanRow | None, PlanRow | None]:
    candidates = [row for row in rows if row.fits and not _is_unrequested(row, request)]
    best = _best(candidates, request)
    others = [row for row in candidates if best is None or row.backend != best.backend]
    return best, _best(others, request)


def _best(fitting: Sequence[PlanRow], request: PlanInput) -> PlanRow | None:
    """Return the simplest row that the fastest does not surely beat."""
    if not fitting:
        return None
    fastest = max(fitting, key=lambda row: row.tokens_per_s)
    as_fast = [
        row
        for row in fitting
        if fastest.tokens_per_s <= row.tokens_per_s * (1 + _comparison_doubt(row, fastest, request))
    ]
    simplest = min(as_fast, key=_complexity)
    # Of the same backend, the fastest variant.
    same = [row for row in as_fast if _complexity(row) == _complexity(simplest)]
    top = max(row.tokens_per_s for row in same)
    nearly = [row for row in same if top <= row.tokens_per_s * (1 + SAME_BACKEND_TOLERANCE)]
    return min(
        nearly,
        key=lambda row: (
            row.options.replicate_across != "none",
            not row.options.reshard_after_forward,
            -row.tokens_per_s,
        ),
    )


def _is_unrequested(row: PlanRow, request: PlanInput) -> bool:
    """True for a legacy backend that the user did not ask for, by name or by its config."""
    requested = {"backend", "fsdp_config"} & request.fixed_options.keys()
    return row.options.strategy.is_legacy and not requested


def _comparison_doubt(row: PlanRow, other: PlanRow, request: PlanInput) -> float:
    if row.backend == other.backend:
        return SAME_BACKEND_TOLERANCE
    return prediction_errors.comparison_uncertainty(request.cluster.kind)


def _complexity(row: PlanRow) -> tuple[int, ...]:
    """Sort key: undesirable options, worst first, then the preference among backends."""
    options = row.options
    return (
        options.offload != "none",
        options.offload_params,
        options.activation_checkpointing,
        PREFERENCE.index(options.backend),
    )


def _explain_row(
    row: PlanRow, best: PlanRow | None, rows: Sequence[PlanRow], request: PlanInput
) -> str:
    if best is None or _is_unrequested(row, request):
        return f"fits, but a newer backend replaces it: used only with --backend {row.backend}"
    host = _host_memory_text(row, request)
    if row is best:
        top = max(
            each.tokens_per_s for each in rows if each.fits and not _is_unrequested(each, request)
        )
        is_fastest = top <= row.tokens_per_s * (1 + _ONE_PERCENT)
        simplest = "the simplest that fits, and none is faster by more than the uncertainty"
        return f"{'the fastest that fits' if is_fastest else simplest}; {row.bound}-bound{host}"
    slower = best.tokens_per_s / row.tokens_per_s
    if abs(math.log(slower)) < math.log1p(_ONE_PERCENT):
        return f"fits, equally fast, less simple{host}"
    if slower < 1:
        doubt = _comparison_doubt(row, best, request)
        return (
            f"fits, predicted {1 / slower - 1:.0%} faster, within the uncertainty of {doubt:.0%};"
            f" less simple{host}"
        )
    much = f"{slower - 1:.0%}" if slower < _IN_PERCENT else f"{slower:.1f}x"
    return f"fits, {much} slower: {_reason(row, best, request)}{host}"


def _host_memory_text(row: PlanRow, request: PlanInput) -> str:
    """Memory that an offload needs on the host, for all ranks of a node."""
    cluster = request.cluster
    places = (
        ("host memory", row.host_bytes * cluster.ranks_per_node, cluster.host_memory_bytes),
        ("NVMe", row.nvme_bytes * cluster.ranks_per_node, cluster.nvme_bytes),
    )
    needed = [place for place in places if place[1] > GIB]
    if not needed or cluster.kind == "cpu":
        return ""
    words = " and ".join(f"{format_gib(size, unit=True)} of {name}" for name, size, _ in needed)
    is_assumed = any(available is None for *_, available in needed)
    return f"; needs {words}{', assumed to be available' if is_assumed else ''}"


def _reason(row: PlanRow, best: PlanRow, request: PlanInput) -> str:
    """Name the part of a step that loses the most time against the best row."""
    names = {"nvlink": "NVLink", "pcie": "PCIe", "cpu": "the loopback"}
    link = names.get(request.cluster.link, request.cluster.link)
    link = link if request.cluster.num_nodes == 1 else "the network between nodes"
    options = row.options
    recomputes = options.activation_checkpointing and not best.options.activation_checkpointing
    causes = {
        "compute_s": "recomputes activations" if recomputes else "engine overhead",
        "exposed_communication_s": f"waits for communication over {link}",
        "optimizer_s": "the optimizer runs on the CPU" if row.host_bytes else "the optimizer step",
        "offload_s": f"moves data to and from {_OFFLOAD_NAMES.get(options.offload_device, '')}",
    }
    tokens = {id(each): each.step_time_s * each.tokens_per_s for each in (row, best)}

    def lost(name: str) -> float:
        row_seconds, best_seconds = getattr(row.cost, name), getattr(best.cost, name)
        return float(row_seconds / tokens[id(row)] - best_seconds / tokens[id(best)])

    return causes[max(causes, key=lost)]


# ------------------------------------------------------------------------ suggestions


def suggest_changes(request: PlanInput) -> Iterator[str]:
    """Yield the single changes that make the model fit, smallest first.

    Tries a smaller micro-batch, searching activation checkpointing, offload and backend if the
    user fixed them, a fused loss, LoRA, and more devices of the same kind.
    """
    # The largest smaller micro-batch; accumulation keeps the batch size of an optimizer step.
    size = before = min(request.batch_sizes)
    while size > 1:
        size //= 2
        row = best_row(replace(request, batch_sizes=(size,)))
        if row is not None:
            accumulate = -(-before // size) * row.options.accumulate
            yield f"micro-batch {size} with --accumulate {accumulate}: {_fits_with(row)}"
            break
    for change, changed in _single_changes(request):
        row = best_row(changed)
        if row is not None:
            yield f"{change}: {_fits_with(row)}"
    ranks = request.world_size
    while ranks * 2 <= MAX_SUGGESTED_RANKS:
        ranks *= 2
        row = best_row(replace(request, cluster=request.cluster.with_num_ranks(ranks)))
        if row is not None:
            yield f"{ranks} of these devices instead of {request.world_size}: {_fits_with(row)}"
            return


def _single_changes(request: PlanInput) -> Iterator[tuple[str, PlanInput]]:
    """Each option that the user fixed set free; then a fused loss, and LoRA."""
    names = {"activation_checkpointing": "activation checkpointing", "offload": "offload"}
    for key in ("activation_checkpointing", "offload", "backend"):
        if key in request.fixed_options:
            freed = {name: value for name, value in request.fixed_options.items() if name != key}
            yield f"another choice of {names.get(key, key)}", replace(request, fixed_options=freed)
    if request.keep_outputs:
        yield DROP_OUTPUTS, replace(request, keep_outputs=False)
    # Another loss and low-rank adapters (Hu et al. 2021) need an analytic spec.
    model = request.model
    if not isinstance(model, DecoderSpec):
        return
    if model.loss == "logits":
        yield fused_loss.ADVICE, replace(request, model=replace(model, loss="trl"))
    if model.trains_base:
        adapted = replace(request, model=model.with_lora(SUGGESTED_LORA_RANK))
        yield f"LoRA of rank {SUGGESTED_LORA_RANK} instead of all parameters", adapted


def _fits_with(row: PlanRow) -> str:
    """Describe the result of a change: "zero3, offload cpu fits with 18.4 GiB a device"."""
    return f"{row.variant} fits with {format_gib(row.device_bytes, unit=True)} a device"
