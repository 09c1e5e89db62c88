"""Checks that loopback works and that no process of the session listens on other interfaces."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import psutil

from nbdist.doctor.finding import note, ok, problem, summarize_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nbdist.doctor.finding import Finding

LOOPBACK = "127.0.0.1"
LOOPBACK_TIMEOUT_S = 1.0


def check_ports(pids: Iterable[int] = ()) -> Iterator[Finding]:
    """Check loopback and list listeners that other machines can reach.

    Args:
        pids: process ids of the launcher, the ranks and their children.
    """
    error = loopback_error()
    if error:
        do = "ranks connect over loopback: allow it in the firewall and bring up the interface lo"
        yield problem("loopback", f"{LOOPBACK} does not work: {error}", do)
    else:
        yield ok("loopback", f"{LOOPBACK} works")
    if session := exposed_listeners(pids):
        message = (
            "the session listens on addresses that other machines can reach:"
            f" {summarize_list(session)}"
        )
        do = "close it if code in a cell opened it; otherwise report this as a bug of nbdist"
        yield problem("ports", message, do)
    else:
        yield ok("ports", "launcher and ranks listen on loopback only")
    if kernel := exposed_listeners([os.getpid()]):
        message = (
            f"this kernel listens on addresses that other machines can reach:"
            f" {summarize_list(kernel)}"
        )
        do = "opened by Jupyter or a library: start kernels with ip 127.0.0.1"
        yield note("ports", message, do)


def loopback_error() -> str:
    """Return why loopback does not work, or "" if a byte was received."""
    try:
        with (
            closing(socket.create_server((LOOPBACK, 0))) as server,
            closing(socket.create_connection(server.getsockname(), LOOPBACK_TIMEOUT_S)) as client,
        ):
            server.settimeout(LOOPBACK_TIMEOUT_S)
            with closing(server.accept()[0]) as connection:
                client.sendall(b"x")
                connection.settimeout(LOOPBACK_TIMEOUT_S)
                return (
                    ""
                    if connection.recv(1) == b"x"
                    else "the received byte differs from the sent one"
                )
    except OSError as error:
        return str(error)


def exposed_listeners(pids: Iterable[int]) -> list[str]:
    """Return non-loopback listening addresses of processes: "0.0.0.0:29500 (pid 4711)"."""
    addresses = []
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            list_connections = getattr(process, "net_connections", None) or process.connections
            for connection in list_connections("inet"):  # psutil 6 renamed it
                if connection.status != psutil.CONN_LISTEN:
                    continue
                address = ipaddress.ip_address(connection.laddr.ip.partition("%")[0])
                if not (getattr(address, "ipv4_mapped", None) or address).is_loopback:
                    addresses.append(f"{connection.laddr.ip}:{connection.laddr.port} (pid {pid})")
    return addresses
