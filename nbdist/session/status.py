"""What `%nbdist status` says of a session, line by line; ranks stand below their nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.display.units import gib

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.hardware.discovery import Node
    from nbdist.hardware.telemetry import Now, Reading
    from nbdist.session.session import Session


def lines(session: Session) -> Iterator[str]:
    """State of the session and of each rank; on nodes with the memory that each one tells now."""
    yield str(session)
    told = session.status()
    if told["standstill"]:
        yield f"  {told['standstill']}"
    for one in told["launchers"]:
        if one["unresponsive"]:
            name = one["name"].removeprefix("the ")
            yield f"  {name}: pid {one['pid']}, {one['unresponsive']}"
    living = session.state in {"ready", "running"}
    now = session.nodes_now() if living else {}
    first = {node.ranks[0]: node for node in session.nodes}
    readings = {rank: one for node in now.values() for rank, one in node.readings.items()}
    for member in told["ranks"]:
        if node := first.get(member["rank"]):
            yield f"  {_node(node, now.get(node.name))}" if living else f"  node {node.name}"
        yield f"  {_rank(member, readings.get(member['rank']))}"


def _node(node: Node, now: Now | None) -> str:
    """A node's heading: what it has, and how much of its own memory is used."""
    if now is None:
        return f"node {node.name}: {node.describe()}, does not answer"
    whole = node.machine.memory_bytes
    used = f"{gib(whole - now.host_free_bytes)} of {gib(whole, unit=True)}"
    return f"node {node.name}: {node.describe()}, host memory {used}"


def _rank(member: Mapping[str, Any], reading: Reading | None) -> str:
    life = member["unresponsive"] or ("alive" if member["alive"] else "ended")
    used = None if reading is None else reading.used_bytes
    holds = "" if used is None else f", {gib(used, unit=True)}"
    return f"rank {member['rank']}: pid {member['pid']}, {member['device']}, {life}{holds}"
