"""Predicted beside measured: the arithmetic and the words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbdist.planner import measured_comparison
from nbdist.planner.measured_comparison import REMAINING_PART, MeasuredMemory, PartComparison
from nbdist.planner.models import analytic
from nbdist.strategies import Hardware, Options
from tests.unit import model_configs

CONFIG = model_configs.llama(64, 172, 2, 4, 4, 1000)
FOUND = MeasuredMemory(
    kind="cpu",
    step=3,
    batch_size=2,
    seq_len=32,
    accumulate=1,
    optimizer={"class": "AdamW", "fused": None, "foreach": None},
    parts={"parameters": 400, "gradients": 100, "gathered": 30, "other": 470},
    allocated_bytes=1000,
    rss_bytes=5000,
)
ON_GPU = replace(
    FOUND, kind="cuda", reserved_bytes=1200, device_bytes=2000, device_name="no such GPU"
)


def options(**given: object) -> Options:
    return Options.from_fields(given).validate(Hardware(kind="cpu", world_size=2))


def test_figures_of_a_rank_survive_the_wire_and_ignore_what_is_new() -> None:
    assert MeasuredMemory.from_json(
        {"kind": "cpu", "step": 3, "batch_size": 1, "seq_len": 8, "accumulate": 1}
        | {"optimizer": {}, "of a later version": 1}
    ) == MeasuredMemory(kind="cpu", step=3, batch_size=1, seq_len=8, accumulate=1, optimizer={})


def test_parts_that_cannot_be_measured_separately_are_combined() -> None:
    parts = FOUND.distinct_parts()
    assert parts[REMAINING_PART] == 500
    assert sum(parts.values()) == FOUND.allocated_bytes


def test_a_gpu_tells_only_what_rests_between_steps() -> None:
    assert ON_GPU.distinct_parts() == {
        "parameters": 400,
        "master": 0,
        "optimizer": 0,
        "buffers": 0,
        REMAINING_PART: 600,
    }


def test_compiled_cpu_ranks_know_no_peak() -> None:
    assert replace(FOUND, allocated_bytes=None).distinct_parts() == {}


def test_the_fullest_rank_is_compared() -> None:
    fuller = replace(FOUND, allocated_bytes=2000)
    check = measured_comparison.compare_plan_with_measurements(
        analytic.spec_from_config(CONFIG), options(), {0: FOUND, 1: fuller}
    )
    assert check.rank == 1
    assert check.allocated.measured_bytes == 2000
    assert "rank 1, the fullest, in step 3" in str(check)
    near = replace(check, allocated=PartComparison("all tensors", 99_999, 100_000))
    assert "-0.0%" not in str(near)


def test_memory_of_another_model_is_named_and_counted_on_both_sides() -> None:
    model = analytic.spec_from_config(CONFIG)
    alone = measured_comparison.compare_plan_with_measurements(model, options(), {0: FOUND})
    check = measured_comparison.compare_plan_with_measurements(
        model, options(), {0: replace(FOUND, beside_bytes=300)}
    )
    lines = {line.part: line for line in check.lines}
    assert lines[measured_comparison.OTHER_MODELS_PART] == PartComparison(
        measured_comparison.OTHER_MODELS_PART, 300, 300
    )
    assert lines[REMAINING_PART].measured_bytes == 200
    assert (check.allocated.predicted_bytes or 0) - (alone.allocated.predicted_bytes or 0) == 300
    assert sum(line.predicted_bytes or 0 for line in check.lines) == check.allocated.predicted_bytes
    assert "held by other models on this rank" in check.note
    assert "other models" not in str(alone)


def test_cpu_ranks_hold_what_is_offloaded_themselves() -> None:
    spec = analytic.spec_from_config(CONFIG)
    chosen = options(backend="zero2", offload="cpu")
    (here, _), (there, _) = (
        measured_comparison.predict_peak(spec, chosen, 2, found) for found in (FOUND, ON_GPU)
    )
    assert here.device_bytes > there.device_bytes
    assert not here.host_parts


def test_accumulation_is_the_measured_one() -> None:
    spec, accumulated = analytic.spec_from_config(CONFIG), replace(FOUND, accumulate=4)
    first, same, other = (
        measured_comparison.predict_peak(spec, options(accumulate=given), 2, found)[0]
        for given, found in ((1, accumulated), (4, accumulated), (4, FOUND))
    )
    assert first == same != other


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (PartComparison("x", 110, 100), 0.1),
        (PartComparison("x", 90, 100), -0.1),
        (PartComparison("x", None, 100), None),
        (PartComparison("x", 100, None), None),
        (PartComparison("x", 100, 0), None),
    ],
)
def test_error_is_relative_to_what_was_measured(line: PartComparison, error: float | None) -> None:
    assert line.relative_error == (error if error is None else pytest.approx(error))


def test_on_a_gpu_device_memory_is_compared_and_resident_memory_only_shown() -> None:
    spec = analytic.spec_from_config(CONFIG)
    on_gpu = measured_comparison.compare_plan_with_measurements(spec, options(), {0: ON_GPU})
    assert on_gpu.device.part == "the device"
    assert on_gpu.device.measured_bytes == 2000
    assert on_gpu.device.predicted_bytes is not None
    on_cpu = measured_comparison.compare_plan_with_measurements(spec, options(), {0: FOUND})
    assert (on_cpu.device.predicted_bytes, on_cpu.device.measured_bytes) == (None, 5000)
    assert "resident memory" in on_cpu._repr_html_()
