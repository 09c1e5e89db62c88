"""Weights of `from_pretrained` that are read from their safetensors files when they are used.

Where `sharded_load` is on, transformers assigns a ``LazyWeight`` where it would
assign a tensor of a file. `prepare()` takes the weights that nothing has used (`sharded_load`).
"""

from __future__ import annotations

import copy
import ctypes
import mmap
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Mapping

_MADV_DONTNEED = 4
_T: Any = torch.Tensor
_NEED_NO_VALUES = frozenset(
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


class LazyWeight(torch.Tensor):
    """Tensor of a safetensors file whose values are read at the first use of any of them.

    Its own memory is allocated and never touched, so it is not resident. Everything outside of
    ``_NEED_NO_VALUES`` first turns it into the tensor or parameter that it would be without this
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
        if func in _NEED_NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                return func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, LazyWeight):
                value.read()
        return func(*args, **(kwargs or {}))

    # nn.Parameter has its own version of these methods of torch.Tensor.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Read the values, then copy."""
        self.read()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Read the values, then pickle."""
        self.read()
        return self.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        """Read the values, then format them."""
        self.read()
        return repr(self)


def release_pages(stored: torch.Tensor) -> None:
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
