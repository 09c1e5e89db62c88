"""JSON from a stranger: every value is checked before it is used; pure.

A check takes a value and the place it has, and gives back the value or raises `Refused`.
Nothing here allocates more than a small multiple of the text's own size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from nbdist.checkpoint.names import shown

T = TypeVar("T")
Check = Callable[[object, str], T]
Plain = None | bool | int | float | str | list["Plain"] | tuple["Plain", ...] | dict[str, "Plain"]
"""What a manifest keeps of values that only their owner understands; tuples come back as lists."""

MAX_DEPTH = 32
MAX_TEXT = 1024
MAX_COUNT = 1 << 62
_MAX_INT = 1 << 64  # seeds of torch are unsigned
_FLOAT = "$float"
"""JSON has no infinity: {"$float": "inf"}."""


class Refused(ValueError):  # noqa: N818 - reads as what happened
    """A value is not what its place asks for: "keys.model.weight has ..."."""


def loads(text: bytes) -> object:
    """Read JSON in which no key stands twice.

    Raises:
        Refused: not JSON, nested too deeply, or a key stands twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, Refused) else Refused("is no readable JSON") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        raise Refused(f"has the key {shown(twice)} twice")
    return made


def _no_constant(name: str) -> object:
    raise Refused(f"has {name}, which is no JSON")


def fields(checks: Mapping[str, Check[Any]]) -> Check[dict[str, Any]]:
    """Check an object of exactly these fields."""

    def check(value: object, where: str) -> dict[str, Any]:
        found = _object(value, where)
        if found.keys() != checks.keys():
            strange = min(found.keys() ^ checks.keys())
            problem = "is unknown" if strange in found else "is missing"
            raise Refused(f"{_join(where, strange)} {problem}")
        return {name: one(found[name], _join(where, name)) for name, one in checks.items()}

    return check


def mapping(key: Check[str], item: Check[T]) -> Check[dict[str, T]]:
    """Check an object whose keys are data."""

    def check(value: object, where: str) -> dict[str, T]:
        pairs = _object(value, where).items()
        return {key(name, where): item(one, _join(where, name)) for name, one in pairs}

    return check


def sequence(item: Check[T], *, at_most: int | None = None) -> Check[tuple[T, ...]]:
    """Check a list."""

    def check(value: object, where: str) -> tuple[T, ...]:
        if type(value) is not list or (at_most is not None and len(value) > at_most):
            bound = "" if at_most is None else f" of at most {at_most}"
            raise _not(value, where, f"a list{bound}")
        return tuple(item(one, f"{where}[{number}]") for number, one in enumerate(value))

    return check


def text(value: object, where: str) -> str:
    """Check a short printable text."""
    if type(value) is not str or len(value) > MAX_TEXT or not value.isprintable():
        raise _not(value, where, f"printable text of at most {MAX_TEXT} characters")
    return value


def count(value: object, where: str) -> int:
    """Check a size or a number of things."""
    if type(value) is not int or not 0 <= value < MAX_COUNT:
        raise _not(value, where, "a count")
    return value


def number(value: object, where: str) -> float:
    """Check a number."""
    found = plain(value, where)
    if type(found) is int or type(found) is float:
        return found
    raise _not(value, where, "a number")


def bits(digits: int) -> Check[int]:
    """Check an unsigned number, written in this many hexadecimal digits."""

    def check(value: object, where: str) -> int:
        good = type(value) is str and len(value) == digits
        if not good or set(str(value)) - set("0123456789abcdef"):
            raise _not(value, where, f"{digits} hexadecimal digits")
        return int(str(value), 16)

    return check


def one_of(allowed: frozenset[str]) -> Check[str]:
    """Check a word from a list."""

    def check(value: object, where: str) -> str:
        if type(value) is not str or value not in allowed:
            raise _not(value, where, f"one of {', '.join(sorted(allowed))}")
        return value

    return check


def plain(value: object, where: str, depth: int = 0) -> Plain:
    """Check a value that only its owner understands."""
    if depth > MAX_DEPTH:
        raise Refused(f"{where} is nested deeper than {MAX_DEPTH}")
    if type(value) is list:
        return [plain(one, f"{where}[{at}]", depth + 1) for at, one in enumerate(value)]
    if type(value) is dict:
        if value.keys() == {_FLOAT}:
            return _special(value[_FLOAT], where)
        return {name: plain(one, _join(where, name), depth + 1) for name, one in value.items()}
    return _scalar(value, where)


def to_plain(value: object, where: str, depth: int = 0) -> Plain:
    """Give a value the form in which `plain` takes it back.

    Raises:
        Refused: it holds something else than None, bool, int, float, str, list, tuple and
            dicts with text as keys.
    """
    if depth > MAX_DEPTH:
        raise Refused(f"{where} is nested deeper than {MAX_DEPTH}")
    if isinstance(value, (list, tuple)):
        return [to_plain(one, f"{where}[{at}]", depth + 1) for at, one in enumerate(value)]
    if isinstance(value, Mapping):
        if _FLOAT in value or not all(type(name) is str for name in value):
            raise Refused(f"{where} has keys that a manifest cannot keep")
        return {name: to_plain(one, _join(where, name), depth + 1) for name, one in value.items()}
    if type(value) is float and not math.isfinite(value):
        return {_FLOAT: repr(value)}
    return _scalar(value, where)


def _scalar(value: object, where: str) -> Plain:
    if value is None or type(value) in {bool, str, float}:
        return value  # type: ignore[return-value] # what the line above says
    if type(value) is int and -_MAX_INT < value < _MAX_INT:
        return value
    raise _not(value, where, "a plain value")


def _special(value: object, where: str) -> float:
    if value not in ("inf", "-inf", "nan"):
        raise _not(value, where, "inf, -inf or nan")
    return float(str(value))


def _object(value: object, where: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise _not(value, where, "an object")
    return value


def _join(where: str, name: object) -> str:
    """Name a field: "files[0].name"."""
    spelled = str(name) if str(name).isidentifier() else shown(name)
    return f"{where}.{spelled}" if where else spelled


def _not(value: object, where: str, wanted: str) -> Refused:
    given = shown(value) if type(value) in {str, int, float} else type(value).__name__
    return Refused(f"{where or 'all of it'} has {given} where {wanted} belongs")
