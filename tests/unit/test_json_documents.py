"""`--json`: one document, with the fields that docs/json.md lists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import nbdist
from nbdist.errors import OptionError
from nbdist.magics import arguments, results
from nbdist.session.checkpoints import Checkpoints
from tests.unit import small_checkpoints
from tests.unit.profile_figures import both, profile

DOCUMENTED = (Path(__file__).parents[2] / "docs" / "json.md").read_text()


def fields_of(kind: str) -> set[str]:
    """The fields of a document in the docs, with those that all documents have."""
    _, _, section = DOCUMENTED.partition(f"`nbdist.{kind}/1`")
    rows = re.findall(r"^\| (`.*?) \|", section.partition("**`")[0], re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)} | {"schema", "nbdist"}


def read(text: str, kind: str) -> dict[str, Any]:
    """A document, whose fields are those of the docs."""
    document: dict[str, Any] = json.loads(text)
    assert document["schema"] == f"nbdist.{kind}/1"
    assert document["nbdist"] == nbdist.__version__
    assert document.keys() == fields_of(kind)
    return document


def test_a_plan() -> None:
    planned = nbdist.plan("1b", devices="2x80GB")
    document = read(results.plan_document(planned), "plan")
    assert len(document["rows"]) == len(planned.rows)
    best = document["best"]
    assert best["command"].startswith("%%distribute --backend ")
    assert sum(best["memory"].values()) == best["device_bytes"]
    refused = [row for row in document["rows"] if row["step_time_s"] is None]
    assert all(not row["fits"] for row in refused)  # infinity is not JSON


def test_a_profile() -> None:
    measured = profile(*both())
    document = read(results.profile_document(measured.to_json()), "profile")
    assert document["verdict"] == measured.verdict
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]


def test_checkpoints(tmp_path: Path) -> None:
    small_checkpoints.save(tmp_path, "base")
    document = read(results.checkpoints_document(Checkpoints(tmp_path)), "checkpoints")
    (entry,) = document["checkpoints"]
    assert entry["name"] == "base"
    assert entry["path"] == str(tmp_path / "base")
    assert entry["created"].endswith("+00:00")
    for name in entry:
        assert f"`{name}`" in DOCUMENTED


def test_no_checkpoints(tmp_path: Path) -> None:
    none = Checkpoints(tmp_path / "no")
    document = read(results.checkpoints_document(none), "checkpoints")
    assert document["checkpoints"] == []


def test_options_that_print_no_json_are_refused() -> None:
    for other in (["--check"], ["7b", "--devices", "any"]):
        options = arguments.PARSERS["plan"].parse_args([*other, "--json"])
        with pytest.raises(OptionError, match="--check and --devices any print no JSON"):
            results.run_plan_command(options, {}, None)
    recording = arguments.PARSERS["profile"].parse_args(["--json", "--steps", "3"])
    with pytest.raises(OptionError, match="--json records no steps"):
        arguments.check_ignored_options(recording)
