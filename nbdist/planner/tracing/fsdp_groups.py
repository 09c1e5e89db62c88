"""The groups a model is cut into by accelerate's FSDP2, and what repeats among them.

`fsdp2_prepare_model` of accelerate 1.15 shards each unit, the input embedding, a tail of
final norm and head, and, as the root, what is left. With tied weights the embedding goes
with the tail; `worker.engines.fsdp` leaves both in the root where the rest of the model has a part
of them. A parameter belongs to the innermost group that holds it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from nbdist.planner.tracing import wrap_units

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

FEW_RUNS = 4
"""Runs of equal blocks in one list; with more of them a period is looked for."""
_NO_SETTING = ("idx", "index", "id", "number")
"""Ends of attribute names that count the blocks and say nothing of what they do."""


@dataclass(eq=False, slots=True, kw_only=True)
class Group:
    """Modules whose parameters are sharded together."""

    name: str
    role: Literal["embedding", "block", "tail", "root"]
    starts: tuple[nn.Module, ...]
    """The modules whose first forward begins this group's part of a pass."""
    owned: list[nn.Parameter]
    times: list[int]
    """Places that it stands for, as indices into the groups of the whole model."""
    stack: int = 0
    """Place of the first block of the list that it is in; its own outside of a list."""

    def counts(self) -> dict[str, Any]:
        """Its parameters, as the fields of a `planner.model_spec.Group`."""
        trainable = [one.numel() for one in self.owned if one.requires_grad]
        return {
            "trainable": sum(trainable),
            "frozen": sum(one.numel() for one in self.owned) - sum(trainable),
            "largest": max((one.numel() for one in self.owned), default=0),
            "tensors": [(one.shape[0] if one.dim() else 1, one.numel()) for one in self.owned],
        }


def is_tied(model: nn.Module) -> bool:
    """Whether the tail's weight is the input embedding's."""
    return wrap_units.are_tied(model) and wrap_units.HEAD in wrap_units.own_ends(model)


def groups(model: nn.Module) -> list[Group]:
    """Cut a model into its groups, the root first and the tail last."""
    names = {id(module): name for name, module in model.named_modules()}
    blocks = wrap_units.units(model)
    found = [_group("root", "root", (), model)]
    own = wrap_units.own_ends(model)
    embedding, head = own.get(wrap_units.EMBEDDING), own.get(wrap_units.HEAD)
    inside = {id(inner) for unit in blocks for inner in unit.modules()}
    if embedding is not None and not is_tied(model) and id(embedding) not in inside:
        found.append(_group("embedding", "embedding", (embedding,), embedding))
    found += [_group(names[id(one)], "block", (one,), one) for one in blocks]
    ends = [one for one in (_final_norm(model), head) if one and id(one) not in inside]
    if ends:
        tail = _group("tail", "tail", tuple(ends), *ends)
        found.append(tail)
    _give_each_its_own(found)
    for number, group in enumerate(found):
        group.times, group.stack = [number], number
    return found


def _group(name: str, role: Any, starts: tuple[nn.Module, ...], *holders: nn.Module) -> Group:
    """Make a group of everything that some modules hold."""
    owned = [parameter for holder in holders for parameter in holder.parameters()]
    return Group(name=name, role=role, starts=starts, owned=owned, times=[])


def _give_each_its_own(found: Iterable[Group]) -> None:
    """Leave each parameter to the last group that holds it: the innermost one."""
    owner: dict[nn.Parameter, Group] = {}
    for group in found:
        owner |= dict.fromkeys(group.owned, group)
    for group in found:
        group.owned = [one for one in dict.fromkeys(group.owned) if owner[one] is group]


def _final_norm(model: nn.Module) -> nn.Module | None:
    """Return the last norm that is a direct child of the base model, as accelerate finds it."""
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if prefix else model
    children = base.children() if isinstance(base, nn.Module) else ()
    norms = [one for one in children if "Norm" in type(one).__name__]
    return norms[-1] if norms else None


def signature(block: nn.Module) -> Hashable:
    """What makes two blocks of one list equal: classes, settings, shapes, what trains."""
    parts: list[Hashable] = []
    for name, module in block.named_modules():
        parts.append((name, type(module), tuple(sorted(_settings(module)))))
        parts += [
            (name, own, tuple(one.shape), one.dtype, one.requires_grad)
            for own, one in module.named_parameters(recurse=False)
        ]
    return tuple(parts)


def _settings(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the plain values that a module was built with."""
    for name, value in vars(module).items():
        plain = isinstance(value, (bool, int, float, str, tuple))
        if plain and not name.startswith("_") and not name.endswith(_NO_SETTING):
            yield name, repr(value)


def kept(signatures: Sequence[Hashable]) -> list[int]:
    """Of each block of a list, the block whose trace stands for it.

    A run of equal blocks keeps its first, second and last one; the second stands for those
    between. Where kinds alternate, a period is kept in the place of a block. Memory is
    affine in the number of equal blocks: each adds what the second one adds.
    """
    runs = [len(list(run)) for _, run in itertools.groupby(signatures)]
    if len(runs) > FEW_RUNS:
        return _periodic(len(signatures), _period(signatures))
    ends = list(itertools.accumulate(runs, initial=0))
    return [
        begin + one
        for begin, length in zip(ends, runs, strict=False)
        for one in _periodic(length, 1)
    ]


def _periodic(length: int, period: int) -> list[int]:
    """Stand-ins in a list that repeats after `period`: first, second and last repetition."""
    return [
        index if index < 2 * period or index >= length - period else period + index % period
        for index in range(length)
    ]


def _period(signatures: Sequence[Hashable]) -> int:
    """Smallest distance after which a list repeats; its length where it does not."""
    length = len(signatures)
    for period in range(1, length):
        if all(signatures[i] == signatures[i + period] for i in range(length - period)):
            return period
    return length


def shorten(model: nn.Module, found: list[Group]) -> list[Group]:
    """Drop the blocks that another one stands for, from the model's own lists.

    Changes the model. Returns the groups that are left, each with the places it stands for.
    """
    by_block = {id(group.starts[0]): group for group in found if group.role == "block"}
    for module in list(model.modules()):
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and _is_stack(module, by_block):
            _shorten_list(model, module, by_block)
    return [group for group in found if group.times]


def _is_stack(module: nn.ModuleList | nn.Sequential, by_block: dict[int, Group]) -> bool:
    """Whether all members of a list are blocks, each once."""
    members = [id(one) for one in module]
    return bool(members) and len(set(members)) == len(members) and set(members) <= by_block.keys()


def _shorten_list(
    model: nn.Module, stack: nn.ModuleList | nn.Sequential, by_block: dict[int, Group]
) -> None:
    """Keep the blocks of one list that stand for themselves."""
    blocks = list(stack)
    stands_for = kept([signature(block) for block in blocks])
    members = [by_block[id(block)] for block in blocks]
    for member in members:
        member.stack, member.name = members[0].stack, _block_name(member.name)
    for index, other in enumerate(stands_for):
        if other != index:
            members[other].times += members[index].times
            members[index].times = []
    left = sorted(set(stands_for))
    _shorten_config(model, len(blocks), left)
    for name in list(stack._modules):  # noqa: SLF001 - ModuleList numbers by itself, Sequential keeps
        del stack._modules[name]  # noqa: SLF001
    for number, index in enumerate(left):
        stack.add_module(str(number), blocks[index])


def _block_name(path: str) -> str:
    """Name the blocks of a list for a reader, by the path of one: "encoder block"."""
    sides = [part for part in path.split(".") if part in {"encoder", "decoder"}]
    return " ".join([*sides[-1:], "block"])


def _shorten_config(model: nn.Module, length: int, left: Sequence[int]) -> None:
    """Keep what the model's configs say of the blocks that are left: one value for each."""
    configs = {id(one.config): one.config for one in model.modules() if hasattr(one, "config")}
    for config in configs.values():
        for name, value in list(vars(config).items()):
            if isinstance(value, list) and len(value) == length:
                setattr(config, name, [value[index] for index in left])
