"""In-memory rendezvous for torch elastic with a single agent and without a network.

torch elastic's rendezvous connects agents of several machines through a store; here one agent forks
all ranks. torch 2.13's TCPStore listens on every interface, whatever address it is given, without
authentication, and c10d's rendezvous unpickles data from it. The ranks use a file store instead
(`worker.rendezvous_store`).
"""

from __future__ import annotations

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND_NAME = "nbdist"
ENDPOINT = "127.0.0.1:0"
"""Required by torch elastic; nothing listens there."""
_NOWHERE = RendezvousStoreInfo("127.0.0.1", -1)
"""MASTER_ADDR and MASTER_PORT of the ranks: connecting or listening fails immediately."""


class SingleAgentRendezvous(RendezvousHandler):
    """A single agent on one machine: rank 0 of 1 as torch elastic counts agents."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._store = HashStore()

    def get_backend(self) -> str:
        """Name of this handler in torch elastic."""
        return BACKEND_NAME

    @property
    def use_agent_store(self) -> bool:
        """True, so that torch's rank 0 does not serve a TCPStore."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store and the only agent's rank."""
        return RendezvousInfo(self._store, 0, 1, _NOWHERE)

    def is_closed(self) -> bool:
        """Return False: it stays open for its agent."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there are no other agents."""

    def num_nodes_waiting(self) -> int:
        """Return 0: there are no other nodes."""
        return 0

    def get_run_id(self) -> str:
        """Id given by the launcher."""
        return self._run_id

    def shutdown(self) -> bool:
        """Drop the store."""
        del self._store
        return True


def register_rendezvous() -> None:
    """Register the handler with torch elastic as ``BACKEND_NAME``."""
    rendezvous_handler_registry.register(BACKEND_NAME, SingleAgentRendezvous)
