"""Nodes of a Ray cluster: a placement group that reserves them, and one actor on each.

Runs in the notebook's kernel and imports Ray at first use. Ray only places and starts the actors
and reports failures; everything else uses the agents' own connections. Ends only nbdist's own
actors and placement group, and the connection if nbdist made it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nbdist.cluster import node_bootstrap
from nbdist.cluster.allocation import (
    AllocatedNode,
    AllocationRequest,
    RankDistribution,
    check_folder,
    fit_to_nodes,
    format_count,
    number_nodes,
    unique_names,
)
from nbdist.errors import StartError
from nbdist.paths import PACKAGE_DIR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from nbdist.cluster.allocation import DeviceType

CLIENT_PORT = 10001
"""Default port of Ray's client server."""
ANSWER_S = 3.0
"""Timeout of a connection."""
ACTORS_S = 90.0
"""Timeout of the actors' start, in which Ray copies nbdist's code to the nodes."""
END_S = node_bootstrap.END_S + 2.0
POLL_S = 0.5
LOG_IN_ERROR = 300
EXCLUDED_UPLOADS = ["checkpoints", ".git", ".venv", "node_modules"]
"""Not copied to nodes that do not share the notebook's folder."""


class RayCluster:
    """Nodes of the Ray cluster at an address.

    Args:
        address: "auto" for the cluster that this machine belongs to; "" the same, or
            RAY_ADDRESS if set; "host:port" of Ray's client server.
        interface: network interface between the nodes, such as "ib0". Default: Ray's.
    """

    name = "ray"
    connected_to: ClassVar[str] = ""
    """Address of nbdist's own connection: Ray has one connection per process."""

    def __init__(self, address: str = "", interface: str = "") -> None:
        """Determine the address, without connecting."""
        self._client = address not in {"", "auto"}
        self._address = address or os.environ.get("RAY_ADDRESS") or "auto"
        if self._address.startswith("ray://"):  # from RAY_ADDRESS
            self._client, self._address = True, self._address.removeprefix("ray://")
        if self._client and ":" not in self._address:
            self._address += f":{CLIENT_PORT}"
        self._interface = interface
        self._lock = threading.RLock()
        """Protects the reservation, which a thread releases when nodes die."""
        self._is_connection_owner = False
        """True if nbdist made the connection, not the user."""
        self._group: Any = None
        self._actors: list[Any] = []
        """By node index."""
        self._runs: dict[Any, int] = {}
        """Results of running agents, with their node indices."""
        self._drains: dict[Any, int] = {}
        """Results of `wait_for_drain`, with their node indices."""
        self._places: list[AllocatedNode] = []
        self._causes: dict[int, str] = {}
        self._nodes_without_folder: list[Mapping[str, Any]] = []
        """Descriptions of nodes that do not have the notebook's folder."""
        self._copied = False
        """True if this connection copies the folder to the nodes."""
        self._unreachable: set[str] = set()
        """Addresses of nodes that Ray lists as alive but that do not respond."""
        self.distribution: RankDistribution
        """Ranks to allocate nodes for; set by the session."""

    # -- before anything is reserved

    def distribute_ranks(
        self, nproc: int | None, nodes: int | None, gpus_per_node: int | None
    ) -> RankDistribution:
        """Complete the request from the resources of the cluster, without reserving them.

        Args:
            nproc: total number of ranks.
            nodes: number of nodes.
            gpus_per_node: 0 for CPU ranks. Default: all, if the cluster has GPUs.

        Raises:
            OptionError: contradictory options.
            StartError: no cluster, or not enough resources; the message names what exists.
        """
        with self._connection():
            gpus = self._resources("GPU")
            cpu = gpus_per_node == 0 or (gpus_per_node is None and not any(gpus.values()))
            request = AllocationRequest(
                kind="cpu" if cpu else "cuda", nproc=nproc, nodes=nodes, gpus_per_node=gpus_per_node
            )
            return fit_to_nodes(request, self._resources("CPU") if cpu else gpus, self._title())

    def num_available_nodes(self, kind: DeviceType, each: int, nodes: int) -> int:
        """Return the number of reachable nodes with room for `each` ranks, at most `nodes`."""
        with self._connection():
            self._find_unreachable_nodes()
            return min(len(self._nodes_with_room(kind, each)), nodes)

    def _find_unreachable_nodes(self) -> None:
        """Connect to each node: Ray notices up to a minute later that a raylet is gone.

        Does nothing outside the cluster, from where nodes may be unreachable anyway.
        """
        self._unreachable.clear()
        for node in () if self._client else self._alive_nodes():
            address = node["NodeManagerAddress"]
            try:
                socket.create_connection((address, node["NodeManagerPort"]), ANSWER_S).close()
            except OSError:
                self._unreachable.add(address)

    def _alive_nodes(self) -> list[dict[str, Any]]:
        """Nodes that Ray lists as alive, without those that did not respond."""
        alive = [node for node in _ray().nodes() if node["Alive"]]
        return [node for node in alive if node["NodeManagerAddress"] not in self._unreachable]

    def _nodes_with_room(self, kind: DeviceType, each: int) -> list[dict[str, Any]]:
        resource = "GPU" if kind == "cuda" else "CPU"
        return [node for node in self._alive_nodes() if node["Resources"].get(resource, 0) >= each]

    def _resources(self, kind: str) -> dict[str, int]:
        """Amount of a resource on each living node, by name."""
        nodes = self._alive_nodes()
        names = unique_names([(n["NodeManagerHostname"], n["NodeManagerAddress"]) for n in nodes])
        amounts = [int(node["Resources"].get(kind, 0)) for node in nodes]
        return dict(zip(names, amounts, strict=True))

    def _title(self) -> str:
        return "The Ray cluster" + ("" if self._address == "auto" else f" at {self._address}")

    # -- the connection

    @contextlib.contextmanager
    def _connection(self) -> Iterator[None]:
        """Hold the lock and a connection; disconnect on an error if nothing is reserved."""
        with self._lock:
            self._connect()
            try:
                yield
            except BaseException:
                if self._group is None:
                    self._disconnect()
                raise

    def _connect(self, folder: Path | None = None) -> None:
        """Connect, and let Ray copy nbdist and optionally a folder to the nodes."""
        ray = _ray()
        if ray.is_initialized():
            connected = RayCluster.connected_to
            if connected not in {"", self._address}:
                raise StartError(
                    "A notebook can be connected to one Ray cluster at a time, and the current"
                    f" session uses another ({connected}). End it with %nbdist stop, then use"
                    f" {self._address}."
                )
            return
        if self._address != "auto":
            # Ray itself retries for minutes if nothing listens there
            host, _, port = self._address.rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
            except (OSError, ValueError) as error:
                raise StartError(
                    f"No response from {self._address} ({error}). --on ray://HOST:{CLIENT_PORT}"
                    " names the head of a running Ray cluster (`ray start --head` prints it), and"
                    " --on ray is the cluster that this machine belongs to."
                ) from error
        env: dict[str, Any] = {"py_modules": [str(PACKAGE_DIR)]}
        if folder is not None:
            env |= {"working_dir": str(folder), "excludes": EXCLUDED_UPLOADS}
        try:
            ray.init(
                address=f"ray://{self._address}" if self._client else self._address,
                runtime_env=env,
                log_to_driver=False,
                logging_level="ERROR",
                configure_logging=False,
            )
        except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            raise StartError(self._connection_error(error)) from error
        self._is_connection_owner, RayCluster.connected_to = True, self._address
        try:
            is_local = ipaddress.ip_address(self.kernel_address).is_loopback
        except ValueError:
            is_local = False
        if os.environ.get("RAY_AUTH_MODE", "") != "token" and not is_local:
            msg = (
                "This Ray cluster requires no token: anyone who can reach its ports can run code"
                " on its nodes. Start it with RAY_AUTH_MODE=token; see docs/clusters.md."
            )
            warnings.warn(msg, RuntimeWarning, stacklevel=2)

    def _disconnect(self) -> None:
        if self._is_connection_owner:
            self._is_connection_owner, self._copied, RayCluster.connected_to = False, False, ""
            _ray().shutdown()

    def _connection_error(self, error: Exception) -> str:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        if "ray[client]" in str(error):
            return f"--on ray://{self._address} needs Ray's client: pip install 'ray[client]'."
        if self._address == "auto" and "Could not find any running" in str(error):
            return (
                "This machine does not belong to a Ray cluster. Join one with `ray start --address"
                f" HEAD:6379`, or connect from outside with --on ray://HEAD:{CLIENT_PORT}."
            )
        if "exceeds the maximum size" in str(error):
            return (
                f"The nodes do not share the folder {Path.cwd()}, and it is too large for Ray to"
                f" copy ({first[:LOG_IN_ERROR]}). Open the notebook in a folder that they share."
            )
        if isinstance(error, ConnectionError):
            return (
                f"{self._title()} responds but rejects this notebook. If it was started with"
                " RAY_AUTH_MODE=token, set that and RAY_AUTH_TOKEN_PATH before Jupyter starts."
            )
        return f"{self._title()} rejected the connection: {first[:LOG_IN_ERROR]}"

    # -- implementation of `allocation.Cluster`

    @property
    def kernel_address(self) -> str:
        """Address of this machine for the nodes."""
        if self._interface:
            return node_bootstrap.interface_address(self._interface)
        if self._client:
            return node_bootstrap.local_address_toward(self._address.rpartition(":")[0].strip("[]"))
        return str(_ray().util.get_node_ip_address())

    def allocate_nodes(self, progress: Callable[[str], None]) -> list[AllocatedNode]:
        """Reserve nodes and start an actor on each; wait while the resources are in use.

        Raises:
            StartError: not enough resources, the nodes do not respond, or versions differ;
                nothing stays reserved.
        """
        with self._connection():
            try:
                self._causes.clear()
                self._places = self._start_actors(self.distribution, progress)
                if self._nodes_without_folder and not self._copied:
                    if not self._is_connection_owner:  # Ray copies folders when it is connected
                        check_folder(self._nodes_without_folder, str(Path.cwd()))
                    progress("Ray is copying the notebook's folder to nodes that do not share it")
                    self.disconnect()
                    self._connect(Path.cwd())
                    self._copied = True
                    self._places = self._start_actors(self.distribution, progress)
            except BaseException:
                self.close()
                raise
            return self._places

    def _reserve(
        self, spread: RankDistribution, cpus: int, gpus: int, progress: Callable[[str], None]
    ) -> None:
        """Reserve nodes with these CPUs and GPUs on each; wait while they are in use."""
        from ray.util.placement_group import placement_group

        bundle: dict[str, float] = {name: n for name, n in (("CPU", cpus), ("GPU", gpus)) if n}
        bundles: list[dict[str, float]] = [bundle] * spread.num_nodes
        self._find_unreachable_nodes()
        if self._unreachable:  # Ray would still use these nodes
            nodes = self._nodes_with_room(spread.kind, spread.ranks_per_node)[: spread.num_nodes]
            pinned = [{**bundle, f"node:{node['NodeManagerAddress']}": 0.001} for node in nodes]
            bundles[: len(pinned)] = pinned
        self._group = placement_group(bundles, strategy="STRICT_SPREAD")
        ready, since = self._group.ready(), time.monotonic()
        # PlacementGroup.wait() truncates its timeout to whole seconds, and each call that times out
        # costs the head 20 KB that it keeps (Ray 2.60)
        while not _ray().wait([ready], timeout=POLL_S)[0]:
            found = len(self._nodes_with_room(spread.kind, spread.ranks_per_node))
            cause = (
                "now in use by others"
                if found >= spread.num_nodes
                else f"but the cluster has {format_count(found, 'node')} of this size"
            )
            progress(f"waiting for {spread.describe()}, {cause} ({time.monotonic() - since:.0f} s)")

    def _start_actors(
        self, spread: RankDistribution, progress: Callable[[str], None]
    ) -> list[AllocatedNode]:
        """Reserve nodes, start the actors and number their nodes: Ray's order is undefined."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Bundle

        each = spread.ranks_per_node
        cpus, gpus = (each, 0) if spread.kind == "cpu" else (1, each)
        self._reserve(spread, cpus, gpus, progress)
        progress(f"starting {spread.num_nodes} Ray actors")
        node = _ray().remote(
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=4,  # others are answered while run() and wait_for_drain() are active
        )(node_bootstrap.NodeBootstrap)
        actors = [
            node.options(scheduling_strategy=Bundle(self._group, i)).remote()
            for i in range(spread.num_nodes)
        ]
        self._actors = actors
        about = self.kernel_address, self._interface, str(Path.cwd())
        try:
            calls = [actor.describe_node.remote(*about) for actor in actors]
            found = list(_ray().get(calls, timeout=ACTORS_S))
        except _ray().exceptions.RayError as error:
            raise StartError(f"A Ray node does not respond: {error_cause(error)}.") from error
        self._nodes_without_folder = [node for node in found if not node.get("has_folder")]
        ordered = sorted(
            zip(actors, found, strict=True), key=lambda pair: pair[1].get("address", "")
        )
        order, nodes = number_nodes([node for _, node in ordered], self.kernel_address, spread)
        self._actors = [ordered[i][0] for i in order]
        return nodes

    def start_agents(self, tickets: Sequence[str]) -> None:
        """Run the agents as children of the actors; the ticket is an argument of the call."""
        self._runs = {
            actor.run.remote(ticket): place
            for place, (actor, ticket) in enumerate(zip(self._actors, tickets, strict=True))
        }
        self._drains = {
            actor.wait_for_drain.remote(): place for place, actor in enumerate(self._actors)
        }

    def lost_nodes(self) -> Mapping[int, str]:
        """Return the nodes whose actor, machine or agent is lost, as reported by Ray."""
        ray, runs = _ray(), list(self._runs)
        if runs:
            ended, _ = ray.wait(runs, num_returns=len(runs), timeout=0)
            for run in ended:
                try:
                    cause = str(ray.get(run))
                except ray.exceptions.RayError as error:
                    cause = error_cause(error)
                self._causes.setdefault(self._runs[run], cause)
        return {place: f"is lost: {reason}" for place, reason in self._causes.items()}

    def drained_nodes(self) -> Mapping[int, float | None]:
        """Return the nodes that Ray drains."""
        ray, drains = _ray(), self._drains
        drained, _ = (
            ray.wait(list(drains), num_returns=len(drains), timeout=0) if drains else ([], [])
        )
        ends: dict[int, float | None] = {}
        for drain in drained:
            with contextlib.suppress(ray.exceptions.RayError):  # `lost_nodes` reports it
                ends[drains[drain]] = ray.get(drain)
        return ends

    def close(self) -> None:
        """End the agents and the actors and release the nodes; keep the connection."""
        with self._lock:
            group, self._group = self._group, None
            if group is None or not _ray().is_initialized():
                return
            from ray.util.placement_group import remove_placement_group

            ray, actors = _ray(), self._actors
            self._actors, self._runs, self._drains = [], {}, {}
            with contextlib.suppress(ray.exceptions.RayError):  # an actor may be lost
                ends = [
                    actor.end.remote()
                    for index, actor in enumerate(actors)
                    if index not in self._causes
                ]
                if ends:
                    ray.wait(ends, num_returns=len(ends), timeout=END_S)
                for actor in actors:
                    ray.kill(actor, no_restart=True)
            with contextlib.suppress(ray.exceptions.RayError):
                remove_placement_group(group)

    def disconnect(self) -> None:
        """Release everything, and disconnect if nbdist made the connection."""
        with self._lock:
            self.close()
            self._disconnect()


def error_cause(error: Exception) -> str:
    """Describe a Ray error: its text has ids first and the reason last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if not line.startswith("[")), "")
    reason, _, _ = reason.partition(". ")  # Ray appends possible causes
    words = {
        "NodeDiedError": "Ray reported that the node died",
        "ActorDiedError": "Ray reported that its actor died",
        "ActorUnavailableError": "Ray cannot reach its actor",
        "GetTimeoutError": f"no response for {ACTORS_S:.0f} s",
        "RuntimeEnvSetupError": "Ray could not copy nbdist to it",
    }.get(type(error).__name__, f"Ray reported {type(error).__name__}")
    return f"{words}: {reason[:LOG_IN_ERROR].rstrip('.')}" if reason else words


def _ray() -> Any:
    """Return the Ray module, imported at first use; raises StartError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise StartError(
            "--on ray needs Ray, which is not installed: pip install 'ray[client]'."
        ) from error
    return ray
