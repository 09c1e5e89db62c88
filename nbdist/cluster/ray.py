"""Nodes of a Ray cluster: a placement group that holds them, and one actor on each.

Runs in the notebook's kernel; Ray is imported when it is used, and not before. It places, starts
and says who has died; everything else goes over the agents' own connections. The cluster itself
is left alone: only our actors, our group and, where we made it, our connection are ended.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import nbdist
from nbdist.cluster import bootstrap, version_check
from nbdist.cluster.allocation import Place, Wanted
from nbdist.cluster.rank_distribution import Spread, fitted
from nbdist.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from nbdist.cluster.allocation import Kind

CLIENT_PORT = 10001
"""Of Ray's client server, where an address names none."""
ANSWER_S = 3.0
"""For an address to take a connection."""
ACTORS_S = 90.0
"""For the actors to answer: Ray brings them our code first."""
END_S = bootstrap.END_S + 2.0
POLL_S = 0.5
LOG_IN_ERROR = 300
NOT_BROUGHT = ["checkpoints", ".git", ".venv", "node_modules"]
"""Of a folder that nodes do not share."""


class RayCluster:
    """Nodes of the Ray cluster at an address.

    Args:
        address: "auto" for the one that this machine is part of; "" the same, or what
            RAY_ADDRESS names; "host:port" of Ray's client server.
        interface: of the network between the nodes, as "ib0". Default: that of Ray.
    """

    name = "ray"
    connected_to: ClassVar[str] = ""
    """Address of the connection that is nbdist's own: Ray has one for the whole process."""

    def __init__(self, address: str = "", interface: str = "") -> None:
        """Connect to nothing yet."""
        self._client = address not in {"", "auto"}
        self._address = address or os.environ.get("RAY_ADDRESS") or "auto"
        if self._address.startswith("ray://"):  # of RAY_ADDRESS
            self._client, self._address = True, self._address.removeprefix("ray://")
        if self._client and ":" not in self._address:
            self._address += f":{CLIENT_PORT}"
        self._interface = interface
        self._lock = threading.RLock()
        """Held by who changes what is reserved: nodes that died are given back on a thread."""
        self._ours = False
        """Whether the connection is our own, and not the notebook's."""
        self._group: Any = None
        self._actors: list[Any] = []
        """By place."""
        self._runs: dict[Any, int] = {}
        """Results of the agents that still run, and their places."""
        self._places: list[Place] = []
        self._causes: dict[int, str] = {}
        self._lacks: list[Mapping[str, Any]] = []
        """What the nodes said that do not have the notebook's folder."""
        self._copied = False
        """Whether this connection brings them a copy."""
        self._silent: set[str] = set()
        """Addresses of nodes that Ray believes in and that do not answer."""
        self.chosen: Spread | None = None
        """What `allot` takes. Default: what is wanted of it."""

    # -- before anything is reserved

    def spread(self, nproc: int | None, nodes: int | None, gpus_per_node: int | None) -> Spread:
        """Fill in what the user left open, from what the cluster has; reserves nothing.

        Args:
            nproc: ranks in all.
            nodes: to spread them over.
            gpus_per_node: 0 for CPU ranks. Default: all, if the cluster has GPUs.

        Raises:
            OptionError: they contradict one another.
            StartError: no cluster, or there is not enough; says how much.
        """
        with self._connected():
            gpus = self._resources("GPU")
            cpu = gpus_per_node == 0 or (gpus_per_node is None and not any(gpus.values()))
            wanted = Wanted(
                kind="cpu" if cpu else "cuda", nproc=nproc, nodes=nodes, gpus_per_node=gpus_per_node
            )
            return fitted(wanted, self._resources("CPU") if cpu else gpus, self._title())

    def left(self, kind: Kind, each: int, nodes: int) -> int:
        """How many nodes, at most as many as before, answer and have room for so many ranks."""
        with self._connected():
            self._silent.clear()
            self._silent.update(
                one["NodeManagerAddress"] for one in self._living() if self._mute(one)
            )
            what = "GPU" if kind == "cuda" else "CPU"
            room = [one for one in self._living() if one["Resources"].get(what, 0) >= each]
            return min(len(room), nodes)

    def _mute(self, node: Mapping[str, Any]) -> bool:
        """Whether a node's raylet takes no connection: Ray itself sees that up to a minute later.

        From outside of the cluster only Ray's word is to be had.
        """
        if self._client:
            return False
        try:
            place = node["NodeManagerAddress"], node["NodeManagerPort"]
            socket.create_connection(place, ANSWER_S).close()
        except OSError:
            return True
        return False

    def _living(self) -> list[dict[str, Any]]:
        """Nodes that Ray says live, but for those that did not answer us."""
        alive = [one for one in _ray().nodes() if one["Alive"]]
        return [one for one in alive if one["NodeManagerAddress"] not in self._silent]

    def _resources(self, kind: str) -> dict[str, int]:
        """How much of it each living node has, by name."""
        living = self._living()
        names = self._names([(n["NodeManagerHostname"], n["NodeManagerAddress"]) for n in living])
        return {
            name: int(node["Resources"].get(kind, 0))
            for name, node in zip(names, living, strict=True)
        }

    @staticmethod
    def _names(nodes: Sequence[tuple[str, str]]) -> list[str]:
        """Host names, with the address where two are the same."""
        often = Counter(host for host, _ in nodes)
        return [host if often[host] == 1 else f"{host} ({ip})" for host, ip in nodes]

    def _title(self) -> str:
        return "The Ray cluster" + ("" if self._address == "auto" else f" at {self._address}")

    # -- the connection

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        """Be connected, alone; where nothing is reserved, a failure ends the connection."""
        with self._lock:
            self._connect()
            try:
                yield
            except BaseException:
                if self._group is None:
                    self._disconnect()
                raise

    def _connect(self, folder: Path | None = None) -> None:
        """Connect, with our package and perhaps a folder for the nodes."""
        ray = _ray()
        if ray.is_initialized():
            self._refuse_another()
            return
        self._knock()
        env: dict[str, Any] = {"py_modules": [str(Path(nbdist.__file__).parent)]}
        if folder is not None:
            env |= {"working_dir": str(folder), "excludes": NOT_BROUGHT}
        try:
            ray.init(
                address=f"ray://{self._address}" if self._client else self._address,
                runtime_env=env,
                log_to_driver=False,
                logging_level="ERROR",
                configure_logging=False,
            )
        except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            raise StartError(self._refused(error)) from error
        self._ours, RayCluster.connected_to = True, self._address
        self._warn_of_open_doors()

    def _refuse_another(self) -> None:
        """See that nobody takes the cluster of a living session for its own."""
        there = RayCluster.connected_to
        if there not in {"", self._address}:
            raise StartError(
                "A notebook can be connected to one Ray cluster at a time, and this one's session"
                f" is on another ({there}); end it with %nbdist stop, then go to {self._address}."
            )

    def _disconnect(self) -> None:
        if self._ours:
            self._ours, self._copied, RayCluster.connected_to = False, False, ""
            _ray().shutdown()

    def _knock(self) -> None:
        """See that somebody answers at the address: Ray itself tries for minutes."""
        if self._address == "auto":
            return
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
        except (OSError, ValueError) as error:
            msg = (
                f"Nobody answers at {self._address} ({error}); --on ray://HOST:{CLIENT_PORT} names"
                " the head of a running Ray cluster (`ray start --head` shows it), and --on ray"
                " is the cluster that this machine is part of."
            )
            raise StartError(msg) from error

    def _refused(self, error: Exception) -> str:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        if "ray[client]" in str(error):
            return f"--on ray://{self._address} needs Ray's client: pip install 'ray[client]'."
        if self._address == "auto" and "Could not find any running" in str(error):
            return (
                "This machine is in no Ray cluster; `ray start --address HEAD:6379` makes it join"
                f" one, and --on ray://HEAD:{CLIENT_PORT} goes to one from outside."
            )
        if "exceeds the maximum size" in str(error):
            return (
                f"Nodes do not share the folder {Path.cwd()}, and it is too big for Ray to bring it"
                f" there ({first[:LOG_IN_ERROR]}); open the notebook in a folder that they share."
            )
        if isinstance(error, ConnectionError):
            return (
                f"{self._title()} answers and does not let this notebook in; if it was started"
                " with RAY_AUTH_MODE=token, set that and RAY_AUTH_TOKEN_PATH before Jupyter"
                " starts."
            )
        return f"{self._title()} does not take this notebook: {first[:LOG_IN_ERROR]}"

    def _warn_of_open_doors(self) -> None:
        """Say when anybody on the network may run code on the cluster."""
        mode = os.environ.get("RAY_AUTH_MODE", "")
        if mode != "token" and not _loopback(self.reach):
            msg = (
                "This Ray cluster asks for no token: whoever reaches its ports can run code on"
                " its nodes. Start it with RAY_AUTH_MODE=token; docs/clusters.md says how."
            )
            warnings.warn(msg, RuntimeWarning, stacklevel=2)

    # -- a cluster, as `base.Cluster` has it

    @property
    def reach(self) -> str:
        """Address of this machine that the nodes reach."""
        if self._interface:
            return bootstrap.of_interface(self._interface)
        if self._client:
            return bootstrap.leading(self._address.rpartition(":")[0].strip("[]"))
        return str(_ray().util.get_node_ip_address())

    def allot(self, wanted: Wanted, progress: Callable[[str], None]) -> list[Place]:
        """Reserve nodes and start an actor on each; waits while others hold what is needed.

        Raises:
            StartError: there is not enough, the nodes do not answer, or versions differ;
                nothing stays reserved.
        """
        with self._connected():
            try:
                self._causes.clear()
                spread = self.chosen or self.spread(
                    wanted.nproc, wanted.nodes, 0 if wanted.kind == "cpu" else wanted.gpus_per_node
                )
                self._reserve(spread, progress)
                self._places = self._number(spread, progress)
                if self._lacks and not self._copied:
                    self._bring_folder(spread, progress)
                version_check.check(bootstrap.versions(), self._places)
            except BaseException:
                self.close()
                raise
            return self._places

    def _reserve(self, spread: Spread, progress: Callable[[str], None]) -> None:
        from ray.util.placement_group import placement_group

        cpus, gpus = (spread.each, 0) if spread.kind == "cpu" else (1, spread.each)
        bundle: dict[str, float] = {name: n for name, n in (("CPU", cpus), ("GPU", gpus)) if n}
        bundles: list[dict[str, float]] = [bundle] * spread.nodes
        if self._silent:  # Ray would still place something there
            what = next(reversed(bundle))
            room = [one for one in self._living() if one["Resources"].get(what, 0) >= spread.each]
            pins = [f"node:{one['NodeManagerAddress']}" for one in room]
            bundles = [{**bundle, pin: 0.001} for pin in pins[: spread.nodes]] or bundles
        self._group = placement_group(bundles, strategy="STRICT_SPREAD")
        since = time.monotonic()
        while not self._group.wait(POLL_S):
            waited = time.monotonic() - since
            if waited > POLL_S:
                what = spread.describe()
                progress(f"waiting for {what} of Ray, which others hold ({waited:.0f} s)")

    def _number(self, spread: Spread, progress: Callable[[str], None]) -> list[Place]:
        """Start the actors; number them, this machine first: a group's order says nothing."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Bundle

        progress(f"Ray starts {spread.nodes} actors")
        cpus, gpus = (spread.each, 0) if spread.kind == "cpu" else (1, spread.each)
        node = _ray().remote(
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=4,  # others are answered while run() holds the agent
        )(bootstrap.Node)
        actors = [
            node.options(scheduling_strategy=Bundle(self._group, i)).remote()
            for i in range(spread.nodes)
        ]
        self._actors = actors
        about = self.reach, self._interface, str(Path.cwd())
        told = self._asked([one.about.remote(*about) for one in actors])
        bootstrap.check(told)
        self._lacks = [one for one in told if not one["has_folder"]]
        order = sorted(
            range(len(told)), key=lambda i: (told[i]["address"] != self.reach, told[i]["address"])
        )
        self._actors, told = [actors[i] for i in order], [told[i] for i in order]
        names = self._names([(one["host"], one["address"]) for one in told])
        return [
            Place(
                name=name,
                address=one["address"],
                ranks=spread.each,
                gpus=tuple(one["gpus"][: spread.each]) if spread.kind == "cuda" else (),
                versions=one["versions"],
            )
            for name, one in zip(names, told, strict=True)
        ]

    def _bring_folder(self, spread: Spread, progress: Callable[[str], None]) -> None:
        """Connect anew, so that Ray brings a copy of the notebook's folder to each node."""
        if not self._ours:  # what a connection brings along is said when it is made
            bootstrap.check_folder(self._lacks, str(Path.cwd()))
        progress("Ray brings a copy of the notebook's folder to nodes that do not share it")
        self.leave()
        self._connect(Path.cwd())
        self._copied = True
        self._reserve(spread, progress)
        self._places = self._number(spread, progress)

    def _asked(self, calls: list[Any], within_s: float = ACTORS_S) -> list[Any]:
        """Results of calls, one for each actor."""
        ray = _ray()
        try:
            return list(ray.get(calls, timeout=within_s))
        except ray.exceptions.RayError as error:
            raise StartError(f"A node of Ray does not answer: {cause(error)}.") from error

    def start(self, tickets: Sequence[str]) -> None:
        """Run the agents, each a child of its actor; the ticket is an argument of the call."""
        self._runs = {
            actor.run.remote(ticket): place
            for place, (actor, ticket) in enumerate(zip(self._actors, tickets, strict=True))
        }

    def lost(self) -> Mapping[int, str]:
        """Places whose actor, node or agent is gone, as far as Ray knows."""
        ray, runs = _ray(), list(self._runs)
        if runs:
            ended, _ = ray.wait(runs, num_returns=len(runs), timeout=0)
            for one in ended:
                self._causes.setdefault(self._runs[one], self._end_of(one))
        return {place: f"is lost: {why}" for place, why in self._causes.items()}

    @staticmethod
    def _end_of(run: Any) -> str:
        ray = _ray()
        try:
            return str(ray.get(run))
        except ray.exceptions.RayError as error:
            return cause(error)

    def close(self) -> None:
        """End the agents and the actors, give the nodes back; stay connected."""
        with self._lock:
            group, self._group = self._group, None
            if group is None or not _ray().is_initialized():
                return
            from ray.util.placement_group import remove_placement_group

            with contextlib.suppress(_ray().exceptions.RayError):  # who is gone needs no end
                self._end_actors()
            with contextlib.suppress(_ray().exceptions.RayError):
                remove_placement_group(group)

    def leave(self) -> None:
        """Give everything back, and end the connection if it is ours."""
        with self._lock:
            self.close()
            self._disconnect()

    def _end_actors(self) -> None:
        ray, actors = _ray(), self._actors
        living = [actor for place, actor in enumerate(actors) if place not in self._causes]
        self._actors, self._runs = [], {}
        ends = [actor.end.remote() for actor in living]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=END_S)
        for actor in actors:
            ray.kill(actor, no_restart=True)


def cause(error: Exception) -> str:
    """Ray's error in words: its lines tell ids first, and the reason last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if not line.startswith("[")), "")
    said, _, _ = said.partition(". ")  # what follows are guesses
    words = {
        "NodeDiedError": "Ray says that the node died",
        "ActorDiedError": "Ray says that its actor died",
        "ActorUnavailableError": "Ray does not reach its actor",
        "GetTimeoutError": f"no answer for {ACTORS_S:.0f} s",
        "RuntimeEnvSetupError": "Ray could not bring it the code of nbdist",
    }.get(type(error).__name__, f"Ray says {type(error).__name__}")
    return f"{words}: {said[:LOG_IN_ERROR].rstrip('.')}" if said else words


def _loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _ray() -> Any:
    """Ray, imported at first use.

    Raises:
        StartError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        msg = "--on ray needs Ray, which is not installed here: pip install 'nbdist[ray]'."
        raise StartError(msg) from error
    return ray
