"""Splits a model into units, which become checkpointed blocks, and into FSDP groups.

Units are of the block classes that a model names itself, or layers in lists, or modules by size.

`fsdp2_prepare_model` of accelerate 1.15 shards each unit, the input embedding, a tail of final norm
and head, and, as the root, the rest. With tied weights the embedding joins the tail;
`worker.engines.fsdp` leaves both in the root if the rest of the model shares their parameters. A
parameter belongs to the innermost group that contains it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from nbdist.errors import OptionError
from nbdist.planner.model_spec import LayerGroup, WeightShape

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Sequence

    from nbdist.planner.model_spec import LayerRole

MIN_UNIT_PARAMS = 10_000
"""Parameters; a smaller group costs more in communication than it saves in memory."""
MAX_UNIT_PARAMS = 100_000_000
TARGET_NUM_UNITS = 8
"""Minimum number of units that a plain module is split into, approximately."""

GET_EMBEDDING_METHOD = "get_input_embeddings"
GET_HEAD_METHOD = "get_output_embeddings"

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
FEW_RUNS = 4
"""Maximum number of runs of equal blocks in a list before a period is searched."""
_NO_SETTING = ("idx", "index", "id", "number")
"""Suffixes of attribute names that number the blocks and do not affect them."""


def block_class_names(model: nn.Module) -> frozenset[str]:
    """Return class names of the blocks that must not be split, of the model or models inside it.

    transformers' models list them in `_no_split_modules`; a wrapper such as a peft model contains
    such a model. Names without a module in this model are dropped.
    """
    present = {type(module).__name__ for module in model.modules()}
    named: set[str] = set()
    for module in model.modules():
        named |= set(getattr(module, "_no_split_modules", None) or ())
    return frozenset(named & present)


def find_wrap_units(
    model: nn.Module,
    *,
    names: Collection[str] | None = None,
    min_num_params: int | None = None,
) -> list[nn.Module]:
    """Return the modules that become units, outermost first, never the model itself.

    Args:
        model: the bare model, or one with checkpointed activations.
        names: class names of the blocks, if given by the user.
        min_num_params: minimum size of a unit, to split by size.

    Raises:
        OptionError: a given name is not a class of this model.
    """
    if names is not None:
        present = {type(module).__name__ for module in model.modules()}
        if missing := sorted(set(names) - present):
            raise OptionError(
                f"The model has no module of class {', '.join(missing)}. "
                f"It has {', '.join(sorted(present))}."
            )
    chosen = frozenset(names) if names is not None else block_class_names(model)
    if chosen and min_num_params is None:
        candidates = [m for m in model.modules() if m is not model and type(m).__name__ in chosen]
    else:
        target = max(MIN_UNIT_PARAMS, _num_params(model) // TARGET_NUM_UNITS)
        smallest = min_num_params or min(MAX_UNIT_PARAMS, target)
        blocks = set() if min_num_params else set(_blocks_in_lists(model, smallest))
        candidates = list(_by_size(model, smallest, blocks))
    # accelerate 1.15 makes the ends units by themselves and torch 2.13 rejects a unit's parameters
    # in another unit that is made later, which would happen with ViTEmbeddings as a unit.
    own, every = (
        set(separable_embedding_and_head(model).values()),
        set(embedding_and_head(model).values()),
    )
    return [unit for unit in candidates if unit in own or every.isdisjoint(unit.modules())]


def embedding_and_head(model: nn.Module) -> dict[str, nn.Module]:
    """Return input embedding and head of a transformers model, by the name of their getter."""
    found: dict[str, nn.Module] = {}
    for name in (GET_EMBEDDING_METHOD, GET_HEAD_METHOD):
        # transformers 5.23 raises for models with several or none (ResNet, CLIP).
        with contextlib.suppress(NotImplementedError):
            module = getattr(model, name, lambda: None)()
            if isinstance(module, nn.Module):
                found[name] = module
    return found


def has_tied_embeddings(model: nn.Module) -> bool:
    """Return whether embedding and head share a weight; accelerate 1.15 then groups them."""
    modules = embedding_and_head(model)
    weight = getattr(modules.get(GET_EMBEDDING_METHOD), "weight", None)
    return weight is not None and weight is getattr(modules.get(GET_HEAD_METHOD), "weight", None)


def separable_embedding_and_head(model: nn.Module) -> dict[str, nn.Module]:
    """Return the ends that can be a group: no other module shares their parameters."""
    # torch 2.13 rejects a parameter in two groups: T5's embedding shares its weight with encoder
    # and decoder, and the bias of BERT's head is also registered next to the head.
    modules = embedding_and_head(model)
    if hasattr(modules.get(GET_HEAD_METHOD), "modules_to_save"):
        # A head that PEFT 0.21 trains. TRL 1.16 multiplies by its weight outside of its forward,
        # where a weight of a unit of its own is sharded, and its gradient would not be reduced.
        del modules[GET_HEAD_METHOD]
    groups = [list(modules)] if has_tied_embeddings(model) else [[name] for name in modules]
    own = [
        names
        for names in groups
        if not _has_shared_parameters(model, [modules[name] for name in names])
    ]
    return {name: modules[name] for names in own for name in names}


def _has_shared_parameters(model: nn.Module, group: Collection[nn.Module]) -> bool:
    inside = {inner for module in group for inner in module.modules()}
    own_parameters = {parameter for module in group for parameter in module.parameters()}
    outside = (module for module in model.modules() if module not in inside)
    return any(
        not own_parameters.isdisjoint(module.parameters(recurse=False)) for module in outside
    )


def _num_params(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _blocks_in_lists(model: nn.Module, smallest: int) -> Iterator[nn.Module]:
    """Yield the modules in lists of one class, such as 12 equal layers, if a list is large."""
    for module in model.modules():
        blocks = list(module.children())
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(set(map(type, blocks))) == 1:
            sizes = list(map(_num_params, blocks))
            if sum(sizes) >= smallest and min(sizes) >= MIN_UNIT_PARAMS:
                yield from blocks


def _by_size(model: nn.Module, smallest: int, blocks: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield the innermost modules of at least a size, or blocks, without shared parameters."""
    # torch 2.13 rejects a parameter in two FSDP groups.
    uses = Counter(
        parameter for module in model.modules() for parameter in module.parameters(recurse=False)
    )

    def large(module: nn.Module) -> bool:
        return (
            (_num_params(module) >= smallest or module in blocks)
            and not isinstance(module, _CONTAINERS)
            and not any(uses[parameter] > 1 for parameter in module.parameters())
        )

    for module in model.modules():
        inner = (child for child in module.modules() if child is not module)
        if module is not model and large(module) and not any(map(large, inner)):
            yield module


def add_activation_checkpointing(model: nn.Module, chosen: Collection[nn.Module]) -> bool:
    """Enable activation checkpointing; return whether anything will be recomputed.

    Most transformers models support it themselves; in other models, the units are wrapped in
    torch's checkpoint wrapper.
    """
    # transformers 5.23 renamed it; models of other libraries have the old name.
    names = ("activation_checkpointing", "gradient_checkpointing")
    name = next((name for name in names if hasattr(model, f"{name}_enable")), None)
    if name is not None and getattr(model, "supports_gradient_checkpointing", True):
        config: Any = getattr(model, "config", None)
        if getattr(config, "use_cache", False):
            # transformers 5.23 would disable it with a warning at the first forward.
            config.use_cache = False
        enable = getattr(model, f"{name}_enable")
        enable(**{f"{name}_kwargs": {"use_reentrant": False}})
        return True
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    ids = frozenset(map(id, chosen))
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in ids)
    return bool(ids)


# -- FSDP groups ------------------------------------------------------------------------------


@dataclass(eq=False, slots=True, kw_only=True)
class FsdpGroup:
    """Modules whose parameters are sharded together."""

    name: str
    role: LayerRole
    first_modules: tuple[nn.Module, ...]
    """Modules whose first forward begins this group's part of a micro-batch."""
    own_params: list[nn.Parameter]
    represented_indices: list[int] = field(default_factory=list)
    """Indices of the groups of the whole model that it represents."""
    quantized_sizes: dict[nn.Parameter, tuple[int, int, int]] = field(default_factory=dict)
    """Elements, bytes, and bytes of scales of each parameter that bitsandbytes has quantized."""
    first_block_index: int = 0
    """Index of the first block of its list; its own index outside of a list."""
    biases: frozenset[int] = frozenset()
    """Indices in `own_params` of the biases of layers that have a weight, too."""
    num_late_params: int = 0
    """How many of the root's floating-point parameters follow the last block in the model."""
    tied_param: int | None = None
    """Index of the root's parameter that is both the embedding's and the head's weight, if any."""

    def layer_group(self, name: str = "", count: int = 1) -> LayerGroup:
        """Return the planner's view of it; by default under its own name."""
        return LayerGroup(
            name=name or self.name,
            role=self.role,
            count=count,
            tensors=tuple(
                WeightShape(
                    each.shape[0] if each.dim() else 1,
                    each.numel(),
                    each.requires_grad,
                    n in self.biases,
                    is_scalar=not each.dim(),
                )
                for n, each in enumerate(self.own_params)
                if each not in self.quantized_sizes
            ),
            quantized=sum(elements for elements, *_ in self.quantized_sizes.values()),
            quantized_bytes=sum(sum(sizes) for _, *sizes in self.quantized_sizes.values()),
            quantized_tensors=tuple(size for _, size, _ in self.quantized_sizes.values()),
            shards_quantized=any(each.is_floating_point() for each in self.quantized_sizes),
            num_late_tensors=self.num_late_params,
            tied_tensor=self.tied_param,
        )


def has_tied_tail(model: nn.Module) -> bool:
    """Return whether the tail's weight is the input embedding's."""
    return GET_HEAD_METHOD in separable_embedding_and_head(model) and has_tied_embeddings(model)


def find_fsdp_groups(model: nn.Module) -> list[FsdpGroup]:
    """Split a model into its groups, the root first and the tail last."""
    names = {id(module): name for name, module in model.named_modules()}
    blocks = find_wrap_units(model)
    result = [_group("root", "root", (), model)]
    own = separable_embedding_and_head(model)
    embedding, head = own.get(GET_EMBEDDING_METHOD), own.get(GET_HEAD_METHOD)
    inside = {id(inner) for unit in blocks for inner in unit.modules()}
    if embedding is not None and not has_tied_tail(model) and id(embedding) not in inside:
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
    if has_tied_embeddings(model):
        tied = embedding_and_head(model)[GET_HEAD_METHOD].weight
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
    return FsdpGroup(name=name, role=role, first_modules=starts, own_params=owned)


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
