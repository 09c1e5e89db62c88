"""Plans of LoRA, quantized models and fused losses, as a user asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import nbdist
from nbdist.errors import PlanError
from nbdist.planner.model_spec import (
    Workload,
    num_frozen_params,
    num_quantized_params,
    num_trainable_params,
    quantized_param_bytes,
)
from nbdist.planner.models import traced
from tests.unit import model_configs

if TYPE_CHECKING:
    from nbdist.planner.result import Plan

LLAMA = model_configs.llama(256, 704, 4, 8, 4, 3000, dtype="bfloat16")
MEASURED = {
    ("ddp", None): 20_195_228,
    ("ddp", "nf4"): 15_925_000,
    ("ddp", "int8"): 19_214_380,
    ("fsdp2", None): 14_384_284,
    ("fsdp2", "nf4"): 14_540_440,
    ("fsdp2", "nf4-bf16"): 13_434_376,
    ("zero2", None): 18_800_488,
    ("zero3", None): 23_803_521,
    ("zero3", "nf4"): 14_972_053,
}
"""Peaks of torch's CPU allocator in a third step of four ranks; benchmarks/footprint.py."""


def plan(model: object = LLAMA, **given: Any) -> Plan:
    chosen = {"devices": "4xcpu", "batch_size": 2, "seq_len": 64, "optimizer": "adamw_loop"}
    return nbdist.plan(model, **(chosen | given))


@pytest.mark.parametrize(("backend", "quantize"), MEASURED)
def test_the_peak_is_that_of_the_allocator(backend: str, quantize: str | None) -> None:
    zero = {"zero_optimization": {"reduce_bucket_size": 50_000}}
    given = {"deepspeed_config": zero} if backend.startswith("zero") else {}
    modules = ["q_proj", "v_proj"]
    row = plan(lora=8, target_modules=modules, quantize=quantize, backend=backend, **given).row(
        backend
    )
    assert row.allocated_bytes == pytest.approx(MEASURED[backend, quantize], rel=0.03)


@pytest.mark.parametrize(
    ("config", "given", "mib"),
    [
        # Restored weights are larger than the activations of a small batch.
        ({"hidden_size": 320, "intermediate_size": 1216, "num_hidden_layers": 5,
          "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 64, "vocab_size": 513},
         {"devices": "3xcpu", "batch_size": 3}, 32.825),
        # The graph keeps the embedding's output, a leaf under checkpointing, and its gradient.
        ({"hidden_size": 512, "intermediate_size": 1216, "head_dim": 64, "vocab_size": 10_027},
         {"devices": "2xcpu", "seq_len": 256, "activation_checkpointing": True}, 105.938),
        # The last layer's backward needs no saved tensor, so the forward runs again after it.
        ({"hidden_size": 384, "intermediate_size": 1408, "num_hidden_layers": 2,
          "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 846},
         {"devices": "2xcpu", "batch_size": 3, "seq_len": 128, "activation_checkpointing": True},
         21.892),
        # What a layer keeps as an attribute lives until the end of the backward.
        ({"model_type": "qwen2", "hidden_size": 384, "intermediate_size": 1536, "head_dim": 64,
          "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
          "vocab_size": 681},
         {"devices": "2xcpu", "seq_len": 128, "backend": "zero1", "deepspeed_config":
          {"zero_optimization": {"reduce_bucket_size": 1_903_617, "overlap_comm": True}}}, 24.183),
    ],
)  # fmt: skip
def test_what_int8_adapters_hold_in_a_forward(
    config: dict[str, Any], given: dict[str, Any], mib: float
) -> None:
    quantized = {"lora": 16, "quantize": "int8", "optimizer": "sgd", "backend": "ddp"}
    (row,) = plan(LLAMA | config, keep_outputs=False, **(quantized | given)).rows[:1]
    assert row.allocated_bytes / 2**20 == pytest.approx(mib, rel=0.002)


def test_the_embeddings_of_a_frozen_model_live_until_its_blocks_have_run() -> None:
    model = plan(lora=4, quantize="nf4").question.model
    run = model.micro_batch_activations(Workload(batch_size=2, seq_len=64, compute="half"))
    _, first, block, _ = run.layers
    embedded = 2 * 2 * 64 * 256
    assert (first.input_bytes, block.input_bytes) == (embedded, 2 * embedded)


def test_zero3_gathers_frozen_weights_again_after_a_checkpointed_forward() -> None:
    # Measured by benchmarks/footprint.py: DeepSpeed releases what is frozen with the last layer.
    zero = {
        "reduce_bucket_size": 293_772,
        "stage3_param_persistence_threshold": 1000,
        "stage3_max_live_parameters": 1_485_695,
        "stage3_max_reuse_distance": 1_875_284,
        "stage3_prefetch_bucket_size": 1_023_067,
    }
    planned = plan(
        model_configs.llama(512, 1536, 2, 8, 4, 2071, model_type="mistral", dtype="bfloat16"),
        lora=4,
        target_modules=["q_proj", "k_proj", "down_proj"],
        batch_size=1,
        optimizer="adamw_fused",
        precision="bf16",
        keep_outputs=False,
        activation_checkpointing=True,
        backend="zero3",
        deepspeed_config={"zero_optimization": zero},
    )
    assert planned.row("zero3").allocated_bytes / 2**20 == pytest.approx(12.704, rel=0.01)


def test_the_argument_of_an_adapted_layer_lives_until_its_call_ends() -> None:
    small = {"intermediate_size": 832, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = LLAMA | small | {"head_dim": 64, "vocab_size": 735}
    given = {"devices": "2xcpu", "batch_size": 4, "seq_len": 128, "optimizer": "adamw"}
    adapters = {"lora": 8, "target_modules": "all-linear", "quantize": "nf4"}
    row = plan(config, backend="ddp", activation_checkpointing=True, **given, **adapters).row("ddp")
    assert row.allocated_bytes / 2**20 == pytest.approx(18.269, rel=0.005)


def test_nf4_has_half_a_byte_and_its_scales_per_parameter() -> None:
    model = plan("8b", lora=16, quantize="nf4").question.model
    each = quantized_param_bytes(model) / num_quantized_params(model)
    assert each == pytest.approx(0.5 + 1 / 64 + 4 / 64 / 256, rel=1e-3)
    # Embedding and head, which stay in the model's dtype.
    assert num_frozen_params(model) == pytest.approx(2 * 128_256 * 4096, rel=1e-3)


@pytest.mark.parametrize(
    ("target_modules", "features"),
    [
        (None, 256 + 256 + 256 + 128),
        (["q_proj"], 256 + 256),
        (["self_attn.q_proj", "down_proj"], 256 + 256 + 256 + 704),
        (r".*\.(k|v)_proj", 2 * (256 + 128)),
        ("all-linear", 2 * (256 + 256) + 2 * (256 + 128) + 3 * (256 + 704)),
    ],
)
def test_target_modules_are_those_of_peft(target_modules: Any, features: int) -> None:
    model = plan(lora=8, target_modules=target_modules).question.model
    assert num_trainable_params(model) == 4 * 8 * features


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lora": 0}, "lora must be an integer from 1 to 10,000,000, got 0"),
        ({"lora": 8, "target_modules": ["q_prj"]}, "'q_prj': .* q_proj, k_proj, .*all-linear"),
        ({"lora": 8, "target_modules": []}, "target_modules are empty"),
        ({"lora": 8, "target_modules": 3}, "must be names or a regular expression, got 3"),
        (
            {"backend": "fsdp1", "fsdp_config": {"sharding_strategy": "NO_SHARD"}},
            "NO_SHARD keeps everything on every rank. Plan ddp",
        ),
        ({"lora": 8, "target_modules": "("}, r"'\(': .* q_proj, k_proj, .*all-linear"),
        ({"target_modules": ["q_proj"]}, "target_modules needs a rank. Add lora=16"),
        ({"lora": 8, "quantize": "int4"}, "quantize must be nf4, int8 or nf4-bf16, got 'int4'"),
        ({"quantize": "nf4"}, "leaves no trainable parameter.* lora=16"),
        ({"lora": 8, "backend": "fsdp1"}, "FSDP1 cannot flatten fp32 adapters"),
        ({"lora": 8, "quantize": "nf4", "backend": "fsdp1"}, "FSDP1 cannot flatten quantized"),
        ({"lora": 8, "quantize": "int8", "backend": "zero3"}, "ZeRO-3 does not shard .* int8"),
        ({"optimizer": "muon", "backend": "zero2"}, "zero2 shards. Use ddp, fsdp2"),
        ({"optimizer": "adamw_8bit", "backend": "fsdp"}, "adamw_8bit cannot step parameters that"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_sentence(given: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan(**given)


def test_an_engine_that_cannot_shard_says_so_in_its_row() -> None:
    table = plan(lora=8, quantize="int8")
    assert "FSDP2 cannot shard bitsandbytes' int8 weights" in table.row("fsdp2").why
    assert table.row("zero2").fits


def test_the_loss_is_among_the_remedies() -> None:
    table = nbdist.plan(
        "1b",
        devices="1x24GB",
        batch_size=8,
        seq_len=2048,
        activation_checkpointing=True,
        offload="cpu",
        backend="zero3",
    )
    advice = "\n".join(table.advice)
    assert 'loss_type="nll"' in advice
    assert "use_liger_kernel=True" in advice


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft 0.21
def test_a_peft_model_with_trls_loss_is_planned_as_it_is() -> None:
    torch = pytest.importorskip("torch")
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    utils = pytest.importorskip("trl.trainer.utils")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    model = model.to(torch.bfloat16)
    utils.add_fused_lm_head(model)
    frozen = plan(model.requires_grad_(False), lora=8).question.model  # noqa: FBT003
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, task_type="CAUSAL_LM"))
    found, asked = plan(adapted).question.model, plan(lora=8).question.model
    assert found.depth == "closed form"
    assert num_trainable_params(found) == num_trainable_params(asked)
    assert frozen == found
    ids = torch.zeros(1, 96, dtype=torch.long)
    assert plan(adapted, inputs={"input_ids": ids}, seq_len=None).question.seq_len == 96
    assert traced.find_analytic_spec(model) is None, "PEFT has put its adapters into it"
    assert found.loss == "trl"  # type: ignore[attr-defined]


def test_optimizers_depend_on_the_shapes_of_adapters() -> None:
    def state(optimizer: str, backend: str = "ddp") -> int:
        row = plan(lora=8, optimizer=optimizer).row(backend)
        return row.memory["optimizer"]

    trained = num_trainable_params(plan(lora=8).question.model)
    assert state("muon") == 4 * trained
    assert state("adamw_8bit") == 8 * trained  # every adapter has less than 4096 elements
    # q and v: A has 8 rows of 256 columns, B has 256 or 128 rows of 8.
    assert state("adafactor") == 4 * 4 * (2 * (8 + 256) + (256 + 8) + (128 + 8))
