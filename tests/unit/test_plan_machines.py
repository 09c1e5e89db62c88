"""Which machine is enough: `nbdist.plan(model, devices="any")`."""

from __future__ import annotations

from typing import Any

import pytest

import nbdist
from nbdist.errors import PlanError
from nbdist.magics import arguments, results
from nbdist.planner.result import MachinePlan

SEQ_LEN = 512


@pytest.fixture(scope="module")
def seven_b() -> MachinePlan:
    return nbdist.plan("7b", devices="any", seq_len=SEQ_LEN)


def test_each_machine_is_the_smallest_that_fits(seven_b: MachinePlan) -> None:
    for machine in seven_b.machines:
        cluster = machine.question.cluster
        assert machine.row.fits
        if cluster.num_nodes == 1 and cluster.world_size > 1:
            half = cluster.with_num_ranks(cluster.world_size // 2)
            precision = machine.question.precision
            smaller = nbdist.plan(
                "7b", devices=half, seq_len=SEQ_LEN, offload="none", precision=precision
            )
            assert smaller.best is None
    assert not any(machine.row.options.offload != "none" for machine in seven_b.machines)


def test_machines_are_sorted_by_gpu_hours(seven_b: MachinePlan) -> None:
    hours = [machine.gpu_hours for machine in seven_b.machines]
    assert hours == sorted(hours)
    machine = seven_b.machines[0]
    tokens = machine.row.tokens_per_s * 3600 * machine.gpu_hours / machine.question.world_size
    assert tokens == pytest.approx(1e9)


def test_a_gpu_without_bf16_is_planned_in_fp16() -> None:
    plan = nbdist.plan("350m", devices="any", only=["T4", "L4"], seq_len=SEQ_LEN)
    precisions = {
        machine.question.cluster.describe(): machine.question.precision for machine in plan.machines
    }
    assert precisions == {"1 x T4-16GB": "fp16", "1 x L4-24GB": "bf16"}


def test_gpus_that_are_too_small_are_named_in_text_and_html() -> None:
    plan = nbdist.plan("70b", devices="any", max_nodes=1, only="T4,B200", seq_len=SEQ_LEN)
    for shown in (str(plan), plan._repr_html_()):
        assert "does not fit on one node of eight: T4-16GB" in shown
        assert "8 x B200-180GB, nvlink" in shown
        assert "GPU-hours per 1e9 tokens" in shown


def test_the_command_takes_the_same_arguments() -> None:
    line = '7b --devices any --max-nodes 2 --only "T4,A10" --seq-len 512'
    options = arguments.PARSERS["plan"].parse_args(arguments.split_line(line, "plan"))
    plan = results.run_plan_command(options, {}, None)
    assert isinstance(plan, MachinePlan)
    assert plan.max_nodes == 2
    names = {machine.question.cluster.smallest_device.name for machine in plan.machines}
    assert names == {"T4-16GB", "A10-24GB"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"devices": "any", "only": "T4,Potato"}, "Unknown GPU 'Potato'"),
        ({"devices": "any", "only": ""}, "only must name GPUs"),
        ({"devices": "any", "only": 4}, "only must name GPUs"),
        ({"devices": "any", "max_nodes": 0}, "max_nodes must be an integer from 1 .*, got 0"),
        ({"devices": "any", "max_nodes": 10**6}, "Too many devices in 'max_nodes 1000000'"),
        ({"devices": "any", "world_size": 4}, "world_size is searched"),
        ({"devices": "2x24GB", "only": "T4"}, 'only need devices="any"'),
    ],
)
def test_bad_arguments_are_one_sentence(given: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        nbdist.plan("7b", **given)
    assert "\n" not in str(caught.value)
