"""Closed forms of BERT and T5: published counts, peaks that were traced, bad configs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.errors import PlanError
from nbdist.planner import model_spec
from nbdist.planner.memory import partitioning
from nbdist.planner.model_spec import Workload
from nbdist.planner.models import analytic

if TYPE_CHECKING:
    from nbdist.planner.model_spec import ComputeMode, ModelSpec

BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
}
CLASSES = BERT | {"architectures": ["BertForSequenceClassification"]}
ROBERTA = BERT | {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}
EAGER = {"_attn_implementation": "eager"}
T5 = {
    "model_type": "t5",
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 4,
    "num_heads": 4,
    "vocab_size": 1000,
}
GATED = T5 | {
    "num_decoder_layers": 3,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}

_T5_SHAPES = {
    "t5-small": (512, 64, 2048, 6, 8),
    "t5-base": (768, 64, 3072, 12, 12),
    "t5-3b": (1024, 128, 16384, 24, 32),
}


def _published_t5(name: str) -> dict[str, Any]:
    fields = ("d_model", "d_kv", "d_ff", "num_layers", "num_heads")
    shape = dict(zip(fields, _T5_SHAPES[name], strict=True))
    return {"model_type": "t5", "architectures": ["T5WithLMHeadModel"], "vocab_size": 32128} | shape


def _published_bert(model_type: str, hidden: int, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
    } | more


_ROBERTA_BASE = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}

# Fields of the published config.json files; counts as transformers 5.23 counts them.
PUBLISHED = [
    (_published_bert("bert", 768, 12, vocab_size=30522), 109_514_298),
    (_published_bert("bert", 1024, 24, vocab_size=30522), 335_174_458),
    (_published_bert("roberta", 768, 12, **_ROBERTA_BASE), 124_697_433),
    (_published_t5("t5-small"), 60_506_624),
    (_published_t5("t5-base"), 222_903_552),
    (_published_t5("t5-3b"), 2_851_598_336),
]


@pytest.mark.parametrize(("config", "count"), PUBLISHED)
def test_published_parameter_counts(config: dict[str, Any], count: int) -> None:
    assert model_spec.num_params(analytic.spec_from_config(config)) == count


# Most bytes of activations and gradients at one moment, for two samples of 64 tokens; traced
# with torch 2.13 and transformers 5.23 on fake CPU tensors ("cuda": as a GPU's autocast and
# fused kernels would).
MEASURED: list[tuple[dict[str, Any], str, ComputeMode, bool, int]] = [
    (BERT, "cpu", "full", False, 5_667_336),
    (BERT, "cpu", "half", False, 3_819_012),
    (BERT, "cpu", "autocast", False, 5_540_872),
    (BERT, "cpu", "full", True, 2_382_344),
    (BERT, "cpu", "half", True, 1_452_500),
    (BERT, "cuda", "full", False, 3_881_480),
    (BERT, "cuda", "half", False, 1_984_004),
    (BERT, "cuda", "half", True, 1_185_284),
    (BERT, "cuda", "autocast", False, 3_706_376),
    (BERT | EAGER, "cpu", "half", False, 2_835_972),
    (BERT | EAGER, "cuda", "autocast", False, 4_615_688),
    (CLASSES, "cpu", "full", False, 3_601_456),
    (CLASSES, "cpu", "full", True, 1_441_328),
    (CLASSES, "cuda", "half", False, 958_752),
    (ROBERTA, "cpu", "autocast", False, 5_542_408),
    (ROBERTA, "cuda", "half", False, 1_985_540),
    (T5, "cpu", "full", False, 12_957_704),
    (T5, "cpu", "half", False, 10_196_996),
    (T5, "cpu", "autocast", False, 12_479_496),
    (T5, "cpu", "full", True, 3_859_976),
    (T5, "cuda", "half", False, 6_043_652),
    (T5, "cuda", "autocast", False, 8_260_616),
    (T5 | EAGER, "cpu", "autocast", False, 10_562_568),
    (GATED, "cpu", "full", False, 13_607_432),
    (GATED, "cpu", "half", True, 2_671_492),
    (GATED, "cuda", "half", False, 6_519_300),
]


@pytest.mark.parametrize(("config", "kind", "compute", "again", "measured"), MEASURED)
def test_peaks_that_were_traced(
    config: dict[str, Any], kind: Any, compute: ComputeMode, *, again: bool, measured: int
) -> None:
    work = Workload(
        batch_size=2, seq_len=64, kind=kind, compute=compute, activation_checkpointing=again
    )
    assert _peak(analytic.spec_from_config(config), work) == pytest.approx(measured, rel=0.005)


def test_a_head_tied_to_the_embedding_is_the_roots() -> None:
    # torch 2.13's FSDP2 refuses what two groups see: BERT's bias of the head, T5's table.
    for config in (BERT, T5):
        model = analytic.spec_from_config(config)
        sizes = {group.role: group.num_params for group in model.groups if group.role != "block"}
        assert not model.tied
        assert sizes["embedding"] == sizes["tail"] == 0
        assert sizes["root"] > 1000 * 64


def test_an_untied_head_has_a_table_and_a_bias_of_its_own() -> None:
    tied = analytic.spec_from_config(BERT)
    untied = analytic.spec_from_config(BERT | {"tie_word_embeddings": False})
    assert model_spec.num_params(untied) - model_spec.num_params(tied) == 1000 * 64 + 1000
    assert untied.groups[-1].num_params == 1000 * 64 + 1000


def test_the_loss_of_a_half_precision_model_stays_in_half() -> None:
    logits = 2 * 64 * 1000
    for config in (BERT, T5):
        model = analytic.spec_from_config(config)
        half = model.micro_batch_activations(Workload(batch_size=2, seq_len=64, compute="half"))
        cast = model.micro_batch_activations(Workload(batch_size=2, seq_len=64, compute="autocast"))
        assert (half.loss_bytes, cast.loss_bytes) == (6 * logits, 12 * logits)


def test_the_table_of_positions_is_in_the_first_block_of_a_stack() -> None:
    blocks = [one for one in analytic.spec_from_config(GATED).groups if one.role == "block"]
    assert [one.count for one in blocks] == [1, 3, 1, 2]
    assert (
        blocks[0].num_params - blocks[1].num_params
        == blocks[2].num_params - blocks[3].num_params
        == 32 * 4
    )


def test_stacks_of_one_block() -> None:
    model = analytic.spec_from_config(T5 | {"num_layers": 1})
    assert [one.count for one in model.groups if one.role == "block"] == [1, 1]
    deeper = analytic.spec_from_config(T5 | {"num_layers": 2})
    work = Workload(batch_size=2, seq_len=64)
    assert _peak(model, work) < _peak(deeper, work)


@pytest.mark.parametrize("config", [BERT, CLASSES, ROBERTA, T5, GATED])
def test_recomputation_keeps_less(config: dict[str, Any]) -> None:
    model = analytic.spec_from_config(config)
    for compute in ("full", "half", "autocast", "half_autocast"):
        work = Workload(batch_size=2, seq_len=64, compute=compute)
        again = replace(work, activation_checkpointing=True)
        assert _saved(model, again) < _saved(model, work)


@pytest.mark.parametrize("config", [BERT, CLASSES, T5])
@pytest.mark.parametrize("field", ["batch_size", "seq_len"])
def test_more_tokens_keep_more(config: dict[str, Any], field: str) -> None:
    model = analytic.spec_from_config(config)
    work = Workload(batch_size=2, seq_len=64)
    kept = [_peak(model, replace(work, **{field: size})) for size in (1, 2, 3, 7, 64)]
    assert kept == sorted(set(kept))


@pytest.mark.parametrize(
    ("config", "tables"),
    [(PUBLISHED[0][0], 512 * 768 + 2 * 768 + 30522), (PUBLISHED[4][0], 2 * 32 * 12)],
)
def test_six_operations_a_parameter_and_token(config: dict[str, Any], tables: int) -> None:
    model = analytic.spec_from_config(config)
    work = Workload(batch_size=2, seq_len=8)
    # The tied table counts once, as the head.
    assert model.flops(work) == pytest.approx(
        6 * 16 * (model_spec.num_params(model) - tables), rel=0.01
    )


def test_a_class_costs_the_head_no_tokens() -> None:
    work = Workload(batch_size=2, seq_len=64)
    words, classes = (analytic.spec_from_config(one).flops(work) for one in (BERT, CLASSES))
    head = 64 * 64 + 64 * 1000
    assert words - classes == 6 * (128 * head - 2 * (64 * 64 + 2 * 64))


def test_adapters_train_on_both_stacks() -> None:
    model = analytic.spec_from_config(GATED)
    adapted = model.with_lora(8)  # type: ignore[attr-defined]
    widths = sum(map(sum, adapted.all_linear_shapes()))
    assert model_spec.num_trainable_params(adapted) == 8 * widths
    assert model_spec.num_frozen_params(adapted) == model_spec.num_params(model)
    work = Workload(batch_size=2, seq_len=64)
    assert _peak(adapted, work) < _peak(model, work)


@pytest.mark.parametrize("config", [BERT, CLASSES, ROBERTA, T5, GATED])
def test_json_keeps_everything(config: dict[str, Any]) -> None:
    model = analytic.spec_from_config(config)
    assert analytic.spec_from_json(json.loads(json.dumps(model.to_json()))) == model


@pytest.mark.parametrize(
    ("config", "known"),
    [
        (BERT, True),
        (BERT | {"architectures": None}, True),
        (BERT | {"architectures": ["BertForTokenClassification"]}, False),
        (BERT | {"is_decoder": True}, False),
        (T5 | {"architectures": ["T5EncoderModel"]}, False),
        ({"model_type": "distilbert"}, False),
    ],
)
def test_classes_that_are_known(config: dict[str, Any], *, known: bool) -> None:
    assert analytic.is_supported(config) is known


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (BERT | {"architectures": ["BertForPreTraining"]}, "as BertForPreTraining has no analytic"),
        (
            {k: v for k, v in BERT.items() if k != "vocab_size"},
            "vocab_size must be an integer from 1 to 10,000,000, got None",
        ),
        (
            {k: v for k, v in BERT.items() if k != "intermediate_size"},
            "intermediate_size must be an integer from 1",
        ),
        (
            {k: v for k, v in T5.items() if k != "d_kv"},
            "d_kv must be an integer from 1 to 10,000,000, got None",
        ),
        (
            {k: v for k, v in T5.items() if k != "num_heads"},
            "num_heads must be an integer from 1 to 10,000,000, got None",
        ),
        (BERT | {"num_attention_heads": 7}, "must be a multiple of num_attention_heads 7"),
        (
            BERT | {"hidden_dropout_prob": 3},
            "hidden_dropout_prob must be a dropout rate between 0 and 1, got 3",
        ),
        (BERT | {"classifier_dropout": "x"}, "classifier_dropout must be a dropout rate"),
        (
            T5 | {"num_decoder_layers": 0},
            "num_decoder_layers must be an integer from 1 to 1,000, got 0",
        ),
        (T5 | {"dropout_rate": -1}, "dropout_rate must be a dropout rate between 0 and 1, got -1"),
    ],
)
def test_a_bad_config_is_a_sentence(config: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=r"^.*[.]$") as caught:
        analytic.spec_from_config(config)
    assert words in str(caught.value)


def _saved(model: ModelSpec, work: Workload) -> int:
    pairs = zip(model.groups, model.micro_batch_activations(work).layers, strict=True)
    return sum(group.count * one.saved_bytes for group, one in pairs)


def _peak(model: ModelSpec, work: Workload) -> int:
    """Activations, outputs, and whole gradients as they come, of one rank that shares nothing."""
    width = 2 if work.compute == "half" else model.element
    return max(
        activations + logits + width * _gradients(model, step)
        for step, activations, logits in zip(
            *model_spec.walk_micro_batch(model, model.micro_batch_activations(work)), strict=True
        )
    )


def _gradients(model: ModelSpec, step: model_spec.WalkStep) -> int:
    return (
        partitioning.num_finished_gradients(model, step) + step.num_grads
        if step.phase == "backward"
        else 0
    )
