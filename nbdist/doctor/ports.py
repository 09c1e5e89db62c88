"""Does loopback work, and is anything of ours listening where others can reach it."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import psutil

from nbdist.doctor.finding import listed, note, ok, problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nbdist.doctor.finding import Finding

LOOPBACK = "127.0.0.1"
WITHIN_S = 1.0


def look(pids: Iterable[int] = ()) -> Iterator[Finding]:
    """Try loopback, and list listeners.

    Args:
        pids: launcher and ranks of the session, with their children.
    """
    why = loopback()
    if why:
        do = "ranks meet there: allow it in the firewall, and bring up the interface lo"
        yield problem("loopback", f"{LOOPBACK} does not work: {why}", do)
    else:
        yield ok("loopback", f"{LOOPBACK} works")
    yield from listeners(open_to_others(pids), open_to_others([os.getpid()]))


def listeners(session: list[str], kernel: list[str]) -> Iterator[Finding]:
    """Findings for listeners that others can reach.

    Args:
        session: of launcher and ranks.
        kernel: of the notebook's own process.
    """
    if session:
        says = f"the session listens where other machines can reach it: {listed(session)}"
        yield problem("ports", says, "code in a cell opened this, or nbdist is at fault: report it")
    else:
        yield ok("ports", "launcher and ranks listen on loopback at most")
    if kernel:
        says = f"this kernel listens where other machines can reach it: {listed(kernel)}"
        do = "Jupyter's or a library's doing: start kernels with the ip 127.0.0.1"
        yield note("ports", says, do)


def loopback() -> str:
    """Why loopback does not work; empty where a byte came through."""
    try:
        with (
            closing(socket.create_server((LOOPBACK, 0))) as server,
            closing(socket.create_connection(server.getsockname(), WITHIN_S)) as out,
        ):
            server.settimeout(WITHIN_S)
            with closing(server.accept()[0]) as into:
                out.sendall(b"x")
                into.settimeout(WITHIN_S)
                return "" if into.recv(1) == b"x" else "what was sent did not arrive"
    except OSError as error:
        return str(error)


def open_to_others(pids: Iterable[int]) -> list[str]:
    """Listening addresses of processes that are not on loopback: "0.0.0.0:29500 (pid 4711)"."""
    found = []
    for pid in pids:
        with suppress(psutil.Error):
            found += [
                f"{one.laddr.ip}:{one.laddr.port} (pid {pid})"
                for one in psutil.Process(pid).net_connections("inet")
                if one.status == psutil.CONN_LISTEN and not _is_loopback(one.laddr.ip)
            ]
    return found


def _is_loopback(ip: str) -> bool:
    address = ipaddress.ip_address(ip.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
