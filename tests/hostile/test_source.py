"""What stands in the sources themselves: nothing that runs what others wrote."""

from __future__ import annotations

import ast
import re
import tarfile
import tomllib
import zipfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "nbdist").rglob("*.py"))
FRONT_END = sorted((ROOT / "widgets" / "src").glob("*.ts"))

IMPORTS = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "runpy", "pty"}
CALLS = {
    *("eval", "exec", "__import__", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"),
    *("yaml.full_load", "numpy.load", "np.load", "torch.jit.load", "pandas.read_pickle"),
    *("distributed.broadcast_object_list", "distributed.all_gather_object"),
}
ALLOWED = {
    # A switch to new ranks: what the old ranks of the same session wrote moments before, in a
    # private folder made for it alone.
    ("worker/operations/namespace_pickle.py", "import pickle"),
    ("worker/operations/namespace_pickle.py", "import cloudpickle"),
    # An expression of the user's, signed as the code of a cell is.
    ("worker/main_thread_requests.py", "eval"),
    # A function of the notebook, which may run any code on its ranks; never the other way.
    ("session/distributed_function.py", "import cloudpickle"),
    ("worker/distributed_function.py", "import cloudpickle"),
    # Checkpoints of others are pickles: read with a find_class that makes no class of theirs,
    # and in full only where the user says --trust.
    ("state/importers/safe_unpickler.py", "import pickle"),
    ("state/importers/safe_unpickler.py", "torch.load"),
    # What ranks tell one another: plain values alone come out, see its find_class.
    ("state/collectives.py", "import pickle"),
    # A snapshot for the PyTorch memory visualizer: written, never read.
    ("worker/profiling/recorder.py", "import pickle"),
}
"""File and what it may do all the same; each with its reason."""


def named(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{named(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> object:
    value = next((one.value for one in call.keywords if one.arg == name), None)
    return value.value if isinstance(value, ast.Constant) else None


def risks(tree: ast.AST) -> set[str]:
    """What of a module could run somebody else's code."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {str(node.module).split(".")[0]}
        else:
            names = set()
        found |= {f"import {name}" for name in names & IMPORTS}
        if isinstance(node, ast.Call):
            name = named(node.func)
            found |= {name} & CALLS
            if name.endswith("torch.load") and keyword(node, "weights_only") is not True:
                found.add("torch.load")
            for flag in ("shell", "allow_pickle", "trust_remote_code"):
                if keyword(node, flag) is True:
                    found.add(f"{flag}=True")
    return found


@pytest.mark.fault("S6")
@pytest.mark.fault("D9")
def test_nothing_runs_what_came_in_but_what_is_listed_with_a_reason() -> None:
    found = {
        (str(path.relative_to(ROOT / "nbdist")), risk)
        for path in MODULES
        for risk in risks(ast.parse(path.read_text()))
    }
    assert found == ALLOWED


@pytest.mark.fault("S6")
@pytest.mark.parametrize(
    "code",
    [
        *("import pickle", "from pickle import loads", "eval(x)", "exec(x)", "os.system(x)"),
        *("subprocess.run(x, shell=True)", "yaml.load(x)", "torch.load(x)", "import marshal"),
        *("torch.load(x, weights_only=False)", "torch.load(x, weights_only=some)", "import shelve"),
        *("np.load(x, allow_pickle=True)", "AutoModel.from_pretrained(x, trust_remote_code=True)"),
    ],
)
def test_the_search_finds_it(code: str) -> None:
    assert risks(ast.parse(code))


def test_the_search_leaves_the_safe_ways_alone() -> None:
    for code in ("torch.load(x, weights_only=True)", "yaml.safe_load(x)", "re.compile(x)"):
        assert not risks(ast.parse(code))


@pytest.mark.fault("S9")
@pytest.mark.fault("S10")
@pytest.mark.fault("S12")
def test_no_store_that_listens_and_no_debug_server_is_made() -> None:
    for path in MODULES:
        names = {
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Name | ast.Attribute)
        }
        assert not names & {"TCPStore", "start_debug_server", "debugpy"}, path
        assert "torch.distributed.debug" not in path.read_text(), path
    source = (ROOT / "nbdist" / "launcher" / "fork_ranks.py").read_text()
    assert source.count("rdzv_backend=RENDEZVOUS_BACKEND") == source.count("rdzv_backend=") == 2


WAYS_IN = (
    *("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"),
    *("createContextualFragment", "srcdoc", "javascript:", "DOMParser", "importScripts"),
)


@pytest.mark.fault("S16")
@pytest.mark.fault("G1")
@pytest.mark.parametrize("path", FRONT_END, ids=lambda path: path.name)
def test_the_front_end_makes_text_nodes_only_and_fetches_nothing_remote(path: Path) -> None:
    text = path.read_text()
    assert not [way for way in WAYS_IN if way in text]
    addresses = re.findall(r"\b(?:https?|wss?)://[^\s'\"`]*", text)
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}  # a name of a namespace, never fetched
    assert not re.search(r"\.on(?:click|error|load)\s*=|setAttribute\(\s*[\"'`]on", text)


# ------------------------------------------------------------------------------ what is shipped


def names_in_wheel(folder: Path) -> list[str]:
    wheel = next(WheelBuilder(str(ROOT)).build(directory=str(folder)))
    return zipfile.ZipFile(wheel).namelist()


@pytest.mark.fault("S21")
def test_the_wheel_holds_the_package_and_no_script_that_an_install_runs(tmp_path: Path) -> None:
    names = names_in_wheel(tmp_path)
    kinds = {Path(name).suffix for name in names if name.startswith("nbdist/")}
    assert kinds <= {".py", ".typed", ".js", ".css", ".json"}
    info = {name.partition("/")[2] for name in names if ".dist-info/" in name}
    assert info <= {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    assert not [name for name in names if name.endswith(".pth") or ".data/" in name]


@pytest.mark.fault("S21")
def test_the_sdist_holds_sources_and_nothing_that_was_made(tmp_path: Path) -> None:
    sdist = next(SdistBuilder(str(ROOT)).build(directory=str(tmp_path)))
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
        assert not [member.name for member in archive.getmembers() if not member.isfile()]
    tops = {name.split("/")[0] for name in names}
    assert tops <= {
        *("nbdist", "tests", "notebooks", "docs", "widgets", "CHANGELOG.md", "constraints.txt"),
        *("Makefile", "hatch_build.py", "pyproject.toml", "README.md", "LICENSE", "PKG-INFO"),
        *(".gitignore",),
    }
    made = re.compile(r"node_modules|__pycache__|\.pyc$|\.so$|\.pt$|\.pkl$|\.bin$|\.safetensors$")
    assert not [name for name in names if made.search(name)]


def brought_by(project: str, extras: set[str], seen: dict[str, set[str]]) -> None:
    """Collect the distributions that an install of `project` brings here."""
    for line in metadata.requires(project) or ():
        wanted = Requirement(line)
        markers = [{"extra": extra} for extra in extras or {""}]
        if wanted.marker and not any(wanted.marker.evaluate(one) for one in markers):
            continue
        name = canonicalize_name(wanted.name)
        if wanted.extras <= seen.get(name, set()) and name in seen:
            continue
        seen.setdefault(name, set()).update(wanted.extras)
        try:
            brought_by(name, wanted.extras, seen)
        except metadata.PackageNotFoundError:
            seen.pop(name)  # not on this machine: nothing of it was brought


@pytest.mark.fault("S21")
def test_everything_that_an_install_brings_is_pinned() -> None:
    pinned = {
        canonicalize_name(line.partition("==")[0])
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    seen: dict[str, set[str]] = {}
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(line for extra in extras for line in extra)]
    for line in wanted:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        seen.setdefault(name, set()).update(requirement.extras)
        with suppress(metadata.PackageNotFoundError):  # Ray is not here: its own pin must be
            brought_by(name, requirement.extras, seen)
    # CUDA's own wheels come with a CUDA build of torch, which is chosen outside (README)
    ours = {name for name in seen if not name.startswith(("nvidia-", "cuda-", "triton"))}
    assert sorted(ours - pinned - {"setuptools", "pip"}) == []


# ------------------------------------------------------------------------------------- the docs

PROPERTIES = [f"S{number}" for number in range(1, 24)]


@pytest.mark.fault("S22")
def test_the_policy_says_how_to_report_and_where_the_threat_model_is() -> None:
    policy = (ROOT / "SECURITY.md").read_text()
    assert "report" in policy.lower()
    assert "(docs/security.md)" in policy
    model = (ROOT / "docs" / "security.md").read_text()
    for threat in ("another user", "another host", "strangers", "web page", "not defended"):
        assert threat in model.lower(), threat


@pytest.mark.fault("S22")
@pytest.mark.parametrize("row", PROPERTIES)
def test_each_property_of_the_docs_names_its_tests(row: str) -> None:
    model = (ROOT / "docs" / "security.md").read_text()
    line = next(line for line in model.splitlines() if line.startswith(f"| {row} |"))
    tests = re.findall(r"`(tests/[^`]+)`", line)
    assert tests, line
    for name in tests:
        path, _, test = name.partition("::")
        assert (ROOT / path).exists(), name
        assert not test or f"def {test}(" in (ROOT / path).read_text(), name
