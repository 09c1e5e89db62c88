"""The Python that runs the ranks: the notebook's own, or that of another environment.

nbdist itself comes from the notebook's environment in both cases, all other packages of the ranks
from theirs. What is installed there is queried by a short script and cached.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from nbdist.errors import OptionError, StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

MIN_PYTHON = (3, 11)
SETUP = "python -m nbdist.setup FOLDER"
QUERY_TIMEOUT_S = 60.0
_QUERY = """
import sys
answer = {"version": sys.version.split()[0], "minor": sys.version_info[:2], "path": sys.path[1:]}
if sys.version_info >= (3, 11):
    import importlib.metadata, sysconfig
    answer["site"] = sysconfig.get_path("purelib")
    answer["packages"] = packages = {}
    for found in importlib.metadata.distributions():  # the first on sys.path is imported
        packages.setdefault(found.metadata["Name"] or "", found.version)
import json
print(json.dumps(answer))
"""
_CORE = ("torch", "accelerate", "ipykernel")
"""Named first; required if nbdist's own metadata is not installed, as in a source tree."""


@dataclass(frozen=True, slots=True)
class RankPython:
    """An interpreter and the packages of its environment."""

    executable: str
    version: str
    packages: Mapping[str, str] | None = field(default=None, compare=False)
    """Versions by normalized name; None for this interpreter, whose packages are looked up."""
    path: tuple[str, ...] = ()
    """Its sys.path; empty for this interpreter."""
    stamp: tuple[str, int] = ("", 0)
    """Its site-packages and when they changed last."""

    @property
    def is_own(self) -> bool:
        """True for the notebook's own interpreter."""
        return self.packages is None

    def version_of(self, package: str) -> str | None:
        """Return the version of an installed package without importing it, or None."""
        if self.packages is not None:
            return self.packages.get(canonicalize_name(package))
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def has(self, package: str) -> bool:
        """Return True if a package can be imported."""
        if self.packages is not None:
            return canonicalize_name(package) in self.packages
        return importlib.util.find_spec(package) is not None

    def check(self) -> None:
        """Check that ranks can start.

        Raises:
            StartError: packages are missing or too old.
        """
        unmet = sorted(
            unmet_requirements(self.version_of, self.requirements("ranks")),
            key=lambda found: found[0].name not in _CORE,
        )
        if unmet:
            shown = [f"{needed} ({version or 'not installed'})" for needed, version in unmet[:4]]
            more = f" and {len(unmet) - 4} more packages" if unmet[4:] else ""
            raise StartError(
                f"Ranks in {self.executable} need {', '.join(shown)}{more}. Install"
                f" {'it' if len(unmet) == 1 else 'them'} there, or create an environment with"
                f" `{SETUP}` and select it with --python FOLDER."
            )

    def requirements(self, *extras: str) -> list[str]:
        """Return the requirements in these extras of nbdist, for this Python version."""
        version = {
            "python_version": ".".join(self.version.split(".")[:2]),
            "python_full_version": self.version,
        }
        try:
            lines = importlib.metadata.requires("nbdist") or []
        except importlib.metadata.PackageNotFoundError:
            lines = []  # a source tree that is not installed
        found = [
            f"{requirement.name}{requirement.specifier}"
            for requirement in map(Requirement, lines)
            if (marker := requirement.marker) is not None
            and not marker.evaluate({**version, "extra": ""})
            and any(marker.evaluate({**version, "extra": extra}) for extra in extras)
        ]
        return found or list(_CORE)

    def describe_difference(self) -> str:
        """Return what another Python version means for cells; "" if nothing."""
        own = platform.python_version()
        here, there = (tuple(map(int, text.split(".")[:2])) for text in (own, self.version))
        if here == there:
            return ""
        older = f"{here[0]}.{here[1]}" if here < there else f"{there[0]}.{there[1]}"
        return (
            f"ranks run Python {self.version}, the notebook {own}: cells can only use the syntax of"
            f" {older}"
        )

    def environment(self, variables: Mapping[str, str], package_folder: Path) -> dict[str, str]:
        """Return environment variables for processes of this interpreter.

        Args:
            variables: those of the notebook.
            package_folder: folder made by `link_package`.
        """
        if self.is_own:
            return dict(variables)
        folder = Path(self.executable).parent
        given = variables.get("PYTHONPATH", "").split(os.pathsep)
        changed = {
            "PATH": os.pathsep.join([str(folder), variables.get("PATH", os.defpath)]),
            "PYTHONPATH": os.pathsep.join([str(package_folder), *_foreign(filter(None, given))]),
        }
        if (folder.parent / "pyvenv.cfg").exists():
            changed["VIRTUAL_ENV"] = str(folder.parent)
        dropped = {"PYTHONHOME", "VIRTUAL_ENV"}
        return {k: v for k, v in variables.items() if k not in dropped} | changed

    def import_path(self, given: Sequence[str], package_folder: Path) -> list[str]:
        """Return sys.path for ranks: without the notebook's packages, with their own.

        Args:
            given: the notebook's sys.path.
            package_folder: folder made by `link_package`.
        """
        if self.is_own:
            return list(given)
        return list(dict.fromkeys([str(package_folder), *_foreign(given), *self.path]))

    def link_package(self, folder: Path) -> Path:
        """Return a folder inside `folder` from which this interpreter imports the same nbdist."""
        inner = folder / "import"
        if not self.is_own:
            inner.mkdir(mode=0o700)
            (inner / "nbdist").symlink_to(Path(__file__).resolve().parent)
        return inner


KERNEL_PYTHON = RankPython(sys.executable, platform.python_version())
_known: dict[str, RankPython] = {}
_selected = [KERNEL_PYTHON]


def select(python: RankPython) -> None:
    """Set the interpreter that planner and doctor ask about: that of the newest session."""
    _selected[0] = python


def selected() -> RankPython:
    """Return the interpreter set by `select`."""
    return _selected[0]


def find(given: str | os.PathLike[str] | None) -> RankPython:
    """Return the interpreter of a path: an executable, a virtual environment, or None for this one.

    Raises:
        OptionError: it does not exist, cannot be executed, or is too old.
    """
    executable = sys.executable if given is None else _locate(os.fspath(given))
    if executable == sys.executable:
        return KERNEL_PYTHON
    known = _known.get(executable)
    if known is None or known.stamp[1] != _changed_at(known.stamp[0]):
        known = _known[executable] = _query(executable)
    return known


def _locate(given: str) -> str:
    """Return the absolute path of the executable. Keeps links: those of an environment lead out."""
    path = Path(os.path.abspath(Path(given).expanduser()))  # noqa: PTH100 - resolve() follows links
    try:
        if path.is_dir():
            path = path / "bin" / "python"
        elif os.sep not in given and (program := shutil.which(given)):
            path = Path(program)
        path.stat()
    except OSError as error:
        raise OptionError(
            f"--python {given} cannot be used: {path}: {error.strerror}. Give a Python"
            f" interpreter or an environment; `{SETUP}` creates one."
        ) from None
    return str(path)


def _query(executable: str) -> RankPython:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
    env["PYTHONPATH"] = ""
    try:
        done = subprocess.run(  # noqa: S603 - the user's interpreter
            [executable, "-"],
            env=env,
            input=_QUERY,
            capture_output=True,
            text=True,
            timeout=QUERY_TIMEOUT_S,
            check=False,
        )
        answer = json.loads((done.stdout.splitlines() or [""])[-1])
        version, minor = answer["version"], tuple(answer["minor"])
    except OSError as error:
        problem = error.strerror or str(error)
    except subprocess.TimeoutExpired:
        problem = f"no answer within {QUERY_TIMEOUT_S:.0f} s"
    except (ValueError, KeyError, TypeError):
        lines = done.stderr.strip().splitlines() or ["it is not a Python interpreter"]
        problem = lines[-1 if lines[0].startswith("Traceback") else 0].rstrip(".")
    else:
        if minor >= MIN_PYTHON:
            found = answer["packages"].items()
            packages: dict[str, str] = {canonicalize_name(name): text for name, text in found}
            stamp = (answer["site"], _changed_at(answer["site"]))
            return RankPython(executable, version, packages, tuple(answer["path"]), stamp)
        problem = f"it is Python {version}, and ranks need Python 3.11 or newer"
    raise OptionError(
        f"--python {executable} cannot be used: {problem}. Give a Python interpreter or an"
        f" environment; `{SETUP}` creates one."
    )


def unmet_requirements(
    version_of: Callable[[str], str | None], required: Iterable[str]
) -> Iterator[tuple[Requirement, str | None]]:
    """Yield requirements that are missing or have another version, with that version.

    Args:
        version_of: returns the version of a package, or None if it is not installed.
        required: requirements in the format of `importlib.metadata.requires`.
    """
    for line in required:
        try:
            requirement = Requirement(line)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            version = version_of(requirement.name)
            if version and requirement.specifier.contains(version, prereleases=True):
                continue
        except (InvalidRequirement, InvalidVersion):
            continue  # a custom build: its version cannot be compared
        yield requirement, version


def _foreign(paths: Iterable[str]) -> list[str]:
    """Return the entries that are outside of this interpreter's library and packages."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    own = {sysconfig.get_path(name) for name in names} | {site.getusersitepackages()}
    own |= set(site.getsitepackages())
    zipped = re.compile(r"python3\d+\.zip")
    return [
        path
        for path in paths
        if not zipped.fullmatch(Path(path).name)
        and not any(Path(path).is_relative_to(folder) for folder in own)
    ]


def _changed_at(folder: str) -> int:
    try:
        return Path(folder).stat().st_mtime_ns
    except OSError:
        return 0
