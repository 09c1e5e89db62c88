"""The types of the front end are generated from nbdist/panel/protocol.py."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import pytest

from nbdist.panel import protocol
from nbdist.panel.commands import ARGUMENTS

if TYPE_CHECKING:
    from types import ModuleType

SCRIPT = Path(__file__).parents[2] / "widgets" / "generate_protocol.py"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """The script, which is in no package."""
    spec = importlib.util.spec_from_file_location("generate_protocol", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_types_of_the_front_end_are_up_to_date() -> None:
    command = [sys.executable, str(SCRIPT), "--check"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("annotation", "typescript"),
    [
        (int, "number"),
        (float | None, "number | null"),
        (list[int | None], "(number | null)[]"),
        (dict[str, Any], "Record<string, unknown>"),
        (Literal["a", "b"], '"a" | "b"'),
        (protocol.SessionState, "SessionState"),
        (list[protocol.DeviceView], "DeviceView[]"),
    ],
    ids=str,
)
def test_a_type_as_typescript(generator: ModuleType, annotation: Any, typescript: str) -> None:
    assert generator.typescript(annotation) == typescript


def test_what_json_does_not_have_is_refused(generator: ModuleType) -> None:
    with pytest.raises(KeyError):
        generator.typescript(bytes)


def test_every_command_of_a_page_has_rules() -> None:
    assert set(ARGUMENTS) == set(get_args(protocol.CommandName))
