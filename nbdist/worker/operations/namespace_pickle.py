"""Pickle of a rank's namespace for a new process; runs on a rank.

This is the only module of nbdist that unpickles arbitrary objects. It reads only what a rank of
the same session has just written, from a private folder (0700) that the session creates for one
switch and removes afterwards. Data from sockets and checkpoints is never unpickled here.

Large data is not in the pickle: tensor storages and array buffers are blocks, each in a file named
after its content, so that equal blocks of several ranks are written once. Objects that the new
process creates itself (prepared models and their parts, the accelerator, `report`) are pickled as a
key, so that a list that contains the model contains the new model afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
import torch
from accelerate.data_loader import DataLoaderAdapter
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.storage import TypedStorage, UntypedStorage
from torch.utils.data import DataLoader

from nbdist.errors import SwitchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
    from pathlib import Path

ObjectKey = Any
"""Key of an object that the new process creates itself; any hashable value."""
_NAMESPACE: ObjectKey = ("namespace",)
_SHARED = {cls.__name__: cls for cls in (PartialState, AcceleratorState, GradientState)}
"""Accelerate's state classes: instances share one dict, and the new process keeps its own."""
_UNPICKLABLE_TYPES: tuple[tuple[type, str], ...] = (
    (io.IOBase, "an open file belongs to its process; open it again"),
    (DTensor, "a DTensor is sharded over the old ranks; keep .full_tensor() instead"),
    (distributed.ProcessGroup, "a process group belongs to the old ranks; create it again"),
    (DeviceMesh, "a device mesh belongs to the old ranks; create it again"),
    (DistributedDataParallel, "it was prepared for the old ranks; prepare it again"),
    (FullyShardedDataParallel, "it was prepared for the old ranks; prepare it again"),
    (DataLoaderAdapter, "it was prepared for the old ranks and is no longer in use"),
)
_REFUSED_BY_NAME = {
    "DeepSpeedEngine": "it was prepared for the old ranks; prepare it again",
    "FSDPModule": "it was prepared for the old ranks; prepare it again",
    "Trainer": "a Trainer belongs to its ranks; create it again with the same model",
    "TrainingArguments": "they hold the old engine's settings; create them again",
    "generator": "a running iterator stays in its process; iter(loader) resumes at its position",
}


class PickleStage(NamedTuple):
    """One object in the pickle; later stages may share objects with it."""

    content: Any
    level: int
    """External objects of higher levels do not exist yet when this stage is unpickled."""
    name: str = ""
    """Name of the variable; empty for nbdist's own stages."""


class ExternalObject(NamedTuple):
    """An object that the new process creates itself."""

    value: object
    key: ObjectKey
    level: int


class PickleStageError(SwitchError):
    """A stage cannot be pickled or unpickled.

    Args:
        is_too_early: the stage refers to an object of a higher level.
    """

    def __init__(self, reason: str, stage_index: int, *, is_too_early: bool = False) -> None:
        super().__init__(reason)
        self.stage_index, self.is_too_early = stage_index, is_too_early


@dataclass(slots=True, kw_only=True)
class PickledNamespace:
    """Pickled objects of one rank, in memory."""

    stream: bytes
    names: list[str]
    """Name of each stage."""
    blocks: list[Any] = field(default_factory=list)
    """Storages and buffers, in the order in which the stream refers to them."""

    def hash_blocks(self) -> list[tuple[str, int]]:
        """Return the digest and the size in bytes of each block."""
        return [
            (hashlib.blake2b(content, digest_size=20).hexdigest(), content.nbytes)
            for content in map(_as_bytes, self.blocks)
        ]


def pickle_stages(
    stages: Sequence[PickleStage], external: Sequence[ExternalObject], namespace: Mapping[str, Any]
) -> PickledNamespace:
    """Pickle objects.

    Args:
        stages: objects that the new process unpickles one after the other.
        external: objects that are pickled as their key.
        namespace: the user's variables; they are the globals of unpickled functions.

    Raises:
        PickleStageError: a stage cannot be pickled.
    """
    out = io.BytesIO()
    pickler = _NamespacePickler(out, external, namespace)
    for index, stage in enumerate(stages):
        pickler.stage_index, pickler.level = index, stage.level
        try:
            pickler.dump(stage.content)
        except PickleStageError:
            raise
        except Exception as error:  # pickling runs arbitrary methods of the objects
            raise PickleStageError(_reason(error), index) from error
    names = [stage.name for stage in stages]
    return PickledNamespace(stream=out.getvalue(), names=names, blocks=pickler.blocks)


def verify_unpickles(
    pickled: PickledNamespace,
    external: Sequence[ExternalObject],
    initial_namespace: Mapping[str, Any],
) -> None:
    """Test that a new process can unpickle the objects; copies no tensor.

    Args:
        external: objects that the new process creates itself; the test uses the current ones.
        initial_namespace: predefined variables of a new process.

    Raises:
        PickleStageError: a stage cannot be unpickled.
    """
    scratch = dict(initial_namespace)
    objects: dict[ObjectKey, object] = {item.key: item.value for item in external}
    unpickler = _TrialUnpickler(
        io.BytesIO(pickled.stream),
        (block for block in pickled.blocks if isinstance(block, pickle.PickleBuffer)),
        lambda number, _: pickled.blocks[number],
        objects | {_NAMESPACE: scratch},
    )
    for index, name in enumerate(pickled.names):
        try:
            value = unpickler.load()
        except Exception as error:  # unpickling runs arbitrary code of the objects
            raise PickleStageError(_reason(error), index) from error
        if name:
            scratch[name] = value


class _NamespacePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions and classes of cells by value, and external objects by key."""

    def __init__(
        self, out: io.BytesIO, external: Sequence[ExternalObject], namespace: Mapping[str, Any]
    ) -> None:
        self.blocks: list[Any] = []
        super().__init__(out, protocol=5, buffer_callback=self.blocks.append)
        self.stage_index = self.level = 0
        self._block_numbers: dict[int, int] = {}
        """Address of a storage -> number of its block."""
        self._external: dict[int, tuple[ObjectKey, int]] = {id(namespace): (_NAMESPACE, 0)}
        for item in external:
            self._external.setdefault(id(item.value), (item.key, item.level))
        self._refusals: dict[type, str] = {}
        # cloudpickle 3.1: id of a function's globals -> the globals that it gets when unpickled.
        self._namespace = namespace
        self.globals_ref[id(namespace)] = namespace

    def persistent_id(self, value: Any) -> ObjectKey | None:
        """Return the key of an object that is not pickled; None for other objects."""
        if id(value) in self._external:
            key, level = self._external[id(value)]
            if level > self.level:
                reason = f"it refers to an object that is prepared later ({key})"
                raise PickleStageError(reason, self.stage_index, is_too_early=True)
            return ("known", key)
        kind = type(value)  # isinstance() would raise for a dead weakref.proxy
        if kind not in self._refusals:
            self._refusals[kind] = _refusal_reason(kind)
        if self._refusals[kind]:
            raise SwitchError(self._refusals[kind])
        if issubclass(kind, (UntypedStorage, TypedStorage)):
            return self._storage_key(value)
        if kind is torch.device and value.type == "cuda":
            # The rank's own GPU, which may be another one in the new rank.
            own = value.index in {None, torch.cuda.current_device()}
            return ("device", value.type) if own else None
        return ("shared", kind.__name__) if _SHARED.get(kind.__name__) is kind else None

    def _storage_key(self, value: Any) -> ObjectKey:
        untyped = value._untyped_storage if isinstance(value, TypedStorage) else value  # noqa: SLF001
        address = untyped._cdata  # noqa: SLF001 - as torch.save does
        if address not in self._block_numbers:
            self._block_numbers[address] = len(self.blocks)
            self.blocks.append(untyped)
        dtype = value.dtype if isinstance(value, TypedStorage) else None
        name = str(dtype).removeprefix("torch.")
        return ("storage", self._block_numbers[address], untyped.device.type, name)

    def _dynamic_function_reduce(self, function: Any) -> Any:
        """Pickle a function of a cell without its globals: they are the user's variables."""
        # Overrides a private method of cloudpickle 3.1.
        reduced = super()._dynamic_function_reduce(function)
        if function.__globals__ is self._namespace:
            reduced[2][1]["__globals__"] = {}
        return reduced

    def reducer_override(self, value: Any) -> Any:
        """Pickle a loader without its worker processes."""
        if isinstance(value, DataLoader) and value._iterator is not None:  # noqa: SLF001
            return object.__new__, (type(value),), {**vars(value), "_iterator": None}
        return super().reducer_override(value)


def _refusal_reason(kind: type) -> str:
    """Return why objects of a class cannot be carried; empty if they can."""
    if issubclass(kind, (io.StringIO, io.BytesIO)):
        return ""
    if "of_before" in vars(kind):
        return "it was replaced by an earlier switch"
    reasons = [reason for cls, reason in _UNPICKLABLE_TYPES if issubclass(kind, cls)]
    libraries = {base.__name__ for base in kind.__mro__ if base.__module__ != "__main__"}
    reasons += [reason for name, reason in _REFUSED_BY_NAME.items() if name in libraries]
    return reasons[0] if reasons else ""


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    message = text[0] if text else "no reason given"
    if isinstance(error, (SwitchError, pickle.PicklingError)) or message.startswith(
        "cannot pickle"
    ):
        return message
    return f"{type(error).__name__}: {message}"


def write_namespace(
    pickled: PickledNamespace, digests: Sequence[str], folder: Path, rank: int
) -> None:
    """Write the pickled objects of a rank, and the blocks that no other rank has written.

    Raises:
        OSError: the disk is full or another write error occurred.
    """
    for digest, block in zip(digests, pickled.blocks, strict=True):
        with (
            contextlib.suppress(FileExistsError),  # an equal block, possibly of another rank
            (folder / f"block-{digest}").open("xb") as file,
        ):
            file.write(_as_bytes(block))
    buffers = [
        number
        for number, block in enumerate(pickled.blocks)
        if isinstance(block, pickle.PickleBuffer)
    ]
    (folder / f"index-{rank}.json").write_text(json.dumps([pickled.names, digests, buffers]))
    (folder / f"stream-{rank}").write_bytes(pickled.stream)


class NamespaceReader:
    """Reader of an old rank's pickle in a new rank.

    Args:
        folder: this session's private folder, which its old ranks have just written.
        rank: number of the old rank.
        device: device for tensors that were on the old rank's GPU.
        variables: namespace to bind variables in; functions use it as globals.
    """

    def __init__(
        self, folder: Path, rank: int, device: torch.device, variables: MutableMapping[str, Any]
    ) -> None:
        self._folder, self._device, self._variables = folder, device, variables
        index = json.loads((folder / f"index-{rank}.json").read_text())
        self.names: list[str]
        self.names, self._digests, buffers = index
        self.known: dict[ObjectKey, object] = {_NAMESPACE: variables}
        """Key -> object that this process created; filled by the caller between stages."""
        self._storages: dict[int, UntypedStorage] = {}
        self._unpickler = _NamespaceUnpickler(
            io.BytesIO((folder / f"stream-{rank}").read_bytes()),
            # A bytearray, so that the arrays are writable.
            (bytearray(_as_bytes(self._read(number))) for number in buffers),
            self._storage,
            self.known,
            device,
        )

    def bind_variables(self) -> list[str]:
        """Unpickle and bind variables up to the next unnamed stage; return their names.

        Raises:
            SwitchError: a variable cannot be unpickled. The message has its name and the reason.
        """
        bound = []
        while self.names and self.names[0]:
            name = self.names[0]
            self._variables[name] = self.read_stage()
            bound.append(name)
        return bound

    def read_stage(self) -> Any:
        """Unpickle the next stage.

        Raises:
            SwitchError: the stage cannot be unpickled. The message has the reason.
        """
        name = self.names.pop(0)
        try:
            return self._unpickler.load()
        except Exception as error:  # unpickling runs arbitrary code of the objects
            reason = f"variable {name}: {_reason(error)}" if name else _reason(error)
            raise SwitchError(reason) from error

    def _storage(self, number: int, device_type: str) -> UntypedStorage:
        if number not in self._storages:
            content = self._read(number)
            if device_type == "cuda":
                content = content.to(self._device)
            self._storages[number] = content.untyped_storage()
        return self._storages[number]

    def _read(self, number: int) -> torch.Tensor:
        path = self._folder / f"block-{self._digests[number]}"
        content = torch.empty(path.stat().st_size, dtype=torch.uint8)
        with path.open("rb") as file:
            if file.readinto(content.numpy().data) != content.numel():
                raise SwitchError(f"{path} is truncated")
        return content


class _NamespaceUnpickler(pickle.Unpickler):
    """Unpickles objects that a rank of this session has pickled.

    Args:
        buffers: buffers of arrays, in order.
        storage: returns the storage of a tensor by its number and the type of its device.
        known: objects that this process created, by key.
        device: device for what was on the old rank's GPU; None: the current GPU.
    """

    def __init__(
        self,
        stream: io.BytesIO,
        buffers: Iterable[Any],
        storage: Callable[[int, str], UntypedStorage],
        known: Mapping[ObjectKey, object],
        device: torch.device | None = None,
    ) -> None:
        super().__init__(stream, buffers=buffers)
        self._storage, self._known, self._device = storage, known, device

    def persistent_load(self, name: Any) -> Any:
        """Return the object for a key."""
        kind, *rest = name
        if kind == "known":
            return self._known[rest[0]]
        if kind == "shared":
            return _SHARED[rest[0]]()
        if kind == "device":
            return self._device or torch.device(rest[0], torch.cuda.current_device())
        number, device_type, dtype = rest
        untyped = self._storage(number, device_type)
        if dtype == "None":
            return untyped
        return TypedStorage(wrap_storage=untyped, dtype=getattr(torch, dtype), _internal=True)


class _TrialUnpickler(_NamespaceUnpickler):
    """Creates new classes instead of reusing those of cells, which stay unchanged."""

    def find_class(self, module: str, name: str) -> Any:
        cls = super().find_class(module, name)
        makes_classes = name in {"_make_skeleton_class", "_make_skeleton_enum"}
        if module.startswith("cloudpickle") and makes_classes:
            # cloudpickle 3.1: the last argument but one is the id that identifies known classes
            return lambda *args: cls(*args[:-2], None, args[-1])
        return cls


def _as_bytes(block: Any) -> memoryview:
    """Return the bytes of a block or of a 1-D tensor, in host memory."""
    if isinstance(block, pickle.PickleBuffer):
        return block.raw()
    if isinstance(block, UntypedStorage):
        block = torch.empty(0, dtype=torch.uint8, device=block.device).set_(block)
    content: memoryview = block.cpu().numpy().data if block.numel() else memoryview(b"")
    return content
