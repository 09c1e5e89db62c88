"""The devices that a plan is for, as a user writes them.

Pure. `parse` reads "8xH100-80GB,nvlink", and for several machines what one of them is in brackets:
"2x(8xH100-80GB,nvlink),400Gb/s".
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from nbdist.errors import PlanError
from nbdist.planner.cluster_spec import USABLE, Cluster, by_memory, cpu_ranks, networked, usual_link
from nbdist.planner.gpu_catalog import GB, GIB, TERA, Device, Key, families, family, lookup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.planner.cluster_spec import Link

MAX_DEVICES = 100_000
"""More than any cluster has: a slip of the keyboard, not a question."""
MAX_MEMORY_GB = 10_000

_COUNTED = re.compile(r"(?:(-?[0-9.]+)\s*[x*]\s*)?(?:(-?[0-9.]+)\s*[x*]\s*)?(.*)", re.IGNORECASE)
_MEMORY = re.compile(r"(-?[0-9.]+|nan|inf)\s*(GI?B|TI?B)", re.IGNORECASE)
_NETWORK = re.compile(r"(?:([0-9]+)\s*[x*]\s*)?([0-9.]+)\s*(Gb|Gbps|Gb/s|Gbit/s)")
_COUNT = re.compile(r"-?[0-9.]+\s*[x*]", re.IGNORECASE)
_BRACKETS = re.compile(r"(-?[0-9.]+)\s*[x*]\s*\(([^()]+)\)\s*((?:,[^()]*)?)", re.IGNORECASE)
_BYTES = re.compile(r"(?:[0-9]+\s*[x*]\s*)?[0-9.]+\s*(?:GBps|GB/s|GB)")
_STORE = re.compile(r"([0-9.]+)\s*(GB|TB)\s+(host|ram|nvme)", re.IGNORECASE)
_LINKS = frozenset({"nvlink", "pcie"})
_MAX_CHARS = 300
_CPU = re.compile(r"(?:(-?[0-9.]+)\s*[x* ]?\s*)?cpus?", re.IGNORECASE)
_EXAMPLES = '"8xH100-80GB,nvlink", "2x24GB,pcie", "2x(8xH100-80GB,nvlink),400Gb/s" or "2xcpu"'


def parse(text: str) -> Cluster:
    """Read a description of devices.

    "[COUNTx]GPU[,nvlink|pcie][,HOST]": the GPU by name, or by memory alone ("24GB"). Several
    machines are "NODESx(ONE MACHINE)[,NETWORK]", or in short "NODESxCOUNTxGPU[,nvlink|pcie]
    [,NETWORK]"; the network is what goes into one node ("400Gb/s" for one adapter, "8x400Gb/s"
    for eight). "512GB host" and "2TB nvme" are of one node. "2xcpu" for CPU ranks.

    Raises:
        PlanError: not of this form, an unknown GPU, or numbers without a meaning.
    """
    if len(str(text)) > _MAX_CHARS or not str(text).isprintable():
        # the expressions below take a time that grows with the square of the length
        message = f"devices {_short(text)} are no words for devices; write them as 8xH100-80GB."
        raise PlanError(message)
    return _nodes(str(text)) if set("()") & set(str(text)) else _plain(str(text))


def _nodes(text: str) -> Cluster:
    """Several machines, one of which stands in brackets.

    Raises:
        PlanError: brackets that do not fit, or a word on their wrong side.
    """
    parts = _BRACKETS.fullmatch(text.strip())
    if parts is None:
        message = (
            f"devices {_short(text)}: the brackets hold one machine, its number stands before them"
            " and the network behind, as in 2x(8xH100-80GB,nvlink),400Gb/s."
        )
        raise PlanError(message)
    nodes, (first, *inside) = _count(parts[1], text), _words(parts[2])
    outside = _words(parts[3])[1:]
    _check_sides(first, inside, outside, text)
    node = _plain(",".join([first, *inside]))
    _check_size(nodes * node.world_size, text)
    devices = node.devices * nodes
    return _finished(replace(node, devices=devices, nodes=nodes), outside, text)


def _words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _check_sides(first: str, inside: Sequence[str], outside: Sequence[str], text: str) -> None:
    """Refuse what stands on the wrong side of the brackets.

    Raises:
        PlanError: it does.
    """
    counted = _COUNTED.fullmatch(first)
    wrong = ""
    if _CPU.fullmatch(first):
        wrong = "CPU ranks are planned for on one machine; write 4xcpu"
    elif counted is not None and counted[2]:
        wrong = f"{first} in the brackets is more than one machine; write 2x(8xH100-80GB)"
    elif networks := [word for word in inside if _NETWORK.fullmatch(word)]:
        wrong = f"{networks[0]} is between machines, so it stands behind the brackets"
    elif links := [word for word in outside if word.lower() in _LINKS]:
        wrong = f"{links[0]} is inside a machine, so it stands in the brackets"
    if wrong:
        message = f"devices {_short(text)}: {wrong}."
        raise PlanError(message)


def _plain(text: str) -> Cluster:
    """A description without brackets."""
    first, *more = _words(text)
    if cpu := _CPU.fullmatch(first):
        _refuse_rest(text, more)
        ranks = _count(cpu[1], text)
        _check_size(ranks, text)
        return cpu_ranks(ranks)
    counted = _COUNTED.fullmatch(first)
    assert counted is not None  # its last group takes anything  # noqa: S101
    one, other, name = counted.groups()
    nodes, count = (_count(one, text), _count(other, text)) if other else (1, _count(one, text))
    _check_size(nodes * count, text)
    if _COUNT.match(name):
        message = (
            f"devices {_short(text)}: {first} has three numbers; write the number of machines and"
            " what one of them has, as in 2x(8xH100-80GB,nvlink),400Gb/s."
        )
        raise PlanError(message)
    device, notes = _described(name, text)
    cluster = Cluster(
        devices=(device,) * (nodes * count),
        link=usual_link(device, nodes * count),
        nodes=nodes,
        notes=notes,
    )
    return _finished(cluster, more, text)


def _check_size(count: int, text: str) -> None:
    """Refuse more devices than any cluster has.

    Raises:
        PlanError: there are.
    """
    if count > MAX_DEVICES:
        message = f"devices {_short(text)} are {count}; at most {MAX_DEVICES} can be."
        raise PlanError(message)


def _finished(cluster: Cluster, more: Sequence[str], text: str) -> Cluster:
    """Apply link, network and host to a cluster, and note what was assumed."""
    for word in more:
        if word.lower() in _LINKS:
            cluster = replace(cluster, link=_link(word.lower(), cluster))
        elif network := _NETWORK.fullmatch(word):
            if cluster.nodes == 1:
                message = (
                    f"devices {_short(text)} is one machine, and {word} would be between several,"
                    " which are written as 2x(8xH100-80GB,nvlink),400Gb/s."
                )
                raise PlanError(message)
            speed = int(network[1] or 1) * _positive(network[2], text) * GB / 8
            cluster = replace(cluster, network=speed)
        elif store := _STORE.fullmatch(word):
            size = int(_positive(store[1], text) * (GB if store[2].upper() == "GB" else TERA))
            where = "nvme_bytes" if store[3].lower() == "nvme" else "host_memory_bytes"
            cluster = replace(cluster, **{where: size})  # type: ignore[arg-type]
        else:
            raise PlanError(_unknown_word(word, text))
    return networked(cluster) if cluster.nodes > 1 and not cluster.network else cluster


def _described(name: str, text: str) -> tuple[Device, tuple[str, ...]]:
    """The device of a name, or a typical one of that memory."""
    if memory := _MEMORY.fullmatch(name.strip()):
        size = _positive(memory[1], text) * (1000 if memory[2].upper().startswith("T") else 1)
        if size > MAX_MEMORY_GB:
            message = f"devices {_short(text)}: no GPU has {size:g} GB; give what one GPU has."
            raise PlanError(message)
        return by_memory(size * USABLE * GIB, f"{size:g} GB names no GPU")
    device = lookup(name)
    if device is None:
        raise PlanError(_unknown_gpu(name, text))
    return device, ()


def _link(word: str, cluster: Cluster) -> Link:
    """The link that was asked for.

    Raises:
        PlanError: NVLink for a GPU that has none.
    """
    device = cluster.devices[0]
    if word == "nvlink" and not device.nvlink:
        message = f"{device.name} has no NVLink; use pcie."
        raise PlanError(message)
    if cluster.world_size == 1:
        return "none"
    return "nvlink" if word == "nvlink" else "pcie"


def _count(text: str | None, whole: str) -> int:
    """How many, 1 if it is not said."""
    if text is None:
        return 1
    if not text.isdigit() or int(text) < 1:
        message = (
            f"devices {_short(whole)}: {text} is not a number of devices; use a whole number from "
            f"1, as in {_EXAMPLES}."
        )
        raise PlanError(message)
    return int(text)


def _positive(text: str, whole: str) -> float:
    """Read a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        message = f"devices {_short(whole)}: {text} is not a size; use a number above 0."
        raise PlanError(message)
    return value


def _refuse_rest(text: str, more: Sequence[str]) -> None:
    """Refuse what CPU ranks do not have."""
    if more:
        message = f"devices {_short(text)}: CPU ranks take no {more[0]!r}; leave it out."
        raise PlanError(message)


def _unknown_gpu(name: str, text: str) -> str:
    """Say that a description names no GPU, and which names are near."""
    from difflib import get_close_matches

    wanted = Key.of(name)
    if same := [device.name for device in family(name)]:
        return f"no {wanted.family} with {wanted.memory} GB is known; there is {', '.join(same)}."
    if not re.search(r"[0-9A-Z]", wanted.family):
        return f"devices {_short(text)} name no GPU; use {_EXAMPLES}."
    first = families()
    if re.search(r"[0-9]\s*(nodes?|machines?)\b", text, re.IGNORECASE):
        return f"devices {_short(text)}: several machines are 2x(8xH100-80GB,nvlink),400Gb/s."
    near = [first[key] for key in get_close_matches(wanted.family, first, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(near)}? Or give" if near else "give"
    return f"{_short(name.strip())} is not a known GPU; {hint} its memory, as in 2x24GB,pcie."


def _unknown_word(word: str, text: str) -> str:
    """Say what may stand after the GPU."""
    from difflib import get_close_matches

    near = get_close_matches(word.lower(), sorted(_LINKS), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    if _BYTES.fullmatch(word):
        hint = "a network counts bits, as 400Gb/s, and memory says whose it is, as 512GB host; "
    return (
        f"devices {_short(text)}: {word!r} is no link; {hint}after the GPU come nvlink or pcie, "
        "a network such as 8x400Gb/s, and 512GB host or 2TB nvme."
    )


def _short(text: str, limit: int = 60) -> str:
    """Quote a user's text, cut where it is long."""
    return repr(text if len(text) <= limit else f"{text[:limit]}...")
