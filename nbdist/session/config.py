"""What the user asked a session for, checked against this machine.

Runs in the notebook's kernel. A `Choice` is immutable; under auto it is made again when the
ranks say what was decided.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Self

from nbdist import strategies
from nbdist.errors import OptionError
from nbdist.hardware import discovery
from nbdist.session import placement as session_placement

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.session.cluster_options import Where

CONFIG_OF = {"fsdp_config": "fsdp", "deepspeed_config": "deepspeed"}
"""Which engine a config file is for."""
SPREAD = ("nodes", "gpus_per_node")
"""How ranks are spread over a cluster."""


def changed(asked: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for, changed.

    A backend by name ends auto, and auto leaves an earlier backend and config file behind, as
    does another engine with the config file, and a backend without replicas with those.
    """
    room = _devices_for(asked, changes) | _spread_for(asked, changes)
    made = {**asked, **changes, **room}
    if "backend" in changes and "auto" not in changes:
        made["auto"] = False
    if made["auto"]:
        engine = None
        made.update({} if "backend" in changes else {"backend": None})
    else:
        named = made.get("backend") or strategies.Options().backend
        strategy = strategies.STRATEGIES[strategies.canonical(named)]
        engine = strategy.engine
        if not strategy.may_replicate and "replicate_across" not in changes:
            made.pop("replicate_across", None)
    left = [name for name, owner in CONFIG_OF.items() if owner != engine and name not in changes]
    return made | dict.fromkeys(left)


def _devices_for(asked: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Let an earlier number of ranks or list of GPUs not contradict the one that changes."""
    if "devices" in changes and "nproc" not in changes:
        return {"nproc": None}
    given = asked.get("devices")
    if changes.get("nproc") is None or "devices" in changes or given is None:
        return {}
    chosen = session_placement.parse_gpus(given) if isinstance(given, str) else tuple(given)
    return {"devices": chosen[: session_placement.parse_nproc(changes["nproc"])]}


def _spread_for(asked: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Let earlier numbers of ranks, nodes and GPUs a node make room for those that change."""
    given = changes.keys() & {"nproc", *SPREAD}
    if given == {"nproc"}:
        return {"nodes": None} if asked.get("gpus_per_node") else {}
    dropped = {"nproc"} if given else set()
    if {"nproc", "nodes"} <= given and asked.get("gpus_per_node"):
        dropped.add("gpus_per_node")
    if {"nproc", "gpus_per_node"} <= given:
        dropped.add("nodes")
    return dict.fromkeys(dropped - given)


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """Devices and options of a session."""

    placement: session_placement.Placement
    hardware: strategies.Hardware
    options: strategies.Options
    """Under auto and before its decision the first that would do."""
    gpus_found: bool
    auto: Mapping[str, Any] | None = None
    """What auto takes as given; None: the user chose."""
    undecided: bool = False
    asked: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What it was made of."""

    @classmethod
    def of(cls, asked: Mapping[str, Any], where: Where | None = None) -> Self:
        """Check everything; raises OptionError, and StartError where a cluster has not enough."""
        options = {key: value for key, value in asked.items() if value is not None}
        nproc, gpus = options.pop("nproc", None), options.pop("devices", None)
        spread = {name: options.pop(name, None) for name in SPREAD}
        auto = options.pop("auto", False)
        found = discovery.found()
        placement = None if where is None else where.placement(nproc, gpus, spread)
        placement = placement or session_placement.placement(nproc, gpus, found)
        hardware = session_placement.hardware(
            placement, found, () if where is None else where.nodes
        )
        if auto:
            made = _placeholder(options, hardware)
            given = {name: getattr(made, name) for name in options}
            return cls(
                placement, hardware, made, bool(found.gpus), given, undecided=True, asked=asked
            )
        checked = strategies.Options.of(options).checked(hardware)
        return cls(placement, hardware, checked, bool(found.gpus), asked=asked)

    def seen(self, where: Where) -> Choice:
        """The same once the nodes are there: what their GPUs can do is known only then.

        Raises:
            OptionError: they cannot do what was asked for.
        """
        if not where.nodes:
            return self
        then = Choice.of(self.asked, where)
        return self if then.hardware == self.hardware else self.decides(then)

    def decided(self, options: strategies.Options) -> Self:
        """The same after auto's decision."""
        return dataclasses.replace(self, options=options, undecided=False)

    def decides(self, then: Choice) -> Choice:
        """Another choice, with auto's decision where this one has it already.

        Raises:
            OptionError: what was decided does not go with what is asked for.
        """
        asks = then.undecided and self.auto is not None and not self.undecided
        if not asks:
            return then
        given = dataclasses.asdict(self.options) | dict(then.auto or {})
        options = strategies.Options.of({k: v for k, v in given.items() if v is not None})
        return then.decided(options.checked(then.hardware))

    def differing(self, then: Choice) -> dict[str, tuple[object, object]]:
        """What would change for a session: name -> (now, then).

        Auto again changes nothing where the decision agrees with what is given.
        """
        before, after = self._flat(), then._flat()
        if then.auto is not None and self.auto is not None:
            given = self.auto if self.undecided else dataclasses.asdict(self.options)
            before = {**_placed(self), **{name: given.get(name) for name in then.auto}}
            after = {**_placed(then), **then.auto}
        elif then.auto is not None or self.undecided:
            before, after = _placed(self), _placed(then)
            before["auto"], after["auto"] = self.auto is not None, then.auto is not None
        return {name: (before[name], after[name]) for name in after if before[name] != after[name]}

    def describe(self) -> str:
        """Ranks and strategy in a few words."""
        where = self.place
        if self.undecided:
            return ", ".join([where, "auto", *self.options.describe().split(", ")[1:]])
        return f"{where}, {'auto: ' if self.auto is not None else ''}{self.options.describe()}"

    @property
    def place(self) -> str:
        """Ranks and devices: "2 CPU ranks (no GPU found)"."""
        here = not self.placement.away
        alone = here and self.placement.devices is None and not self.gpus_found
        return self.placement.describe() + (" (no GPU found)" if alone else "")

    @property
    def visible(self) -> tuple[str, ...] | None:
        """UUIDs of the ranks' GPUs; None for CPU ranks."""
        return None if self.placement.devices is None else self.placement.visible

    def _flat(self) -> dict[str, object]:
        """All options in one table."""
        return _placed(self) | dataclasses.asdict(self.options)


def _placed(choice: Choice) -> dict[str, object]:
    """Where the ranks are."""
    placement = choice.placement
    nodes = {"nodes": placement.nodes} if placement.away else {}
    return {"nproc": placement.nproc, "devices": placement.devices, **nodes}


def _placeholder(given: Mapping[str, Any], hardware: strategies.Hardware) -> strategies.Options:
    """The first backend's options that agree with what is given.

    Raises:
        OptionError: no backend takes what is given, or something that auto decides was given.
    """
    for name in ("backend", *CONFIG_OF):
        if name in given:
            message = f"auto chooses the backend, and the option {name} names one; leave one out."
            raise OptionError(message)
    refusals: list[OptionError] = []
    for name in strategies.STRATEGIES:
        try:
            return strategies.Options.of({**given, "backend": name}).checked(hardware)
        except OptionError as error:
            refusals.append(error)
    raise refusals[-1]
