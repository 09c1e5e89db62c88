"""A rendezvous whose store listens on loopback only.

torch 2.13's TCPStore ignores the host it is given and listens on every interface, without
a password; c10d's own rendezvous unpickles what it finds there. Handing the store a socket
that is bound already keeps it on 127.0.0.1, and holding that socket makes a busy port
impossible.
"""

from __future__ import annotations

import datetime as dt
import os
import socket

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

NAME = "nbdist"
LOOPBACK = "127.0.0.1"
BACKLOG = 128
STORE_TIMEOUT = dt.timedelta(seconds=60)


class LoopbackRendezvous(RendezvousHandler):
    """One machine, one group: rank 0 of 1 as torch elastic counts agents."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        """Bind a free loopback port and serve a store on it."""
        self._run_id = parameters.run_id
        listener = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
        self._port = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK,
            self._port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=os.dup(listener.fileno()),
            timeout=STORE_TIMEOUT,
        )
        listener.close()

    def get_backend(self) -> str:
        """Name under which torch elastic finds this handler."""
        return NAME

    @property
    def use_agent_store(self) -> bool:
        """The ranks use this store; no second one is opened."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Give the only agent the store."""
        store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))

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
        """Drop the store, which closes its socket."""
        del self._store
        return True


def register() -> None:
    """Make the handler known to torch elastic under `NAME`."""
    rendezvous_handler_registry.register(NAME, LoopbackRendezvous)
