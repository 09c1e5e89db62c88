"""Plan of the tensors and files that `save_pretrained` would write, made on the meta device.

transformers itself processes the meta model's state dict: it selects among tied tensors, renames
tensors, splits and merges them (the experts of a mixture are one tensor in memory and many in a
file). A dispatch mode records what happens to each tensor. As a result each tensor of a file is
either an interval of a tensor in memory or belongs to a group of tensors that is computed
together.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from nbdist.errors import CheckpointError
from nbdist.state import meta_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    """A tensor in an output file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    key: str = ""
    """Key of the tensor that it is an interval of; empty if it is computed."""
    start: int = 0
    """Index of its first element in that tensor, flattened."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedTensors:
    """Output tensors that are computed together from source tensors."""

    sources: Mapping[str, str]
    """Name in the state dict -> key."""
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """Tensors of an export."""

    file_prefix: str
    """Prefix of the names of tensor files: "model" or "adapter_model"."""
    targets: tuple[OutputTensor, ...]
    groups: tuple[DerivedTensors, ...]
    left_out: tuple[str, ...] = ()
    """Entries of the state dict that are not tensors."""


def plan_export(
    model: nn.Module, keys: Mapping[str, tuple[str, torch.dtype]], dtype: torch.dtype | None
) -> ExportPlan:
    """Plan the tensors that `save_pretrained` would write.

    Args:
        model: model on the meta device; not changed.
        keys: name of a parameter or persistent buffer (the first name if tied) -> its key and
            its dtype in memory.
        dtype: dtype of floating-point tensors in the files; None: as in memory.

    Raises:
        CheckpointError: the model cannot be exported. The message has the reason.
    """
    kind = type(model).__name__
    adapter = is_adapter_only(model)
    if getattr(model, "hf_quantizer", None) is not None and not adapter:
        raise CheckpointError(
            f"{kind} is quantized and can only be saved by its own save_pretrained."
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise CheckpointError(
            f"{kind} has adapters inside (add_adapter). Wrap it with peft.get_peft_model, or pull"
            " its state dict with %nbdist pull."
        )
    state = model.state_dict(keep_vars=True)
    if adapter:  # its base may have scales
        known = meta_model.first_names(model)
        state = {name: value for name, value in state.items() if id(value) in known}
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    provenance = _ProvenanceMode(model, tensors, keys)
    try:
        with provenance:
            outputs = _convert(model, dict(provenance.state), adapter=adapter)
    except Exception as error:  # a model's own weight conversion may raise anything
        raise CheckpointError(
            f"transformers failed to plan the save of {kind}"
            f" ({type(error).__name__}: {error}). Pull its state dict with %nbdist pull and save"
            " that."
        ) from error
    targets = tuple(provenance.describe(name, out, dtype) for name, out in outputs.items())
    computed = {target.name: outputs[target.name] for target in targets if not target.key}
    return ExportPlan(
        file_prefix="adapter_model" if adapter else "model",
        targets=targets,
        groups=tuple(provenance.group(computed)),
        left_out=tuple(name for name in state if name not in tensors),
    )


def compute_tensors(
    model: nn.Module, group: DerivedTensors, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Compute the tensors of a group from whole source tensors.

    Args:
        model: model on the meta device.
        tensors: name in the state dict -> source tensor.
    """
    tensors_by_name = _convert(model, dict(tensors), adapter=is_adapter_only(model))
    return {name: tensors_by_name[name] for name in group.targets}


def assign_to_files(
    outlined: ExportPlan, max_shard_size: str | int
) -> dict[str, list[OutputTensor]]:
    """Assign the tensors to files as transformers does: file name -> tensors, in order.

    Raises:
        CheckpointError: `max_shard_size` is invalid.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    by_name = {target.name: target for target in outlined.targets}
    blank = {
        target.name: torch.empty(target.shape, dtype=target.dtype, device="meta")
        for target in outlined.targets
    }
    try:
        split = split_torch_state_dict_into_shards(
            blank,
            filename_pattern=f"{outlined.file_prefix}{{suffix}}.safetensors",
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        raise CheckpointError(
            f"Cannot parse max_shard_size {max_shard_size!r}. Examples: 5GB, 500MB."
        ) from error
    return {
        file: [by_name[name] for name in names] for file, names in split.filename_to_tensors.items()
    }


def weight_index(model: nn.Module, files: Mapping[str, list[OutputTensor]]) -> dict[str, object]:
    """Return the index of tensors and files in the format of transformers."""
    tensors = [target for targets in files.values() for target in targets]
    return {
        "metadata": {
            "total_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "total_size": sum(target.numel * target.dtype.itemsize for target in tensors),
        },
        "weight_map": {target.name: file for file, targets in files.items() for target in targets},
    }


def write_configs(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """Write everything except tensors: configs, custom model code, adapter settings.

    Args:
        model: model on the meta device; its config is changed as by `save_pretrained`.
        dtype: dtype to write to the config.
    """
    if not is_adapter_only(model) and not isinstance(model, PreTrainedModel):
        return
    described: Any = model if is_adapter_only(model) else model.to(dtype)
    # With an empty state dict transformers 5 writes no tensors, and peft an empty file.
    described.save_pretrained(str(folder), state_dict={})
    for file in folder.glob("*.safetensors*"):
        file.unlink()


def is_adapter_only(model: nn.Module) -> bool:
    """Return whether only adapters are saved, as peft does; does not import peft."""
    return any(
        base.__name__ == "PeftModel" and base.__module__.split(".")[0] == "peft"
        for base in type(model).__mro__
    )


def _saved_names(model: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterable[str]:
    """Return the names that are saved: one per group of tied weights."""
    if is_adapter_only(model):
        return state  # peft selects among them
    if not isinstance(model, PreTrainedModel):
        first: dict[int, str] = {}
        for name, tensor in state.items():
            first.setdefault(id(tensor), name)
        return first.values()
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = model._keys_to_ignore_on_save or ()  # noqa: SLF001 - as its save_pretrained does
    saved = {name: tensor.detach() for name, tensor in state.items() if name not in ignored}
    try:
        return list(remove_tied_weights_from_state_dict(saved, model))
    except RuntimeError as error:
        raise CheckpointError(
            f"{type(model).__name__} shares weights that its class does not declare as tied, so"
            " from_pretrained would not share them. Untie them, or pull the state dict with"
            " %nbdist pull and save that."
        ) from error


def _convert(
    model: nn.Module, state: dict[str, torch.Tensor], *, adapter: bool
) -> dict[str, torch.Tensor]:
    """Convert state dict entries to the names and tensors of the files."""
    if adapter:
        peft = importlib.import_module("peft")  # installed, since it created the model

        picked: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(model, state_dict=state)
        return picked
    if not isinstance(model, PreTrainedModel):
        return state
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, state)
    return converted


class _ProvenanceMode(TorchDispatchMode):
    """Records the state dict entries that each tensor is computed from."""

    def __init__(
        self,
        model: nn.Module,
        state: Mapping[str, torch.Tensor],
        keys: Mapping[str, tuple[str, torch.dtype]],
    ) -> None:
        """Create a meta tensor with the dtype in memory for each entry that is saved.

        Raises:
            CheckpointError: an entry is neither a parameter nor a buffer.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.state: dict[str, torch.Tensor] = {}
        """State dict of the meta tensors."""
        self._model_name = type(model).__name__
        self._keys: dict[str, str] = {}
        """Name in the state dict -> key."""
        first = meta_model.first_names(model)
        canonical = {name: first.get(id(tensor), "") for name, tensor in state.items()}
        unknown = [name for name, first_name in canonical.items() if first_name not in keys]
        if unknown:
            raise CheckpointError(
                f"{unknown[0]} in the state dict of {self._model_name} is neither a parameter nor"
                " a buffer. Pull the tensors that it is made of with %nbdist pull and save those."
            )
        for name in _saved_names(model, state):
            self._keys[name], dtype = keys[canonical[name]]
            self.state[name] = torch.empty(state[name].shape, dtype=dtype, device="meta")
        self._sources = {id(tensor): {name} for name, tensor in self.state.items()}
        self._copies: dict[int, torch.Tensor] = {}
        """Storage id of a copy -> the tensor that was copied."""
        self._alive: list[Any] = []
        """References to all recorded tensors, so that their ids stay unique."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation and record that each result depends on all inputs."""
        result = func(*args, **(kwargs or {}))
        inputs = [self._sources.get(id(leaf), set()) for leaf in tree_leaves((args, kwargs))]
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._sources[id(leaf)] = self._sources.get(id(leaf), set()).union(*inputs)
                self._alive.append(leaf)
        if func is torch.ops.aten.clone.default and result.is_contiguous():
            self._copies[_storage_id(result)] = args[0]
        return result

    def describe(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> OutputTensor:
        """Describe an output tensor, as an interval of a tensor in memory if possible."""
        made_of = self._sources.get(id(tensor), set())
        stored = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        key, start = "", 0
        if len(made_of) == 1:
            (source,) = made_of
            offset = self._offset_in(self.state[source], tensor)
            if offset is not None:
                key, start = self._keys[source], offset
        return OutputTensor(
            name=name, shape=tuple(tensor.shape), dtype=stored, key=key, start=start
        )

    def _offset_in(self, whole: torch.Tensor, tensor: torch.Tensor) -> int | None:
        """Return the index of a tensor's first element in `whole` if it is contiguous there.

        Follows copies that only change the memory layout: experts are split off like this.
        """
        if not tensor.is_contiguous() or tensor.dtype != whole.dtype:
            return None
        storage, start = _storage_id(tensor), int(tensor.storage_offset())
        while storage != _storage_id(whole):
            copied = self._copies.get(storage)
            offset = None if copied is None else _offset_within(copied, start, tensor.numel())
            if copied is None or offset is None:
                return None
            storage, start = _storage_id(copied), offset
        return start

    def group(self, computed: Mapping[str, torch.Tensor]) -> Iterator[DerivedTensors]:
        """Group the computed tensors that share source entries.

        Raises:
            CheckpointError: a tensor depends on no entry of the state dict.
        """
        merged: list[tuple[set[str], list[str]]] = []
        for name, tensor in computed.items():
            sources, names = set(self._sources.get(id(tensor), ())), [name]
            if not sources:
                raise CheckpointError(
                    f"transformers writes {name}, which depends on no weight of"
                    f" {self._model_name}. Pull its state dict and save that."
                )
            for group in [group for group in merged if group[0] & sources]:
                merged.remove(group)
                sources |= group[0]
                names = group[1] + names
            merged.append((sources, names))
        for sources, names in merged:
            keys = {name: key for name, key in self._keys.items() if name in sources}
            yield DerivedTensors(sources=keys, targets=tuple(names))


def _offset_within(copied: torch.Tensor, start: int, count: int) -> int | None:
    """Return the storage offset of row-major elements if they are contiguous in memory."""
    sizes, strides = list(copied.shape), list(copied.stride())
    block = 1
    while sizes and strides[-1] == block:
        block *= sizes.pop()
        strides.pop()
    if start % block + count > block:
        return None
    row, position = start // block, int(copied.storage_offset()) + start % block
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        position += row % size * stride
        row //= size
    return position


def _storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - a stable id; torch has no public one
