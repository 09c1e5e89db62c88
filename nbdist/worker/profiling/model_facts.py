"""Properties of the prepared model and of the DataLoaders used by the loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1

from nbdist.profiler.measurements import DataLoaderStats, ProfiledModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

    from nbdist.worker.memory import memory_probe
    from nbdist.worker.profiling.instrumentation import LoaderStats


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCounts:
    """Numbers of steps, forwards and backwards in a window."""

    num_steps: int
    """Steps of the optimizer that defines the window."""
    num_updates: int
    """Steps of all prepared optimizers."""
    forward_counts: Mapping[nn.Module, int]
    """Forwards with gradients per model."""
    num_backwards: int

    def num_micro_batches(self, prepared: nn.Module) -> int:
        """Return the number of micro-batches of a model per step; 0 if there is no backward."""
        if not self.num_backwards:
            return 0
        # A loss may need two forwards, and one forward may have two losses: use the minimum.
        backwards = self.num_backwards / max(1, self.num_updates)
        passes = self.forward_counts.get(prepared, 0) / max(1, self.num_steps)
        return max(1, round(min(backwards, passes or backwards)))


def describe_model(
    probe: memory_probe.MemoryProbe | None, counts: LoopCounts
) -> ProfiledModel | None:
    """Return the properties of the measured model; None if it no longer exists."""
    prepared = probe.prepared_model if probe is not None else None
    if probe is None or prepared is None:
        return None
    # Not `probe.meta_model or prepared`: len() of a compiled model raises.
    whole = probe.meta_model if probe.meta_model is not None else prepared
    options = probe.options
    sizes = fsdp_unit_numels(prepared)
    samples, tokens = probe.batch_shape or (0, 0)
    micro_batches = counts.num_micro_batches(prepared)
    return ProfiledModel(
        backend=options.backend if options is not None else "",
        params=sum(parameter.numel() for parameter in whole.parameters()),
        units=len(sizes),
        largest_unit=max(sizes, default=0),
        training=prepared.training,
        precision=str(options.precision) if options is not None else "",
        optimizer=str(probe.optimizer_description.get("class", "")),
        samples=samples if micro_batches else 0,
        seq_len=tokens,
        accumulate=micro_batches or probe.accumulate,
    )


def loop_notes(
    probe: memory_probe.MemoryProbe | None,
    found: ProfiledModel | None,
    passes: Mapping[nn.Module, int],
) -> list[str]:
    """Return notes for the user about the loop and its models."""
    sentences = []
    if probe is not None and found is not None and found.accumulate < probe.accumulate:
        sentences.append(
            f"--accumulate {probe.accumulate} has no effect: this loop takes an optimizer step for"
            " every batch. Run its body under: with accelerator.accumulate(model):"
        )
    if len(passes) > 1:
        sentences.append(
            f"{len(passes)} models train in this loop. Memory, units and tokens are reported for"
            " the one that was prepared last."
        )
    return sentences


def fsdp_unit_numels(prepared: nn.Module) -> list[int]:
    """Return the number of parameters of each FSDP unit; [] for other engines."""
    sizes = [sum(map(_whole, _own(module))) for module in prepared.modules()]
    return [size for size in sizes if size]


def _own(module: nn.Module) -> list[Any]:
    """Return the parameters of a module's FSDP unit, as FSDP1 or FSDP2 stores them."""
    if isinstance(module, FSDPModule):
        groups = module._get_fsdp_state()._fsdp_param_groups  # noqa: SLF001
        return [parameter for group in groups for parameter in group.fsdp_params]
    handle = getattr(module, "_handle", None) if isinstance(module, Fsdp1) else None
    return [] if handle is None else [handle.flat_param]


def _whole(parameter: Any) -> int:
    """Return the number of elements of the unsharded parameter."""
    size = getattr(parameter, "_orig_size", None)
    if size is None:
        size = parameter._unpadded_unsharded_size  # noqa: SLF001 - FSDP1
    return int(size.numel())


def summarize_loaders(loaders: Iterable[LoaderStats], steps: int) -> list[DataLoaderStats]:
    """Return the statistics per DataLoader. Iterators with equal settings are merged."""
    kinds: dict[tuple[object, ...], list[LoaderStats]] = {}
    for iterator in loaders:
        kind = (
            iterator.num_workers,
            iterator.pin_memory,
            iterator.batch_size,
            iterator.is_sharded,
        )
        kinds.setdefault(kind, []).append(iterator)
    merged = []
    for same in kinds.values():
        first, batches = same[0], sum(iterator.num_batches for iterator in same)
        each = 1 / batches if batches and not first.num_workers else 0.0
        merged.append(
            DataLoaderStats(
                num_workers=first.num_workers,
                pin_memory=first.pin_memory,
                batch_size=first.batch_size,
                sharded=first.is_sharded,
                batches=batches / max(1, steps),
                fetch_s=each * sum(iterator.seconds for iterator in same),
                fetch_cpu_s=each * sum(iterator.cpu_seconds for iterator in same),
            )
        )
    return merged
