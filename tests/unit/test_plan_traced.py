"""The spec made of a trace, and the arithmetic that makes its figures; no torch."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.errors import PlanError
from nbdist.planner import model_spec
from nbdist.planner.model_spec import BackwardPeakCandidate, Workload
from nbdist.planner.models import traced

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def fields() -> dict[str, Any]:
    """A model of two blocks and a head, as the child process writes it."""
    part = {
        "saved": [100, 10],
        "input": [8, 2],
        "gradient": [0, 4],
        "forward": [[[0, 40], 0], [[200, 5], 0], [[0, 50], 1], [[7, 0], 2]],
        "backward": [[[0, 60], 0], [[300, 1], 0], [[10, 20], 7]],
        "gradients": [[[10, 20], 7]],
        "flops": 5.0,
    }
    run = {"groups": [part, part], "loss": [[[0, 30], 0]], "outputs": [0, 2], "batch": [0, 8]}
    group = {
        "count": 2,
        "quantized_tensors": [],
        "tensors": [[2, 4, True], [3, 3, True], [1, 1, False]],
    }
    return {
        "depth": "traced",
        "name": "a net",
        "tied": False,
        "element": 4,
        "trainable_element": 4,
        "batch_size": 2,
        "seq_len": 16,
        "groups": [
            group | {"name": "block", "role": "block"},
            group | {"name": "tail", "role": "tail", "count": 1},
        ],
        "passes": {"cuda half": run, "cuda half checkpointing": run},
    }


def at(batch_size: int, **rest: Any) -> Workload:
    return Workload(**({"batch_size": batch_size, "seq_len": 16} | rest))


def test_bytes_are_lines_in_the_batch_size() -> None:
    model = traced.from_json(fields())
    for batch in (1, 3, 50):
        run = model.micro_batch_activations(at(batch))
        assert run.layers[0].saved_bytes == 100 + 10 * batch
        assert run.layers[0].input_bytes == 8 + 2 * batch
        assert run.layers[0].forward_peaks == (max(50 * batch, 200 + 5 * batch), 7)
        assert (run.loss_bytes, run.output_bytes) == (30 * batch, 2 * batch)


def test_a_group_whose_gradients_are_made_in_other_groups_has_a_backward() -> None:
    plain = fields()
    plain["passes"]["cuda half"]["groups"][0]["backward"] = []
    run = traced.from_json(plain).micro_batch_activations(at(3))
    assert run.layers[0].backward_moments == ((100 + 10 * 3, 7, 0),)


def test_instants_that_another_exceeds_are_left_out_at_each_batch_size() -> None:
    model = traced.from_json(fields())
    assert model.micro_batch_activations(at(1)).layers[0].backward_moments == (
        BackwardPeakCandidate(301, 0),
        BackwardPeakCandidate(30, 7),
    )
    assert model.micro_batch_activations(at(50)).layers[0].backward_moments == (
        BackwardPeakCandidate(3000, 0),
        BackwardPeakCandidate(1010, 7),
    )


def test_a_trace_survives_json() -> None:
    model = traced.from_json(fields())
    again = traced.from_json(json.loads(json.dumps(model.to_json())))
    assert again == model
    assert again.depth == "traced"
    assert model_spec.num_params(again) == 3 * 8


def test_operations_add_up_over_groups_and_samples() -> None:
    assert traced.from_json(fields()).flops(at(4)) == 4 * 3 * 5.0


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (at(1, seq_len=32), "traced with 16 tokens per sample"),
        (at(1, kind="cpu"), "'cpu half' was not traced"),
        (at(1, compute="autocast"), "This trace has cuda half"),
    ],
)
def test_what_was_not_traced_is_said(workload: Workload, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        traced.from_json(fields()).micro_batch_activations(workload)


def test_a_way_of_computing_in_which_the_model_fails_says_so() -> None:
    broken = fields()
    broken["passes"] = broken["passes"] | {"cuda autocast": {"error": "it fails under autocast"}}
    model = traced.from_json(broken | {"notes": ["a note."]})
    assert model.micro_batch_activations(at(1)).output_bytes == 2
    assert traced.from_json(model.to_json()).notes == ("a note.",)
    with pytest.raises(PlanError, match="it fails under autocast"):
        model.micro_batch_activations(at(1, compute="autocast"))


def child(code: str) -> list[str]:
    """A command that plays the trace's child process."""
    return [sys.executable, "-c", code]


def answer_of(
    command: list[str], request: dict[str, Any], progress: Callable[[str], None]
) -> dict[str, Any]:
    return traced._answer(command, os.environ, request, progress)


def test_progress_and_answer_of_the_child_arrive() -> None:
    lines: list[str] = []
    code = (
        "import json, sys; request = json.load(sys.stdin);"
        "print('trace: looking', file=sys.stderr); print('noise', file=sys.stderr);"
        "print(json.dumps({'got': request}))"
    )
    assert answer_of(child(code), {"a": 1}, lines.append) == {"got": {"a": 1}}
    assert lines == ["looking"]


def test_the_childs_last_line_is_the_reason() -> None:
    code = "import sys; sys.exit('trace: no such model')"
    with pytest.raises(PlanError, match=r"Cannot trace the model \(no such model\)"):
        answer_of(child(code), {}, lambda _: None)


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "TRACE_TIMEOUT_S", 0.2)
    with pytest.raises(PlanError, match=r"Cannot trace the model \(timeout after"):
        answer_of(child("import threading; threading.Event().wait()"), {}, lambda _: None)


# -- the cache -------------------------------------------------------------------------------

CONFIG = {"model_type": "bert", "hidden_size": 64}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "nbdist" / "traces"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Requests to child processes, each answered with `fields()`."""
    requests: list[Any] = []

    def answer(_: object, __: object, request: Any, ___: object) -> dict[str, Any]:
        requests.append(request)
        return fields()

    monkeypatch.setattr(traced, "_answer", answer)
    return requests


def trace(lines: list[str] | None = None, **changes: Any) -> traced.TracedModel:
    asked = {"config": CONFIG, "batch_size": 2, "seq_len": 16} | changes
    say = (lines if lines is not None else []).append
    return traced.trace_config(asked.pop("config"), progress=say, **asked)


def test_a_config_is_traced_once(folder: Path, asked: list[Any]) -> None:
    lines: list[str] = []
    assert trace(lines) == trace(lines)
    assert len(asked) == len(list(folder.iterdir())) == 1
    assert lines == [traced.FIRST_TRACE]


@pytest.mark.parametrize(
    "changes",
    [
        {"config": CONFIG | {"hidden_size": 65}},
        {"batch_size": 3},
        {"seq_len": 17},
        {"kinds": ("cpu",)},
        {"computes": ("full",)},
    ],
    ids=str,
)
@pytest.mark.usefixtures("folder")
def test_whatever_else_is_asked_is_another_trace(asked: list[Any], changes: dict[str, Any]) -> None:
    trace()
    trace(**changes)
    assert len(asked) == 2


@pytest.mark.usefixtures("folder")
def test_another_transformers_is_another_trace(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace()
    monkeypatch.setattr(traced, "_version", lambda _: "99")
    trace()
    assert len(asked) == 2


WITHOUT_GROUPS = {"groups": [], "loss": [], "outputs": [0, 1], "batch": [0, 1]}


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[]",
        "{}",
        {"groups": []},
        {"groups": 7},
        {"passes": {"cuda half": 7}},
        {"passes": {"cuda half": WITHOUT_GROUPS}},
        {"passes": {"cuda half": WITHOUT_GROUPS | {"outputs": [float("nan"), 1]}}},
        {"more": 1},
    ],
    ids=str,
)
def test_a_damaged_trace_is_made_again(folder: Path, asked: list[Any], damage: object) -> None:
    model = trace()
    (file,) = folder.iterdir()
    file.write_text(damage if isinstance(damage, str) else json.dumps(fields() | damage))
    assert trace() == model
    assert len(asked) == 2


def test_a_trace_that_fails_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise PlanError("it cannot be.")

    monkeypatch.setattr(traced, "_answer", fail)
    with pytest.raises(PlanError, match="it cannot be"):
        trace()
    assert not folder.exists()


@pytest.mark.usefixtures("asked")
def test_the_oldest_traces_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "MAX_CACHED_TRACES", 3)
    for length in range(1, 6):
        trace(seq_len=length)
    assert len(list(folder.iterdir())) == 3
