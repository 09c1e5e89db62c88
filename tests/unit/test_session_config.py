"""What a user asks a session for: explicit options, and auto with what it takes as given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nbdist.errors import OptionError
from nbdist.session.config import SessionCluster, SessionConfig, merge_options


def choice(**asked: Any) -> SessionConfig:
    """Two CPU ranks, also where there are GPUs."""
    options = {"nproc": 2, "devices": "none", **asked}
    return SessionConfig.from_options(options, SessionCluster({}))


def decided(backend: str, **asked: Any) -> SessionConfig:
    before = choice(auto=True, **asked)
    return before.with_auto_decision(replace(before.options, backend=backend))


def test_auto_keeps_what_is_given_and_searches_the_rest() -> None:
    made = choice(auto=True, offload="cpu", accumulate=4)
    assert made.auto == {"offload": "cpu", "accumulate": 4}
    assert made.is_auto_pending
    assert made.options.offload == "cpu"
    assert "auto, offload cpu, accumulate 4" in made.describe()


def test_the_decision_is_described() -> None:
    assert decided("zero2").describe().endswith("auto: zero2")


def test_auto_again_changes_nothing() -> None:
    made = decided("zero3", offload="cpu")
    assert made.diff(choice(auto=True, offload="cpu")) == {}
    assert made.diff(choice(auto=True)) == {}
    assert choice(auto=True).diff(choice(auto=True)) == {}


def test_auto_with_a_contradiction_starts_new_ranks() -> None:
    assert decided("zero3", offload="cpu").diff(choice(auto=True, offload="none")) == {
        "offload": ("cpu", "none")
    }
    assert "nproc" in decided("ddp").diff(choice(nproc=1))


def test_an_explicit_backend_after_auto_is_compared_with_the_decision() -> None:
    assert decided("fsdp2").diff(choice(backend="fsdp")) == {}
    assert decided("fsdp2").diff(choice(backend="ddp")) == {"backend": ("fsdp2", "ddp")}
    assert choice(auto=True).diff(choice(backend="ddp")) == {"auto": (True, False)}
    assert choice(backend="ddp").diff(choice(auto=True)) == {"auto": (False, True)}


def test_a_backend_without_replicas_leaves_them_behind() -> None:
    replicated = {"auto": False, "backend": "fsdp", "replicate_across": "nodes"}
    assert "replicate_across" not in merge_options(replicated, {"backend": "ddp"})
    assert merge_options(replicated, {"clip": 1.0})["replicate_across"] == "nodes"
    asked = merge_options(replicated, {"backend": "zero3", "replicate_across": "nodes"})
    assert asked["replicate_across"] == "nodes"  # refused later, in a sentence


def test_a_backend_by_name_ends_auto() -> None:
    assert merge_options({"auto": True, "clip": 1.0}, {"backend": "zero1"}) == {
        "auto": False,
        "clip": 1.0,
        "backend": "zero1",
        "fsdp_config": None,
    }


def test_auto_leaves_backend_and_config_file_behind() -> None:
    made = merge_options({"backend": "fsdp", "fsdp_config": {}, "auto": False}, {"auto": True})
    assert made["backend"] is None
    assert made["fsdp_config"] is None


def test_another_engine_leaves_the_config_file_behind() -> None:
    before = {"backend": "fsdp", "fsdp_config": {"fsdp_version": 2}, "auto": False}
    assert merge_options(before, {"backend": "zero3"})["fsdp_config"] is None
    assert merge_options(before, {"backend": "fsdp1"})["fsdp_config"] == {"fsdp_version": 2}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"backend": "fsdp"}, "the option backend was given"),
        ({"deepspeed_config": {}}, "the option deepspeed_config was given"),
        ({"offload": "nvme"}, "nvme needs a folder"),
        ({"offload": "tape"}, "Unknown offload"),
        ({"precision": "bf15"}, "Unknown precision"),
        ({"speed": 1}, r"Unknown option speed\. Use backend, .*nproc"),
        ({"gpus": "0,1"}, r"Unknown option gpus\. Did you mean devices\?"),
    ],
)
def test_what_no_backend_takes_is_refused_under_auto(given: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        choice(auto=True, **given)
