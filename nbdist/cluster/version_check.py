"""Whether the nodes of a session have the same software as the notebook; pure.

Cells, messages and tensors go between these versions: other ones fail late and obscurely.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.cluster.allocation import Place

COMPARED = ("python", "torch", "nbdist")
"""As `there.versions` names them."""
NOTEBOOK = "the notebook"


def check(here: Mapping[str, str], places: Sequence[Place]) -> None:
    """Refuse nodes whose versions differ from the notebook's.

    Python may differ in its last number; torch's build ("+cu130", "+cpu") may not.

    Raises:
        StartError: lists them, with the nodes that have each.
    """
    lines = []
    for name in COMPARED:
        found: dict[str, list[str]] = {here.get(name, "none"): [NOTEBOOK]}
        for place in places:
            found.setdefault(place.versions.get(name, "none"), []).append(place.name)
        if len({_compared(name, version) for version in found}) > 1:
            words = [f"{version} on {listed(nodes)}" for version, nodes in found.items()]
            lines.append(f"{name} {', '.join(words)}")
    if lines:
        msg = (
            f"Versions differ between the nodes: {'; '.join(lines)}."
            " Install the same ones everywhere; nothing was started."
        )
        raise StartError(msg)


def _compared(name: str, version: str) -> str:
    return ".".join(version.split(".")[:2]) if name == "python" else version


def listed(nodes: Sequence[str], most: int = 4) -> str:
    """The names of nodes, the first few of them: "alpha, beta and 3 more"."""
    more = len(nodes) - most
    return ", ".join(nodes[:most]) + (f" and {more} more" if more > 0 else "")
