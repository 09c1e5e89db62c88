"""What can be pickled of a rank, on its way from an old process into a new one; runs on a rank.

The one module of nbdist that unpickles. It reads what a rank of this very session wrote
moments before, in a private folder (0700) that the session made for this one switch and
removes after it; nothing that came over a socket, and no checkpoint, is ever unpickled.

Large things are not in the pickle: storages of tensors and buffers of arrays are blocks of a
file beside it, those that several ranks hold alike only once. What the new process makes by
itself (the prepared model and all that belongs to it, the accelerator, `report`) is a name in
the pickle, so that a list that holds the model holds the new one afterwards.
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

Key = Any
"""Of an object that the new process makes by itself; any hashable value."""
_ALIGNED = 64
_SHARED = {cls.__name__: cls for cls in (PartialState, AcceleratorState, GradientState)}
"""Accelerate's states: all objects of a class share one dict, which must stay the new one's."""


class Stage(NamedTuple):
    """One object of a parcel; what comes later may share parts with it."""

    content: Any
    level: int
    """Known objects of higher levels do not exist yet when it is unpacked."""
    name: str = ""
    """Of the variable that it is; empty for nbdist's own."""


class Known(NamedTuple):
    """An object that the new process makes by itself."""

    one: object
    key: Key
    level: int


class StageError(SwitchError):
    """A stage cannot be packed, or not be unpacked."""

    def __init__(self, reason: str, place: int, *, too_early: bool = False) -> None:
        """Say which stage.

        Args:
            reason: why.
            place: its number.
            too_early: whether it refers to something of a higher level.
        """
        super().__init__(reason)
        self.place, self.too_early = place, too_early


@dataclass(slots=True, kw_only=True)
class Parcel:
    """Packed objects of one rank, still in memory."""

    stream: bytes
    names: list[str]
    """Of each stage."""
    blocks: list[Any] = field(default_factory=list)
    """Storages and buffers, in the order in which the stream needs them."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the stream and of all blocks."""
        return len(self.stream) + sum(map(_bytes_of, self.blocks))


def pack(stages: Sequence[Stage], known: Sequence[Known], namespace: Mapping[str, Any]) -> Parcel:
    """Pack objects.

    Args:
        stages: what the new process unpacks one after the other.
        known: objects that are not packed.
        namespace: the user's variables; functions find their globals in it again.

    Raises:
        StageError: one cannot be packed.
    """
    out = io.BytesIO()
    packer = _Packer(out, known, namespace)
    for place, stage in enumerate(stages):
        packer.level = stage.level
        try:
            packer.dump(stage.content)
        except _TooEarlyError as error:
            raise StageError(str(error), place, too_early=True) from error
        except Exception as error:  # objects may do anything while they are pickled
            raise StageError(_reason(error), place) from error
    names = [stage.name for stage in stages]
    return Parcel(stream=out.getvalue(), names=names, blocks=packer.blocks)


def tried(parcel: Parcel, known: Sequence[Known], beginning: Mapping[str, Any]) -> None:
    """Unpack a parcel as a new process will, and throw away what comes; copies no tensor.

    Args:
        parcel: just packed.
        known: objects that the new process makes by itself; here they are what they are.
        beginning: variables that a new process has from its start.

    Raises:
        StageError: one cannot be unpacked.
    """
    scratch = dict(beginning)
    found: dict[Key, object] = {one.key: one.one for one in known} | {_NAMESPACE: scratch}
    unpacker = _Trial(io.BytesIO(parcel.stream), _Packed(parcel), found)
    for place, name in enumerate(parcel.names):
        try:
            value = unpacker.load()
        except Exception as error:  # objects may do anything while they are unpickled
            raise StageError(_reason(error), place) from error
        if name:
            scratch[name] = value


class _TooEarlyError(SwitchError):
    """Something of a higher level is referred to."""


_NAMESPACE: Key = ("namespace",)


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions and classes of cells by value, and known objects by name."""

    def __init__(
        self, out: io.BytesIO, known: Sequence[Known], namespace: Mapping[str, Any]
    ) -> None:
        super().__init__(out, protocol=5, buffer_callback=self._take)
        self.level = 0
        self.blocks: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._alive = known
        self._known: dict[int, tuple[Key, int]] = {id(namespace): (_NAMESPACE, 0)}
        for one in known:
            self._known.setdefault(id(one.one), (one.key, one.level))
        self._actions: dict[type, Callable[[Any], Key | None] | None] = {}
        # cloudpickle 3.1: the globals that a function gets; ours are the user's, by name.
        self._namespace = namespace
        self.globals_ref[id(namespace)] = namespace

    def persistent_id(self, one: Any) -> Key | None:
        """Name what is not pickled; None for all else."""
        found = self._known.get(id(one))
        if found is not None:
            return self._reference(*found)
        kind = type(one)
        if kind not in self._actions:
            self._actions[kind] = self._action(kind)
        action = self._actions[kind]
        return None if action is None else action(one)

    def _reference(self, key: Key, level: int) -> Key:
        if level > self.level:
            message = f"it refers to what is prepared later ({key})"
            raise _TooEarlyError(message)
        return ("known", key)

    def _action(self, kind: type) -> Callable[[Any], Key | None] | None:
        """How objects of a class are named, where they are not pickled."""
        if issubclass(kind, (UntypedStorage, TypedStorage)):
            return self._storage
        if kind is torch.device:
            return _device
        if _SHARED.get(kind.__name__) is kind:
            return lambda _: ("shared", kind.__name__)
        reason = _refusal(kind)
        return _refusing(reason) if reason else None

    def _storage(self, one: Any) -> Key:
        untyped = one._untyped_storage if isinstance(one, TypedStorage) else one  # noqa: SLF001
        if untyped._cdata not in self._numbers:  # noqa: SLF001 - as torch.save does
            self._numbers[untyped._cdata] = len(self.blocks)  # noqa: SLF001
            self.blocks.append(untyped)
        dtype = one.dtype if isinstance(one, TypedStorage) else None
        number = self._numbers[untyped._cdata]  # noqa: SLF001
        return ("storage", number, untyped.device.type, str(dtype).removeprefix("torch."))

    def _take(self, buffer: pickle.PickleBuffer) -> None:
        """Keep the bytes of an array out of the stream."""
        self.blocks.append(buffer)

    def _dynamic_function_reduce(self, function: Any) -> Any:
        """Pickle a function of a cell without its globals: they are the user's variables."""
        reduced = super()._dynamic_function_reduce(function)
        if function.__globals__ is self._namespace:
            reduced[2][1]["__globals__"] = {}
        return reduced

    def reducer_override(self, one: Any) -> Any:
        """Leave the worker processes of a loader behind."""
        if isinstance(one, DataLoader) and one._iterator is not None:  # noqa: SLF001
            return object.__new__, (type(one),), {**vars(one), "_iterator": None}
        return super().reducer_override(one)


def _device(one: torch.device) -> Key | None:
    """Name the rank's own GPU: the new rank's may be another."""
    own = one.type == "cuda" and one.index in {None, torch.cuda.current_device()}
    return ("device", one.type) if own else None


def _refusal(kind: type) -> str:
    """Why objects of a class stay behind; empty where nothing is known against it."""
    if "of_before" in vars(kind):
        return "it was replaced by an earlier switch"
    found = [reason for cls, reason in _REFUSED if issubclass(kind, cls)]
    libraries = {base.__name__ for base in kind.__mro__ if base.__module__ != "__main__"}
    found += [reason for name, reason in _REFUSED_BY_NAME.items() if name in libraries]
    return found[0] if found else ""


def _refusing(reason: str) -> Callable[[Any], None]:
    def refuse(one: object) -> None:
        if isinstance(one, (io.StringIO, io.BytesIO)):
            return
        raise SwitchError(reason)

    return refuse


_REFUSED: tuple[tuple[type, str], ...] = (
    (io.IOBase, "an open file belongs to its process; open it again"),
    (DTensor, "a DTensor is cut for the old ranks; keep .full_tensor() instead"),
    (distributed.ProcessGroup, "a process group is of the old ranks; make it again"),
    (DeviceMesh, "a device mesh is of the old ranks; make it again"),
    (DistributedDataParallel, "it was prepared for the old ranks; prepare it again"),
    (FullyShardedDataParallel, "it was prepared for the old ranks; prepare it again"),
    (DataLoaderAdapter, "it was prepared for the old ranks and is in use no more"),
)
_REFUSED_BY_NAME = {
    "DeepSpeedEngine": "it was prepared for the old ranks; prepare it again",
    "FSDPModule": "it was prepared for the old ranks; prepare it again",
    "Trainer": "a Trainer is built around its ranks; make it again, with the same model",
    "TrainingArguments": "they hold the old engine's settings; make them again",
    "generator": "an iterator at work stays in its process; iter(loader) goes on where it was",
}


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    words = text[0] if text else "no reason given"
    if isinstance(error, (SwitchError, pickle.PicklingError)) or words.startswith("cannot pickle"):
        return words
    return f"{type(error).__name__}: {words}"


# Files


class Block(NamedTuple):
    """Where the bytes of a block are."""

    rank: int
    """In whose file."""
    offset: int
    size_bytes: int


@dataclass(slots=True)
class Plan:
    """What one rank writes, and where it finds what others write."""

    blocks: list[Block]
    mine: list[int]
    """Numbers of the blocks that this rank writes."""
    size_bytes: int
    """Of what it writes, the stream included."""


def planned(parcel: Parcel, rank: int, everyones: Callable[[Any], list[Any]]) -> Plan:
    """Say who writes which block: the first rank that has it; a collective.

    Args:
        parcel: of this rank.
        rank: this one.
        everyones: gives what each rank gives.
    """
    marks = [(hashlib.blake2b(_octets(one)).hexdigest(), _bytes_of(one)) for one in parcel.blocks]
    places: dict[tuple[str, int], Block] = {}
    for owner, theirs in enumerate(everyones(marks)):
        offset = 0
        for mark in theirs:
            if mark not in places:
                places[mark] = Block(owner, offset, mark[1])
                offset += -(-mark[1] // _ALIGNED) * _ALIGNED
    blocks = [places[mark] for mark in marks]
    firsts = {block: number for number, block in reversed(list(enumerate(blocks)))}
    mine = sorted(number for block, number in firsts.items() if block.rank == rank)
    written = sum(-(-blocks[number].size_bytes // _ALIGNED) * _ALIGNED for number in mine)
    return Plan(blocks, mine, written + len(parcel.stream))


def write(parcel: Parcel, plan: Plan, folder: Path, rank: int) -> None:
    """Write a rank's parcel.

    Raises:
        OSError: the disk is full or refuses.
    """
    with (folder / f"blocks-{rank}").open("wb") as file:
        for number in plan.mine:
            file.seek(plan.blocks[number].offset)
            file.write(_octets(parcel.blocks[number]))
    buffers = [
        number for number, one in enumerate(parcel.blocks) if isinstance(one, pickle.PickleBuffer)
    ]
    (folder / f"index-{rank}.json").write_text(json.dumps([parcel.names, plan.blocks, buffers]))
    (folder / f"stream-{rank}").write_bytes(parcel.stream)


class Arrived:
    """The parcel of an old rank, being unpacked in a new one.

    Args:
        folder: this session's own, which its old ranks have just written.
        rank: the old one.
        device: where tensors that were on the old rank's GPU go.
    """

    def __init__(self, folder: Path, rank: int, device: torch.device) -> None:
        """Open the files."""
        index = (folder / f"index-{rank}.json").read_text()
        self.names, blocks, buffers = json.loads(index)
        self.known: dict[Key, object] = {}
        """What this process has made so far; to be filled between stages."""
        stream = io.BytesIO((folder / f"stream-{rank}").read_bytes())
        self._unpacker = _Unpacker(stream, _Written(folder, blocks, buffers, device), self.known)

        self._variables: MutableMapping[str, Any] = {}

    def namespace(self, variables: MutableMapping[str, Any]) -> None:
        """Give functions these globals, and bind variables here."""
        self._variables = self.known[_NAMESPACE] = variables

    def bind(self) -> list[str]:
        """Unpack variables, each bound at once, up to a stage that is none; returns their names.

        Raises:
            SwitchError: one cannot be made again; says which, and why.
        """
        bound = []
        while self.names and self.names[0]:
            name = self.names[0]
            self._variables[name] = self.next()
            bound.append(name)
        return bound

    def next(self) -> Any:
        """Unpack the next stage.

        Raises:
            SwitchError: it cannot be made again; says why.
        """
        name = self.names.pop(0)
        try:
            return self._unpacker.load()
        except Exception as error:  # objects may do anything while they are unpickled
            reason = f"variable {name}: {_reason(error)}" if name else _reason(error)
            raise SwitchError(reason) from error


class _Packed:
    """Blocks of a parcel in memory, as they are."""

    def __init__(self, parcel: Parcel) -> None:
        self.device: torch.device | None = None
        self._blocks = parcel.blocks

    def buffers(self) -> Iterator[Any]:
        """Arrays' buffers, in order."""
        return (one for one in self._blocks if isinstance(one, pickle.PickleBuffer))

    def storage(self, number: int, _: str) -> UntypedStorage:
        """A tensor's storage."""
        found: UntypedStorage = self._blocks[number]
        return found


class _Written:
    """Blocks in files, each read when it is needed."""

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
        """Arrays' buffers, in order; what is made of them can be written into."""
        return (bytearray(_octets(self._read(number))) for number in self._buffers)

    def storage(self, number: int, kind: str) -> UntypedStorage:
        """A tensor's storage, on its device."""
        if number not in self._storages:
            read = self._read(number)
            target = self.device if kind == "cuda" and self.device is not None else read.device
            self._storages[number] = read.to(target).untyped_storage()
        return self._storages[number]

    def _read(self, number: int) -> torch.Tensor:
        rank, offset, size_bytes = Block(*self._blocks[number])
        octets = torch.empty(size_bytes, dtype=torch.uint8)
        with (self._folder / f"blocks-{rank}").open("rb") as file:
            file.seek(offset)
            if file.readinto(octets.numpy().data) != size_bytes:
                message = "a file of the switch was cut short"
                raise SwitchError(message)
        return octets


class _Unpacker(pickle.Unpickler):
    """Unpickles what a rank of this session has packed."""

    def __init__(
        self, stream: io.BytesIO, source: _Packed | _Written, known: Mapping[Key, object]
    ) -> None:
        super().__init__(stream, buffers=source.buffers())
        self._source, self._known = source, known

    def persistent_load(self, name: Any) -> Any:
        """Give what a name stands for."""
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


class _Trial(_Unpacker):
    """Makes classes of cells anew: those that exist here stay as they are."""

    def find_class(self, module: str, name: str) -> Any:
        """Find a class or function."""
        found = super().find_class(module, name)
        if module.startswith("cloudpickle") and name in _MAKES_CLASSES:
            return functools.partial(_untracked, found)
        return found


_MAKES_CLASSES = frozenset({"_make_skeleton_class", "_make_skeleton_enum"})


def _untracked(make: Callable[..., type], *args: Any) -> type:
    """Let cloudpickle 3.1 make a class that it does not take for one that exists already."""
    *head, _tracker, extra = args
    return make(*head, None, extra)


def _bytes_of(block: Any) -> int:
    return block.nbytes() if isinstance(block, UntypedStorage) else block.raw().nbytes


def _octets(block: Any) -> memoryview:
    """The bytes of a block, or of a tensor of one dimension, in host memory."""
    if isinstance(block, pickle.PickleBuffer):
        return block.raw()
    if isinstance(block, UntypedStorage):
        block = torch.empty(0, dtype=torch.uint8, device=block.device).set_(block)
    found: memoryview = block.cpu().numpy().data if block.numel() else memoryview(b"")
    return found
