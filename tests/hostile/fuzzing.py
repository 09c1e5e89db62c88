"""What the fuzz tests have in common: how often, how long, how much memory, and JSON gone wrong."""

from __future__ import annotations

import copy
import datetime as dt
import resource
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FEW, MANY = 50, 10_000
EACH = dt.timedelta(seconds=10)
"""For one input; all take milliseconds, on a machine that does nothing else."""
MAX_BYTES = 300_000_000
"""More than before, hypothesis' own included."""

often = pytest.mark.parametrize(
    "examples", [FEW, pytest.param(MANY, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])]
)


def hold(check: Callable[[Any], None], inputs: st.SearchStrategy[Any], examples: int) -> None:
    """Check a property for so many inputs."""
    profile = settings(
        max_examples=examples,
        deadline=EACH,
        database=None,
        derandomize=examples == FEW,  # what every commit is tested with does not change
        suppress_health_check=list(HealthCheck),
    )
    before = _largest_bytes()
    profile(given(inputs)(check))()
    assert _largest_bytes() - before < MAX_BYTES


def _largest_bytes() -> int:
    """The most that this process has ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


NESTED = "[" * 100_000
ODD = st.sampled_from(
    [
        *("", " ", "\0", "\n", "\r", "../x", "/etc/passwd", "a" * 300, "<img src=x onerror=f()>"),
        *("__import__('os').system('x')", "${HOME}", "$(x)", "{{7*7}}", "%s%n", "\u202e", "\ud800"),
        *("nan", "inf", "-1", "1e999", "9" * 5000, "0x10", "\u0661", "True", "null", "none"),
    ]
)
texts = st.one_of(ODD, st.text(max_size=30))
numbers = st.one_of(
    st.integers(-3, 40),
    st.integers(),
    st.sampled_from([2**31, 2**63, 2**64, 10**30, -(2**63) - 1]),
    st.floats(),
)
plain = st.one_of(st.none(), st.booleans(), numbers, texts)
trees: st.SearchStrategy[Any] = st.recursive(
    plain,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=12,
)
"""What JSON can hold."""


def mutated(good: Any) -> st.SearchStrategy[Any]:
    """A good tree with one to three of its places replaced, removed, or given another name."""
    places = list(_places(good, ()))
    change = st.tuples(st.sampled_from(places), st.sampled_from(["put", "drop", "rename"]), trees)

    def changed(changes: list[tuple[tuple[Any, ...], str, Any]]) -> Any:
        tree = copy.deepcopy(good)
        for place, how, value in changes:
            tree = _changed(tree, place, how, value)
        return tree

    return st.lists(change, min_size=1, max_size=3).map(changed)


def _places(tree: Any, above: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if above:
        yield above
    if not isinstance(tree, dict | list):
        return
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from _places(value, (*above, key))


def _changed(tree: Any, place: tuple[Any, ...], how: str, value: Any) -> Any:
    *above, last = place
    holder = tree
    for key in above:
        if not isinstance(holder, dict | list) or not _has(holder, key):
            return tree  # an earlier change took it away
        holder = holder[key]
    if not isinstance(holder, dict | list) or not _has(holder, last):
        return tree
    if how == "put" or isinstance(holder, list):
        holder[last] = value
    else:
        taken = holder.pop(last)
        if how == "rename":
            holder[str(value)[:40]] = taken
    return tree


def _has(holder: Any, key: Any) -> bool:
    if isinstance(holder, dict):
        return key in holder
    return isinstance(key, int) and key < len(holder)
