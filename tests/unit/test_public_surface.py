"""What users and scripts type: a change here is a change of the interface.

`python tests/unit/test_public_surface.py` writes the snapshot again.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.completer import CompletionContext

import nbdist
from nbdist.magics import arguments, magics

if TYPE_CHECKING:
    import argparse

SNAPSHOT = Path(__file__).with_name("public_surface.json")


def call_of(function: object) -> str:
    try:
        signature = inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "..."
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    plain = signature.replace(parameters=bare, return_annotation=signature.empty)
    return str(plain).replace(" object at 0x", " at ")


def members_of(cls: type) -> dict[str, str]:
    """Public methods, properties and fields of a class that nbdist defines."""
    members: dict[str, str] = {}
    for base in reversed([b for b in cls.__mro__ if b.__module__.startswith("nbdist")]):
        for name, value in vars(base).items():
            if name.startswith("_"):
                continue
            if isinstance(value, property):
                members[name] = "property"
            elif inspect.isfunction(value) or isinstance(value, classmethod):
                members[name] = call_of(getattr(cls, name))
    if dataclasses.is_dataclass(cls):
        public = [f.name for f in dataclasses.fields(cls) if not f.name.startswith("_")]
        members |= dict.fromkeys(public, "field")
    return dict(sorted(members.items()))


def options_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Options and arguments of a magic, with the name of their value and their choices."""
    actions = parser._actions
    return {
        "/".join(a.option_strings) or a.dest: f"{a.metavar or ''} {list(a.choices or [])}".strip()
        for a in actions
    }


def completions(line: str) -> list[str]:
    """What Tab offers at the end of a line."""
    context = CompletionContext("", line, len(line), 0, 1000)
    return sorted(choice.text for choice in magics.MATCHER(context)["completions"])


def commands() -> dict[str, Any]:
    """Each command of `%nbdist` with the options that complete after it."""
    return {name: completions(f"%nbdist {name} ") for name in completions("%nbdist ")}


def help_texts() -> dict[str, str]:
    """What `-h` prints for each magic that takes options, without line breaks."""
    shown = ("plan", "switch", "export", "save", "load", "checkpoints")
    shown += ("profile", "panel", "doctor")
    parsers = {"%%distribute": magics.NbDist.distribute.parser}
    parsers |= {name: arguments.PARSERS[name] for name in shown}
    return {name: " ".join(parser.format_help().split()) for name, parser in parsers.items()}


def surface() -> dict[str, Any]:
    exported: dict[str, Any] = {}
    for name in sorted(nbdist.__all__):
        value = getattr(nbdist, name)
        exported[name] = members_of(value) if inspect.isclass(value) else call_of(value)
    made = nbdist.plan("1b", devices="2x80GB")
    return {
        "nbdist": exported,
        "Plan": members_of(type(made)),
        "Plan.rows[0]": members_of(type(made.rows[0])),
        "%%distribute": options_of(magics.NbDist.distribute.parser),
        "%nbdist": commands(),
        "help": help_texts(),
        "%config NbDist": sorted(magics.NbDist.class_own_traits(config=True)),
    }


def test_public_names_options_and_fields_are_those_of_the_snapshot() -> None:
    assert surface() == json.loads(SNAPSHOT.read_text())


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(surface(), indent=1) + "\n")
