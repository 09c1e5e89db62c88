from __future__ import annotations

import pytest
from IPython.core.error import UsageError

from nbdist.errors import PlanError
from nbdist.magics import arguments, results
from nbdist.planner.result import Plan
from tests.unit import model_configs


def run(line: str, **names: object) -> object:
    options = arguments.PARSERS["plan"].parse_args(arguments.split_line(line, "plan"))
    return results.run_plan_command(options, names, None)


def planned(line: str, **names: object) -> Plan:
    answer = run(line, **names)
    assert isinstance(answer, Plan)
    return answer


def test_a_size_and_devices_in_words() -> None:
    plan = planned("7b --devices 8xA100-80GB,nvlink --batch-size 1,2 --seq-len 1024")
    assert plan.question.batch_sizes == (1, 2)
    assert (plan.question.seq_len, plan.question.world_size) == (1024, 8)


def test_options_of_the_line_are_fixed() -> None:
    plan = planned(
        "1b --devices 2x24GB --precision fp16 --optimizer sgd --offload nvme --accumulate 4"
        " --activation-checkpointing -n 4"
    )
    fixed = plan.question.fixed_options
    assert fixed == {
        "offload": "nvme:PATH",
        "activation_checkpointing": True,
        "accumulate": 4,
    }
    assert (plan.question.precision, plan.question.optimizer.name) == ("fp16", "sgd")
    assert plan.question.world_size == 4


def test_adapters_of_a_quantized_model() -> None:
    plan = planned(
        "8b --devices 2x24GB --lora 16 --target-modules q_proj,v_proj --quantize nf4"
        " --optimizer muon"
    )
    assert (plan.question.model.name, plan.question.optimizer.name) == (
        "llama, 8.04B parameters",
        "muon",
    )
    refused = plan.row("zero3")
    assert not refused.fits
    assert refused.why == (
        "muon cannot step parameters that zero3 shards. Use ddp, fsdp2 or another optimizer."
    )


def test_a_variable_of_the_notebook() -> None:
    shape = model_configs.gpt2(64, 2, 4, 100, n_positions=128)
    plan = planned("shape --devices 2x24GB", shape=shape)
    assert plan.question.seq_len == 128
    assert plan.question.model.name.startswith("gpt2")


@pytest.mark.parametrize("line", ["", "--check"])
def test_without_a_session_it_says_what_can_be_planned(line: str) -> None:
    with pytest.raises(PlanError, match=r"no session .* %nbdist plan 7b"):
        run(line)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("7b --batch-size 1,x", "--batch-size must be a list of integers"),
        ("7b --batch 1 --what", "what"),
        ("7b --precision int3", "int3"),
        ('7b "', "quotation"),
    ],
)
def test_a_line_that_cannot_be_read(line: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run(line)
