"""Every message between the kernel's hub and the agents of the nodes; pure.

One encrypted connection for each node (CurveZMQ over TCP). A message is a JSON text, then any
number of frames of bytes that it does not look into.

    Hello     agent -> hub   the agent is there: its folders and versions, and what its machine has
    Line      both ways      a line of the link between kernel and launcher, as in `wire`
    Launch    hub -> agent   start ranks: the line, the key of their messages
    Cut       hub -> agent   let go of the ranks' sockets
    Frames    hub -> agent   a message of the kernel to some ranks, signed
    Bundle    agent -> hub   what ranks have said, signed (`cluster/message_batch.py`)
    Taken     hub -> agent   the kernel has read it
    Stored    both ways      a request of a rank to the store of the process groups; its answer
    States    agent -> hub   processes that are stopped or gone
    Ask       hub -> agent   files, stacks, the log, memory: answered once, or in parts
    Answer    agent -> hub   what was asked for, or why not
    Beat      both ways      still there
    End       hub -> agent   end the launcher, the ranks and the agent
    Bye       agent -> hub   the agent ends, and why
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

BEAT_S = 1.0
LEASE_S = 20.0
"""An agent that hears nothing of the hub for so long ends everything that it has started."""
CUT_OFF_S = 10.0
"""A node of which the hub hears nothing for so long is lost."""
CHUNK_BYTES = 1 << 20
"""Of a file, in one message."""
AT_ONCE = 256
"""Messages that are read from one socket before others get their turn: a rank may flood."""
AHEAD = 2
"""Bundles of what ranks say that are on their way; while the kernel has not read them, what the
ranks say next is brought together."""
WINDOW = 16
"""Chunks of one file that are on their way at once."""
SHARED_S = 5.0
"""A file that one machine has written is seen on others within this time, on a disk they share."""
SHARE_IT = "All nodes have to see the folder: use one on a disk that they share"


@dataclass(frozen=True, slots=True)
class Ticket:
    """What an agent needs to find the hub and to be let in; a secret."""

    hub: str
    """Address: "tcp://10.0.0.1:40123"."""
    hub_key: str
    """Public, in Z85."""
    public: str
    secret: str
    """This node's own pair of keys."""
    index: int
    """Of the place."""
    kind: Literal["cpu", "cuda"]
    """Of the ranks."""
    cwd: str
    path: list[str] = field(default_factory=list)
    """The kernel's sys.path."""
    lease_s: float = LEASE_S

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Ticket:
        """Read it.

        Raises:
            ValueError: it is none.
        """
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            msg = "this is no ticket of a node"  # what it is stays unsaid: it may be a secret
            raise ValueError(msg) from None


@dataclass(frozen=True, slots=True)
class Hello:
    """The agent is there."""

    host: str
    pid: int
    launcher: int
    """Its process."""
    run_dir: str
    bulk_dir: str
    versions: dict[str, str]
    machine: dict[str, Any]
    """`machine.Machine.to_json()`."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the link."""

    text: str


@dataclass(frozen=True, slots=True)
class Launch:
    """Start ranks: `fields` of `wire.Launch`, in which the agent fills in its folders."""

    fields: dict[str, Any]
    key: str
    """That signs the messages of the ranks."""
    address: str
    """Of this node's interface to the other nodes."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Let go of the ranks' sockets."""


@dataclass(frozen=True, slots=True)
class Frames:
    """A message to some ranks of a node."""

    ranks: tuple[int, ...]
    channel: str
    generation: int


@dataclass(frozen=True, slots=True)
class Bundle:
    """What ranks of a node have said."""

    generation: int


@dataclass(frozen=True, slots=True)
class Taken:
    """A bundle was read."""

    generation: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A request to the store and its answer: who asks and the values are in the frames."""

    op: str
    keys: list[str] = field(default_factory=list)
    number: int = 0
    """To add; of an answer the count."""
    seconds: float = 0.0
    """How long to wait."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class States:
    """Processes of the ranks and the launcher that do not simply run, by name.

    "gone", or the status as psutil names it.
    """

    states: dict[str, str]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to the agent itself."""

    id: int
    what: str
    given: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """Its answer, or a part of it."""

    id: int
    value: Any = None
    error: str = ""
    """One sentence; nothing follows."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Still there."""


@dataclass(frozen=True, slots=True)
class End:
    """End everything."""


@dataclass(frozen=True, slots=True)
class Bye:
    """The agent ends."""

    why: str


_OfRanks = Frames | Bundle | Taken | Stored | States
Message = Hello | Line | Launch | Cut | _OfRanks | Ask | Answer | Beat | End | Bye
_TYPES = {cls.__name__: cls for cls in get_args(Message)}


def pack(message: Message, *frames: bytes) -> list[bytes]:
    """The frames that go over the connection."""
    return [_known_head(message) if type(message) is Frames else _head(message), *frames]


def _head(message: Message) -> bytes:
    return json.dumps([type(message).__name__, asdict(message)]).encode()


_known_head = functools.lru_cache(maxsize=4096)(_head)
"""Of `Frames`: they are few, and of each a cell sends many."""


def unpack(frames: list[bytes]) -> tuple[Message, list[bytes]]:
    """Read what `pack` made.

    Raises:
        ValueError: it is no message.
    """
    try:
        head = frames[0]
        message = _known_read(head) if head.startswith(_OF_FRAMES) else _read(head)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        msg = f"{frames[:1]!r:.100} is no message of a node ({type(error).__name__})"
        raise ValueError(msg) from error
    return message, frames[1:]


def _read(head: bytes) -> Message:
    name, fields = json.loads(head)
    message: Message = _TYPES[name](**fields)
    return message


def _read_frames(head: bytes) -> Frames:
    _, fields = json.loads(head)
    return Frames(tuple(fields.pop("ranks")), **fields)


_known_read = functools.lru_cache(maxsize=4096)(_read_frames)
_OF_FRAMES = b'["Frames"'
