"""Options of a session, checked against the hardware of this machine or cluster.

Runs in the notebook's kernel. `SessionConfig` is immutable; under auto it is replaced when the
ranks report the decision. `SessionCluster` queries a cluster for what the user left open, and
caches the answer while the session keeps its nodes.
"""

from __future__ import annotations

import dataclasses
import os
import re
from typing import TYPE_CHECKING, Any, Self

from nbdist import rank_python, strategies
from nbdist.cluster.ray import RayCluster
from nbdist.cluster.slurm import SlurmCluster
from nbdist.errors import OptionError, StartError
from nbdist.hardware import discovery
from nbdist.session import device_placement as session_placement
from nbdist.session.progress import StatusLine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.cluster.allocation import RankDistribution
    from nbdist.hardware.discovery import SessionNode

CONFIG_FILE_ENGINES = {"fsdp_config": "fsdp", "deepspeed_config": "deepspeed"}
"""Backend family of each config file option."""
_CLUSTER_ARGUMENTS = {
    name: argument for name, argument in strategies.ARGUMENTS.items() if argument.scope == "cluster"
}
OPTION_NAMES = tuple(_CLUSTER_ARGUMENTS)
"""Session options that select the cluster."""
DISTRIBUTION_OPTIONS = tuple(name for name, item in _CLUSTER_ARGUMENTS.items() if item.can_switch)
"""Options for the distribution of ranks over cluster nodes."""
FIXED_OPTIONS = tuple(name for name in OPTION_NAMES if name not in DISTRIBUTION_OPTIONS)
"""Those that cannot change during a session."""
SLURM_OPTIONS = ("partition", "time", "account")
NODE_OPTIONS = ("nodes", "gpus_per_node", "interface")
_RAY = re.compile(r"ray(?:://(auto|[\w.-]+(?::\d{1,5})?|\[[0-9a-fA-F:]+\](?::\d{1,5})?))?")


def expand_config_file(options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the option `config` by the options in that file; print what has no effect.

    Raises:
        OptionError: a file or a value that a session does not support, or contradictory options.
    """
    file = options.get("config")
    if isinstance(file, (str, os.PathLike)):
        options = {**options, "config": strategies.load_accelerate_config(os.fspath(file))}
    expanded, ignored = strategies.merge_config_file(options)
    if ignored:
        with StatusLine() as line:
            line.show(f"ignored keys of the config file: {', '.join(ignored)}")
    return expanded


def merge_options(requested: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the requested options with `changes` applied.

    Naming a backend turns auto off. Auto drops an earlier backend and config file. Another
    backend family drops the config file, and a backend without replicas drops replicate_across.
    """
    room = _devices_for(requested, changes) | _drop_replaced_counts(requested, changes)
    merged = {**requested, **changes, **room}
    if "backend" in changes and "auto" not in changes:
        merged["auto"] = False
    if merged["auto"]:
        engine = None
        merged.update({} if "backend" in changes else {"backend": None})
    else:
        named = merged.get("backend") or strategies.Options().backend
        strategy = strategies.STRATEGIES[strategies.canonical_backend(named)]
        engine = strategy.engine
        if not strategy.can_replicate and "replicate_across" not in changes:
            merged.pop("replicate_across", None)
    left = [
        name
        for name, owner in CONFIG_FILE_ENGINES.items()
        if owner != engine and name not in changes
    ]
    return merged | dict.fromkeys(left)


def _devices_for(requested: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Adjust an earlier number of ranks or list of GPUs to the one that changes."""
    if "devices" in changes and "nproc" not in changes:
        return {"nproc": None}
    devices = requested.get("devices")
    if changes.get("nproc") is None or "devices" in changes or devices is None:
        return {}
    chosen = session_placement.parse_gpus(devices) if isinstance(devices, str) else tuple(devices)
    return {"devices": chosen[: session_placement.parse_count(changes["nproc"])]}


def _drop_replaced_counts(
    requested: Mapping[str, Any], changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Drop earlier numbers of ranks, nodes and GPUs per node that the changes replace."""
    given = changes.keys() & {"nproc", *DISTRIBUTION_OPTIONS}
    if given == {"nproc"}:
        return {"nodes": None} if requested.get("gpus_per_node") else {}
    dropped = {"nproc"} if given else set()
    if {"nproc", "nodes"} <= given and requested.get("gpus_per_node"):
        dropped.add("gpus_per_node")
    if {"nproc", "gpus_per_node"} <= given:
        dropped.add("nodes")
    return dict.fromkeys(dropped - given)


@dataclasses.dataclass(frozen=True, slots=True)
class SessionConfig:
    """Devices and options of a session."""

    placement: session_placement.DevicePlacement
    hardware: strategies.Hardware
    options: strategies.Options
    """Under auto, before its decision, a placeholder."""
    has_gpus: bool
    auto: Mapping[str, Any] | None = None
    """Options that auto must keep; None without auto."""
    is_auto_pending: bool = False
    requested_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_options(cls, requested: Mapping[str, Any], where: SessionCluster) -> Self:
        """Validate the requested options.

        Raises:
            OptionError: an unknown option, or a value that is not allowed.
            StartError: the cluster is too small.
        """
        strategies.SessionOptions.check_names(requested)
        options = {key: value for key, value in requested.items() if value is not None}
        nproc, gpus = options.pop("nproc", None), options.pop("devices", None)
        spread = {name: options.pop(name, None) for name in DISTRIBUTION_OPTIONS}
        auto = options.pop("auto", False)
        machine = discovery.discover_machine()
        placement = where.choose_placement(nproc, gpus, spread)
        placement = placement or session_placement.choose_placement(nproc, gpus, machine)
        hardware = session_placement.hardware_for_placement(
            placement, machine, where.nodes, where.python
        )
        if auto:
            checked = _placeholder(options, hardware)
        else:
            checked = strategies.Options.from_fields(options).validate(hardware)
        return cls(
            placement,
            hardware,
            checked,
            has_gpus=bool(machine.gpus),
            auto={name: getattr(checked, name) for name in options} if auto else None,
            is_auto_pending=bool(auto),
            requested_options=requested,
        )

    def with_node_hardware(self, where: SessionCluster) -> SessionConfig:
        """Return the choice updated with the nodes' GPUs, whose capability is known only then.

        Raises:
            OptionError: they do not support the options.
        """
        if not where.nodes:
            return self
        then = SessionConfig.from_options(self.requested_options, where)
        return self if then.hardware == self.hardware else self.merge_auto_decision(then)

    def with_auto_decision(self, options: strategies.Options) -> Self:
        """Return a copy with the options that auto decided on."""
        return dataclasses.replace(self, options=options, is_auto_pending=False)

    def merge_auto_decision(self, new_config: SessionConfig) -> SessionConfig:
        """Apply auto's decision to another choice, if there is one.

        Raises:
            OptionError: the decision is not compatible with the new options.
        """
        needs_auto = (
            new_config.is_auto_pending and self.auto is not None and not self.is_auto_pending
        )
        if not needs_auto:
            return new_config
        given = dataclasses.asdict(self.options) | dict(new_config.auto or {})
        options = strategies.Options.from_fields({k: v for k, v in given.items() if v is not None})
        return new_config.with_auto_decision(options.validate(new_config.hardware))

    def diff(self, new_config: SessionConfig) -> dict[str, tuple[object, object]]:
        """Return what would change for a session: name -> (current, new).

        Requesting auto again changes nothing if the decision agrees with the given options.
        """
        before, after = (
            _placement_options(config) | dataclasses.asdict(config.options)
            for config in (self, new_config)
        )
        if new_config.auto is not None and self.auto is not None:
            given = self.auto if self.is_auto_pending else dataclasses.asdict(self.options)
            before = {
                **_placement_options(self),
                **{name: given.get(name) for name in new_config.auto},
            }
            after = {**_placement_options(new_config), **new_config.auto}
        elif new_config.auto is not None or self.is_auto_pending:
            before, after = _placement_options(self), _placement_options(new_config)
            before["auto"], after["auto"] = self.auto is not None, new_config.auto is not None
        return {name: (before[name], after[name]) for name in after if before[name] != after[name]}

    def describe(self) -> str:
        """Return ranks and strategy in a few words."""
        where = self.describe_devices
        if self.is_auto_pending:
            return ", ".join([where, "auto", *self.options.describe().split(", ")[1:]])
        return f"{where}, {'auto: ' if self.auto is not None else ''}{self.options.describe()}"

    @property
    def describe_devices(self) -> str:
        """Ranks and devices: "2 CPU ranks (no GPU found)"."""
        here = not self.placement.is_remote
        alone = here and self.placement.devices is None and not self.has_gpus
        return self.placement.describe() + (" (no GPU found)" if alone else "")


def _placement_options(choice: SessionConfig) -> dict[str, object]:
    placement = choice.placement
    nodes = {"nodes": placement.num_nodes} if placement.is_remote else {}
    return {"nproc": placement.nproc, "devices": placement.devices, **nodes}


def _placeholder(options: Mapping[str, Any], hardware: strategies.Hardware) -> strategies.Options:
    """Return the options of the first backend that is compatible with the given ones.

    Raises:
        OptionError: no backend is, or an option was given that auto decides.
    """
    for name in ("backend", *CONFIG_FILE_ENGINES):
        if name in options:
            raise OptionError(
                f"auto chooses the backend itself, but the option {name} was given. Leave one of"
                " them out."
            )
    refusals: list[OptionError] = []
    for name in strategies.STRATEGIES:
        try:
            return strategies.Options.from_fields({**options, "backend": name}).validate(hardware)
        except OptionError as error:
            refusals.append(error)
    raise refusals[-1]


def create_cluster(
    on: str, cluster_options: Mapping[str, object]
) -> RayCluster | SlurmCluster | None:
    """Create the cluster of `--on`, without connecting to it; None for this machine.

    Args:
        on: local, ray, ray://HOST:PORT, ray://auto or slurm.
        cluster_options: options of the session, of which those for clusters are read.

    Raises:
        OptionError: unknown cluster, or an option that it does not support.
    """
    ray = _RAY.fullmatch(on)
    if ray is None and on not in {"local", "slurm"}:
        raise OptionError(f"Unknown --on {on!r}. Use local, ray, ray://HOST:PORT or slurm.")
    unsupported = [
        (SLURM_OPTIONS if on != "slurm" else (), "--on slurm"),
        (NODE_OPTIONS if on == "local" else (), "--on ray or --on slurm"),
        (("python",) if on != "local" else (), "--on local"),
    ]
    for names, where in unsupported:
        given = [
            f"--{name.replace('_', '-')}" for name in names if cluster_options.get(name) is not None
        ]
        if given:
            raise OptionError(f"{', '.join(given)} can be used with {where} only. Leave it out.")
    interface = str(cluster_options.get("interface") or "")
    if ray:
        return RayCluster(ray[1] or "", interface)
    if on == "slurm":
        options = {name: str(cluster_options.get(name) or "") for name in SLURM_OPTIONS}
        return SlurmCluster(interface=interface, **options)
    return None


class SessionCluster:
    """Cluster options of a session.

    Raises:
        OptionError: an unknown cluster, or an option that it does not support.
    """

    def __init__(self, requested: Mapping[str, Any]) -> None:
        self.fixed_options = {
            name: requested[name] for name in FIXED_OPTIONS if requested.get(name) is not None
        }
        self.on = str(self.fixed_options.setdefault("on", "local"))
        self.cluster = create_cluster(self.on, requested)
        self.python = rank_python.find(self.fixed_options.get("python"))
        """Interpreter of ranks on this machine."""
        rank_python.select(self.python)
        self.nodes: Sequence[SessionNode] = ()
        """Nodes of the last start, as their agents reported them."""
        self._known: dict[tuple[int | None, ...], RankDistribution] = {}

    def check_changes(self, changes: Mapping[str, Any]) -> None:
        """Check that changes do not move a session elsewhere.

        Raises:
            OptionError: an option that needs a new session.
        """
        if changes.get("python") and rank_python.find(changes["python"]) == self.python:
            changes = {**changes, "python": None}  # the same interpreter, written differently
        for name in FIXED_OPTIONS:
            if changes.get(name) is not None and changes[name] != self.fixed_options.get(name):
                where = f"run {self.python.executable}" if name == "python" else f"are on {self.on}"
                raise OptionError(
                    f"Cannot change to --{name} {changes[name]}: this session's ranks {where}."
                    " Use %nbdist stop; the next cell starts a new session."
                )
        if self.cluster is None:
            create_cluster(self.on, changes)

    def choose_placement(
        self, nproc: Any, gpus: Any, requested: Mapping[str, Any]
    ) -> session_placement.DevicePlacement | None:
        """Choose the devices on the cluster; return None on this machine.

        Raises:
            OptionError: contradictory options, or indices of this machine's GPUs.
            StartError: the cluster is not reachable or too small.
        """
        if self.cluster is None:
            return None
        per_node = session_placement.parse_count(
            requested.get("gpus_per_node"), "--gpus-per-node", minimum=0
        )
        if gpus is not None:
            if gpus not in ("none", (), []) or per_node:
                raise OptionError(
                    f"--gpus {gpus} selects GPUs of this machine, but the ranks run on {self.on}."
                    " Use --gpus-per-node N."
                )
            per_node = 0
        options = (
            session_placement.parse_count(nproc),
            session_placement.parse_count(requested.get("nodes"), "--nodes"),
            per_node,
        )
        if options not in self._known:
            self._known[options] = self.cluster.distribute_ranks(*options)
        return session_placement.cluster_placement(self._known[options])

    def close(self) -> None:
        """Release the cluster."""
        self._known.clear()
        if self.cluster is not None:
            self.cluster.disconnect()

    def options_for_remaining_nodes(
        self, placement: session_placement.DevicePlacement
    ) -> dict[str, int]:
        """Return the options that change after nodes were lost: the remaining nodes take over.

        Raises:
            StartError: none remains.
        """
        self._known.clear()
        if self.cluster is None:
            return {}
        each = placement.nproc // placement.num_nodes
        nodes = self.cluster.num_available_nodes(placement.kind, each, placement.num_nodes)
        if nodes == 0:
            raise StartError(
                f"No remaining node of {self.on} has room for {each} ranks. Use %nbdist stop to"
                " end the session."
            )
        if nodes == placement.num_nodes:
            return {}
        return {"nodes": nodes, "nproc": nodes * each}
