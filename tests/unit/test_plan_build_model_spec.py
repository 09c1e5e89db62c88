"""What people hand to the planner: sizes, configs and names, as they write them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

import nbdist
from nbdist.errors import PlanError
from nbdist.planner import build_model_spec, model_spec, optimizers
from nbdist.planner.models import analytic, traced
from tests.unit import model_configs

if TYPE_CHECKING:
    from pathlib import Path

LLAMA = model_configs.llama(512, 1376, 4, 8, 8, 8000, max_position_embeddings=1024)


pytestmark = pytest.mark.usefixtures("own_cache")


def notes(config: object, **asked: Any) -> str:
    return "\n".join(nbdist.plan(config, devices="2x24GB,pcie", **asked).question.notes)


# ---- sizes


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("7 b", "7b"),
        (" 7B ", "7b"),
        ("1.5 B", "1.5b"),
        ("7bn", "7b"),
        ("7 billion", "7b"),
        ("350 Million", "350m"),
        ("7e9", "7b"),
        ("7,000,000,000", "7b"),
        ("7_000_000_000", "7b"),
        ("1t", "1000b"),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, plain: str) -> None:
    assert analytic.is_parameter_count(text)
    assert analytic.spec_from_parameter_count(text) == analytic.spec_from_parameter_count(plain)


@pytest.mark.parametrize("text", ["7", "7g", "7 bx", "7 apples", "0b", "0.5m", "99999b", "1e99"])
def test_a_misspelled_size_lists_the_accepted_forms(text: str) -> None:
    with pytest.raises(PlanError, match='such as "7b", "350m" or "7e9"'):
        nbdist.plan(text, devices="2x24GB")


def test_a_folder_that_is_named_like_a_size_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "7b").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match="neither a size"):
        nbdist.plan("7b", devices="2x24GB")


def test_an_empty_name_is_a_sentence() -> None:
    with pytest.raises(PlanError, match=r'The model is empty \(""\)\. Give a size'):
        nbdist.plan("", devices="2x24GB")


# ---- optimizers


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("AdamW", "adamw"),
        ("ADAMW_8BIT", "adamw_8bit"),
        ("torch.optim.AdamW", "adamw"),
        ("bitsandbytes.optim.PagedAdamW8bit", "adamw_8bit"),
        ("SGD", "sgd"),
        (type("RMSprop", (), {}), "rmsprop"),
    ],
)
def test_optimizers_are_known_by_name_and_class(given: object, name: str) -> None:
    assert optimizers.find_optimizer(given).name == name


@pytest.mark.parametrize(
    ("given", "hint"),
    [("adamwx", "Did you mean adamw"), ("torch.optim.LBFGS", "Use one of adamw, ")],
)
def test_an_unknown_optimizer_gets_the_nearest_ones(given: str, hint: str) -> None:
    with pytest.raises(PlanError, match=f"{re.escape(given)}.*{hint}"):
        optimizers.find_optimizer(given)


# ---- configs that nobody can build


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "neither model_type nor architectures"),
        ({"hidden_size": 64}, "complete config.json of transformers"),
        ({"_class_name": "UNet2DModel"}, r"UNet2DModel of diffusers\. Give the model itself"),
        (LLAMA | {"model_type": "lama"}, r"no model_type 'lama'\. Did you mean llama"),
        (
            {"model_type": "x9", "auto_map": {"AutoModel": "x.X"}},
            "the author's code, which is not run",
        ),
    ],
)
@pytest.mark.fault("F6")
def test_a_config_that_cannot_be_built_is_refused_at_once(
    config: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(traced, "_answer", never)
    with pytest.raises(PlanError, match=words) as caught:
        nbdist.plan(config, devices="2x24GB")
    assert str(caught.value).lower().count("give the model") == 1


def test_model_types_of_transformers_are_read_without_importing_it() -> None:
    assert {
        "llama",
        "clip",
        "clip_vision_model",
        "whisper",
        "gemma3_text",
    } <= traced.model_types()
    traced.check_model_type({"model_type": "gemma3"})
    traced.check_model_type({"architectures": ["LlamaForCausalLM"]})


# ---- what a config says beside its sizes


def test_a_class_stands_for_its_model_type() -> None:
    unnamed = {name: value for name, value in LLAMA.items() if name != "model_type"}
    named = unnamed | {"architectures": ["LlamaForCausalLM"]}
    assert analytic.spec_from_config(named) == analytic.spec_from_config(LLAMA)


@pytest.mark.parametrize(
    ("architecture", "exact"),
    [
        ("LlamaForCausalLM", True),
        ("YarnLlamaForCausalLM", True),
        ("LlamaForSequenceClassification", False),
        ("LlamaForTokenClassification", False),
        ("LlamaModel", False),
    ],
)
def test_heads_without_a_closed_form_are_traced(architecture: str, *, exact: bool) -> None:
    assert analytic.is_supported(LLAMA | {"architectures": [architecture]}) is exact
    assert analytic.is_supported(LLAMA | {"hidden_act": "gelu"})
    assert not analytic.is_supported(LLAMA | {"hidden_act": "relu2"})


def test_another_class_than_the_planned_one_is_noted() -> None:
    assert "LlamaForCausalLM" not in notes(LLAMA | {"architectures": ["LlamaForCausalLM"]})
    text = notes(LLAMA | {"architectures": "YarnLlamaForCausalLM"})
    assert "Planned as LlamaForCausalLM: the config names YarnLlamaForCausalLM" in text


def test_quantization_is_noted() -> None:
    quantized = LLAMA | {"quantization_config": {"quant_method": "awq"}, "dtype": "bfloat16"}
    text = notes(quantized)
    assert "quantization_config (awq) is ignored" in text
    assert "with 16 bits each" in text
    assert "quantization" not in notes(LLAMA)


def test_notes_survive_json_and_lora_and_change_no_figure() -> None:
    plain = analytic.spec_from_config(LLAMA)
    model = model_spec.with_notes(plain, ["one.", "two."])
    assert model == plain
    assert build_model_spec.spec_from_json(model.to_json()).notes == ("one.", "two.")


# ---- lengths


def test_a_sample_longer_than_the_positions_is_noted() -> None:
    assert "seq_len 2,048 exceeds the config's max_position_embeddings of 1,024" in notes(
        LLAMA, seq_len=2048
    )
    assert "seq_len" not in notes(LLAMA, seq_len=1024)
    assert "seq_len" not in notes(LLAMA)


def test_positions_of_a_text_tower_and_of_a_decoder_are_found() -> None:
    assert build_model_spec.default_seq_len({"text_config": {"max_position_embeddings": 77}}) == 77
    assert (
        build_model_spec.default_seq_len(
            {"max_source_positions": 1500, "max_target_positions": 448}
        )
        == 448
    )
    assert build_model_spec.seq_len_notes({"text_config": {"max_position_embeddings": 77}}, 78)


def test_relative_positions_have_no_end() -> None:
    assert (
        build_model_spec.seq_len_notes(
            {"n_positions": 512, "relative_attention_num_buckets": 32}, 999
        )
        == []
    )
