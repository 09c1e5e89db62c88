"""Text of `%nbdist status`; ranks are listed below their nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.number_formatting import format_gib

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.hardware.discovery import SessionNode
    from nbdist.hardware.telemetry import GpuReading, NodeUsage
    from nbdist.session.session import Session


def status_lines(session: Session) -> Iterator[str]:
    """Yield a line for the session, its nodes and each rank, with current memory use on nodes."""
    yield str(session)
    report = session.status()
    if report["standstill"]:
        yield f"  {report['standstill']}"
    for launcher in report["launchers"]:
        if launcher["unresponsive"]:
            name = launcher["name"].removeprefix("the ")
            yield f"  {name}: pid {launcher['pid']}, {launcher['unresponsive']}"
    is_running = session.state in {"ready", "running"}
    usages = session.nodes_now() if is_running else {}
    first = {node.ranks[0]: node for node in session.nodes}
    readings = {
        rank: reading for usage in usages.values() for rank, reading in usage.readings.items()
    }
    for member in report["ranks"]:
        if node := first.get(member["rank"]):
            yield f"  {_node(node, usages.get(node.name))}" if is_running else f"  node {node.name}"
        yield f"  {_rank(member, readings.get(member['rank']))}"


def _node(node: SessionNode, now: NodeUsage | None) -> str:
    """Return the heading of a node: its hardware and its host memory use."""
    if now is None:
        return f"node {node.name}: {node.describe()}, not responding"
    whole = node.machine.memory_bytes
    used = f"{format_gib(whole - now.host_free_bytes)} of {format_gib(whole, unit=True)}"
    return f"node {node.name}: {node.describe()}, host memory {used}"


def _rank(member: Mapping[str, Any], reading: GpuReading | None) -> str:
    life = member["unresponsive"] or ("alive" if member["alive"] else "ended")
    used = None if reading is None else reading.used_bytes
    holds = "" if used is None else f", {format_gib(used, unit=True)}"
    return f"rank {member['rank']}: pid {member['pid']}, {member['device']}, {life}{holds}"
