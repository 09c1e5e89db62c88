"""Writes safetensors files as a stream: the header first, then the data, with a checksum.

    length (8 bytes, little endian) | JSON | tensor data without gaps

The safetensors library reads these files, but it can only write tensors that are all in memory,
and only to a disk. The metadata includes DCP_SHARDING_INFO (the offsets of each tensor in the full
tensor) as HuggingFaceStorageWriter of torch 2.13 writes it, so that
`dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))` can read the folder.
"""

from __future__ import annotations

import json
import math
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from nbdist.checkpoint.manifest import SAFETENSORS_DTYPES, CheckpointFile
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""
ALIGNMENT = 64
"""The data begins at a multiple of this, so that memory-mapped tensors are aligned."""
LENGTH_BYTES = 8
SHARDING_KEY = "DCP_SHARDING_INFO"
"""Metadata of a file: tensor name -> {"saved_offsets": its first index in the full tensor}."""
_MIN_THREADED_CRC_BYTES = 1 << 20
"""Smaller buffers are checksummed in the same thread: waking another one takes longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a file: a full tensor or a chunk of it."""

    name: str
    dtype: str
    """Name of the torch dtype, such as "float32"."""
    shape: tuple[int, ...]
    """Shape of the tensor in the file."""
    offsets: tuple[int, ...] | None = None
    """First index in the full tensor; None: all zero."""

    @property
    def size_bytes(self) -> int:
        """Size of its data in bytes."""
        return math.prod(self.shape) * SAFETENSORS_DTYPES[self.dtype][1]


def build_header(
    tensors: Sequence[StoredTensor], *, metadata: Mapping[str, str] | None = None
) -> bytes:
    """Build the header of a file that contains these tensors in order.

    Args:
        tensors: the tensors in the order of the file.
        metadata: metadata of the file. Default: the metadata that the torch reader requires.

    Raises:
        ValueError: a duplicate name, or a tensor that is not aligned to its element size. Order
            the tensors by element size, largest first.
        CheckpointError: the header exceeds the limit of safetensors.
    """
    if metadata is None:
        # As in torch 2.13, filesystem.py, `_write_files_from_queue`.
        offsets = {
            tensor.name: {"saved_offsets": list(tensor.offsets or (0,) * len(tensor.shape))}
            for tensor in tensors
        }
        sharding = json.dumps(offsets, separators=(",", ":"))
        metadata = {SHARDING_KEY: sharding, "DCP_VERSION": "1.0", "format": "pt"}
    tree: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for tensor in tensors:
        dtype, itemsize = SAFETENSORS_DTYPES[tensor.dtype]
        stop = start + tensor.size_bytes
        if tensor.name in tree or start % itemsize:
            raise ValueError(f"{tensor.name} is a duplicate or misaligned at byte {start}.")
        tree[tensor.name] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(tree, separators=(",", ":")).encode()
    text = text.ljust(-(-(LENGTH_BYTES + len(text)) // ALIGNMENT) * ALIGNMENT - LENGTH_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"{len(tensors)} tensors are too many for one file. Save fewer.")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


class OutputFile(Protocol):
    """A new file in the storage of a checkpoint, open for writing."""

    def write(self, content: memoryview) -> None:
        """Write all of the content."""

    def close(self) -> None:
        """Make the file durable and close it."""

    def abort(self) -> None:
        """Close the file and remove it, as far as that is possible."""


class SafetensorsWriter:
    """Writer of one safetensors file. The end of `with` makes it durable.

        tensors = [StoredTensor(name="w", dtype="float32", shape=(2,))]
        with SafetensorsWriter("a.safetensors", tensors, DurableFile(path)) as file:
            file.write(content)
        file.result  # its size and checksum

    If the `with` block raises, the file is removed.
    """

    result: CheckpointFile
    """Name, size and checksum of the file, after the end of `with`."""

    def __init__(self, name: str, tensors: Sequence[StoredTensor], output: OutputFile) -> None:
        """Write the header.

        Args:
            name: file name for the manifest.
            tensors: the tensors in the order in which they will be written.
            output: the file, which the writer closes or removes.

        Raises:
            OSError: the file cannot be written.
            ValueError: a duplicate or misaligned tensor (see ``build_header``).
        """
        self._name, self._output = name, output
        self._left = [tensor.size_bytes for tensor in reversed(tensors)]
        self._crc32 = self._size_bytes = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="nbdist-crc")
        try:
            self._write_with_checksum(memoryview(build_header(tensors)))
        except BaseException:
            self._abort()
            raise

    def write(self, content: memoryview) -> None:
        """Write the next bytes of the current tensor. Blocks until they are written.

        Args:
            content: contiguous bytes, at most the remaining bytes of the tensor. The buffer may
                be reused after the call.

        Raises:
            OSError: the disk is full, or a quota or file size limit is exceeded.
            ValueError: `content` is larger than the rest of the tensor.
        """
        while self._left and not self._left[-1]:
            self._left.pop()
        if not content.nbytes:
            return
        if not self._left or content.nbytes > self._left[-1]:
            raise ValueError(f"{content.nbytes} bytes are more than the rest of the tensor.")
        self._left[-1] -= content.nbytes
        self._write_with_checksum(content.cast("B"))

    def _write_with_checksum(self, content: memoryview) -> None:
        if content.nbytes < _MIN_THREADED_CRC_BYTES:
            self._output.write(content)
            self._crc32 = zlib.crc32(content, self._crc32)
        else:
            # zlib releases the GIL: the checksum takes no time of its own on a second core.
            checksum = self._pool.submit(zlib.crc32, content, self._crc32)
            try:
                self._output.write(content)
            finally:
                self._crc32 = checksum.result()
        self._size_bytes += content.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Make the file durable and close it, or remove it after an exception.

        Raises:
            OSError: the file cannot be synced.
            ValueError: not all bytes of the tensors were written.
        """
        missing = sum(self._left)
        if kind is not None or missing:
            self._abort()
            if kind is None:
                raise ValueError(f"{missing} bytes of {self._name} are missing.")
            return
        try:
            self._output.close()
        except BaseException:
            self._abort()
            raise
        self._pool.shutdown()
        self.result = CheckpointFile(
            name=self._name, size_bytes=self._size_bytes, crc32=self._crc32
        )

    def _abort(self) -> None:
        self._pool.shutdown()
        self._output.abort()
