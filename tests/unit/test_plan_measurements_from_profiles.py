"""What a profile teaches the planner, and how a plan says where its figures are from."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import nbdist
from nbdist.planner import (
    measurement_store,
    optimizers,
    step_time,
    target_devices,
)
from nbdist.planner.measurement_store import MeasurementStore, record_device_memory, store_path
from nbdist.planner.memory.timeline import TrainingSetup
from nbdist.planner.models import analytic
from nbdist.profiler import what_if
from nbdist.profiler.measurements import CollectiveStats, RankProfile
from nbdist.strategies import Options
from tests.unit import model_configs
from tests.unit.profile_figures import MODEL

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.planner.cluster_spec import ClusterSpec

MIB = 1 << 20
HOST = "Some Processor, 2 cores"
LLAMA = model_configs.llama(512, 1536, 4, 8, 8, 8000)
SPEC = analytic.spec_from_config(LLAMA)
OPTIONS = Options(backend="ddp", precision="no")
BATCH = {"batch_size": 8, "seq_len": 256}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def ranks(words: str = "2xcpu") -> ClusterSpec:
    return target_devices.parse_devices(words).with_measurements(MeasurementStore(HOST))


def predicted(cluster: ClusterSpec, options: Options = OPTIONS) -> step_time.StepCost:
    """The planner's cost of the very step that was profiled."""
    setup = TrainingSetup(
        options=options,
        world_size=cluster.world_size,
        optimizer=optimizers.optimizer_for_device(optimizers.find_optimizer("adamw"), cluster.kind),
        kind=cluster.kind,
    )
    workload = setup.workload(SPEC, **BATCH, keep_outputs=True)
    return step_time.step_cost(SPEC, setup, cluster, workload)


def profiled(compute_s: float, *traffic: CollectiveStats, **model: Any) -> list[RankProfile]:
    """Both ranks' figures of a step whose passes took so long."""
    batch = {"samples": BATCH["batch_size"], "seq_len": BATCH["seq_len"]}
    return [
        RankProfile(
            rank=rank,
            kind="cpu",
            device="cpu",
            ends=[0.0, 2 * compute_s],
            parts={"forward": compute_s / 3, "backward": 2 * compute_s / 3},
            traffic=list(traffic),
            model=replace(MODEL, **(batch | model)),
        )
        for rank in range(2)
    ]


def test_a_loop_is_planned_with_the_time_that_it_took() -> None:
    before = predicted(ranks())
    taken = 1.7 * before.compute_s
    what_if.learn_from_profile(profiled(taken), spec=SPEC, options=OPTIONS, cluster=ranks())
    after = predicted(ranks())
    assert after.compute_s == pytest.approx(taken, rel=0.01)
    assert after.uncertainty < before.uncertainty


def test_a_second_profile_counts_as_much_as_those_before() -> None:
    once = predicted(ranks()).compute_s
    for factor in (1, 2):
        what_if.learn_from_profile(
            profiled(factor * once), spec=SPEC, options=OPTIONS, cluster=ranks()
        )
    assert once < predicted(ranks()).compute_s < 2 * once
    assert ranks().slowest_device.loop_speeds["fp32"].runs == 2


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_times_that_no_speed_explains_are_not_learned(factor: float) -> None:
    taken = factor * predicted(ranks()).compute_s
    what_if.learn_from_profile(profiled(taken), spec=SPEC, options=OPTIONS, cluster=ranks())
    assert not store_path().exists()


def test_a_step_that_launches_bind_teaches_no_speed() -> None:
    gpus = ranks("2xH100")
    options = Options(backend="ddp", precision="bf16")
    tiny = profiled(predicted(gpus, options).compute_s, samples=1, seq_len=8)
    what_if.learn_from_profile(tiny, spec=SPEC, options=options, cluster=gpus)
    assert not store_path().exists()


def test_a_small_model_on_cpu_ranks_teaches_no_speed() -> None:
    small = analytic.spec_from_config(model_configs.llama(64, 172, 2, 4, 4, 256))
    tiny = profiled(0.015, samples=1, seq_len=32)  # measured; the launches alone may take 10 ms
    what_if.learn_from_profile(tiny, spec=small, options=OPTIONS, cluster=ranks())
    assert not store_path().exists()


def test_collectives_beside_real_work_are_learned_by_their_size() -> None:
    traffic = CollectiveStats(
        name="all_reduce", count=4, bytes=100 * MIB, seconds=0.9, exposed_s=0.2, waiting_s=0.1
    )
    small = CollectiveStats(
        name="all_gather_into_tensor", count=1, bytes=64, seconds=0.1, exposed_s=0.1
    )
    what_if.learn_from_profile(
        profiled(1e9, traffic, small), spec=SPEC, options=OPTIONS, cluster=ranks()
    )
    links = ranks().comm_speed
    assert links is not None
    assert links["all_reduce"].collective_time_s(25 * MIB) == pytest.approx(0.2)
    assert links["all_reduce"].collective_time_s(4096) is None, "far from that size"
    assert "all_gather" not in links, "too small to tell a link from its latency"


def test_devices_in_words_learn_nothing() -> None:
    words = target_devices.parse_devices("2xcpu")
    what_if.learn_from_profile(profiled(1.0), spec=SPEC, options=OPTIONS, cluster=words)
    assert not store_path().exists()


def test_no_figures_teach_nothing() -> None:
    what_if.learn_from_profile([], spec=SPEC, options=OPTIONS, cluster=ranks())
    unseen = [replace(one, model=None) for one in profiled(1.0)]
    what_if.learn_from_profile(unseen, spec=SPEC, options=OPTIONS, cluster=ranks())
    assert not store_path().exists()


# -------------------------------------------------------------------- what a plan says


def calibrate(cluster: ClusterSpec) -> None:
    curve = [[4096, 1e-3], [64 * MIB, 0.1]]
    figures = {
        "device": cluster.slowest_device.name,
        "curves": {"all_reduce": curve, "all_gather": curve, "reduce_scatter": curve},
        "products": {"fp32": 4e10, "bf16": 4e10},
        "memory": 2e9,
    }
    target_devices.apply_calibration([figures] * cluster.world_size, cluster)


def test_a_plan_says_what_was_measured_here_and_when() -> None:
    today = measurement_store.today()
    before = nbdist.plan(LLAMA, precision="no", **BATCH)
    line = "sources: link and compute speed from the catalogue (%nbdist profile --calibrate"
    assert line in str(before)
    calibrate(target_devices.detect_local_cluster(2))
    after = nbdist.plan(LLAMA, precision="no", **BATCH)
    line = f"sources: link and compute speed measured here ({today})"
    assert line in str(after)
    assert line in after._repr_html_()
    assert "catalogue" not in str(after)
    assert after.row("ddp").step_time_s != before.row("ddp").step_time_s
    fewer = nbdist.plan(LLAMA, world_size=4, precision="no", **BATCH)
    assert "measured here" not in str(fewer), "of other ranks nothing was measured"


def test_a_plan_for_devices_in_words_says_catalogue_whatever_was_measured() -> None:
    calibrate(target_devices.detect_local_cluster(2))
    plan = nbdist.plan(LLAMA, devices="2xcpu", precision="no", **BATCH)
    assert "sources: link and compute speed from the catalogue\n" in str(plan)


def test_memory_that_a_session_measured_on_this_gpu_is_said() -> None:
    found = ranks("2xA100-80GB")
    record_device_memory(
        found.smallest_device.name,
        "ddp",
        "none",
        allocated_bytes=10 << 30,
        reserved_bytes=11 << 30,
        device_bytes=12 << 30,
    )
    plan = nbdist.plan(LLAMA, devices=found, backend="ddp", **BATCH)
    today = measurement_store.today()
    text = f"sources: memory measured here ({today}); link and compute speed from the"
    assert text in str(plan)
