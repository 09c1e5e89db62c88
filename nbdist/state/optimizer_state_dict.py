"""State dicts of optimizers as plain values and tensors, for state that cannot be resharded.

    tree, tensors = flatten(optimizer)      values for JSON, plain tensors by path
    unflatten(tree, tensors, optimizer)     the same state dict, for `load_state_dict`

Nothing is pickled. A tensor subclass (torchao's quantized state) becomes its inner tensors, by
`__tensor_flatten__`, and is rebuilt by a class that is imported already. A DTensor becomes its
local tensor.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nbdist.checkpoint.name_validation import printable
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.optim import Optimizer

Tensors = dict[str, torch.Tensor]
"""Path in the state dict -> tensor."""

_PLAIN = (type(None), bool, int, float, str)
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_NO_MATCH = "does not match the prepared optimizer. Prepare the optimizer that was saved"


def flatten(optimizer: Optimizer) -> tuple[Any, Tensors]:
    """Return the state dict of an optimizer as a value for JSON and the tensors by path.

    Options of groups that cannot be stored, such as functions, are left out: a load takes them
    from the prepared optimizer.

    Raises:
        CheckpointError: the state contains an object that cannot be stored.
    """
    flattener = _Flattener(type(optimizer).__name__)
    saved = optimizer.state_dict()
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(saved["param_groups"]):
        groups.append({})
        for name, value in group.items():
            # Options that cannot be stored, such as functions, stay those of the live optimizer.
            with contextlib.suppress(CheckpointError):
                groups[-1][name] = flattener.flatten(value, f"param_groups.{number}.{name}")
    rest = {name: value for name, value in saved.items() if name != "param_groups"}
    tree = {
        "groups": groups,
        "rest": flattener.flatten(rest, ""),
        "shapes": [list(_local(parameter).shape) for parameter in optimizer_parameters(optimizer)],
    }
    return tree, flattener.tensors


def unflatten(tree: Any, tensors: Mapping[str, torch.Tensor], optimizer: Optimizer) -> Any:
    """Return the state dict that `flatten` was called with.

    Args:
        tree: value that `flatten` returned, which may be untrusted.
        tensors: its tensors by path, on any device.
        optimizer: optimizer that will load it.

    Raises:
        CheckpointError: the value is invalid, or of an optimizer with other parameters.
    """
    name = type(optimizer).__name__
    shapes = [list(_local(parameter).shape) for parameter in optimizer_parameters(optimizer)]
    try:
        if tree["shapes"] != shapes or len(tree["groups"]) != len(optimizer.param_groups):
            raise CheckpointError(f"The saved state of {name} {_NO_MATCH}.")
        unflattener = _Unflattener(tensors, optimizer)
        live = optimizer.state_dict()["param_groups"]
        groups = [
            known | {name: unflattener.unflatten(value) for name, value in options.items()}
            for known, options in zip(live, tree["groups"], strict=True)
        ]
        return {**unflattener.unflatten(tree["rest"]), "param_groups": groups}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"The saved state of {name} {_NO_MATCH}: {error}.") from error


def load(optimizer: Optimizer, saved: Any) -> None:
    """Load a state dict without a change of values.

    `torch.optim.Optimizer.load_state_dict` (torch 2.13) casts state to the dtype of the parameter;
    state in another dtype is put back afterwards.
    """
    optimizer.load_state_dict(saved)
    by_number = dict(enumerate(optimizer_parameters(optimizer)))
    for number, values in saved["state"].items():
        live = optimizer.state[by_number[number]] if number in by_number else {}
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, torch.Tensor) and name in live and live[name].dtype != value.dtype:
                live[name] = value


def optimizer_parameters(optimizer: Optimizer) -> Iterator[Any]:
    """Yield the parameters of all groups of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Flattener:
    def __init__(self, optimizer: str) -> None:
        self.optimizer = optimizer
        self.tensors: Tensors = {}
        self._paths: dict[int, str] = {}
        """id() of a tensor -> its path: bitsandbytes shares its tables among all parameters."""

    def flatten(self, value: Any, path: str) -> Any:
        """Return a value for JSON; lists and plain values stay, everything else is a dict."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, dict):
            start = f"{path}." if path else ""
            for key in value:
                if type(key) not in {str, int}:
                    self._refuse(f"{path} key", key)
            return {
                "dict": [[key, self.flatten(item, f"{start}{key}")] for key, item in value.items()]
            }
        if isinstance(value, (list, tuple)):
            items = [self.flatten(item, f"{path}.{number}") for number, item in enumerate(value)]
            return {"tuple": items} if isinstance(value, tuple) else items
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        return self._refuse(path, value)

    def _tensor(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        shape = {"shape": list(tensor.shape), "stride": list(tensor.stride())}
        if isinstance(tensor, DTensor):
            dims = [
                -1 if placement.is_replicate() else getattr(placement, "dim", None)
                for placement in tensor.placements
            ]
            return {"local": self.flatten(tensor.to_local(), path), "placements": dims, **shape}
        subclass: Any = tensor
        if is_traceable_wrapper_subclass(subclass):
            names, context = subclass.__tensor_flatten__()
            return {
                "class": class_name(type(subclass)),
                "inner": {
                    name: self.flatten(getattr(subclass, name), f"{path}.{name}") for name in names
                },
                "context": self.flatten(context, f"{path}.context"),
                **shape,
            }
        if type(tensor) not in _PLAIN_TENSORS:
            self._refuse(path, tensor)
        path = self._paths.setdefault(id(tensor), path)
        self.tensors[path] = tensor
        return {"tensor": path, "device": tensor.device.type}

    def _refuse(self, path: str, value: object) -> Any:
        raise CheckpointError(
            f"The state of {self.optimizer} contains {path}, of type {type(value).__name__}, which"
            " cannot be stored. Nothing was written. Keep such objects out of optimizer.state, or"
            " save the weights with %nbdist export."
        )


class _Unflattener:
    def __init__(self, tensors: Mapping[str, torch.Tensor], optimizer: Optimizer) -> None:
        self._tensors = tensors
        parameters = list(optimizer_parameters(optimizer))
        self._meshes = [item.device_mesh for item in parameters if isinstance(item, DTensor)]
        self._device = parameters[0].device if parameters else torch.device("cpu")

    def unflatten(self, value: Any) -> Any:  # noqa: PLR0911 - one for each form
        """Return the value that was flattened."""
        if isinstance(value, list):
            return [self.unflatten(item) for item in value]
        if not isinstance(value, dict):
            return value
        match next(iter(value)):
            case "dict":
                return {key: self.unflatten(item) for key, item in value["dict"]}
            case "tuple":
                return tuple(self.unflatten(item) for item in value["tuple"])
            case "dtype":
                dtype = getattr(torch, value["dtype"])
                if not isinstance(dtype, torch.dtype):
                    raise TypeError(f"{printable(str(value['dtype']))} is not a dtype")
                return dtype
            case "tensor":
                device = "cpu" if value["device"] == "cpu" else self._device
                return self._tensors[value["tensor"]].to(device)
            case "class":
                inner = {name: self.unflatten(item) for name, item in value["inner"].items()}
                context, size = self.unflatten(value["context"]), torch.Size(value["shape"])
                cls = _tensor_class(value["class"])
                return cls.__tensor_unflatten__(inner, context, size, tuple(value["stride"]))
            case "local":
                dims = value["placements"]
                return DTensor.from_local(
                    self.unflatten(value["local"]),
                    self._meshes[0],
                    [Replicate() if dim == -1 else Shard(dim) for dim in dims],
                    run_check=False,
                    shape=torch.Size(value["shape"]),
                    stride=tuple(value["stride"]),
                )
            case form:
                raise TypeError(f"{printable(str(form))} is not known")


def class_name(cls: type) -> str:
    """Return the full name of a class: "torch.optim.adamw.AdamW"."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _tensor_class(name: str) -> Any:
    """Return an imported tensor subclass; imports nothing.

    Raises:
        TypeError: there is none.
    """
    waiting = [torch.Tensor]
    while waiting:
        cls = waiting.pop()
        if class_name(cls) == name and hasattr(cls, "__tensor_unflatten__"):
            return cls
        waiting += cls.__subclasses__()
    raise TypeError(f"the tensor class {printable(name)} is not imported")
