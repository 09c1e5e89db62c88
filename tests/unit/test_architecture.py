"""The direction of imports, what must never be imported where, and the size of the package."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[2] / "nbdist"
PURE = {
    "_version",
    "errors",
    "hardware",
    "number_formatting",
    "paths",
    "protocol",
    "rank_sets",
    "redaction",
    "rank_python",
    "signal_handling",
}
PURE |= {"strategies"}
MAY_IMPORT = {
    "_version": set(),
    "errors": {"protocol"},
    "hardware": set(),
    "number_formatting": set(),
    "paths": {"errors"},
    "redaction": set(),
    "rank_python": {"errors"},
    "rank_sets": {"errors"},
    "signal_handling": set(),
    "protocol": {"errors", "signal_handling"},
    "checkpoint": {"errors", "hardware", "paths", "redaction"},
    "strategies": {"errors", "paths"},
    "state": {"errors", "checkpoint", "number_formatting"},
    "planner": {"display", "errors", "hardware", "number_formatting", "paths", "rank_python"}
    | {"strategies"},
    "profiler": {"display", "errors", "number_formatting", "planner", "protocol", "rank_sets"}
    | {"strategies"},
    "display": set(),
    # of "output" the deduplication, which agents use for the messages of their ranks
    "cluster": {"_version", "errors", "hardware", "output", "paths", "protocol", "rank_python"}
    | {"redaction", "signal_handling"},
    "output": {"number_formatting", "protocol", "rank_sets"},
    # "state" where a user asks for tensors; test_loading_brings_no_torch holds it to that
    "session": {*PURE, "checkpoint", "cluster", "display", "operations", "output", "planner"}
    | {"profiler", "state"},
    "operations": {*PURE, "checkpoint", "display", "output", "planner", "session"},
    "panel": {*PURE, "display", "operations", "output", "planner", "profiler", "session"},
    "launcher": {*PURE, "worker"},
    "setup": {"errors", "hardware", "rank_python"},
    # of "profiler" the measurements alone; test_a_rank_measures_and_does_not_judge
    "worker": {*PURE, "checkpoint", "cluster", "display", "launcher", "planner", "profiler"}
    | {"state"},
    "doctor": {*PURE, "cluster", "display", "output", "panel", "profiler", "session"},
    "magics": {*PURE, "cluster", "doctor", "operations", "output", "planner", "session"},
    "": {*PURE, "doctor", "magics", "operations", "panel", "planner", "profiler", "session"}
    | {"worker"},
}
"""Package -> packages it may import from; "" is the package itself."""
HEAVY = {"torch", "accelerate", "deepspeed", "transformers"}


@functools.cache
def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def room(path: Path) -> str:
    """Room of a file: a folder, or a module at the top."""
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imported(path: Path) -> set[str]:
    """Full names of everything a module imports, anywhere in it."""
    return imported_names(ast.walk(modules()[path]))


def imported_at_import(path: Path) -> set[str]:
    """Full names of what a module imports when it is imported itself."""
    return imported_names(modules()[path].body)


def imported_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Full names that import statements among these nodes import."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def rooms_of(names: set[str]) -> set[str]:
    """Rooms that a set of imported names lies in."""
    own = [name.split(".") for name in names if name.split(".")[0] == "nbdist"]
    known = {room(path) for path in modules()}
    return {parts[1] if len(parts) > 1 and parts[1] in known else "" for parts in own}


def test_arrows_point_downwards() -> None:
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules()
        for name in rooms_of(imported(path)) - MAY_IMPORT[room(path)] - {room(path)}
    }
    assert not wrong


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_imports_have_no_circle() -> None:
    """Imports for types and inside functions count: files of a circle cannot be read apart."""
    named = {dotted(path): path for path in modules()}
    graph: dict[str, set[str]] = {}
    for name, path in named.items():
        # `from package import module` is an import of the module, else of the package
        found = {x if x in named else x.rpartition(".")[0] for x in imported(path)}
        graph[name] = (found & named.keys()) - {name}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"circle of imports: {' -> '.join(reversed(error.args[1]))}")


def test_the_architecture_page_names_what_exists() -> None:
    text = (ROOT.parent / "docs" / "architecture.md").read_text()
    classes = {
        n.name for t in modules().values() for n in ast.walk(t) if isinstance(n, ast.ClassDef)
    }
    known = classes | {dotted(path).removeprefix("nbdist.") for path in modules()}
    for name in re.findall(r"`([\w/.]+)`", text):
        if "/" in name or name.endswith(".py"):
            assert [*ROOT.rglob(name), *ROOT.parent.glob(name)], name
        elif re.fullmatch(r"[A-Z]\w+|[a-z_]+(\.[a-z_]+)+", name):
            assert name in known, name


def test_heavy_libraries_stay_on_the_ranks() -> None:
    for path in modules():
        if room(path) not in {"worker", "launcher", "state"} and "tracing" not in path.parts:
            names = {name.split(".")[0] for name in imported_at_import(path)}
            assert not names & HEAVY, path


def test_a_rank_measures_and_does_not_judge() -> None:
    for path in modules():
        if room(path) == "worker":
            judged = {name for name in imported(path) if name.startswith("nbdist.profiler")}
            assert all(name.startswith("nbdist.profiler.measurements") for name in judged), path


WITHOUT: dict[str, set[str]] = {
    "import nbdist.magics.magics, nbdist.session.session": HEAVY | {"fsspec"},
    "import nbdist.magics.magics, nbdist.session.session, nbdist.panel": {
        "anywidget",
        "ipywidgets",
        "comm",
    },
    "import nbdist; nbdist.plan('7b', devices='8xA100-80GB')": HEAVY | {"numpy"},
    "import nbdist.checkpoint as c, pathlib; c.FolderStorage(pathlib.Path()).list_checkpoints()": {
        "torch",
        "numpy",
        "safetensors",
        "pickle",
    },
}
"""Code of the kernel -> packages that it does not import."""


@pytest.mark.parametrize("code", WITHOUT)
def test_the_kernel_imports_what_it_needs(code: str, tmp_path: Path) -> None:
    loaded = f"{code}\nimport sys; print(sorted({WITHOUT[code]!r} & set(sys.modules)))"
    command = [sys.executable, "-c", loaded]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_the_kernel_shows_a_panel_only_when_asked() -> None:
    for path in modules():
        if room(path) == "session":
            assert "panel" not in rooms_of(imported_at_import(path)), path


@pytest.mark.nightly
def test_benchmarks_start() -> None:
    """Each group is imported; a renamed module does not show before that."""
    benchmarks = ROOT.parent / "benchmarks"
    subprocess.run([sys.executable, benchmarks, "--help"], capture_output=True, check=True)


def test_only_one_table_distinguishes_backends() -> None:
    names = {"ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"}
    for path, tree in modules().items():
        if room(path) == "strategies":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                compared = {
                    c.value for c in [node.left, *node.comparators] if isinstance(c, ast.Constant)
                }
                assert not compared & names, f"{path}:{node.lineno}"
