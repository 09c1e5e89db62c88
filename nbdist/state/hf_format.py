"""What `save_pretrained` would write of a model, found out without a byte of the model.

transformers itself decides it, on the skeleton, whose tensors have no data: which of tied
tensors stays, which tensors get other names, which are taken apart or put together (experts
of a mixture are one tensor in memory and many in a file). What happens to each tensor is
watched, so that a tensor of a file is known as an interval of one in memory, or, where it is
computed, as one of a group that is made together.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

WEIGHTS = "model"
ADAPTER = "adapter_model"
"""Beginnings of the names of files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A tensor of the folder."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    key: str = ""
    """Of the tensor that it is an interval of; empty where it is computed."""
    start: int = 0
    """First element in that tensor, flattened."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tensors of the folder that are computed together from others."""

    sources: Mapping[str, str]
    """Name in the state dict -> key."""
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What is to be written."""

    kind: str
    """How the files with tensors begin: "model"."""
    targets: tuple[Target, ...]
    groups: tuple[Group, ...]
    left_out: tuple[str, ...] = ()
    """Entries of the state dict that are no tensors."""


@dataclass(slots=True)
class _Watch:
    """Tensors without data, and of which others they were made."""

    model: nn.Module
    state: dict[str, torch.Tensor]
    """As in a state dict, in the types of memory."""
    keys: dict[str, str]
    """Name in the state dict -> key."""
    made_of: dict[int, set[str]] = field(default_factory=dict)
    copies: dict[int, torch.Tensor] = field(default_factory=dict)
    """Memory of a copy -> the tensor that was copied."""
    alive: list[Any] = field(default_factory=list)
    """Ids must stay what they are."""


def outline(
    model: nn.Module, keys: Mapping[str, tuple[str, torch.dtype]], dtype: torch.dtype | None
) -> Outline:
    """Find out what `save_pretrained` would write.

    Args:
        model: on the meta device; is not changed.
        keys: name of a parameter or persistent buffer, tied ones by their first -> its key and
            its type in memory.
        dtype: of floating-point tensors in the files; None: as in memory.

    Raises:
        CheckpointError: the model cannot be saved so; says why.
    """
    _check(model)
    state, left_out = _state_dict(model)
    watch = _watch(model, state, keys)
    adapter = adapters(model)
    try:
        with _Recorder(watch):
            made = _renamed(model, dict(watch.state), adapter=adapter)
    except Exception as error:  # what a model's own mapping may raise is not known
        message = (
            f"transformers cannot say how {type(model).__name__} is saved"
            f" ({type(error).__name__}: {error}); pull its state dict with %nbdist pull and save"
            " that."
        )
        raise CheckpointError(message) from error
    targets = tuple(_target(watch, name, tensor, dtype) for name, tensor in made.items())
    groups = tuple(_groups(watch, made, [one.name for one in targets if not one.key]))
    kind = ADAPTER if adapter else WEIGHTS
    return Outline(kind=kind, targets=targets, groups=groups, left_out=tuple(left_out))


def made(
    model: nn.Module, group: Group, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Compute the tensors of a group from whole ones, by their names in the state dict."""
    found = _renamed(model, dict(tensors), adapter=adapters(model))
    return {name: found[name] for name in group.targets}


def shards(outlined: Outline, max_shard_size: str | int) -> dict[str, list[Target]]:
    """Share the tensors out to files, as transformers does: file -> tensors, in order.

    Raises:
        CheckpointError: not a size.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    by_name = {one.name: one for one in outlined.targets}
    blank = {
        one.name: torch.empty(one.shape, dtype=one.dtype, device="meta") for one in outlined.targets
    }
    try:
        split = split_torch_state_dict_into_shards(
            blank,
            filename_pattern=f"{outlined.kind}{{suffix}}.safetensors",
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        message = f"{max_shard_size!r} is no size of a file; give one as 5GB or 500MB."
        raise CheckpointError(message) from error
    return {
        file: [by_name[name] for name in names] for file, names in split.filename_to_tensors.items()
    }


def index(model: nn.Module, files: Mapping[str, list[Target]]) -> dict[str, object]:
    """Say which tensor is in which file, in the form of transformers."""
    tensors = [one for targets in files.values() for one in targets]
    return {
        "metadata": {
            "total_parameters": sum(one.numel() for one in model.parameters()),
            "total_size": sum(one.numel * one.dtype.itemsize for one in tensors),
        },
        "weight_map": {one.name: file for file, targets in files.items() for one in targets},
    }


def describe(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """Write all but the tensors: configurations, a model's own code, an adapter's settings.

    Args:
        model: on the meta device; its config is changed as `save_pretrained` changes it.
        folder: exists.
        dtype: that the config names.
    """
    if not adapters(model) and not is_pretrained(model):
        return
    described: Any = model if adapters(model) else model.to(dtype)
    # An empty state dict: transformers 5 writes no tensors then, and peft an empty file.
    described.save_pretrained(str(folder), state_dict={})
    for file in folder.glob("*.safetensors*"):
        file.unlink()


def is_pretrained(model: nn.Module) -> bool:
    """Whether `from_pretrained` of its class will read the folder."""
    return isinstance(model, PreTrainedModel)


def adapters(model: nn.Module) -> bool:
    """Whether only the adapters of a model are saved, as peft does; without importing peft."""
    return any(
        base.__name__ == "PeftModel" and base.__module__.split(".")[0] == "peft"
        for base in type(model).__mro__
    )


# -- inside


def _check(model: nn.Module) -> None:
    """Refuse models of which something else than the weights would have to be saved."""
    kind = type(model).__name__
    if getattr(model, "hf_quantizer", None) is not None:
        message = f"{kind} is quantized, and only its own save_pretrained knows how to save that."
        raise CheckpointError(message)
    if getattr(model, "_hf_peft_config_loaded", False):
        message = (
            f"{kind} has adapters inside (add_adapter); wrap it with peft.get_peft_model, or pull"
            " its state dict with %nbdist pull."
        )
        raise CheckpointError(message)


def _state_dict(model: nn.Module) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Entries of the state dict that are tensors, and names of the others."""
    state = model.state_dict(keep_vars=True)
    tensors = {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}
    return tensors, [name for name in state if name not in tensors]


def _watch(
    model: nn.Module,
    state: Mapping[str, torch.Tensor],
    keys: Mapping[str, tuple[str, torch.dtype]],
) -> _Watch:
    """Give each entry of the state dict its key, and a blank of the type that memory has."""
    first = {
        id(one): name
        for named in (model.named_parameters(), model.named_buffers())
        for name, one in named
    }
    found = {name: first.get(id(one), "") for name, one in state.items()}
    strange = [name for name, own in found.items() if own not in keys]
    if strange:
        message = (
            f"{strange[0]} is in the state dict of {type(model).__name__}, but is no parameter or"
            " buffer of it; pull what it is made of with %nbdist pull and save that."
        )
        raise CheckpointError(message)
    blanks: dict[str, torch.Tensor] = {}
    named: dict[str, str] = {}
    for name in _kept(model, state):
        key, dtype = keys[found[name]]
        named[name] = key
        blanks[name] = torch.empty(state[name].shape, dtype=dtype, device="meta")
    made_of = {id(blank): {name} for name, blank in blanks.items()}
    return _Watch(model, blanks, named, made_of, alive=list(blanks.values()))


def _kept(model: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterable[str]:
    """Names that are saved: of tied ones that which the model asks for when it is loaded."""
    if not isinstance(model, PreTrainedModel):
        return _first_of_tied(model, state)
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = model._keys_to_ignore_on_save or ()  # noqa: SLF001 - as its save_pretrained does
    left = {name: one.detach() for name, one in state.items() if name not in ignored}
    try:
        return list(remove_tied_weights_from_state_dict(left, model))
    except RuntimeError as error:
        message = (
            f"{type(model).__name__} shares weights that its class does not declare as tied, so"
            " from_pretrained would not share them again; untie them, or pull the state dict with"
            " %nbdist pull and save that."
        )
        raise CheckpointError(message) from error


def _first_of_tied(model: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Names of a model that nobody has rules for; all of one with adapters: peft picks."""
    seen: set[int] = set()
    for name, one in state.items():
        if id(one) not in seen or adapters(model):
            yield name
        seen.add(id(one))


def _renamed(
    model: nn.Module, state: dict[str, torch.Tensor], *, adapter: bool
) -> dict[str, torch.Tensor]:
    """Turn entries of a state dict into what is in files."""
    if adapter:
        peft = importlib.import_module("peft")  # it made the model: it is there

        picked: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(model, state_dict=state)
        return picked
    if not isinstance(model, PreTrainedModel):
        return state
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, torch.Tensor] = revert_weight_conversion(model, state)
    return found


class _Recorder(TorchDispatchMode):
    """Remembers of which entries each tensor is made."""

    def __init__(self, watch: _Watch) -> None:
        """Begin with the entries themselves."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Compute as always; what comes out is made of all that went in."""
        result = func(*args, **(kwargs or {}))
        known = self._watch.made_of
        into = [known.get(id(one), set()) for one in tree_leaves((args, kwargs))]
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor):
                known[id(one)] = known.get(id(one), set()).union(*into)
                self._watch.alive.append(one)
        if func is torch.ops.aten.clone.default and result.is_contiguous():
            self._watch.copies[_memory(result)] = args[0]
        return result


def _target(watch: _Watch, name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> Target:
    """Describe a tensor of a file; an interval of a tensor in memory where it is one."""
    made_of = watch.made_of.get(id(tensor), set())
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    key, start = "", 0
    if len(made_of) == 1:
        (source,) = made_of
        found = _place(watch, tensor, watch.state[source])
        if found is not None:
            key, start = watch.keys[source], found
    return Target(name=name, shape=tuple(tensor.shape), dtype=kind, key=key, start=start)


def _place(watch: _Watch, tensor: torch.Tensor, whole: torch.Tensor) -> int | None:
    """First element in a whole tensor, where those of another one follow each other in it.

    Copies that only lay elements out anew are looked through: experts are split off so.
    """
    if not tensor.is_contiguous() or tensor.dtype != whole.dtype:
        return None
    memory, start = _memory(tensor), int(tensor.storage_offset())
    while memory != _memory(whole):
        copied = watch.copies.get(memory)
        at = None if copied is None else _within(copied, start, tensor.numel())
        if copied is None or at is None:
            return None
        memory, start = _memory(copied), at
    return start


def _within(copied: torch.Tensor, start: int, count: int) -> int | None:
    """Where elements of a tensor, counted row by row, lie side by side in its memory."""
    sizes, strides = list(copied.shape), list(copied.stride())
    block = 1
    while sizes and strides[-1] == block:
        block *= sizes.pop()
        strides.pop()
    if start % block + count > block:
        return None
    row, at = start // block, int(copied.storage_offset()) + start % block
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        at += row % size * stride
        row //= size
    return at


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch has no other name for it


def _groups(
    watch: _Watch, tensors: Mapping[str, torch.Tensor], computed: Iterable[str]
) -> Iterator[Group]:
    """Put together what is computed from the same entries."""
    left: list[tuple[set[str], list[str]]] = []
    for name in computed:
        sources, names = set(watch.made_of.get(id(tensors[name]), ())), [name]
        if not sources:
            message = (
                f"{name} is written by transformers but made of no weight of"
                f" {type(watch.model).__name__}; pull its state dict and save that."
            )
            raise CheckpointError(message)
        for other in [one for one in left if one[0] & sources]:
            left.remove(other)
            sources |= other[0]
            names = other[1] + names
        left.append((sources, names))
    for sources, names in left:
        keys = {name: key for name, key in watch.keys.items() if name in sources}
        yield Group(sources=keys, targets=tuple(names))
