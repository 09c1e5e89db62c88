"""How an option is written: its flag, its value and its help. Declared at the field it sets.

The parsers of the magics, tab completion, the panel's checks and docs/options.md are built from
these declarations.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable


def parse_clip_norm(text: str) -> float | str:
    """Parse the value of --clip: a number, or "none"."""
    if text == "none":
        return text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"needs a number or none, got {text!r}") from None


def strip_quotes(text: str) -> str:
    """Remove the quotes that IPython (9.18) leaves around an option's value."""
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One option of `%%distribute`, and keyword argument of `Session`."""

    help: str
    scope: Literal["engine", "ranks", "cluster"] = "engine"
    """What it configures."""
    metavar: str = ""
    """Name of the value; empty for a flag."""
    flag: str = ""
    """Flag of the option. Default: the name of the field."""
    short_flag: str = ""
    type: Callable[[str], Any] = str
    """Converts the text of a line, as argparse's argument of this name."""
    values: tuple[str, ...] = ()
    """Values that tab completion offers."""
    load: Callable[[str], Any] | None = None
    """Loads the file that the value names, or parses its inline JSON."""
    can_be_unset: bool = False
    """"none" as the value removes an earlier one."""
    can_switch: bool = True
    """`%nbdist switch` and the panel accept it too."""
    panel_limit: int = 0
    """Largest number, or length of a text, that the panel may send; 0: not sent by the panel."""

    def flags(self, name: str) -> list[str]:
        """Return the flags of the field `name`."""
        long = self.flag or f"--{name.replace('_', '-')}"
        return [self.short_flag, long] if self.short_flag else [long]

    def read(self, value: Any) -> Any:
        """Return the value for the session of a parsed value.

        Raises:
            OptionError: a config file that cannot be read.
        """
        if self.can_be_unset and value == "none":
            return None
        return self.load(value) if self.load and value else value


def option(default: Any, **declaration: Any) -> Any:
    """Return a dataclass field that is an option; `declaration` has the fields of `Argument`."""
    return field(default=default, metadata={"argument": Argument(**declaration)})
