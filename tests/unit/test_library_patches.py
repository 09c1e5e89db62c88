"""Patches of libraries are listed in one module and fit the installed versions."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from nbdist.worker import library_patches
from nbdist.worker.library_patches import PATCHES

ROOT = Path(library_patches.__file__).parents[1]
CONSTRAINTS = ROOT.parent / "constraints.txt"
LIBRARIES = {"accelerate", "deepspeed", "peft", "torch", "transformers"}


@pytest.mark.parametrize("target", [name for name in PATCHES if not name.endswith("*")])
def test_each_patched_attribute_exists(target: str) -> None:
    owner, name = library_patches.resolve(target)
    assert hasattr(owner, name)


@pytest.mark.parametrize("library", sorted(LIBRARIES))
def test_the_reasons_were_read_in_the_tested_version(library: str) -> None:
    pins = re.findall(rf"^{library}==(\d+\.\d+)", CONSTRAINTS.read_text(), re.MULTILINE)
    assert {library_patches.VERSIONS[library]} == set(pins)


def test_what_is_not_listed_cannot_be_patched() -> None:
    with pytest.raises(KeyError):
        library_patches.patch("torch:add", lambda original: original)


def test_a_patch_is_made_once_and_a_temporary_one_is_undone() -> None:
    from accelerate.accelerator import Accelerator

    before = Accelerator.save_state
    with library_patches.patched(
        "accelerate.accelerator:Accelerator.save_state", lambda _: lambda *_, **__: "nothing"
    ):
        assert Accelerator.save_state(None) == "nothing"
        assert Accelerator.save_state.__name__ == "save_state"
    assert Accelerator.save_state is before


def names_of_libraries(tree: ast.Module) -> set[str]:
    """Names under which a module imports a library or its parts."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                alias.asname or alias.name.split(".")[0]
                for alias in node.names
                if alias.name.split(".")[0] in LIBRARIES
            }
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in LIBRARIES:
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def assigned(tree: ast.Module) -> set[str]:
    libraries = names_of_libraries(tree)
    targets: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets += [target for target in node.targets if isinstance(target, ast.Attribute)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            targets.append(node.args[0])
    return {ast.unparse(target) for target in targets if root_of(target) in libraries}


def test_no_other_module_assigns_attributes_of_a_library() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in sorted(ROOT.rglob("*.py"))
        # A copy of script_runtime.py runs without nbdist, so it cannot use library_patches.
        if "tracing" not in path.parts and path.name != "script_runtime.py"
        if (names := assigned(ast.parse(path.read_text())))
    }
    # A counter of torch's, which names the next group.
    assert found == {"worker/process_group.py": {"distributed_c10d._world.group_count"}}
