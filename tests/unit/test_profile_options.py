"""What a profile or a calibration is asked for with: taken, or refused in a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from nbdist.errors import OptionError
from nbdist.magics import arguments
from nbdist.operations import calibrate
from nbdist.planner import cluster_spec
from nbdist.session.profiler import ProfileOptions
from nbdist.strategies import Hardware, Options

if TYPE_CHECKING:
    from pathlib import Path


def test_a_truth_or_the_arguments_of_a_profile_are_taken(tmp_path: Path) -> None:
    assert ProfileOptions.parse(False) is None  # noqa: FBT003 - as Session.run is given it
    assert ProfileOptions.parse(True) == ProfileOptions()  # noqa: FBT003
    assert ProfileOptions.parse({}) == ProfileOptions()
    given = {"steps": 3, "trace": tmp_path, "memory": False}
    assert ProfileOptions.parse(given) == ProfileOptions(steps=3, trace=tmp_path, memory=False)


@pytest.mark.parametrize("given", [{"stepz": 1}, 0, 1, "yes", ["steps"], {1: 2}])
def test_anything_else_is_refused_with_what_is_allowed(given: object) -> None:
    with pytest.raises(OptionError, match=r"must be True, False or a dict of steps, trace, memory"):
        ProfileOptions.parse(given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"trace": 5}, "--trace must be a folder, got 5"),
        ({"trace": ""}, "--trace must be a folder, got ''"),
        ({"memory": "no"}, "memory must be True or False, got 'no'"),
        ({"steps": 0}, "from 1 to 1000, got 0"),
    ],
)
def test_an_argument_that_is_not_allowed_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        ProfileOptions.parse(given)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--show --steps 3", "--show records no steps"),
        ("--calibrate --steps 3", "--calibrate records no steps"),
        ("--calibrate --trace out", "--calibrate records no steps"),
        ("--show --no-memory", "--show records no steps"),
        ("--show --calibrate", "Leave one of them out"),
        ("--disk /tmp", "--disk /tmp needs --calibrate"),
    ],
)
def test_no_option_of_the_magic_is_ignored(line: str, words: str) -> None:
    asked = arguments.PARSERS["profile"].parse_args(arguments.split_line(line, "profile"))
    with pytest.raises(OptionError, match=words):
        arguments.check_ignored_options(asked)


def test_a_disk_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    def ask(*_: object, **__: object) -> None:
        pytest.fail("the ranks were asked to measure")

    with pytest.raises(OptionError, match=f"Cannot write to --disk {tmp_path}/nope"):
        calibrate.calibrate(
            type("WorkerGroup", (), {"send_request": ask})(),
            options=Options(),
            hardware=Hardware(world_size=2),
            cluster=cluster_spec.cpu_cluster(2, host_memory_bytes=1 << 30, num_cpus=2),
            disk=tmp_path / "nope",
        )
    assert not (tmp_path / "nope").exists()
