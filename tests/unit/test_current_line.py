"""Where a rank's main thread says it is."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.session.rank_activity import describe_position
from nbdist.worker import stacks

FILE = "/tmp/ipykernel_1/123.py"  # noqa: S108 - a name, no file
TORCHS = """
def all_reduce():
    _inner()

def _inner():
    get_rank()

def get_rank():
    found.append(asked())
"""
STANDING: Any = {}
COLLECTIVES = "/somewhere/site-packages/torch/distributed/distributed_c10d.py"


@pytest.fixture(autouse=True)
def this_file_is_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "LIBRARY_PATHS", (*stacks.LIBRARY_PATHS, __file__))


def cell_of(file: str) -> tuple[str, str] | None:
    return ("Cell", "In[3]") if file == FILE else None


def asked() -> Any:
    """Ask on another thread, as the control thread does."""
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(stacks.current_line_reply(cell_of, STANDING))
    )
    thread.start()
    thread.join()
    return answers[0]


def ran(code: str, file: str, **names: Any) -> dict[str, Any]:
    exec(compile(code, file, "exec"), names)  # noqa: S102 - a frame of that file is needed
    return names


def test_the_line_of_the_cell_and_the_outermost_collective() -> None:
    found: list[Any] = []
    functions = ran(TORCHS, COLLECTIVES, asked=asked, found=found)
    ran("x = 1\n\nall_reduce()", FILE, **functions)
    assert found == [
        {
            "cell": "In[3]",
            "line": 3,
            "source": "",
            "script": "",
            "called": "all_reduce",
            "collective": "all_reduce",
            "standing": STANDING,
        }
    ]


def test_the_line_of_a_script_that_the_cell_runs() -> None:
    found: list[Any] = []
    functions = ran(TORCHS, COLLECTIVES, asked=asked, found=found)
    script = ran("def main():\n    all_reduce()", "/somewhere/train.py", **functions)
    ran("x = 1\nmain()", FILE, **script)
    assert (found[0]["line"], found[0]["script"]) == (2, "train.py line 2")
    assert describe_position(found[0]) == "all_reduce at line 2 (train.py line 2)"


def test_outside_of_a_cell_nothing_is_said() -> None:
    assert asked()["cell"] == ""


def test_between_two_lines_it_is_in_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    code = SimpleNamespace(co_filename=FILE, co_name="<module>", co_firstlineno=1)
    between = SimpleNamespace(f_code=code, f_lineno=None, f_back=None)
    monkeypatch.setattr(stacks, "main_frame", lambda: between)
    text = stacks.current_line_reply(cell_of, STANDING)
    assert (text["cell"], text["line"]) == ("In[3]", 1)
