"""FSDP groups of a model as accelerate's FSDP2 makes them, and repetitions among them.

`fsdp2_prepare_model` of accelerate 1.15 shards each unit, the input embedding, a tail of final norm
and head, and, as the root, the rest. With tied weights the embedding joins the tail;
`worker.engines.fsdp` leaves both in the root if the rest of the model shares their parameters. A
parameter belongs to the innermost group that contains it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from nbdist.planner.tracing import wrap_units

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

FEW_RUNS = 4
"""Maximum number of runs of equal blocks in a list before a period is searched."""
_NO_SETTING = ("idx", "index", "id", "number")
"""Suffixes of attribute names that number the blocks and do not affect them."""


@dataclass(eq=False, slots=True, kw_only=True)
class FsdpGroup:
    """Modules whose parameters are sharded together."""

    name: str
    role: Literal["embedding", "block", "tail", "root"]
    first_modules: tuple[nn.Module, ...]
    """Modules whose first forward begins this group's part of a micro-batch."""
    own_params: list[nn.Parameter]
    represented_indices: list[int]
    """Indices of the groups of the whole model that it represents."""
    quantized_sizes: dict[nn.Parameter, tuple[int, int, int]]
    """Elements, bytes, and bytes of scales of each parameter that bitsandbytes has quantized."""
    first_block_index: int = 0
    """Index of the first block of its list; its own index outside of a list."""
    biases: frozenset[int] = frozenset()
    """Indices in `own_params` of the biases of layers that have a weight, too."""
    num_late_params: int = 0
    """How many of the root's floating-point parameters follow the last block in the model."""
    tied_param: int | None = None
    """Index of the root's parameter that is both the embedding's and the head's weight, if any."""

    def parameter_counts(self) -> dict[str, Any]:
        """Return its parameters as fields of a `LayerGroup`."""
        floating = [each for each in self.own_params if each not in self.quantized_sizes]
        trainable = [parameter.numel() for parameter in floating if parameter.requires_grad]
        sizes = [parameter.numel() for parameter in floating]
        return {
            "trainable": sum(trainable),
            "frozen": sum(sizes) - sum(trainable),
            "quantized": sum(elements for elements, *_ in self.quantized_sizes.values()),
            "quantized_bytes": sum(sum(sizes) for _, *sizes in self.quantized_sizes.values()),
            "quantized_tensors": [size for _, size, _ in self.quantized_sizes.values()],
            "shards_quantized": any(each.is_floating_point() for each in self.quantized_sizes),
            "largest": max(sizes, default=0),
            "num_late_tensors": self.num_late_params,
            "tied_tensor": self.tied_param,
            "tensors": [
                (
                    each.shape[0] if each.dim() else 1,
                    each.numel(),
                    each.requires_grad,
                    n in self.biases,
                )
                for n, each in enumerate(self.own_params)
                if each not in self.quantized_sizes
            ],
        }


def has_tied_embeddings(model: nn.Module) -> bool:
    """Return whether the tail's weight is the input embedding's."""
    own = wrap_units.separable_embedding_and_head(model)
    return wrap_units.GET_HEAD_METHOD in own and wrap_units.has_tied_embeddings(model)


def find_fsdp_groups(model: nn.Module) -> list[FsdpGroup]:
    """Split a model into its groups, the root first and the tail last."""
    names = {id(module): name for name, module in model.named_modules()}
    blocks = wrap_units.find_wrap_units(model)
    result = [_group("root", "root", (), model)]
    own = wrap_units.separable_embedding_and_head(model)
    embedding, head = own.get(wrap_units.GET_EMBEDDING_METHOD), own.get(wrap_units.GET_HEAD_METHOD)
    inside = {id(inner) for unit in blocks for inner in unit.modules()}
    if embedding is not None and not has_tied_embeddings(model) and id(embedding) not in inside:
        result.append(_group("embedding", "embedding", (embedding,), embedding))
    result += [_group(names[id(block)], "block", (block,), block) for block in blocks]
    ends = [module for module in (_final_norm(model), head) if module and id(module) not in inside]
    if ends:
        result.append(_group("tail", "tail", tuple(ends), *ends))
    # Each parameter belongs to the last group that contains it: the innermost one.
    owner: dict[nn.Parameter, FsdpGroup] = {}
    for group in result:
        owner |= dict.fromkeys(group.own_params, group)
    states = _quantization_states(model)
    biases = {getattr(layer, "bias", None) for layer in model.modules() if hasattr(layer, "weight")}
    for number, group in enumerate(result):
        group.own_params = [
            parameter for parameter in dict.fromkeys(group.own_params) if owner[parameter] is group
        ]
        group.biases = frozenset(n for n, each in enumerate(group.own_params) if each in biases)
        group.represented_indices, group.first_block_index = [number], number
        group.quantized_sizes = {
            each: _quantized_size(each, states.get(each))
            for each in group.own_params
            if each in states or not each.is_floating_point()
        }
    root = result[0]
    if wrap_units.has_tied_embeddings(model):
        tied = wrap_units.embedding_and_head(model)[wrap_units.GET_HEAD_METHOD].weight
        root.tied_param = next((n for n, each in enumerate(root.own_params) if each is tied), None)
    in_order = list(model.parameters())
    in_blocks = [at for at, each in enumerate(in_order) if owner[each].role == "block"]
    after_blocks = in_order[max(in_blocks, default=len(in_order)) + 1 :]
    root.num_late_params = sum(
        owner[each] is root and each.is_floating_point() for each in after_blocks
    )
    return result


def _quantization_states(model: nn.Module) -> dict[nn.Parameter, Any]:
    """Return the state of each 4-bit weight of bitsandbytes 0.50.

    Its layer has it too, where an engine or a copy has replaced the weight by another parameter.
    """
    states: dict[nn.Parameter, Any] = {}
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        for holder in (weight, module):
            if (state := getattr(holder, "quant_state", None)) is not None:
                states[weight] = state
    return states


def _quantized_size(parameter: Any, state: Any) -> tuple[int, int, int]:
    scales = [getattr(parameter, "SCB", None)]
    if state is not None:
        scales = [state.absmax, state.code, state.offset]
        scales += [] if state.state2 is None else [state.state2.absmax, state.state2.code]
    elements = parameter.numel() if state is None else state.shape.numel()
    kept = [each for each in scales if each is not None]
    own = parameter.numel() * parameter.element_size()
    return elements, own, sum(each.numel() * each.element_size() for each in kept)


def _group(name: str, role: Any, starts: tuple[nn.Module, ...], *holders: nn.Module) -> FsdpGroup:
    owned = [parameter for holder in holders for parameter in holder.parameters()]
    return FsdpGroup(
        name=name,
        role=role,
        first_modules=starts,
        own_params=owned,
        represented_indices=[],
        quantized_sizes={},
    )


def _final_norm(model: nn.Module) -> nn.Module | None:
    """Return the last norm that is a direct child of the base model, as accelerate does."""
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if prefix else model
    children = base.children() if isinstance(base, nn.Module) else ()
    norms = [child for child in children if "Norm" in type(child).__name__]
    return norms[-1] if norms else None


def block_signature(block: nn.Module) -> Hashable:
    """Return a key that is equal for interchangeable blocks: classes, settings, shapes."""
    parts: list[Hashable] = []
    for name, module in block.named_modules():
        settings = sorted(
            (key, repr(value))
            for key, value in vars(module).items()
            if isinstance(value, (bool, int, float, str, tuple))
            and not key.startswith("_")
            and not key.endswith(_NO_SETTING)
        )
        parts.append((name, type(module), tuple(settings)))
        parts += [
            (name, own, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
            for own, parameter in module.named_parameters(recurse=False)
        ]
    return tuple(parts)


def representative_blocks(signatures: Sequence[Hashable]) -> list[int]:
    """Return for each block of a list the index of the block that represents it.

    A run of equal blocks keeps its first, second and last one; the second represents those in
    between. If kinds alternate, periods take the place of blocks. Memory is affine in the number
    of equal blocks: each adds what the second one adds.
    """
    runs = [len(list(run)) for _, run in itertools.groupby(signatures)]
    if len(runs) > FEW_RUNS:
        # The smallest distance after which the list repeats; its length if it does not.
        length = len(signatures)
        shifts = range(1, length)
        period = next((n for n in shifts if signatures[n:] == signatures[: length - n]), length)
        return _periodic(length, period)
    ends = list(itertools.accumulate(runs, initial=0))
    return [
        begin + index
        for begin, length in zip(ends, runs, strict=False)
        for index in _periodic(length, 1)
    ]


def _periodic(length: int, period: int) -> list[int]:
    """Representatives in a list with a period: its first, second and last repetition."""
    return [
        index if index < 2 * period or index >= length - period else period + index % period
        for index in range(length)
    ]


def drop_repeated_blocks(model: nn.Module, found: list[FsdpGroup]) -> list[FsdpGroup]:
    """Drop the blocks that another one represents from the model's own lists.

    Modifies the model. Returns the remaining groups, each with the indices it represents.
    """
    by_block = {id(group.first_modules[0]): group for group in found if group.role == "block"}
    for module in list(model.modules()):
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            members = [id(member) for member in module]
            # All members are blocks, each once.
            if members and len(set(members)) == len(members) and set(members) <= by_block.keys():
                _shorten_list(model, module, by_block)
    return [group for group in found if group.represented_indices]


def _shorten_list(
    model: nn.Module, stack: nn.ModuleList | nn.Sequential, by_block: dict[int, FsdpGroup]
) -> None:
    """Keep only the blocks of one list that represent themselves."""
    blocks = list(stack)
    representatives = representative_blocks([block_signature(block) for block in blocks])
    members = [by_block[id(block)] for block in blocks]
    for member in members:
        member.first_block_index = members[0].first_block_index
        sides = [part for part in member.name.split(".") if part in {"encoder", "decoder"}]
        member.name = " ".join([*sides[-1:], "block"])  # "encoder block"
    for index, other in enumerate(representatives):
        if other != index:
            members[other].represented_indices += members[index].represented_indices
            members[index].represented_indices = []
    remaining = sorted(set(representatives))
    _shorten_config(model, len(blocks), remaining)
    for name in list(stack._modules):  # noqa: SLF001 - ModuleList renumbers itself, Sequential does not
        del stack._modules[name]  # noqa: SLF001
    for number, index in enumerate(remaining):
        stack.add_module(str(number), blocks[index])


def _shorten_config(model: nn.Module, length: int, remaining: Sequence[int]) -> None:
    """Shorten per-block lists in the model's configs to the remaining blocks."""
    configs = {
        id(module.config): module.config for module in model.modules() if hasattr(module, "config")
    }
    for config in configs.values():
        for name, value in list(vars(config).items()):
            if isinstance(value, list) and len(value) == length:
                setattr(config, name, [value[index] for index in remaining])
