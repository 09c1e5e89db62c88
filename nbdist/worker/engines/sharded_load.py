"""Loads a model of `from_pretrained` as shards: each rank reads its own part of the files.

`from_pretrained` returns a model whose weights are not read until something uses them: where
``is_sharded``, transformers assigns a ``LazyWeight`` where it would assign a tensor of a file.
`prepare()` builds the engine from memory that is not touched, as a switch does,
and then reads this rank's intervals of the files into the engine's shards. A weight that any rank
has used before `prepare()` is an ordinary parameter; rank 0 broadcasts it.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import mmap
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from nbdist.errors import SwitchError
from nbdist.number_formatting import format_bytes
from nbdist.state import collectives, layouts, meta_model
from nbdist.state.tensor_index import TensorIndex, TensorPart
from nbdist.worker.engines import wrap_policy
from nbdist.worker.library_patches import patch, when_imported
from nbdist.worker.training import whole_weights
from nbdist.worker.training.training_state import ModelAndOptimizerState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from accelerate import Accelerator

    from nbdist.strategies import Options
    from nbdist.worker.training.prepared_models import PreparedModel

_MODELS, _LOADING = "transformers.modeling_utils", "transformers.core_model_loading"
_COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}

_MADV_DONTNEED = 4
_T: Any = torch.Tensor
_METADATA_ONLY = frozenset(
    {
        *(_T.device.__get__, _T.dtype.__get__, _T.layout.__get__, _T.shape.__get__),
        *(_T.ndim.__get__, _T.itemsize.__get__, _T.nbytes.__get__),
        *(_T.is_cpu.__get__, _T.is_cuda.__get__, _T.is_meta.__get__, _T.is_mps.__get__),
        *(_T.is_nested.__get__, _T.is_quantized.__get__, _T.is_sparse.__get__),
        *(_T.requires_grad.__get__, _T.requires_grad.__set__, _T.requires_grad_),
        *(_T.grad.__get__, _T.grad_fn.__get__, _T.is_leaf.__get__, _T.retains_grad.__get__),
        *(_T._base.__get__, _T._version.__get__),  # noqa: SLF001
        *(_T.__hash__, _T.__len__, _T.dim, _T.numel, _T.nelement, _T.size, _T.element_size),
        *(_T.stride, _T.storage_offset, _T.is_contiguous, _T.get_device),
        *(_T.is_complex, _T.is_floating_point),
        *(torch.is_complex, torch.is_floating_point, torch.numel),
    }
)
"""Attributes, methods and functions that depend on a tensor's shape, dtype, device and flags."""

_checkpoints: list[str] = []
"""Files that `from_pretrained` is reading; an empty text if their tensors are not to be lazy."""


class LazyWeight(torch.Tensor):
    """Tensor of a safetensors file whose values are read at the first use of any of them.

    Its own memory is allocated and never touched, so it is not resident. Everything outside of
    ``_METADATA_ONLY`` first turns it into the tensor or parameter that it would be without this
    class: the same object, with the values of the file in its dtype.
    """

    stored: torch.Tensor
    """The values, in the dtype of the file: a view of the memory-mapped file."""
    checkpoint: str
    """Names and sizes of the files."""

    @classmethod
    def of_file(cls, stored: torch.Tensor, dtype: torch.dtype, checkpoint: str) -> Self:
        """Return the lazy tensor for a view of a file."""
        weight = torch.empty(stored.shape, dtype=dtype).as_subclass(cls)
        weight.stored, weight.checkpoint = stored, checkpoint
        return weight

    def make_parameter(self) -> None:
        """Make it a parameter for `isinstance` and for modules, as ``nn.Parameter(tensor)``."""
        self._is_param = True  # torch 2.13: the flag of a parameter of another class
        self.requires_grad_(self.is_floating_point())

    def read(self) -> None:
        """Turn it into an ordinary tensor or parameter with the values."""
        dtype = self.dtype
        self.data = self.detach_values().to(dtype)

    def detach_values(self) -> torch.Tensor:
        """Turn it into an ordinary tensor or parameter without values; return those of the file."""
        attributes = self.__dict__
        is_parameter = attributes.pop("_is_param", False)
        del attributes["checkpoint"]
        stored: torch.Tensor = attributes.pop("stored")
        self.__class__ = nn.Parameter if is_parameter else torch.Tensor  # type: ignore[assignment]
        return stored

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Read the values first, unless the function does not depend on them."""
        if func in _METADATA_ONLY:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                return func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, LazyWeight):
                value.read()
        return func(*args, **(kwargs or {}))

    # nn.Parameter has its own version of these methods of torch.Tensor.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.read()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.read()
        return self.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        self.read()
        return repr(self)


def is_sharded(options: Options) -> bool:
    """Return whether models are loaded as shards under these options."""
    return (
        options.sharded_load
        and "parameters" in options.strategy.shards
        and options.offload_device != "nvme"  # ZeRO-3 swaps parameters out while it is built
    )


def install(is_on: Callable[[], bool]) -> None:
    """Make `from_pretrained` return lazy weights.

    Args:
        is_on: whether they are wanted; asked at each call of `from_pretrained`.
    """
    when_imported(_MODELS, lambda: _patch_loading(is_on))


def _patch_loading(is_on: Callable[[], bool]) -> None:
    def note_files(load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def load_pretrained(
            model: nn.Module,
            state_dict: Any,
            checkpoint_files: Any,
            load_config: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            files = checkpoint_files or ()
            lazy = is_on() and state_dict is None and files and not load_config.is_quantized
            sizes = {Path(file).name: Path(file).stat().st_size for file in files}
            _checkpoints.append(", ".join(f"{k} {v}" for k, v in sizes.items()) if lazy else "")
            try:
                return load(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
            finally:
                _checkpoints.pop()

        return staticmethod(load_pretrained)

    def defer_copy(copy: Callable[..., Any]) -> Callable[..., Any]:
        def materialize_copy(tensor: Any, device: Any = None, dtype: Any = None) -> Any:
            # A slice of a safetensors file is memory-mapped; other formats are tensors already.
            is_mapped = not isinstance(tensor, torch.Tensor)
            if not (_checkpoints and _checkpoints[-1] and is_mapped and str(device) == "cpu"):
                return copy(tensor, device, dtype)
            stored = tensor[...]
            return LazyWeight.of_file(stored, dtype or stored.dtype, _checkpoints[-1])

        return materialize_copy

    def assign_lazy(assign: Callable[..., Any]) -> Callable[..., Any]:
        def set_param(model: nn.Module, name: str, value: Any, *args: Any) -> Any:
            if isinstance(value, LazyWeight):
                owner, _, attribute = name.rpartition(".")
                if attribute in model.get_submodule(owner)._parameters:  # noqa: SLF001
                    value.make_parameter()
                else:
                    value.read()
            return assign(model, name, value, *args)

        return set_param

    patch(f"{_MODELS}:PreTrainedModel._load_pretrained_model", note_files)
    patch(f"{_MODELS}:PreTrainedModel.save_pretrained", whole_weights.save_from_all_ranks)
    patch(f"{_LOADING}:_materialize_copy", defer_copy)
    patch(f"{_LOADING}:set_param_for_module", assign_lazy)


class _Unread(NamedTuple):
    """A parameter whose values are still in its file."""

    parameter: weakref.ref[nn.Parameter]
    """FSDP2 moves the parameters of each unit to the GPU and frees them there once it has shards:
    a reference would keep the whole model on every GPU."""
    dtype: torch.dtype
    stored: torch.Tensor

    def read_part(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Return elements as a full load and the engine's cast to `dtype` would."""
        part: torch.Tensor = self.stored.view(-1)[start:stop].to(self.dtype).to(dtype)
        return part


class _WithoutCopies(TorchFunctionMode):
    """Context in which the values of some parameters are not copied, because they are not read yet.

    Engines allocate a rank's shard (torch 2.13's `fully_shard` with zeros) and copy a part of the
    parameter to it. Either would touch memory that is written again when the shard is read.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        # Kept, although an engine may move the parameters to a GPU: their addresses could otherwise
        # become those of tensors with values.
        storages = [parameter.untyped_storage() for parameter in parameters]
        self._unread = {storage.data_ptr(): storage for storage in storages}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.copy_ and self._is_unread(args[1]):
            return args[0]
        if func is torch.Tensor.new_zeros and self._is_unread(args[0]):
            func = torch.Tensor.new_empty
        return func(*args, **(kwargs or {}))

    def _is_unread(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() in self._unread
        )


class UnreadWeights:
    """Weights of new models that no rank has used, in one call of `prepare()`.

    Args:
        models: the new models of the call.
        options: the session's options; None for an Accelerator with the user's own engine.
    """

    def __init__(self, models: Sequence[nn.Module], options: Options | None) -> None:
        """Turn all weights into ordinary parameters; a collective if models are sharded."""
        self._models = models
        self._titles = {id(model): type(model).__name__ for model in models}
        """id() of a model -> its class; FSDP2 changes the class."""
        self._unread: dict[int, dict[str, _Unread]] = {}
        """id() of a model -> name -> weight."""
        for model in models:
            lazy = {n: p for n, p in model.named_parameters() if isinstance(p, LazyWeight)}
            common: set[Any] = set()
            if options is not None and is_sharded(options):
                mine = {(name, p.checkpoint, p.dtype) for name, p in lazy.items()}
                common = set.intersection(*collectives.all_gather_values(mine))
            for name, weight in lazy.items():
                if (name, weight.checkpoint, weight.dtype) not in common:
                    weight.read()
                    continue
                entry = _Unread(weakref.ref(weight), weight.dtype, weight.detach_values())
                self._unread.setdefault(id(model), {})[name] = entry

    @contextlib.contextmanager
    def deferred(self, accelerator: Accelerator) -> Iterator[None]:
        """Prepare the models without these weights; if that fails, read them as a whole."""
        entries = [entry for of_model in self._unread.values() for entry in of_model.values()]
        if not entries:
            yield
            return
        try:
            with wrap_policy.defer_weights(), self._without_values(accelerator, entries):
                yield
        except BaseException:
            for reference, dtype, stored in entries:
                parameter = reference()
                if parameter is not None and parameter.shape == stored.shape:
                    parameter.data = stored.to(dtype)
            raise

    def _without_values(
        self, accelerator: Accelerator, entries: Sequence[_Unread]
    ) -> _WithoutCopies:
        """Return the context in which the models are prepared; broadcast the other weights."""
        parameters = [
            parameter for entry in entries if (parameter := entry.parameter()) is not None
        ]
        for model in self._models:
            wrap_policy.broadcast_from_rank_0(model, without=set(map(id, parameters)))
        for parameter in parameters:
            # The engines cast parameters before they shard them, which would touch all of the
            # memory: it is allocated in that dtype.
            dtype = _engine_dtype(accelerator, parameter)
            if parameter.dtype != dtype:
                parameter.data = torch.empty(parameter.shape, dtype=dtype)
        return _WithoutCopies(parameters)

    @torch.no_grad()
    def read_shards(self, prepared: PreparedModel) -> None:
        """Read this rank's shards of the weights of a prepared model, and print how much.

        Raises:
            SwitchError: this engine's shards cannot be written.
        """
        identity = id(prepared.user_model())
        unread, title = self._unread.pop(identity, None), self._titles.get(identity)
        if unread is None:
            return
        try:
            layouts.check_layout(prepared.model)
            state = ModelAndOptimizerState(prepared)
            targets = state.target_shards(optimizers=False)
        except SwitchError as error:
            raise SwitchError(
                f"{error} To load a whole model on each rank, use --no-sharded-load."
            ) from error
        dtypes = {
            meta_model.bare_name(name): parameter.dtype
            for name, parameter in prepared.model.named_parameters()
        }
        for name, entry in unread.items():
            key = state.model_prefix + name
            dtype = dtypes.get(name, targets[key].dtype)
            fetch = functools.partial(entry.read_part, dtype=dtype)
            index, size = TensorIndex(), entry.stored.numel()
            index.add_tensor(key, tuple(entry.stored.shape), dtype, TensorPart(0, size, fetch))
            index.read_into({key: targets[key]})
            _release_pages(entry.stored)
        state.layout.finalize_state({})
        if collectives.rank() == 0:
            num_bytes = sum(entry.stored.nbytes for entry in unread.values())
            print(  # noqa: T201
                f"Loaded {len(unread)} of {len(targets)} weights of {title} as shards: each rank"
                f" read its part of {format_bytes(num_bytes)}."
            )


def _release_pages(stored: torch.Tensor) -> None:
    """Remove the pages of a memory-mapped tensor from this process; a later access maps them again.

    Otherwise the ranks' processes would together hold the whole file, beside their shards.
    """
    size = mmap.PAGESIZE
    start = -(-stored.data_ptr() // size) * size
    stop = (stored.data_ptr() + stored.nbytes) // size * size
    if start < stop:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_DONTNEED
        )


def _engine_dtype(accelerator: Accelerator, parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype that an engine casts a parameter to before it shards it."""
    precision = accelerator.mixed_precision
    if not parameter.is_floating_point():
        return parameter.dtype
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # deepspeed 0.19, `_cast_module_mixed_precision`
        return _COMPUTE.get(precision, parameter.dtype)
    # accelerate 1.15, `fsdp2_prepare_model`; FSDP1's shards are cast later
    is_cast = accelerator.is_fsdp2 and precision != "no" and parameter.requires_grad
    return torch.float32 if is_cast else parameter.dtype
