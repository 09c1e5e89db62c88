"""What would make a step faster: which changes, what they gain, and what they have gained."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.magics import arguments
from nbdist.planner.measurement_store import Measurement
from nbdist.planner.models import analytic
from nbdist.profiler.advice import MIN_GAIN, Advice
from nbdist.profiler.lint import LintFinding, read_training_cell
from nbdist.profiler.measurements import LineProfile, RankProfile
from tests.unit.profile_figures import BALANCED, LENGTH, SAMPLES, both, profile, rank, setting

if TYPE_CHECKING:
    from nbdist.profiler.dataloader_call import DataLoaderCall
    from nbdist.profiler.profile import Profile


pytestmark = pytest.mark.usefixtures("own_cache")


def titles(found: Profile) -> list[str]:
    return [one.title for one in found.advice]


def advised(found: Profile, title: str) -> Advice:
    return next(one for one in found.advice if one.title == title)


# ------------------------------------------------------------------------ changes of the cell


def test_a_slow_loader_gets_as_many_workers_as_hide_it() -> None:
    found = profile(*both(data=0.2))
    (one,) = found.advice
    assert one.title == "num_workers=4"
    assert one.line == "# DataLoader(..., num_workers=4, persistent_workers=True)"
    rest = found.step_s - 0.2
    assert one.gain.faster == pytest.approx(found.step_s / (rest + 0.1 * 0.2 / 4) - 1)
    assert one.gain.low < one.gain.faster < one.gain.high


TRAIN = """
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
WORKERS = "num_workers=4, persistent_workers=True"


def source_of(*cells: str) -> DataLoaderCall | None:
    found = read_training_cell([(f"In[{number}]", one) for number, one in enumerate(cells, 1)])
    assert found is not None
    return found.loader


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        (
            "loader = accelerator.prepare(DataLoader(rows, 8, num_workers=0))",
            f"loader = accelerator.prepare(DataLoader(rows, batch_size=8, {WORKERS}))",
        ),
        (
            "data = torch.utils.data.DataLoader(rows)\nnet, loader = one.prepare(net, data)",
            f"loader = one.prepare(torch.utils.data.DataLoader(rows, {WORKERS}))",
        ),
        ("loader = DataLoader(rows)", f"loader = DataLoader(rows, {WORKERS})"),
        (
            "def build():\n    loader = DataLoader(rows)\n    return loader\nloader = build()",
            f"# In[1], line 2: DataLoader(..., {WORKERS})",
        ),
        ("loader = DataLoader(rows, **options)", f"# DataLoader(..., {WORKERS})"),
    ],
)
def test_the_line_for_a_loader_runs_as_it_is_or_is_an_instruction(cell: str, line: str) -> None:
    (one,) = profile(*both(data=0.2), loader_text=source_of(cell, TRAIN)).advice
    assert one.line == line
    ast.parse(one.line)


def test_the_line_for_a_larger_batch_is_that_of_the_loader() -> None:
    source = source_of("loader = accelerator.prepare(DataLoader(rows, 8))", TRAIN)
    found = profile(*both(communication=0.3), loader_text=source)
    one = next(one for one in found.advice if "micro_batch" in one.change)
    size = one.change["micro_batch"]
    assert one.line == f"loader = accelerator.prepare(DataLoader(rows, batch_size={size}))"


def test_the_loader_of_a_trainer_is_changed_in_its_arguments() -> None:
    setup = "args = TrainingArguments(output_dir='out')\ntrainer = Trainer(model, args)"
    (one,) = profile(*both(data=0.2), loader_text=source_of(setup, "trainer.train()")).advice
    assert one.line == (
        "# In[1], line 1: TrainingArguments(..., dataloader_num_workers=4,"
        " dataloader_persistent_workers=True)"
    )
    assert "(In[1], line 1)" in one.why


def test_a_loader_that_waits_gets_more_workers_than_there_are_cores() -> None:
    found = profile(*both(data=0.2, loader={"fetch_s": 0.2, "fetch_cpu_s": 0.01}))
    (one,) = found.advice
    assert one.title == "num_workers=4"
    assert one.why.endswith("They wait more than they compute, so 4 workers are fine on 2 cores.")


@pytest.mark.parametrize(("cores", "advised"), [(2, []), (8, ["num_workers=2"])])
def test_a_loader_that_computes_gets_no_more_workers_than_cores(
    cores: int, advised: list[str]
) -> None:
    where = setting()
    where = replace(where, cluster=replace(where.cluster, num_cpus=cores))
    computes = {"fetch_s": 0.2, "fetch_cpu_s": 0.19}
    found = profile(*both(data=0.2, loader=computes), where=where)
    assert titles(found) == advised
    assert found.bound == "input"
    assert found.verdict.endswith("gains 5 %") == (not advised)


def test_the_straggler_s_own_line_is_named() -> None:
    own = sum(BALANCED.values()) - BALANCED["communication"]
    line = LineProfile(cell="In[2]", line=4, source="time.sleep(0.03)", seconds=0.3 * own)
    waits = rank(0, communication=BALANCED["communication"] + 0.3 * own)
    slow = replace(rank(1, idle=0.3 * own), lines=[line])
    (one,) = profile(waits, slow).advice
    assert "In[2], line 4: time.sleep(0.03)" in one.why
    assert one.gain.faster == pytest.approx(0.27, abs=0.02)


def test_a_line_is_advised_with_the_words_of_the_lint() -> None:
    line = LineProfile(cell="In[3]", line=12, source="total += loss.item()", seconds=0.04)
    remark = LintFinding(
        kind="sync",
        cell="In[3]",
        line=12,
        source="total += loss.item()",
        reason="`.item()` waits for the device in every step.",
        change="total += loss.detach()",
        sure="certain",
    )
    ranks = [replace(one, lines=[line]) for one in both(python=0.045)]
    found = profile(*ranks, remarks=[remark])
    one = advised(found, "In[3], line 12")
    assert one.line == "# In[3], line 12: total += loss.detach()"
    assert one.why == "`.item()` waits for the device in every step."
    assert one.gain.faster == pytest.approx(found.step_s / (found.step_s - 0.04) - 1)
    assert "in the code" not in str(found)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("time.sleep(0.04)", "do this less often or outside of the loop"),
        ("for batch in batches(" + "rows, " * 20 + "):", "the workers of a DataLoader can prepare"),
        ("loss.backward(); optimizer.step()", "to a separate line and profile again"),
    ],
)
def test_a_slow_line_gets_an_instruction_and_no_code(source: str, words: str) -> None:
    line = LineProfile(cell="In[3]", line=12, source=source, seconds=0.04)
    found = profile(*[replace(one, lines=[line]) for one in both(python=0.045)])
    one = advised(found, "In[3], line 12")
    assert one.line.startswith("# In[3], line 12: ")
    assert words in one.line
    assert "step %" not in str(found)


@pytest.mark.parametrize(("used", "credited"), [(1, False), (2, False), (4, True), (8, True)])
def test_fewer_workers_than_advised_are_not_credited_to_the_advice(
    used: int, *, credited: bool
) -> None:
    before = profile(*both(data=0.2))
    assert titles(before) == ["num_workers=4"]
    after = profile(*both(data=0.1, loader={"num_workers": used}), before=before)
    assert bool(after.advice_outcome) == credited


def test_copies_on_a_gpu_get_page_locked_memory() -> None:
    ranks = both(kind="cuda", copies=0.04)
    found = profile(*ranks, where=setting("2xH100-80GB,nvlink"))
    assert "pin_memory=True" in titles(found)
    pinned = [replace(one, loaders=[replace(one.loaders[0], pin_memory=True)]) for one in ranks]
    again = profile(*pinned, where=setting("2xH100-80GB,nvlink"))
    assert "pin_memory=True" not in titles(again)


# ---------------------------------------------------------------------- changes of the engine


def test_a_slow_link_is_shared_by_larger_batches() -> None:
    found = profile(*both(communication=0.3))
    kinds = [next(iter(one.change)) for one in found.advice]
    assert kinds == ["micro_batch", "options"]
    assert all(one.gain.faster > 1 for one in found.advice)
    assert advised(found, titles(found)[1]).changes == {"accumulate": 8}


@pytest.mark.parametrize(
    "tiny", [{"optimizer": 0.037}, {"communication": 0.027, "python": 0.018, "optimizer": 0.025}]
)
def test_a_tiny_batch_without_one_large_cause_gets_a_larger_one(tiny: dict[str, float]) -> None:
    found = profile(*both(**tiny))
    assert found.bottlenecks == ()
    assert found.bound == "compute"
    (one,) = found.advice
    assert "micro_batch" in one.change
    assert found.verdict.startswith("compute-bound: ")
    assert "nothing cheap" not in found.verdict


def small_units(**changes: Any) -> list[RankProfile]:
    """FSDP on CPU ranks gathers many units: 20 % of the step, hidden by nothing."""
    model = {"backend": "fsdp2", "units": 5, "largest_unit": 1 << 18}
    ranks = both(communication=0.027, collective="all_gather", model=model | changes)
    return [replace(one, traffic=[replace(one.traffic[0], count=10)]) for one in ranks]


def test_fsdp_s_gathers_are_shared_by_more_samples_before_they_are_blamed() -> None:
    found = profile(*small_units(), where=setting(backend="fsdp2"))
    assert found.bottlenecks == ()
    assert {next(iter(one.change)) for one in found.advice} == {"micro_batch", "options"}
    assert "nothing cheap" not in found.verdict
    quiet = [replace(one, traffic=[]) for one in small_units()]
    assert profile(*quiet, where=setting(backend="fsdp2")).verdict.endswith("nothing cheap to gain")


def test_gathers_that_no_known_change_shares_are_not_denied() -> None:
    where = replace(setting(backend="fsdp2"), model_spec=None)
    assert profile(*small_units(), where=where).verdict == (
        "compute-bound, but 20 % of the step is communication; none of the known changes gains 5 %"
    )


@pytest.mark.parametrize("share", [0.09, 0.12])
def test_the_planted_control_gets_no_larger_batch(share: float) -> None:
    computing = 0.09 / (1 - share - 0.06 - 0.04)
    parts = {"optimizer": share, "communication": 0.06, "python": 0.02, "data": 0.02}
    found = profile(*both(**{part: one * computing for part, one in parts.items()}))
    assert found.verdict == "compute-bound, nothing cheap to gain"


def test_a_link_that_was_measured_on_another_day_does_not_favour_another_engine() -> None:
    small, large = str(1 << 16), str(1 << 24)
    curves = {
        "all_reduce": {small: 0.1, large: 10.0},
        "all_gather": {small: 1e-4, large: 1e-3},
    }
    fast_gathers = {
        name: Measurement(values=curve, day="2026-01-01") for name, curve in curves.items()
    }
    where = setting()
    where = replace(where, cluster=replace(where.cluster, comm_speed=fast_gathers))
    found = profile(*both(communication=0.3), where=where)
    assert titles(found) == titles(profile(*both(communication=0.3)))


def test_a_batch_that_does_not_fit_is_not_advised() -> None:
    ranks = both(kind="cuda", communication=0.3, model={"samples": 16, "seq_len": 4096})
    where = replace(
        setting("2xA100-40GB,pcie", precision="bf16"),
        model_spec=analytic.spec_from_parameter_count("1b"),
    )
    assert not [one for one in profile(*ranks, where=where).advice if "micro_batch" in one.change]


def test_gpus_connected_by_pcie_get_advice_to_communicate_less() -> None:
    model = {"backend": "zero3", "samples": 1, "seq_len": 512, "accumulate": 4}
    ranks = both(
        kind="cuda",
        forward=0.3,
        backward=0.6,
        communication=3.0,
        collective="all_gather",
        model=model,
    )
    where = replace(
        setting("2xH100-80GB,pcie", backend="zero3", precision="bf16"),
        model_spec=analytic.spec_from_parameter_count("3b"),
    )
    found = profile(*ranks, where=where)
    assert any("backend" in one.changes for one in found.advice)
    assert any(one.line.startswith("%nbdist switch ") for one in found.advice)


def test_an_offload_that_is_not_needed_is_left_out() -> None:
    ranks = both(
        kind="cuda", optimizer=0.5, offload=0.3, forward=0.1, backward=0.2, model={"seq_len": 512}
    )
    where = replace(
        setting("2xH100-80GB,nvlink", backend="zero2", precision="bf16", offload="cpu"),
        model_spec=analytic.spec_from_parameter_count("1b"),
    )
    found = profile(*ranks, where=where)
    one = advised(found, "offload none")
    assert one.line == "%nbdist switch --offload none"
    assert one.changes == {"offload": "none"}
    assert one.gain.faster > 1


def test_an_offload_that_memory_needs_is_kept() -> None:
    ranks = both(kind="cuda", optimizer=0.5, offload=0.3, model={"seq_len": 512, "samples": 1})
    where = setting("2xA100-40GB,pcie", backend="zero2", precision="bf16", offload="cpu")
    assert "offload none" not in titles(profile(*ranks, where=where))


def test_activation_checkpointing_that_memory_does_not_need_is_switched_off() -> None:
    where = setting(activation_checkpointing=True)
    found = profile(*both(), where=where)
    (one,) = found.advice
    assert one.line == "%nbdist switch --no-activation-checkpointing"
    assert one.gain.faster == pytest.approx(0.25, abs=0.08)
    assert found.verdict == "compute-bound: 78 % of the step is forward and backward"


def test_full_precision_on_tensor_cores_gets_bf16() -> None:
    model = {"samples": 1, "seq_len": 2048}
    ranks = both(kind="cuda", forward=0.3, backward=0.6, model=model)
    where = replace(
        setting("2xH100-80GB,nvlink"), model_spec=analytic.spec_from_parameter_count("1b")
    )
    found = profile(*ranks, where=where)
    assert advised(found, "bf16").line == "%nbdist switch --precision bf16"
    assert advised(found, "bf16").gain.faster > 1


def test_one_unit_on_cpu_ranks_is_advised_for_its_memory_and_says_what_it_costs() -> None:
    model = {"backend": "fsdp2", "units": 1, "largest_unit": 1 << 20}
    ranks = both(communication=0.03, collective="all_gather", model=model)
    found = profile(*ranks, where=setting(backend="fsdp2"))
    one = advised(found, "FSDP units")
    step_s = found.step_s
    assert one.gain.faster == pytest.approx(step_s / (step_s + 0.03 * 7 / 8) - 1)
    assert one.gain.low < one.gain.faster < 0
    assert one.gain_text == "reduces the peak memory by 3.5 MiB, and is about 16 % slower"
    assert '"min_num_params": 131072' in one.line


def test_a_loop_that_accumulates_by_hand_gets_no_advice_about_it() -> None:
    model = {"accumulate": 4}
    by_engine = profile(*both(communication=0.05, model=model), where=setting(accumulate=4))
    by_hand = profile(*both(communication=0.05, model=model), where=setting())
    assert any("accumulate" in title for title in titles(by_engine))
    assert not any("accumulate" in title for title in titles(by_hand))


@pytest.mark.parametrize(
    "changes",
    [
        {"communication": 0.3},
        {"optimizer": 0.2},
        {"data": 0.1, "communication": 0.2},
        {"python": 0.1},
        {"idle": 0.1, "communication": 0.1},
    ],
)
def test_at_most_three_are_advised_the_one_that_gains_most_first(changes: dict[str, Any]) -> None:
    found = profile(*both(**changes))
    gains = [one.gain.faster for one in found.advice]
    assert gains == sorted(gains, reverse=True)
    assert len(gains) <= 3
    assert all(gain >= MIN_GAIN for gain in gains)


def test_every_line_to_switch_is_one_that_the_magic_takes() -> None:
    seen = set()
    cases = [
        (both(communication=0.3), setting()),
        (both(), setting(activation_checkpointing=True)),
        (both(optimizer=0.5, kind="cuda"), setting("2xH100-80GB,nvlink", backend="fsdp2")),
        (both(communication=0.5, kind="cuda"), setting("8xH100-80GB,nvlink", backend="fsdp2")),
        (
            both(communication=0.1, model={"units": 1, "largest_unit": 1 << 20}),
            setting(backend="fsdp2"),
        ),
    ]
    for ranks, where in cases:
        for one in profile(*ranks, where=replace(where, model_spec=setting().model_spec)).advice:
            if one.changes:
                line = one.line.removeprefix("%nbdist switch ")
                asked = arguments.PARSERS["switch"].parse_args(arguments.split_line(line, "switch"))
                for name, value in one.changes.items():
                    given = getattr(asked, name)
                    assert given == value or "{" in str(given)
                    seen.add(name)
    assert {"accumulate", "activation_checkpointing", "fsdp_config"} <= seen


# ------------------------------------------------------------------------- what was gained


def test_workers_that_were_added_are_reported_with_their_gain() -> None:
    before = profile(*both(data=0.2))
    after = profile(*both(data=0.02, loader={"num_workers": 4}), before=before)
    measured = before.step_s / after.step_s
    assert after.advice_outcome == (
        f"num_workers=4: predicted 2.7 times as fast, measured {measured:.1f} times as fast"
    )
    assert str(after).splitlines()[1].strip() == after.advice_outcome


def test_a_switch_that_was_made_is_reported() -> None:
    checkpointed = setting(activation_checkpointing=True)
    before = profile(*both(), where=checkpointed)
    after = profile(*both(forward=0.02, backward=0.045), before=before)
    assert (
        after.advice_outcome == "activation checkpointing off: predicted 19 % faster, measured 28 %"
    )


def test_a_larger_batch_is_compared_per_sample() -> None:
    before = profile(*both(communication=0.3))
    size = before.advice[0].change["micro_batch"]
    times = size // SAMPLES
    after = profile(
        *both(
            communication=0.3,
            forward=0.03 * times,
            backward=0.06 * times,
            model={"samples": size},
        ),
        before=before,
    )
    assert f"micro-batch {size}: predicted" in after.advice_outcome
    assert "times as fast, measured" in after.advice_outcome
    assert after.tokens_per_s == pytest.approx(2 * size * LENGTH / after.step_s)


def test_advice_that_was_not_followed_is_not_reported() -> None:
    before = profile(*both(data=0.2))
    assert profile(*both(data=0.2), before=before).advice_outcome == ""
    assert profile(*both(), before=profile(*both())).advice_outcome == ""


@pytest.mark.parametrize("other", [{"params": 5}, {"seq_len": 32}, {"samples": 1}])
def test_another_model_or_batch_is_not_compared(other: dict[str, int]) -> None:
    before = profile(*both(data=0.2))
    after = profile(*both(loader={"num_workers": 4}, model=other), before=before)
    assert after.advice_outcome == ""


def test_a_line_or_straggler_that_disappeared_is_not_followed_advice() -> None:
    line = LineProfile(cell="In[3]", line=12, source="x = loss.item()", seconds=0.04)
    before = profile(*[replace(one, lines=[line]) for one in both(python=0.045)])
    assert before.advice
    assert profile(*both(), before=before).advice_outcome == ""

    own = sum(BALANCED.values()) - BALANCED["communication"]
    waits = rank(0, communication=BALANCED["communication"] + 0.3 * own)
    before = profile(waits, rank(1, backward=BALANCED["backward"] + 0.3 * own))
    assert before.advice
    assert profile(*both(), before=before).advice_outcome == ""
