"""Checks that the nodes of a session have the same software versions as the notebook.

Cells, messages and tensors are exchanged between them: different versions fail late and obscurely.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.cluster.allocation import AllocatedNode

CHECKED_PACKAGES = ("python", "torch", "nbdist")
"""Names as in ``bootstrap.software_versions``."""
NOTEBOOK_NAME = "the notebook"


def check_versions(here: Mapping[str, str], places: Sequence[AllocatedNode]) -> None:
    """Raise if a node's versions differ from the notebook's.

    Python's micro version may differ; torch's build ("+cu130", "+cpu") may not.

    Raises:
        StartError: lists the versions and their nodes.
    """
    lines = []
    for name in CHECKED_PACKAGES:
        found: dict[str, list[str]] = {here.get(name, "none"): [NOTEBOOK_NAME]}
        for place in places:
            found.setdefault(place.versions.get(name, "none"), []).append(place.name)
        if len({_compared(name, version) for version in found}) > 1:
            words = [f"{version} on {format_names(nodes)}" for version, nodes in found.items()]
            lines.append(f"{name} {', '.join(words)}")
    if lines:
        msg = (
            f"Versions differ between the nodes: {'; '.join(lines)}."
            " Install the same versions everywhere. Nothing was started."
        )
        raise StartError(msg)


def _compared(name: str, version: str) -> str:
    return ".".join(version.split(".")[:2]) if name == "python" else version


def format_names(nodes: Sequence[str], most: int = 4) -> str:
    """Return the first few names of nodes: "alpha, beta and 3 more"."""
    more = len(nodes) - most
    return ", ".join(nodes[:most]) + (f" and {more} more" if more > 0 else "")
