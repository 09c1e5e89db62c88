"""Validation of untrusted JSON.

A check takes a value and its path in the document, and returns the value or raises
``ValidationError``. Memory use is a small multiple of the size of the text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from nbdist.checkpoint.names import printable

T = TypeVar("T")
Check = Callable[[object, str], T]
JsonValue = (
    None
    | bool
    | int
    | float
    | str
    | list["JsonValue"]
    | tuple["JsonValue", ...]
    | dict[str, "JsonValue"]
)
"""A JSON value that nbdist stores but does not interpret. Tuples are read back as lists."""

MAX_DEPTH = 32
MAX_TEXT_CHARS = 1024
MAX_COUNT = 1 << 62
_MAX_INT = 1 << 64  # torch seeds are unsigned 64-bit integers
_FLOAT = "$float"
"""Key that encodes inf and nan, which JSON lacks: {"$float": "inf"}."""


class ValidationError(ValueError):
    """A value is not allowed at its path. The message is a fragment for a larger message."""


def loads(text: bytes) -> object:
    """Parse JSON without duplicate keys.

    Raises:
        ValidationError: not JSON, nested too deeply, or a duplicate key.
    """
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise (
            error if isinstance(error, ValidationError) else ValidationError("not valid JSON")
        ) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    merged = dict(pairs)
    if len(merged) != len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        raise ValidationError(f"duplicate key {printable(twice)}")
    return merged


def _no_constant(name: str) -> object:
    raise ValidationError(f"{name} is not valid JSON")


def fields(checks: Mapping[str, Check[Any]]) -> Check[dict[str, Any]]:
    """Return a check for an object with exactly these fields."""

    def check(value: object, where: str) -> dict[str, Any]:
        given = _object(value, where)
        if given.keys() != checks.keys():
            name = min(given.keys() ^ checks.keys())
            problem = "is unknown" if name in given else "is missing"
            raise ValidationError(f"{_join(where, name)} {problem}")
        return {name: item(given[name], _join(where, name)) for name, item in checks.items()}

    return check


def mapping(key: Check[str], item: Check[T]) -> Check[dict[str, T]]:
    """Return a check for an object with arbitrary keys."""

    def check(value: object, where: str) -> dict[str, T]:
        pairs = _object(value, where).items()
        return {key(name, where): item(entry, _join(where, name)) for name, entry in pairs}

    return check


def sequence(item: Check[T], *, at_most: int | None = None) -> Check[tuple[T, ...]]:
    """Return a check for a list."""

    def check(value: object, where: str) -> tuple[T, ...]:
        if type(value) is not list or (at_most is not None and len(value) > at_most):
            bound = "" if at_most is None else f" of at most {at_most} items"
            raise _not(value, where, f"a list{bound}")
        return tuple(item(entry, f"{where}[{index}]") for index, entry in enumerate(value))

    return check


def text(value: object, where: str) -> str:
    """Check a printable string of at most 1024 characters."""
    if type(value) is not str or len(value) > MAX_TEXT_CHARS or not value.isprintable():
        raise _not(value, where, f"printable text of at most {MAX_TEXT_CHARS} characters")
    return value


def count(value: object, where: str) -> int:
    """Check a non-negative integer below 2 ** 62."""
    if type(value) is not int or not 0 <= value < MAX_COUNT:
        raise _not(value, where, "a non-negative integer")
    return value


def number(value: object, where: str) -> float:
    """Check an integer or a float."""
    checked = json_value(value, where)
    if type(checked) is int or type(checked) is float:
        return checked
    raise _not(value, where, "a number")


def hex_digits(digits: int) -> Check[int]:
    """Return a check for an unsigned integer written with this many hexadecimal digits."""

    def check(value: object, where: str) -> int:
        is_right_length = type(value) is str and len(value) == digits
        if not is_right_length or set(str(value)) - set("0123456789abcdef"):
            raise _not(value, where, f"{digits} hexadecimal digits")
        return int(str(value), 16)

    return check


def one_of(allowed: frozenset[str]) -> Check[str]:
    """Return a check for one of the allowed strings."""

    def check(value: object, where: str) -> str:
        if type(value) is not str or value not in allowed:
            raise _not(value, where, f"one of {', '.join(sorted(allowed))}")
        return value

    return check


def json_value(value: object, where: str, depth: int = 0) -> JsonValue:
    """Check a value that nbdist does not interpret, and decode inf and nan."""
    if depth > MAX_DEPTH:
        raise ValidationError(f"{where} is nested deeper than {MAX_DEPTH}")
    if type(value) is list:
        return [json_value(item, f"{where}[{at}]", depth + 1) for at, item in enumerate(value)]
    if type(value) is dict:
        if value.keys() == {_FLOAT}:
            return _special(value[_FLOAT], where)
        return {
            name: json_value(item, _join(where, name), depth + 1) for name, item in value.items()
        }
    return _scalar(value, where)


def to_json_value(value: object, where: str, depth: int = 0) -> JsonValue:
    """Encode a value for JSON. ``json_value`` decodes it.

    Raises:
        ValidationError: a value other than None, bool, int, float, str, list, tuple and dict with
            string keys.
    """
    if depth > MAX_DEPTH:
        raise ValidationError(f"{where} is nested deeper than {MAX_DEPTH}")
    if isinstance(value, (list, tuple)):
        return [to_json_value(item, f"{where}[{at}]", depth + 1) for at, item in enumerate(value)]
    if isinstance(value, Mapping):
        if _FLOAT in value or not all(type(name) is str for name in value):
            raise ValidationError(
                f"{where} has keys that are not strings or are reserved ({_FLOAT})"
            )
        return {
            name: to_json_value(item, _join(where, name), depth + 1) for name, item in value.items()
        }
    if type(value) is float and not math.isfinite(value):
        return {_FLOAT: repr(value)}
    return _scalar(value, where)


def _scalar(value: object, where: str) -> JsonValue:
    if value is None or type(value) in {bool, str, float}:
        return value  # type: ignore[return-value] # the type is checked above
    if type(value) is int and -_MAX_INT < value < _MAX_INT:
        return value
    raise _not(value, where, "a number, string, boolean or null")


def _special(value: object, where: str) -> float:
    if value not in ("inf", "-inf", "nan"):
        raise _not(value, where, "inf, -inf or nan")
    return float(str(value))


def _object(value: object, where: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise _not(value, where, "an object")
    return value


def _join(where: str, name: object) -> str:
    """Return the path of a field, for example "files[0].name"."""
    spelled = str(name) if str(name).isidentifier() else printable(name)
    return f"{where}.{spelled}" if where else spelled


def _not(value: object, where: str, wanted: str) -> ValidationError:
    given = printable(value) if type(value) in {str, int, float} else type(value).__name__
    if isinstance(value, list):
        given = f"a list of {len(value)} items"
    return ValidationError(f"{where or 'the document'} must be {wanted}, got {given}")
