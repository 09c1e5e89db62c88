"""Calibration on two real CPU ranks: what is measured, what plans make of it, what stays."""

from __future__ import annotations

import os
import statistics
from typing import TYPE_CHECKING, NamedTuple

import pytest

import nbdist
from nbdist import PlanError, Session, SessionBusy, SessionError
from nbdist.operations import calibrate
from nbdist.planner import measurement_store, step_time, target_devices
from nbdist.session import planner
from nbdist.worker.operations import calibrate as calibration
from tests.conftest import eventually
from tests.e2e.training import value_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist.operations.calibrate import CalibrationReport

MIB = 1 << 20
FACTOR = 4.0
"""By which a collective may differ from one measured moments before: others compute here too."""
FRESH = """
import numpy, random, statistics, time

def fresh(size, rounds=9):
    tensor = torch.ones(size // 4)
    taken = []
    for _ in range(rounds):
        torch.distributed.barrier()
        since = time.perf_counter()
        torch.distributed.all_reduce(tensor, async_op=True).wait()
        taken.append(time.perf_counter() - since)
    return statistics.median(taken)

def state():
    found = torch.get_rng_state(), str(random.getstate()), str(numpy.random.get_state())
    groups = sorted(torch.distributed.distributed_c10d._world.pg_names.values())
    return [*map(str, found), hash(found[0].numpy().tobytes()), groups,
            torch.distributed.distributed_c10d._world.group_count,
            torch.is_grad_enabled(), torch.get_default_dtype()]
"""


LOOP = """
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=1000, hidden_size=128, intermediate_size=344, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=256, use_cache=False))
ids = torch.randint(0, 1000, (4, 64))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

def train(steps):
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

train(2)
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Two ranks and their kernel, where nothing was measured before."""
    with Session(nproc=2, precision="bf16") as session, pytest.MonkeyPatch.context() as patch:
        session.run(FRESH)
        # after the start: no other launcher is needed
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        session.run(f"import os; os.environ['XDG_CACHE_HOME'] = {os.environ['XDG_CACHE_HOME']!r}")
        yield session


class Calibrated(NamedTuple):
    """A calibration, and what it has left."""

    report: CalibrationReport
    is_state_same: dict[int, bool]
    new_names: dict[int, list[str]]
    files: list[Path]


@pytest.fixture(scope="module")
def calibrated(ranks: Session, tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    disk = tmp_path_factory.mktemp("disk")
    ranks.run("names = before = None\nnames, before = set(globals()), state()")
    report = ranks.calibrate(disk=disk)
    is_state_same = ranks.run("state() == before").values
    new_names = ranks.run("[name for name in set(globals()) - names if name[0] != '_']").values
    return Calibrated(report, is_state_same, new_names, list(disk.iterdir()))


@pytest.fixture(scope="module")
def measured(calibrated: Calibrated) -> CalibrationReport:
    return calibrated.report


def test_variables_random_numbers_groups_and_the_disk_stay_as_they_were(
    calibrated: Calibrated,
) -> None:
    assert calibrated.is_state_same == {0: True, 1: True}
    assert calibrated.new_names == {0: [], 1: []}
    assert calibrated.files == []


@pytest.mark.nightly
def test_each_collective_is_measured_at_four_sizes_and_its_latency(
    measured: CalibrationReport,
) -> None:
    for figures in measured.figures.values():
        assert set(figures["curves"]) == set(measurement_store.COLLECTIVES)
        for curve in figures["curves"].values():
            assert [size for size, _ in curve] == list(calibration.MESSAGE_BYTES)
            assert all(seconds > 0 for _, seconds in curve)
            assert curve[-1][1] > curve[0][1], "64 MiB take longer than 4 KiB"
        assert set(figures["products"]) == {"fp32", "bf16"}
        assert figures["disk"]["read"] > 0
        assert figures["disk"]["write"] > 0
    assert "all_reduce of 64 MiB" in str(measured)
    assert ">matrix products in bf16</td>" in measured._repr_html_()
    own = next(one for one in measured.lines if one.what == "elementwise kernels")
    slowest = min(one["memory"] for one in measured.figures.values())
    assert own.measured == f"{slowest / 1e9:.3g} GB/s"
    assert measured.figures[0]["disk"]["filesystem"] in str(measured)


def test_a_plan_is_another_one_then_and_says_so(
    ranks: Session, measured: CalibrationReport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = {"world_size": 2, "batch_size": 1, "seq_len": 64, "precision": "no"}
    after = nbdist.plan("124m", **arguments)
    assert "link, compute speed and disk measured here (" in str(after)
    words = nbdist.plan("124m", devices="2xcpu", **arguments)
    assert "link and compute speed from the catalogue" in str(words)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = nbdist.plan("124m", **arguments)
    assert "catalogue" in str(before)
    assert after.row("ddp").step_time_s != before.row("ddp").step_time_s
    assert measured.figures, "and it was measured by these ranks"
    assert ranks.world_size == len(measured.figures)
    ranks.run(
        "from nbdist.worker.engines import accelerator_patch as a, auto_strategy as auto\n"
        "cluster = auto.build_cluster_spec([2**30] * 2, a.current_config().hardware, ())"
    )
    assert value_of(ranks, "cluster.comm_measured_date"), "--auto uses it too"


@pytest.mark.alone
def test_a_collective_of_another_size_takes_about_as_long_as_planned(ranks: Session) -> None:
    ratios: dict[int, list[float]] = {4 * MIB: [], 32 * MIB: []}
    for _ in range(2):  # others compute on this machine meanwhile
        ranks.calibrate()
        for size, found in ratios.items():
            planned = step_time.collective_time_s(
                "all_reduce", size, target_devices.detect_local_cluster(2, kind="cpu")
            )
            found.append(value_of(ranks, f"fresh({size})") / planned)
    for found in ratios.values():
        assert 1 / FACTOR < statistics.geometric_mean(found) < FACTOR, ratios


@pytest.mark.nightly
def test_the_memory_is_given_back(ranks: Session) -> None:
    resident = "import psutil; psutil.Process().memory_info().rss"
    held = []
    for _ in range(3):  # what the allocator keeps for later differs by tens of MB
        ranks.calibrate()
        held.append(ranks.run(resident).values)
    first, second, last = held
    for rank in last:
        assert last[rank] - max(first[rank], second[rank]) < 32 * MIB, held


def test_a_folder_that_only_the_ranks_miss_is_refused_on_all_of_them(
    ranks: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "_check_disk", lambda _: None)  # as on other machines
    with pytest.raises(SessionError, match="No such file or directory"):
        ranks.calibrate(disk=tmp_path / "missing")
    assert value_of(ranks, "1 + 1") == 2, "and the ranks are in step"
    assert list(tmp_path.iterdir()) == []


def test_a_running_cell_is_not_disturbed(ranks: Session) -> None:
    ranks.run("import time\nwhile True: time.sleep(0.01)", background=True)
    with pytest.raises(SessionBusy):
        ranks.calibrate()
    ranks.interrupt()
    eventually(lambda: ranks.running is None, within_s=10)


def test_a_profile_teaches_the_planner_this_loop(ranks: Session) -> None:
    ranks.run(LOOP)
    before = planner.plan_model(ranks).row("ddp").cost
    ranks.run("train(6)", profile={"steps": 3, "memory": False})
    eventually(lambda: ranks.profiles, within_s=60)
    profile = ranks.profiles[-1]
    after = planner.plan_model(ranks).row("ddp").cost
    assert before is not None
    assert after is not None
    computing = profile.parts["forward"] + profile.parts["backward"]
    # the planner learns from the median of the ranks
    assert after.compute_s == pytest.approx(computing, rel=0.3)
    assert after.uncertainty < before.uncertainty
    device = target_devices.detect_local_cluster(2, kind="cpu").slowest_device
    assert device.loop_speeds["bf16"].runs == 1
    assert "compute speed" in str(planner.plan_model(ranks)).partition("measured here")[0]


@pytest.mark.nightly
@pytest.mark.usefixtures("own_cache")
def test_one_rank_alone_has_no_link_to_measure() -> None:
    with Session(nproc=1) as alone:
        figures = alone.calibrate().figures[0]
        assert figures["curves"] == {}
        assert figures["products"]["fp32"] > 0
        with pytest.raises(PlanError):
            planner.plan_model(alone)
    assert target_devices.detect_local_cluster(1, kind="cpu").comm_speed is None
