"""Stores a calibration: it replaces the speeds of these ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.planner.measurement_store import COLLECTIVES, DTYPES, is_memory_filesystem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.planner.cluster_spec import ClusterSpec
    from nbdist.planner.measurement_store import MeasurementStore


def apply_calibration(figures: Sequence[Mapping[str, Any]], cluster: ClusterSpec) -> ClusterSpec:
    """Store the measurements of a calibration and return the cluster with them.

    Args:
        figures: results of `worker.benchmarks.calibration.calibrate` for each rank.
        cluster: the ranks, detected on this machine.
    """
    store = cluster.measurement_store
    if store is None:
        return cluster
    for name in COLLECTIVES:
        # For each size, the slowest rank's time.
        curve: dict[str, float] = {}
        for rank in figures:
            for size, seconds in rank["curves"].get(name, ()):
                curve[str(size)] = max(seconds, curve.get(str(size), 0.0))
        store.record("collective", f"{name}, {cluster.describe()}", curve, average=False)
    by_place: dict[str, list[Mapping[str, Any]]] = {}
    for rank in figures:
        place = cluster.describe() if cluster.kind == "cpu" else str(rank["device"])
        by_place.setdefault(place, []).append(rank)
    for place, ranks in by_place.items():
        _store_compute_speed(store, place, ranks)
    disks = [rank["disk"] for rank in figures if "disk" in rank]
    if disks and not is_memory_filesystem(disks[0]["filesystem"]):
        total = {
            direction: sum(disk[direction] for disk in disks) for direction in ("read", "write")
        }
        store.record("disk", str(disks[0]["filesystem"])[:200], total, average=False)
    store.save()
    return cluster.with_measurements(store)


def _store_compute_speed(
    store: MeasurementStore, place: str, figures: Sequence[Mapping[str, Any]]
) -> None:
    """Store the slowest of these ranks; data types that were not measured now are kept."""
    old = store.get("compute", place)
    values = {kind: old.values[kind] for kind in DTYPES if old and kind in old.values}
    for kind in DTYPES:
        if all(kind in rank["products"] for rank in figures):
            values[kind] = min(rank["products"][kind] for rank in figures)
    values["memory"] = min(rank["memory"] for rank in figures)
    copies = [rank["copies"]["to_device_pinned"] for rank in figures if "copies" in rank]
    if copies:
        values["host_link"] = min(copies)
    store.record("compute", place, values, average=False)
