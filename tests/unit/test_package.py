"""What is shipped: the wheel, the pins, the scripts that others call."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import nbdist

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def pins(path: Path) -> dict[str, str]:
    lines = [line.strip() for line in path.read_text().splitlines()]
    return dict(line.split("==") for line in lines if "==" in line)


def test_version_is_the_same_in_all_files() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    recipe = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text())
    versions = [project["version"], citation["version"], recipe["context"]["version"]]
    assert versions == [nbdist.__version__] * 3


def test_the_conda_recipe_requires_what_ranks_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    recipe = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text())
    there = dict(line.split(" ", 1) for line in recipe["requirements"]["run"] if " " in line)
    ranks = [Requirement(line) for line in project["optional-dependencies"]["ranks"]]
    for needed in ranks:
        name = {"torch": "pytorch"}.get(needed.name, needed.name)
        assert SpecifierSet(there[name]) == needed.specifier, name


def test_a_report_of_a_bug_has_the_output_of_the_doctor() -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    (field,) = (part for part in form["body"] if part.get("id") == "doctor")
    assert "%nbdist doctor --json" in field["attributes"]["label"]
    assert field["validations"]["required"]


def test_binder_takes_the_tested_versions() -> None:
    tested = pins(ROOT / "constraints.txt")
    assert pins(ROOT / "binder" / "requirements.txt").items() <= tested.items()


@pytest.mark.parametrize("name", [".ci/run", "binder/postBuild"])
def test_script_can_be_executed(name: str) -> None:
    path = ROOT / name
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env bash\n")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_committed_clean(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata
    assert all(cell.id.replace("-", "").isalpha() for cell in notebook.cells)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


def tree() -> dict[str, str]:
    """Packages of the tree in CONTRIBUTING.md: path and sentence."""
    found, folders = {}, [""]
    for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines():
        if match := re.fullmatch(r"((?:  )*)([a-z_0-9]+/)(?: +(\S.*))?", line):
            depth = len(match[1]) // 2
            path = folders[depth] + match[2]
            folders[depth + 1 :] = [path]
            found[path.removesuffix("/")] = match[3] or ""
    return found


def test_every_package_is_in_the_tree_with_its_first_sentence() -> None:
    packages = {
        str(path.parent.relative_to(ROOT)): ast.get_docstring(ast.parse(path.read_text())) or ""
        for path in (ROOT / "nbdist").rglob("__init__.py")
        if path.parent.name != "nbdist"
    }
    sentences = {name: " ".join(text.split("\n\n")[0].split()) for name, text in packages.items()}
    assert {name: text for name, text in tree().items() if name != "nbdist"} == sentences


def test_every_module_says_what_it_holds() -> None:
    for path in (ROOT / "nbdist").rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_on_other_systems_than_linux_plans_work_and_a_session_says_why_it_cannot_start() -> None:
    code = "import platform; platform.system = lambda: 'Windows'; import nbdist\n"
    code += "print(nbdist.plan('7b', devices='8xA100-80GB,nvlink').best)\nnbdist.Session"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert "tokens" in done.stdout
    assert "nbdist runs ranks on Linux only, and this is Windows." in done.stderr


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


PRIVATE_NAMES_IN_TESTS = 18
"""Largest number of places in tests that access private attributes of nbdist. Raise it never."""
PROTOCOL_NAMES = {"_repr_html_", "_repr_mimebundle_", "_render_traceback_"}
"""Names that IPython calls."""


_DEFINED = re.compile(r"(?:def|class) (_\w+)|(?:^|self\.)(_\w+)(?:: [^=\n]+)? =", re.MULTILINE)


def test_tests_use_public_names() -> None:
    package = (path.read_text() for path in (ROOT / "nbdist").rglob("*.py"))
    own = {name for text in package for pair in _DEFINED.findall(text) for name in pair}
    places = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in own - PROTOCOL_NAMES
        and not node.attr.startswith("__")
        and ast.unparse(node.value) not in {"self", "cls", "os"}
    ]
    assert len(places) <= PRIVATE_NAMES_IN_TESTS, "\n".join(places)
