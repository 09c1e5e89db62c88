"""Messages between the kernel and the agents of the nodes.

Each node has one encrypted connection (CurveZMQ over TCP). A message is a JSON text followed by any
number of binary frames. The classes say who sends it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

HEARTBEAT_S = 1.0
LEASE_S = 20.0
"""Without a message from the kernel for this long, an agent ends all that it started."""
NODE_TIMEOUT_S = 10.0
"""Without a message from a node for this long, the node is lost."""
CHUNK_BYTES = 1 << 20
"""Size of a chunk in a file transfer."""
MAX_MESSAGES_PER_POLL = 256
"""Messages read from one socket in a row: a flooding rank must not block the others."""
MIN_FREE_BYTES = 64 << 20
"""Space to leave free in shared memory."""
MAX_UNREAD_CHUNKS = 16
"""Number of chunks of one file in flight."""
SHARED_FOLDER_TIMEOUT_S = 5.0
"""Time for a file written on one machine to appear on others that share the disk."""
SHARED_FOLDER_HINT = "All nodes must see the folder: use one on a shared disk"


@dataclass(frozen=True, slots=True)
class AgentCredentials:
    """Credentials and settings with which an agent connects to the kernel. A secret."""

    hub: str
    """Address of the agent server: "tcp://10.0.0.1:40123"."""
    hub_key: str
    """Public key of the agent server, in Z85."""
    public: str
    secret: str
    """Secret key of this node; `public` belongs to it."""
    kind: Literal["cpu", "cuda"]
    """Device type of the ranks."""
    lease_s: float = LEASE_S

    def to_json(self) -> str:
        """Return the ticket as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> AgentCredentials:
        """Rebuild from `to_json()`.

        Raises:
            ValueError: not a ticket.
        """
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            msg = "not the connection data of a node"  # without the text, which may be a secret
            raise ValueError(msg) from None


@dataclass(frozen=True, slots=True)
class AgentHello:
    """Agent to kernel: the agent has started."""

    launcher: int
    """Process id of the launcher."""
    run_dir: str
    bulk_dir: str
    machine: dict[str, Any]
    """``hardware.discovery.Machine.to_json()``."""


@dataclass(frozen=True, slots=True)
class LauncherLinkMessage:
    """Both ways: a line of the link between kernel and launcher."""

    text: str


@dataclass(frozen=True, slots=True)
class LaunchNodeRanksRequest:
    """Kernel to agent: start ranks.

    `fields` are those of the launch message, in which the agent fills in its folders.
    """

    fields: dict[str, Any]
    key: str
    """Key that signs the messages of the ranks."""
    address: str
    """Address of this node's interface to the other nodes."""


@dataclass(frozen=True, slots=True)
class CloseRankSocketsRequest:
    """Kernel to agent: close the sockets of the ranks."""


@dataclass(frozen=True, slots=True)
class RequestToRanks:
    """Kernel to agent: a signed message to some ranks of the node."""

    ranks: list[int]
    channel: str
    generation: int


@dataclass(frozen=True, slots=True)
class MessagesFromRanks:
    """Agent to kernel: signed messages of the node's ranks, in the frames."""

    generation: int
    index: list[tuple[tuple[int, ...], str, int]]
    """For each message the ranks that sent it, the channel and the number of its frames.

    A message without frames was not signed and is dropped.
    """


@dataclass(frozen=True, slots=True)
class KeyValueMessage:
    """Both ways: a rank's request to the key-value store, or the reply.

    The frames hold the requester and values.
    """

    op: str
    keys: list[str] = field(default_factory=list)
    number: int = 0
    """Number to add; in a reply the result."""
    seconds: float = 0.0
    """Timeout."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class ProcessStates:
    """Agent to kernel: ranks and launcher that are stopped or have exited, by name.

    The state is "gone", or psutil's status.
    """

    states: dict[str, str]


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """Kernel to agent: a request about files, stacks, logs or memory."""

    id: int
    what: str
    given: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AgentReply:
    """Agent to kernel: the reply to a request."""

    id: int
    value: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Both ways: the sender is alive."""


@dataclass(frozen=True, slots=True)
class StopAgentRequest:
    """Kernel to agent: end the launcher, the ranks and the agent."""


@dataclass(frozen=True, slots=True)
class AgentExited:
    """Agent to kernel: the agent ends."""

    why: str


Message = (
    AgentHello
    | LauncherLinkMessage
    | LaunchNodeRanksRequest
    | CloseRankSocketsRequest
    | RequestToRanks
    | MessagesFromRanks
    | KeyValueMessage
    | ProcessStates
    | AgentRequest
    | AgentReply
    | Heartbeat
    | StopAgentRequest
    | AgentExited
)
_TYPES = {cls.__name__: cls for cls in get_args(Message)}


def pack_message(message: Message, *frames: bytes) -> list[bytes]:
    """Return the frames of a message for the connection."""
    # asdict would copy the list of ranks, one by one, for each node.
    values = {each.name: getattr(message, each.name) for each in fields(message)}
    return [json.dumps([type(message).__name__, values]).encode(), *frames]


def unpack_message(frames: list[bytes]) -> tuple[Message, list[bytes]]:
    """Decode the frames of ``pack_message``.

    Raises:
        ValueError: not a message.
    """
    try:
        name, values = json.loads(frames[0])
        message: Message = _TYPES[name](**values)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(
            f"{frames[:1]!r:.100} is not a node message ({type(error).__name__})"
        ) from error
    return message, frames[1:]
