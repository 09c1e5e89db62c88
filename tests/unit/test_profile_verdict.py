"""Each planted bottleneck is named, and nothing is blamed in a run that has none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.profiler.measurements import LineProfile, OperatorStats, RankProfile
from tests.unit.profile_figures import BALANCED, BEGAN, both, noisy, profile, rank, setting

if TYPE_CHECKING:
    from nbdist.profiler.profile import Profile


pytestmark = pytest.mark.usefixtures("own_cache")


def slow_rank(part: str = "backward", by: float = 0.3, **more: Any) -> list[RankProfile]:
    """Rank 1 does its own work so much slower; rank 0 waits in the collective."""
    own = sum(BALANCED.values()) - BALANCED["communication"]
    lost = by * own
    waits = rank(0, communication=BALANCED["communication"] + lost, **more)
    return [waits, rank(1, **more, **{part: BALANCED.get(part, 0.0) + lost})]


def one_unit(**more: Any) -> list[RankProfile]:
    """FSDP gathers the whole model at once."""
    model = {"backend": "fsdp2", "units": 1, "largest_unit": 1 << 20}
    return both(communication=0.03, collective="all_gather", model=model, **more)


def with_line(source: str, seconds: float, **parts: float) -> list[RankProfile]:
    """Both ranks were so long on a line of the cell."""
    line = LineProfile(cell="In[3]", line=12, source=source, seconds=seconds)
    return [replace(one, lines=[line]) for one in both(**parts)]


# ------------------------------------------------------------------------ what is planted


def test_a_loader_of_200_ms_is_input_bound() -> None:
    found = profile(*both(data=0.2))
    assert found.verdict == (
        "input-bound: 64 % of the step waits for the next batch (num_workers=0)"
    )
    assert kinds(found) == ["input"]


def test_a_rank_that_is_30_percent_slower_is_named_with_what_the_others_wait() -> None:
    found = profile(*slow_rank())
    assert found.straggler == 1
    assert found.verdict == (
        "rank 1 is 30 % slower: the other rank waits 22 % of the step; most of the extra time is in"
        " the backward"
    )
    assert kinds(found) == ["straggler"]


@pytest.mark.parametrize("part", ["data", "python", "idle", "optimizer", "copies"])
def test_what_the_slow_rank_alone_does_is_not_blamed_on_all(part: str) -> None:
    found = profile(*slow_rank(part))
    assert kinds(found) == ["straggler"]
    assert found.straggler_details is not None
    assert found.straggler_details.slowest_part == part


def test_a_rank_that_reads_the_batches_of_all_is_input_bound() -> None:
    # accelerate reads an IterableDataset on rank 0 and sends the batches out
    waits, reads = slow_rank("data", by=2.0)
    waits.loaders = []
    found = profile(waits, reads)
    data = reads.parts["data"]
    assert found.straggler is None
    assert kinds(found) == ["input"]
    assert found.bottlenecks[0].step_share == pytest.approx(data / found.step_s)
    assert found.verdict.endswith(
        "of the step waits for the next batch (num_workers=0), which rank 1 reads for all ranks"
    )
    workers, *_ = found.advice
    assert workers.title.startswith("num_workers=")
    assert workers.gain.faster > 1
    assert "get_worker_info" in workers.why


def test_a_model_wrapped_as_one_unit_is_said_with_its_collective() -> None:
    found = profile(*one_unit(), where=setting(backend="fsdp2"))
    assert found.verdict == (
        "communication-bound: 22 % of the step waits for all_gather;"
        " the model is one FSDP unit, so nothing is prefetched"
    )
    assert kinds(found) == ["communication"]


def test_a_unit_that_has_nearly_all_parameters_is_as_bad_as_one() -> None:
    model = {"backend": "fsdp2", "units": 4, "largest_unit": 1_000_000}
    ranks = both(communication=0.03, collective="all_gather", model=model)
    where = setting(backend="fsdp2")
    assert "; one FSDP unit has 95 % of the model" in profile(*ranks, where=where).verdict
    cut = both(communication=0.03, model=model | {"largest_unit": 1 << 18})
    assert profile(*cut, where=where).bottlenecks == ()


def test_a_tiny_batch_on_a_slow_link_is_communication_bound() -> None:
    found = profile(*both(communication=0.3))
    assert found.verdict == (
        "communication-bound: 74 % of the step waits for all_reduce; the loopback"
    )
    assert kinds(found) == ["communication"]


def test_the_link_between_gpus_is_named() -> None:
    ranks = both(kind="cuda", communication=0.3, collective="all_gather")
    found = profile(*ranks, where=setting("2xA100-80GB,pcie", backend="fsdp2"))
    assert found.verdict.endswith("waits for all_gather; PCIe")


def test_an_offloaded_optimizer_is_said_to_be_offloaded() -> None:
    found = profile(
        *both(optimizer=0.06, offload=0.03), where=setting(backend="zero2", offload="cpu")
    )
    assert found.verdict == (
        "optimizer-bound (offloaded): 46 % of the step is the optimizer on the CPU and transfers"
        " to and from host memory"
    )
    assert kinds(found) == ["offload"]


def test_an_item_in_every_step_is_host_bound_at_its_line() -> None:
    found = profile(*with_line("total += loss.item()", 0.04, python=0.045))
    assert found.verdict == (
        "host-bound: 29 % of the step is Python code of the cell; most of it at In[3], line 12:"
        " total += loss.item()"
    )
    assert kinds(found) == ["host"]


def test_one_line_is_blamed_below_the_share_that_all_python_needs() -> None:
    assert kinds(profile(*both(python=0.02))) == []
    assert kinds(profile(*with_line("x = loss.item()", 0.018, python=0.02))) == ["host"]


def test_a_line_that_computes_is_not_taken_for_python() -> None:
    assert kinds(profile(*with_line("accelerator.backward(loss)", 0.06))) == []


def test_a_gpu_that_waits_for_launches_is_host_bound() -> None:
    found = profile(*both(kind="cuda", idle=0.05), where=setting("2xH100-80GB,nvlink"))
    assert found.bound == "host"
    assert "idle time" in found.verdict


def test_copies_to_the_device_are_distinguished_from_waiting_for_batches() -> None:
    found = profile(*both(kind="cuda", copies=0.04), where=setting("2xH100-80GB,nvlink"))
    assert found.verdict == "input-bound: 26 % of the step copies batches to the device"


def test_elementwise_kernels_on_a_gpu_are_memory_bound() -> None:
    kernels = [
        OperatorStats(name="vectorized_elementwise_kernel", count=100, seconds=0.07),
        OperatorStats(name="nvjet_hsh_128x128_mm", count=30, seconds=0.02),
    ]
    ranks = [replace(one, operators=kernels) for one in both(kind="cuda")]
    slow = setting("2xH100-80GB,nvlink", precision="bf16")
    tiny = replace(slow, model_spec=setting().model_spec)
    found = profile(*ranks, where=tiny)
    assert found.bound == "memory"
    assert found.mfu is not None
    assert profile(
        *ranks, where=replace(tiny, options=replace(tiny.options, compile=True))
    ).bound == ("compute")


# ------------------------------------------------------------------------ control runs


@pytest.mark.parametrize("seed", range(300))
def test_noise_is_never_blamed(seed: int) -> None:
    found = profile(*noisy(seed))
    assert found.bottlenecks == ()
    assert found.verdict == "compute-bound, nothing cheap to gain"
    assert found.advice == ()


@pytest.mark.parametrize("by", [0.0, 0.05, 0.1])
def test_a_rank_that_is_a_little_slower_is_not_named(by: float) -> None:
    assert profile(*slow_rank(by=by)).bottlenecks == ()


def test_ranks_that_take_turns_in_being_late_are_no_stragglers() -> None:
    first = rank(0, communication=0.05, backward=0.08, late=[0.0, 0.04] * 4)
    second = rank(1, communication=0.05, backward=0.08, late=[0.04, 0.0] * 4)
    assert profile(first, second).straggler is None


@pytest.mark.parametrize(("steps", "named"), [(2, None), (4, None), (5, 1)])
def test_few_steps_name_no_straggler(steps: int, named: int | None) -> None:
    assert profile(*slow_rank(by=0.9, steps=steps)).straggler == named


def test_a_step_without_a_largest_part_says_its_largest_parts() -> None:
    found = profile(*both(optimizer=0.05, communication=0.05, python=0.035, data=0.022))
    assert found.verdict.startswith("no single bottleneck: backward")
    assert found.bound == "mixed"


# ------------------------------------------------------------------------ ranks compared


def test_waiting_is_what_lies_before_the_last_rank_came() -> None:
    waits, slow = profile(*slow_rank()).ranks
    lost = 0.3 * (sum(BALANCED.values()) - BALANCED["communication"])
    assert waits.parts["waiting"] == pytest.approx(lost, rel=1e-3)
    assert waits.parts["communication"] == pytest.approx(BALANCED["communication"], rel=1e-3)
    assert slow.parts["waiting"] == 0
    assert sum(waits.parts.values()) == pytest.approx(waits.step_s)
    assert waits.traffic[0].waiting_s == pytest.approx(lost, rel=1e-3)
    assert waits.traffic[0].bandwidth == pytest.approx(slow.traffic[0].bandwidth, rel=1e-2)


def test_windows_that_begin_a_step_apart_are_matched() -> None:
    waits, slow = slow_rank()
    slow.ends, slow.begins["0"] = slow.ends[1:], slow.begins["0"][1:]
    assert profile(waits, slow).straggler == 1


def test_collectives_that_cannot_be_matched_leave_all_of_it_communication() -> None:
    first, other = slow_rank()
    other.begins["0"] = [[BEGAN - 1e4 + at, 0.001] for at in range(8)]
    found = profile(first, other)
    assert all(one.parts["waiting"] == 0 for one in found.ranks)
    assert "could not be matched" in found.notes[0]


def test_time_that_computation_overlaps_is_not_waiting() -> None:
    # of 100 ms, the last 10 are exposed; the last rank came after 50
    early, late = rank(0, communication=0.01), rank(1, communication=0.01)
    early.begins["0"] = [[end - 0.1, 0.01, 0.1] for end in early.ends[1:]]
    late.begins["0"] = [[end - 0.05, 0.01, 0.05] for end in late.ends[1:]]
    assert all(one.parts["waiting"] == 0 for one in profile(early, late).ranks)


def test_waiting_at_the_start_is_distinguished_from_communication_at_the_end() -> None:
    # of 100 ms, the first 40 look for the other rank and the last 10 wait for the backend
    early, late = rank(0, communication=0.05), rank(1, communication=0.01)
    spans = [0.0, 0.04, 0.09, 0.1]
    early.begins["0"] = [[end - 0.1, 0.05, 0.1, *spans] for end in early.ends[1:]]
    late.begins["0"] = [[end - 0.06, 0.01, 0.06, 0.05, 0.06] for end in early.ends[1:]]
    first, second = profile(early, late).ranks
    assert first.parts["waiting"] == pytest.approx(0.04, rel=1e-3)
    assert first.parts["communication"] == pytest.approx(0.01, rel=1e-2)
    assert second.parts["waiting"] == 0


def test_of_many_ranks_the_slow_one_is_found() -> None:
    waits, slow = slow_rank()
    ranks = [replace(waits, rank=number) for number in range(64)]
    ranks[41] = replace(slow, rank=41)
    found = profile(*ranks)
    assert found.verdict.startswith("rank 41 is 30 % slower: the others wait 22 %")
    assert kinds(found) == ["straggler"]


def test_a_note_of_one_rank_names_it() -> None:
    first, second = both()
    second.notes = ["No kernels were seen."]
    assert profile(first, second).notes == ["rank 1: No kernels were seen."]
    first.notes = ["No kernels were seen."]
    assert profile(first, second).notes == ["No kernels were seen."]


def kinds(found: Profile) -> list[str]:
    return [blame.kind for blame in found.bottlenecks]
