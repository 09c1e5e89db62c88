"""Closed forms: parameter counts of published models, bytes that were measured, bad configs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.errors import PlanError
from nbdist.planner import build_model_spec, model_spec
from nbdist.planner.model_spec import Workload
from nbdist.planner.models import analytic
from tests.unit import model_configs
from tests.unit import published_runs as runs

if TYPE_CHECKING:
    from nbdist.planner.model_spec import (
        ComputeMode,
        LayerActivations,
        MicroBatchActivations,
        ModelSpec,
    )

LLAMA = model_configs.llama(64, 176, 2, 4, 2, 100, head_dim=16)
GPT2 = model_configs.gpt2(64, 2, 4, 100)

# Fields of the published config.json files; counts as the model cards' safetensors have them.
PUBLISHED: dict[str, tuple[ModelSpec, int]] = {
    "Llama-2-7B": (runs.LLAMA_7B, 6_738_415_616),
    "Llama-3-8B": (runs.LLAMA3_8B, 8_030_261_248),
    "Llama-3-70B": (runs.LLAMA3_70B, 70_553_706_496),
    "Mistral-7B-v0.1": (
        runs.llama(4096, 14336, 32, 32, 8, 32000, model_type="mistral"),
        7_241_732_096,
    ),
    "Qwen2-0.5B": (
        runs.llama(896, 4864, 24, 14, 2, 151936, model_type="qwen2", tie_word_embeddings=True),
        494_032_768,
    ),
    "GPT-2": (runs.GPT2_SMALL, 124_439_808),
    "GPT-2 XL": (runs.GPT2_XL, 1_557_611_200),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name: str) -> None:
    model, count = PUBLISHED[name]
    assert model_spec.num_params(model) == count


# Bytes that one block keeps, and the most that its backward holds with gradients, for two
# samples of 64 tokens; traced with torch 2.13 and transformers 5.23 on fake CPU tensors.
MEASURED: list[tuple[dict[str, Any], ComputeMode, str, int, int]] = [
    (LLAMA, "half", "sdpa", 363_520, 492_544),
    (LLAMA, "half", "eager", 574_464, 703_488),
    (LLAMA, "full", "sdpa", 658_432, 916_480),
    (LLAMA, "autocast", "sdpa", 537_600, 683_008),
    (LLAMA, "autocast", "eager", 748_544, 893_952),
    (LLAMA | {"model_type": "qwen3"}, "half", "sdpa", 440_320, 569_344),
    (GPT2, "half", "sdpa", 934_912, 1_098_880),
    (GPT2, "half", "eager", 689_152, 853_120),
    (GPT2, "full", "sdpa", 1_378_304, 1_706_240),
    (GPT2, "autocast", "sdpa", 1_067_008, 1_247_488),
    (GPT2, "autocast", "eager", 886_784, 1_067_264),
]


@pytest.mark.parametrize(("config", "compute", "attention", "saved", "backward"), MEASURED)
def test_a_block_keeps_what_was_measured(
    config: dict[str, Any], compute: ComputeMode, attention: str, saved: int, backward: int
) -> None:
    model = analytic.spec_from_config(config | {"_attn_implementation": attention})
    block = _block(model, _run(model, compute=compute))
    element = 2 if compute == "half" else 4
    assert block.saved_bytes == saved
    assert (
        max(one.held_bytes + element * one.num_grads for one in block.backward_moments) == backward
    )


def test_korthikanti_s_count_for_a_gpt_without_scores() -> None:
    # Korthikanti et al. 2022 (arXiv 2205.05198) count 34 s b h bytes a layer without the 5 a s
    # / h of scores; gelu_new written out keeps 4 x 4h x 2 bytes more, a GPU's kernels the rest.
    model = analytic.spec_from_config(GPT2 | {"activation_function": "gelu"})
    run = model.micro_batch_activations(Workload(batch_size=2, seq_len=64, kind="cuda"))
    per_token = _block(model, run).saved_bytes / (2 * 64 * 64)
    assert 32 < per_token < 36


@pytest.mark.parametrize("config", [LLAMA, GPT2])
def test_recomputation_never_keeps_more(config: dict[str, Any]) -> None:
    model = analytic.spec_from_config(config)
    for compute in ("full", "half", "autocast", "half_autocast"):
        plain = _block(model, _run(model, compute=compute))
        again = _block(model, _run(model, compute=compute, activation_checkpointing=True))
        assert again.saved_bytes < plain.saved_bytes
        assert max(again.backward_moments).held_bytes >= max(plain.backward_moments).held_bytes


@pytest.mark.parametrize("config", [LLAMA, GPT2])
@pytest.mark.parametrize("field", ["batch_size", "seq_len"])
def test_more_tokens_keep_more(config: dict[str, Any], field: str) -> None:
    model = analytic.spec_from_config(config)
    sizes = [_run(model, **{field: size}) for size in (1, 2, 3, 7, 64)]
    kept = [sum(one.saved_bytes for one in run.layers) + run.loss_bytes for run in sizes]
    assert kept == sorted(set(kept))


def test_a_sample_more_costs_always_the_same() -> None:
    model = analytic.spec_from_config(LLAMA)
    saved = [_block(model, _run(model, batch_size=size)).saved_bytes for size in (2, 3, 4)]
    assert saved[2] - saved[1] == saved[1] - saved[0]


def test_autocast_of_a_gpu_keeps_norms_in_fp32() -> None:
    model = analytic.spec_from_config(GPT2 | {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0})
    here = _run(model, compute="half_autocast", kind="cpu")
    there = _run(model, compute="half_autocast", kind="cuda")
    assert _block(model, there).saved_bytes > _block(model, here).saved_bytes


def test_the_loss_is_twelve_bytes_a_logit() -> None:
    run = _run(analytic.spec_from_config(LLAMA), compute="half")
    assert run.output_bytes == 2 * 128 * 100
    assert run.loss_bytes == 12 * 128 * 100


def test_six_operations_a_parameter_and_token() -> None:
    model = analytic.spec_from_parameter_count("7b")
    work = Workload(batch_size=1, seq_len=128)
    counted = model_spec.num_params(model) - 32_000 * 4096
    assert model.flops(work) == pytest.approx(6 * counted * 128, rel=0.01)
    again = model.flops(replace(work, activation_checkpointing=True))
    assert again == pytest.approx(model.flops(work) * 8 / 6, rel=0.01)


@pytest.mark.parametrize("config", [LLAMA, GPT2])
def test_json_keeps_everything(config: dict[str, Any]) -> None:
    model = analytic.spec_from_config(config)
    assert build_model_spec.spec_from_json(model.to_json()) == model


@pytest.mark.parametrize(
    ("text", "count"), [("7b", 6.74e9), ("8B", 8.03e9), ("70b", 70.55e9), ("0.5b", 0.494e9)]
)
def test_sizes_with_a_published_shape(text: str, count: float) -> None:
    assert model_spec.num_params(analytic.spec_from_parameter_count(text)) == pytest.approx(
        count, rel=0.002
    )


@pytest.mark.parametrize("text", ["125m", "350m", "1.3b", "2.7b", "6b", "20b", "180b", "540b"])
def test_other_sizes_are_hit_within_three_percent(text: str) -> None:
    wanted = float(text[:-1]) * {"m": 1e6, "b": 1e9}[text[-1]]
    model = analytic.spec_from_parameter_count(text)
    assert model_spec.num_params(model) == pytest.approx(wanted, rel=0.03)
    assert model.to_json()["hidden"] % model.to_json()["heads"] == 0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "resnet"}, "'resnet' has no analytic formula"),
        (
            {k: v for k, v in LLAMA.items() if k != "vocab_size"},
            "vocab_size must be an integer from 1 to 10,000,000, got None",
        ),
        (LLAMA | {"hidden_size": 0}, "hidden_size must be an integer from 1 to 10,000,000, got 0"),
        (
            LLAMA | {"hidden_size": math.nan},
            "hidden_size must be an integer from 1 to 10,000,000, got nan",
        ),
        (
            LLAMA | {"num_hidden_layers": True},
            "num_hidden_layers must be an integer from 1 to 1,000, got True",
        ),
        (LLAMA | {"num_hidden_layers": 10**12}, "from 1 to 1,000, got 1000000000000"),
        (LLAMA | {"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads 3"),
        (LLAMA | {"dtype": "int3"}, "Unknown dtype 'int3'"),
        (
            LLAMA | {"attention_dropout": 2},
            "attention_dropout must be a dropout rate between 0 and 1, got 2",
        ),
        (
            LLAMA | {"attention_dropout": math.nan},
            "attention_dropout must be a dropout rate between 0 and 1, got nan",
        ),
        (GPT2 | {"n_head": 7}, "n_embd 64 must be a multiple of n_head 7"),
    ],
)
def test_a_bad_config_is_a_sentence(config: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=r"^.*[.]$") as caught:
        analytic.spec_from_config(config)
    assert words in str(caught.value)


def _run(model: ModelSpec, **given: Any) -> MicroBatchActivations:
    return model.micro_batch_activations(
        Workload(**({"batch_size": 2, "seq_len": 64, "kind": "cpu"} | given))
    )


def _block(model: ModelSpec, run: MicroBatchActivations) -> LayerActivations:
    pairs = zip(model.groups, run.layers, strict=True)
    return next(one for group, one in pairs if group.role == "block")
