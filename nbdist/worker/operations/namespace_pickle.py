"""Pickle of a rank's namespace for a new process; runs on a rank.

This is the only module of nbdist that unpickles arbitrary objects. It reads only what a rank of
the same session has just written, from a private folder (0700) that the session creates for one
switch and removes afterwards. Data from sockets and checkpoints is never unpickled here.

Large data is not in the pickle: tensor storages and array buffers are blocks of a separate file,
deduplicated across ranks. Objects that the new process creates itself (prepared models and their
parts, the accelerator, `report`) are pickled as a key, so that a list that contains the model
contains the new model afterwards.
"""

from __future__ import annotations

import functools
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
    from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
    from pathlib import Path

ObjectKey = Any
"""Key of an object that the new process creates itself; any hashable value."""
_ALIGNED = 64
_SHARED = {cls.__name__: cls for cls in (PartialState, AcceleratorState, GradientState)}
"""Accelerate's state classes: instances share one dict, and the new process keeps its own."""


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
    """A stage cannot be pickled or unpickled."""

    def __init__(self, reason: str, place: int, *, too_early: bool = False) -> None:
        """Create the error.

        Args:
            reason: error text.
            place: index of the stage.
            too_early: the stage refers to an object of a higher level.
        """
        super().__init__(reason)
        self.stage_index, self.is_too_early = place, too_early


@dataclass(slots=True, kw_only=True)
class PickledNamespace:
    """Pickled objects of one rank, in memory."""

    stream: bytes
    names: list[str]
    """Name of each stage."""
    blocks: list[Any] = field(default_factory=list)
    """Storages and buffers, in the order in which the stream refers to them."""

    @property
    def size_bytes(self) -> int:
        """Size of the stream and all blocks in bytes."""
        return len(self.stream) + sum(map(_bytes_of, self.blocks))


def pickle_stages(
    stages: Sequence[PickleStage], external: Sequence[ExternalObject], namespace: Mapping[str, Any]
) -> PickledNamespace:
    """Pickle objects.

    Args:
        stages: objects that the new process unpickles one after the other.
        external: objects that are pickled as their key.
        namespace: the user's variables; they are the globals of unpickled functions.

    Raises:
        StageError: a stage cannot be pickled.
    """
    out = io.BytesIO()
    packer = _NamespacePickler(out, external, namespace)
    for place, stage in enumerate(stages):
        packer.level = stage.level
        try:
            packer.dump(stage.content)
        except _TooEarlyError as error:
            raise PickleStageError(str(error), place, too_early=True) from error
        except Exception as error:  # pickling runs arbitrary methods of the objects
            raise PickleStageError(_reason(error), place) from error
    names = [stage.name for stage in stages]
    return PickledNamespace(stream=out.getvalue(), names=names, blocks=packer.blocks)


def verify_unpickles(
    pickled: PickledNamespace,
    external: Sequence[ExternalObject],
    initial_namespace: Mapping[str, Any],
) -> None:
    """Test that a new process can unpickle the objects; copies no tensor.

    Args:
        pickled: result of ``pickle_stages``.
        external: objects that the new process creates itself; the test uses the current ones.
        initial_namespace: predefined variables of a new process.

    Raises:
        StageError: a stage cannot be unpickled.
    """
    scratch = dict(initial_namespace)
    objects: dict[ObjectKey, object] = {item.key: item.value for item in external} | {
        _NAMESPACE: scratch
    }
    unpacker = _TrialUnpickler(io.BytesIO(pickled.stream), _MemoryBlocks(pickled), objects)
    for place, name in enumerate(pickled.names):
        try:
            value = unpacker.load()
        except Exception as error:  # unpickling runs arbitrary code of the objects
            raise PickleStageError(_reason(error), place) from error
        if name:
            scratch[name] = value


class _TooEarlyError(SwitchError):
    """A stage refers to an object of a higher level."""


_NAMESPACE: ObjectKey = ("namespace",)


class _NamespacePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions and classes of cells by value, and external objects by key."""

    def __init__(
        self, out: io.BytesIO, external: Sequence[ExternalObject], namespace: Mapping[str, Any]
    ) -> None:
        super().__init__(out, protocol=5, buffer_callback=self._take)
        self.level = 0
        self.blocks: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._alive = external
        self._known: dict[int, tuple[ObjectKey, int]] = {id(namespace): (_NAMESPACE, 0)}
        for item in external:
            self._known.setdefault(id(item.value), (item.key, item.level))
        self._actions: dict[type, Callable[[Any], ObjectKey | None] | None] = {}
        # cloudpickle 3.1: id of a function's globals -> the globals that it gets when unpickled.
        self._namespace = namespace
        self.globals_ref[id(namespace)] = namespace

    def persistent_id(self, value: Any) -> ObjectKey | None:
        """Return the key of an object that is not pickled; None for other objects."""
        entry = self._known.get(id(value))
        if entry is not None:
            return self._reference(*entry)
        kind = type(value)
        if kind not in self._actions:
            self._actions[kind] = self._action(kind)
        action = self._actions[kind]
        return None if action is None else action(value)

    def _reference(self, key: ObjectKey, level: int) -> ObjectKey:
        if level > self.level:
            message = f"it refers to an object that is prepared later ({key})"
            raise _TooEarlyError(message)
        return ("known", key)

    def _action(self, kind: type) -> Callable[[Any], ObjectKey | None] | None:
        """Return the function that gives keys to objects of a class; None to pickle them."""
        if issubclass(kind, (UntypedStorage, TypedStorage)):
            return self._storage
        if kind is torch.device:
            return _device
        if _SHARED.get(kind.__name__) is kind:
            return lambda _: ("shared", kind.__name__)
        reason = _refusal(kind)
        return _refusing(reason) if reason else None

    def _storage(self, value: Any) -> ObjectKey:
        untyped = value._untyped_storage if isinstance(value, TypedStorage) else value  # noqa: SLF001
        if untyped._cdata not in self._numbers:  # noqa: SLF001 - as torch.save does
            self._numbers[untyped._cdata] = len(self.blocks)  # noqa: SLF001
            self.blocks.append(untyped)
        dtype = value.dtype if isinstance(value, TypedStorage) else None
        number = self._numbers[untyped._cdata]  # noqa: SLF001
        return ("storage", number, untyped.device.type, str(dtype).removeprefix("torch."))

    def _take(self, buffer: pickle.PickleBuffer) -> None:
        """Store an array's buffer as a block, outside of the stream."""
        self.blocks.append(buffer)

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


def _device(device: torch.device) -> ObjectKey | None:
    """Return a key for the rank's own GPU: the new rank may have another one."""
    is_own_gpu = device.type == "cuda" and device.index in {None, torch.cuda.current_device()}
    return ("device", device.type) if is_own_gpu else None


def _refusal(kind: type) -> str:
    """Return why objects of a class cannot be carried; empty if they can."""
    if "of_before" in vars(kind):
        return "it was replaced by an earlier switch"
    reasons = [reason for cls, reason in _REFUSED if issubclass(kind, cls)]
    libraries = {base.__name__ for base in kind.__mro__ if base.__module__ != "__main__"}
    reasons += [reason for name, reason in _REFUSED_BY_NAME.items() if name in libraries]
    return reasons[0] if reasons else ""


def _refusing(reason: str) -> Callable[[Any], None]:
    def refuse(value: object) -> None:
        if isinstance(value, (io.StringIO, io.BytesIO)):
            return
        raise SwitchError(reason)

    return refuse


_REFUSED: tuple[tuple[type, str], ...] = (
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


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    message = text[0] if text else "no reason given"
    if isinstance(error, (SwitchError, pickle.PicklingError)) or message.startswith(
        "cannot pickle"
    ):
        return message
    return f"{type(error).__name__}: {message}"


# Files


class BlockLocation(NamedTuple):
    """Location of a block."""

    rank: int
    """Rank whose file contains it."""
    offset: int
    size_bytes: int


@dataclass(slots=True)
class WritePlan:
    """Blocks that one rank writes, and locations of all its blocks."""

    blocks: list[BlockLocation]
    own_blocks: list[int]
    """Indices of the blocks that this rank writes."""
    size_bytes: int
    """Bytes that this rank writes, including the stream."""


def plan_writes(
    pickled: PickledNamespace, rank: int, everyones: Callable[[Any], list[Any]]
) -> WritePlan:
    """Assign each block to the first rank that has it; a collective.

    Args:
        pickled: pickled objects of this rank.
        rank: this rank.
        everyones: all-gathers an object.
    """
    marks = [
        (hashlib.blake2b(_octets(block)).hexdigest(), _bytes_of(block)) for block in pickled.blocks
    ]
    places: dict[tuple[str, int], BlockLocation] = {}
    for owner, rank_marks in enumerate(everyones(marks)):
        offset = 0
        for mark in rank_marks:
            if mark not in places:
                places[mark] = BlockLocation(owner, offset, mark[1])
                offset += -(-mark[1] // _ALIGNED) * _ALIGNED
    blocks = [places[mark] for mark in marks]
    firsts = {block: number for number, block in reversed(list(enumerate(blocks)))}
    own_blocks = sorted(number for block, number in firsts.items() if block.rank == rank)
    written = sum(-(-blocks[number].size_bytes // _ALIGNED) * _ALIGNED for number in own_blocks)
    return WritePlan(blocks, own_blocks, written + len(pickled.stream))


def write_namespace(pickled: PickledNamespace, plan: WritePlan, folder: Path, rank: int) -> None:
    """Write the pickled objects of a rank.

    Raises:
        OSError: the disk is full or another write error occurred.
    """
    with (folder / f"blocks-{rank}").open("wb") as file:
        for number in plan.own_blocks:
            file.seek(plan.blocks[number].offset)
            file.write(_octets(pickled.blocks[number]))
    buffers = [
        number
        for number, block in enumerate(pickled.blocks)
        if isinstance(block, pickle.PickleBuffer)
    ]
    (folder / f"index-{rank}.json").write_text(json.dumps([pickled.names, plan.blocks, buffers]))
    (folder / f"stream-{rank}").write_bytes(pickled.stream)


class NamespaceReader:
    """Reader of an old rank's pickle in a new rank.

    Args:
        folder: this session's private folder, which its old ranks have just written.
        rank: number of the old rank.
        device: device for tensors that were on the old rank's GPU.
    """

    def __init__(self, folder: Path, rank: int, device: torch.device) -> None:
        index = (folder / f"index-{rank}.json").read_text()
        self.names, blocks, buffers = json.loads(index)
        self.known: dict[ObjectKey, object] = {}
        """Key -> object that this process created; filled by the caller between stages."""
        stream = io.BytesIO((folder / f"stream-{rank}").read_bytes())
        self._unpacker = _NamespaceUnpickler(
            stream, _FileBlocks(folder, blocks, buffers, device), self.known
        )

        self._variables: MutableMapping[str, Any] = {}

    def set_namespace(self, variables: MutableMapping[str, Any]) -> None:
        """Set the namespace that variables are bound in and that functions use as globals."""
        self._variables = self.known[_NAMESPACE] = variables

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
            return self._unpacker.load()
        except Exception as error:  # unpickling runs arbitrary code of the objects
            reason = f"variable {name}: {_reason(error)}" if name else _reason(error)
            raise SwitchError(reason) from error


class _MemoryBlocks:
    """Blocks in memory, used without a copy."""

    def __init__(self, pickled: PickledNamespace) -> None:
        self.device: torch.device | None = None
        self._blocks = pickled.blocks

    def buffers(self) -> Iterator[Any]:
        """Return the buffers of arrays, in order."""
        return (block for block in self._blocks if isinstance(block, pickle.PickleBuffer))

    def storage(self, number: int, _: str) -> UntypedStorage:
        """Return the storage of a tensor."""
        storage: UntypedStorage = self._blocks[number]
        return storage


class _FileBlocks:
    """Blocks in files, each read on first use."""

    def __init__(
        self,
        folder: Path,
        blocks: Sequence[Sequence[int]],
        buffers: Sequence[int],
        device: torch.device,
    ) -> None:
        self.device: torch.device | None = device
        self._folder, self._blocks, self._buffers = folder, blocks, buffers
        self._storages: dict[int, UntypedStorage] = {}

    def buffers(self) -> Iterator[Any]:
        """Return the buffers of arrays, in order; a bytearray, so that the arrays are writable."""
        return (bytearray(_octets(self._read(number))) for number in self._buffers)

    def storage(self, number: int, kind: str) -> UntypedStorage:
        """Return the storage of a tensor, on its device."""
        if number not in self._storages:
            read = self._read(number)
            target = self.device if kind == "cuda" and self.device is not None else read.device
            self._storages[number] = read.to(target).untyped_storage()
        return self._storages[number]

    def _read(self, number: int) -> torch.Tensor:
        rank, offset, size_bytes = BlockLocation(*self._blocks[number])
        octets = torch.empty(size_bytes, dtype=torch.uint8)
        with (self._folder / f"blocks-{rank}").open("rb") as file:
            file.seek(offset)
            if file.readinto(octets.numpy().data) != size_bytes:
                message = f"blocks-{rank} in {self._folder} is truncated"
                raise SwitchError(message)
        return octets


class _NamespaceUnpickler(pickle.Unpickler):
    """Unpickles objects that a rank of this session has pickled."""

    def __init__(
        self,
        stream: io.BytesIO,
        source: _MemoryBlocks | _FileBlocks,
        known_objects: Mapping[ObjectKey, object],
    ) -> None:
        super().__init__(stream, buffers=source.buffers())
        self._source, self._known = source, known_objects

    def persistent_load(self, name: Any) -> Any:
        """Return the object for a key."""
        kind, *rest = name
        if kind == "known":
            return self._known[rest[0]]
        if kind == "shared":
            return _SHARED[rest[0]]()
        if kind == "device":
            return self._source.device or torch.device(rest[0], torch.cuda.current_device())
        number, device, dtype = rest
        untyped = self._source.storage(number, device)
        if dtype == "None":
            return untyped
        return TypedStorage(wrap_storage=untyped, dtype=getattr(torch, dtype), _internal=True)


class _TrialUnpickler(_NamespaceUnpickler):
    """Creates new classes instead of reusing those of cells, which stay unchanged."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function."""
        cls = super().find_class(module, name)
        if module.startswith("cloudpickle") and name in _MAKES_CLASSES:
            return functools.partial(_untracked, cls)
        return cls


_MAKES_CLASSES = frozenset({"_make_skeleton_class", "_make_skeleton_enum"})


def _untracked(make: Callable[..., type], *args: Any) -> type:
    """Call cloudpickle 3.1's class constructor without the id that identifies known classes."""
    *head, _tracker, extra = args
    return make(*head, None, extra)


def _bytes_of(block: Any) -> int:
    return block.nbytes() if isinstance(block, UntypedStorage) else block.raw().nbytes


def _octets(block: Any) -> memoryview:
    """Return the bytes of a block or of a 1-D tensor, in host memory."""
    if isinstance(block, pickle.PickleBuffer):
        return block.raw()
    if isinstance(block, UntypedStorage):
        block = torch.empty(0, dtype=torch.uint8, device=block.device).set_(block)
    content: memoryview = block.cpu().numpy().data if block.numel() else memoryview(b"")
    return content
