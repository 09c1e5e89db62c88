"""A rendezvous without a network: there is one agent, and what it stores stays in its memory.

torch elastic brings agents of several machines together through a store. Here one agent
forks all ranks. torch 2.13's TCPStore listens on every interface, whatever address it is
given, and asks for no password; c10d's own rendezvous unpickles what it finds there. The
ranks meet in a file (`worker.rendezvous_store`).
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

NAME = "nbdist"
ENDPOINT = "127.0.0.1:0"
"""torch elastic wants one; nothing listens there."""
_NOWHERE = RendezvousStoreInfo("127.0.0.1", -1)
"""MASTER_ADDR and MASTER_PORT of the ranks: who tries to connect or to listen fails at once."""


class OneAgent(RendezvousHandler):
    """One machine, one group: rank 0 of 1 as torch elastic counts agents."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        """Make the agent's store."""
        self._run_id = parameters.run_id
        self._store = HashStore()

    def get_backend(self) -> str:
        """Name under which torch elastic finds this handler."""
        return NAME

    @property
    def use_agent_store(self) -> bool:
        """Not to open a TCPStore: with False, torch's rank 0 would serve one."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Give the only agent the store."""
        return RendezvousInfo(self._store, 0, 1, _NOWHERE)

    def is_closed(self) -> bool:
        """Never closed to its only agent."""
        return False

    def set_closed(self) -> None:
        """Nothing to tell: there is no other agent."""

    def num_nodes_waiting(self) -> int:
        """No other machine ever waits."""
        return 0

    def get_run_id(self) -> str:
        """Id given by the launcher."""
        return self._run_id

    def shutdown(self) -> bool:
        """Drop the store."""
        del self._store
        return True


def register() -> None:
    """Make the handler known to torch elastic under `NAME`."""
    rendezvous_handler_registry.register(NAME, OneAgent)
