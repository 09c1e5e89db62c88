"""What the engine made of the model, and the loaders that were used; runs on a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1

from nbdist.profiler.measurements import Loader, Model

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

    from nbdist.worker.memory import memory_probe
    from nbdist.worker.profiling.instrumentation import Taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the loop did in a window."""

    steps: int
    """By which the window is counted."""
    updates: int
    """Steps of all prepared optimizers."""
    passes: Mapping[nn.Module, int]
    """Forwards with gradients by model."""
    backwards: int

    def micro_batches(self, prepared: nn.Module) -> int:
        """Of a step of a model; 0 where the loop has no backward.

        A model may go forward twice for a loss, and one forward may have two.
        """
        if not self.backwards:
            return 0
        backwards = self.backwards / max(1, self.updates)
        passes = self.passes.get(prepared, 0) / max(1, self.steps)
        return max(1, round(min(backwards, passes or backwards)))


def model(watch: memory_probe.Watch | None, seen: Seen) -> Model | None:
    """Facts of the model that is followed; None where it is gone."""
    prepared = watch.prepared if watch is not None else None
    if watch is None or prepared is None:
        return None
    whole = watch.twin if watch.twin is not None else prepared  # len() of a compiled one raises
    options = watch.options
    sizes = units(prepared)
    samples, tokens = watch.shape or (0, 0)
    micro_batches = seen.micro_batches(prepared)
    return Model(
        backend=options.backend if options is not None else "",
        params=sum(one.numel() for one in whole.parameters()),
        units=len(sizes),
        largest_unit=max(sizes, default=0),
        training=prepared.training,
        precision=str(options.precision) if options is not None else "",
        optimizer=str(watch.described.get("class", "")),
        samples=samples if micro_batches else 0,
        seq_len=tokens,
        accumulate=micro_batches or watch.accumulate,
    )


def notes(
    watch: memory_probe.Watch | None, found: Model | None, passes: Mapping[nn.Module, int]
) -> list[str]:
    """What the user should know of the loop and its models, in sentences."""
    said = []
    if watch is not None and found is not None and found.accumulate < watch.accumulate:
        said.append(
            f"--accumulate {watch.accumulate} has no effect in this loop, which steps at every"
            " batch; run its body under: with accelerator.accumulate(model):"
        )
    if len(passes) > 1:
        said.append(
            f"{len(passes)} models train in this loop; what is said of memory, units and tokens is"
            " of the one that was prepared last."
        )
    return said


def units(prepared: nn.Module) -> list[int]:
    """Parameters of each unit that FSDP gathers at once; none under other engines."""
    found = [sum(map(_whole, _own(one))) for one in prepared.modules()]
    return [size for size in found if size]


def _own(module: nn.Module) -> list[Any]:
    """FSDP's own record of the parameters of one unit."""
    if isinstance(module, FSDPModule):
        groups = module._get_fsdp_state()._fsdp_param_groups  # noqa: SLF001
        return [one for group in groups for one in group.fsdp_params]
    handle = getattr(module, "_handle", None) if isinstance(module, Fsdp1) else None
    return [] if handle is None else [handle.flat_param]


def _whole(parameter: Any) -> int:
    """Elements of a parameter on all ranks together."""
    size = getattr(parameter, "_orig_size", None)
    if size is None:
        size = parameter._unpadded_unsharded_size  # noqa: SLF001 - FSDP1
    return int(size.numel())


def loaders(taken: Iterable[Taken], steps: int) -> list[Loader]:
    """Loaders that batches were taken from; iterators of one loader count together."""
    kinds: dict[tuple[object, ...], list[Taken]] = {}
    for one in taken:
        kind = (one.num_workers, one.pin_memory, one.batch_size, one.sharded)
        kinds.setdefault(kind, []).append(one)
    found = []
    for same in kinds.values():
        first, batches = same[0], sum(one.batches for one in same)
        each = 1 / batches if batches and not first.num_workers else 0.0
        found.append(
            Loader(
                num_workers=first.num_workers,
                pin_memory=first.pin_memory,
                batch_size=first.batch_size,
                sharded=first.sharded,
                batches=batches / max(1, steps),
                fetch_s=each * sum(one.seconds for one in same),
                fetch_cpu_s=each * sum(one.cpu_seconds for one in same),
            )
        )
    return found
