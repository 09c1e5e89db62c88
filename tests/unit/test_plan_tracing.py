"""Tracing a module in this process: ways of computing, and what a config's model trains on."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch import nn
from torch.profiler import ProfilerActivity, profile

import nbdist
from nbdist.errors import PlanError
from nbdist.planner.model_spec import Workload
from nbdist.planner.models import traced
from nbdist.planner.tracing import build_model, trace_variants, wrap_units
from tests import models

if TYPE_CHECKING:
    from pathlib import Path


class Upcasting(nn.Module):
    """Casts to fp32 in the middle, as some UNets do: it fails with weights in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv1d(4, 4, 3), nn.Conv1d(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x).float())  # type: ignore[no-any-return]


def figures(
    model: nn.Module,
    computes: tuple[str, ...] = trace_variants.COMPUTE_MODES,
    kinds: tuple[str, ...] = ("cuda",),
) -> dict[str, Any]:
    """What the child process would answer."""
    asked = trace_variants.TraceRequest(
        batch_size=2, seq_len=None, device_kinds=kinds, compute_modes=computes
    )
    return trace_variants.trace_module_fields(
        model, ((torch.empty(2, 4, 16),), {}), asked, lambda _: None
    )


def test_the_root_tells_what_is_used_after_the_blocks() -> None:
    root = wrap_units.find_fsdp_groups(models.bert())[0].layer_group()
    assert root.num_late_tensors == 5  # the bias, dense layer and norm of the head
    assert root.tied_tensor == 0  # the embedding of tokens
    assert [shape.is_bias for shape in root.tensors[-4:]] == [False, True, False, True]


class Holding(nn.Module):
    """Keeps a wide tensor in a variable while its blocks run."""

    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.repeat(1, 1, 8)
        for block in self.blocks:
            x = block(x)
        return x + wide.mean()


def test_a_block_begins_with_what_the_model_holds_in_variables() -> None:
    model = traced.from_json(figures(Holding(), ("full",)))
    run = model.micro_batch_activations(Workload(batch_size=2, seq_len=1, compute="full"))
    block = next(n for n, group in enumerate(model.groups) if group.role == "block")
    wide = 4 * 2 * 4 * 16 * 8
    assert run.layers[block].saved_bytes < wide <= run.layers[block].input_bytes


def test_a_way_of_computing_that_fails_refuses_the_rows_of_its_engines_alone() -> None:
    model = traced.from_json(figures(Upcasting()))
    plan = nbdist.plan(model, devices="2x24GB,pcie")
    refused = {row.backend: row.why for row in plan.rows if row.cost is None}
    assert refused.keys() == {"fsdp2", "zero1", "zero2", "zero3"}
    for why in refused.values():
        assert why.startswith("Forward or backward fails with parameters in 16 bits (Upcasting")
        assert "RuntimeError: " in why
    assert plan.best is not None
    assert plan.best.backend in {"ddp", "fsdp1"}
    assert "Upcasting" in str(plan)
    assert "Upcasting" in plan._repr_html_()


def test_a_convolution_on_a_cpu_needs_the_copies_that_this_processor_makes() -> None:
    batch, runs = 2, figures(nn.Conv1d(4, 512, 16), ("full",), ("cpu", "cuda"))["passes"]
    planned = [runs[f"{kind} full"]["loss"][0][0] for kind in ("cpu", "cuda")]
    at_batch = [constant + slope * batch for constant, slope in planned]
    image, weight, gradient = torch.ones(2, 4, 16), torch.ones(512, 4, 16), torch.ones(2, 512, 1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        how = ([512], [1], [0], [1], False, [0], 1, [False, True, True])
        result = torch.ops.aten.convolution_backward(gradient, image, weight, *how)
    assert result[0] is None
    events = recorded.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert at_batch[0] - at_batch[1] == max(itertools.accumulate(sizes)) - sum(sizes) > 0


def test_gradients_after_the_blocks_count_once() -> None:
    class Block(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = super().forward(x).repeat(1, 1, 2000).tanh()
            return x + wide.mean(-1, keepdim=True)

    class Classifier(nn.Module):
        _no_split_modules = ("Block",)

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(16, 16) for _ in range(3))
            self.classes = nn.Linear(16, 4096, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.classes(x.mean((0, 1)))  # type: ignore[no-any-return]

    model = traced.from_json(figures(Classifier(), ("full",), ("cpu",)))
    late = 4 * 16 * 4096
    assert model.groups[0].num_late_tensors == 1
    assert all(at[0] < late for at, _ in model.passes["cpu full"]["groups"][1]["backward"])
    given: dict[str, Any] = {"devices": "2xcpu", "precision": "no", "optimizer": "sgd"}
    for backend in ("ddp", "fsdp2", "zero1"):
        for accumulate, gradients in ((1, late), (2, late + 3 * 4 * (16 * 16 + 16))):
            given |= {"backend": backend, "accumulate": accumulate}
            row = nbdist.plan(model, batch_size=2, **given).rows[0]
            assert row.peak_moment == "backward of last block"
            assert row.memory["gradients"] == gradients


def test_zero3_has_two_gradients_of_a_tied_embedding_and_gathers_it_alone() -> None:
    # Measured by benchmarks/footprint.py: autograd adds the second gradient in place, and the
    # message with which the embedding was gathered is free by then.
    config = transformers.BertConfig(
        vocab_size=4237, hidden_size=320, intermediate_size=1280, num_hidden_layers=3,
        num_attention_heads=10,
    )  # fmt: skip
    zero = {
        "reduce_bucket_size": 252_431,
        "stage3_param_persistence_threshold": 1000,
        "stage3_max_live_parameters": 680_647,
        "stage3_max_reuse_distance": 1_816_660,
        "stage3_prefetch_bucket_size": 476_730,
    }
    row = nbdist.plan(
        transformers.BertForMaskedLM(config),
        devices="64xcpu",
        batch_size=1,
        seq_len=64,
        precision="no",
        optimizer="adamw",
        keep_outputs=False,
        clip=1.0,
        backend="zero3",
        deepspeed_config={"zero_optimization": zero},
    ).rows[0]
    assert row.allocated_bytes / 2**20 == pytest.approx(21.26, rel=0.05)


def test_blocks_of_a_model_without_checkpointing_of_its_own_are_recomputed() -> None:
    sizes = {"hidden_sizes": [16, 32], "depths": [1, 2], "num_stages": 2, "image_size": 32}
    model = transformers.ConvNextForImageClassification(transformers.ConvNextConfig(**sizes))
    inputs = {"pixel_values": torch.zeros(2, 3, 32, 32), "labels": torch.zeros(2, dtype=torch.long)}
    rows = nbdist.plan(model, devices="2x24GB", inputs=inputs, backend="ddp").rows
    assert {row.options.activation_checkpointing for row in rows if row.cost} == {False, True}


def test_a_model_with_a_scalar_parameter_is_planned_without_fsdp() -> None:
    activation = nn.PReLU()
    activation.weight = nn.Parameter(torch.tensor(0.25))
    model = nn.Sequential(nn.Linear(8, 8), activation)
    table = nbdist.plan(model, inputs=torch.ones(2, 8), devices="2x24GB")
    assert "FSDP does not shard scalar parameters" in table.row("fsdp2").why
    assert table.row("zero2").fits


def test_a_gradient_of_several_uses_is_summed_in_place() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rest = (
                nn.Linear(16, 16),
                nn.ModuleList(nn.Linear(16, 16) for _ in "abc"),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.first(x))
            return torch.stack([layer(hidden).sum() for layer in self.rest]).sum()

    run = figures(Branches(), ("full",))["passes"]["cuda full"]
    slopes = [slope for (_, slope), _ in run["groups"][0]["gradients"]]
    # By sample: the input and the hidden tensor, the sum of its gradients and the next one.
    assert max(slopes) == 4 * 4 * 16 * 4


def test_fsdp2_casts_an_image_again_for_an_embedding_that_is_a_unit() -> None:
    class Peeking(nn.Module):  # like transformers' ViT
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Linear(16, 16), nn.Linear(16, 16)

        def get_input_embeddings(self) -> nn.Module:
            return self.embedding

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            image = image.to(self.embedding.weight.dtype)
            return self.head(self.embedding(image))  # type: ignore[no-any-return]

    passes = figures(Peeking())["passes"]
    held = [
        passes[f"cuda {way}"]["groups"][0]["forward"][0][0][1] for way in ("half", "half_shards")
    ]
    assert held[1] - held[0] == 4 * 16 * (4 + 2)


def test_a_plan_whose_every_row_fails_is_refused() -> None:
    model = traced.from_json(figures(Upcasting()))
    with pytest.raises(PlanError, match="fails with parameters in 16 bits"):
        nbdist.plan(model, devices="2x24GB,pcie", backend="zero3")


def test_a_model_that_fails_in_every_way_is_one_sentence() -> None:
    text = figures(Upcasting(), ("half",))["error"]
    assert text.startswith("Cannot trace the model (Upcasting on fake tensors: ")
    assert "nbdist.plan(model, inputs=...)" in text


# ---- what a transformers model trains on

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 99,
}


def sample(
    config: dict[str, Any], seq_len: int = 2048
) -> tuple[nn.Module, build_model.SampleBatch]:
    model, _ = build_model.build_from_config(config)
    return model, build_model.make_sample_batch(model, 3, seq_len)


def shapes(found: build_model.SampleBatch) -> dict[str, tuple[int, ...]]:
    tensors = found.batch[1].items()
    return {name: tuple(one.shape) for name, one in tensors if isinstance(one, torch.Tensor)}


def test_clip_trains_on_pictures_with_texts() -> None:
    vision = SMALL | {"image_size": 32, "patch_size": 8}
    config = {"model_type": "clip", "text_config": SMALL, "vision_config": vision}
    _, found = sample(config)
    assert shapes(found) == {"input_ids": (3, 77), "pixel_values": (3, 3, 32, 32)}
    assert found.batch[1]["return_loss"] is True
    assert not found.has_tokens
    assert found.notes == ["A sample is an image of 32 x 32 and a text of 77 tokens."]


def test_a_model_of_text_and_pictures_is_planned_for_text_and_says_so() -> None:
    vision = SMALL | {"image_size": 32, "patch_size": 8}
    text = SMALL | {"num_key_value_heads": 1, "head_dim": 16}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": vision}
    model, found = sample(config, 16)
    assert type(model).__name__ == "Gemma3ForConditionalGeneration"
    assert shapes(found).keys() == {"input_ids", "labels", "token_type_ids"}
    assert found.has_tokens
    assert "Planned for text alone, without images" in found.notes[0]
    assert not model.config.text_config.use_cache  # type: ignore[union-attr]


def test_whisper_trains_on_its_fixed_frames_and_a_text_that_its_decoder_takes() -> None:
    config = {
        "model_type": "whisper",
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    model, found = sample(config)
    assert type(model).__name__ == "WhisperForConditionalGeneration"
    assert shapes(found) == {"input_features": (3, 80, 3000), "labels": (3, 448)}
    assert found.notes == ["A sample is 3,000 frames of audio and a text of 448 tokens."]


def test_an_encoder_is_trained_on_masked_words_unless_its_config_says_decoder() -> None:
    config = SMALL | {"model_type": "bert"}
    assert type(sample(config, 16)[0]).__name__ == "BertForMaskedLM"
    assert type(sample(config | {"is_decoder": True}, 16)[0]).__name__ == "BertLMHeadModel"


def test_a_t5_needs_no_start_token_in_its_config() -> None:
    config = {"model_type": "t5", "d_model": 32, "d_kv": 8, "num_layers": 1, "num_heads": 4}
    model, found = sample(config, 16)
    assert type(model).__name__ == "T5ForConditionalGeneration"
    assert shapes(found) == {"input_ids": (3, 16), "labels": (3, 16)}
    assert model.config.decoder_start_token_id == 0  # type: ignore[union-attr]


# ---- models that were traced before


def bert(**changes: Any) -> nn.Module:
    config = SMALL | {"model_type": "bert", "max_position_embeddings": 16} | changes
    return build_model.build_from_config(config)[0]


def known(model: nn.Module, batch_size: int = 2) -> Any:
    return traced.find_known_spec(
        model, batch_size=batch_size, seq_len=16, inputs=None, kinds=("cpu",)
    )


def test_inputs_say_their_own_length() -> None:
    tokens = torch.ones(2, 8, dtype=torch.long)
    given = {"inputs": {"input_ids": tokens, "labels": tokens}, "devices": "2xcpu"}
    assert nbdist.plan(bert(), **given).question.seq_len == 8
    with pytest.raises(PlanError, match="seq_len=16 does not match the inputs, which have 8 token"):
        nbdist.plan(bert(), seq_len=16, **given)


def test_a_module_is_traced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert known(bert()) is None
    lines: list[str] = []
    model = traced.spec_from_module(
        bert(), batch_size=2, seq_len=16, progress=lines.append, kinds=("cpu",)
    )
    assert lines[0] == traced.FIRST_TRACE
    assert known(bert()) == model, "an equal module too"
    assert known(bert(), batch_size=3) is None
    assert known(bert(hidden_dropout_prob=0.0)) is None
    frozen, changed, calm = bert(), bert(), bert()
    next(frozen.parameters()).requires_grad_(False)  # noqa: FBT003
    changed.add_module("more", nn.Linear(3, 3))
    for module in calm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert known(frozen) is known(changed) is known(calm) is None


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft 0.21
def test_adapters_on_a_model_of_transformers_are_traced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def adapted(**changes: Any) -> nn.Module:
        config = peft.LoraConfig(target_modules=["query"], use_dora=True, **changes)
        model: nn.Module = peft.get_peft_model(bert(), config)
        return model

    traced.spec_from_module(
        adapted(), batch_size=2, seq_len=16, progress=lambda _: None, kinds=("cpu",)
    )
    assert known(adapted()) is not None
    assert known(adapted(r=4)) is known(adapted(lora_dropout=0.5)) is None


@pytest.mark.usefixtures("own_cache")
def test_a_module_of_ones_own_is_traced_in_each_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {"inputs": torch.zeros(2, 4, 16), "devices": "2xcpu"}
    plan = nbdist.plan(nn.Conv1d(4, 4, 3), seq_len=77, **given)
    assert "seq_len 77 is not used: the inputs have no tokens." in plan.question.notes
    assert traced.UNCACHED_TRACE in capsys.readouterr().err
    assert not (tmp_path / "nbdist" / "traces").exists()
    with pytest.raises(PlanError, match="The example input has 0 samples"):
        nbdist.plan(nn.Conv1d(4, 4, 3), **given | {"inputs": torch.zeros(0, 4, 16)})
    with pytest.raises(PlanError, match=r"closed formulas .*Plan the PEFT model"):
        nbdist.plan(nn.Conv1d(4, 4, 3), lora=8, **given)


def test_too_few_positions_are_named_before_the_failed_trace() -> None:
    with pytest.raises(PlanError, match=r"^seq_len 9 exceeds .* of 8; .*BertForMaskedLM on fake"):
        nbdist.plan(bert(max_position_embeddings=8), devices="2xcpu", seq_len=9)


def test_heads_have_labels_of_their_own() -> None:
    config = SMALL | {"num_labels": 5, "d_model": 32, "pad_token_id": 0}
    by_token = dict.fromkeys(["LlamaForTokenClassification", "MarianMTModel"], (3, 16))
    for name, labels in ({"LlamaForSequenceClassification": (3,)} | by_token).items():
        model, found = sample(config | {"architectures": [name]}, 16)
        assert type(model).__name__ == name
        assert shapes(found)["labels"] == labels


def test_a_class_that_transformers_lacks_is_noted() -> None:
    config = SMALL | {"model_type": "llama", "architectures": ["LlamaForDreams"]}
    model, notes = build_model.build_from_config(config)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert notes == [
        "Planned as LlamaForCausalLM: transformers has no LlamaForDreams, which the config names."
    ]


def test_what_is_not_known_says_what_to_give() -> None:
    with pytest.raises(PlanError, match=r"inputs=.*or, for its language model alone, give conf"):
        sample({"model_type": "blip-2", "num_query_tokens": 4})
    with pytest.raises(PlanError, match=r"no model class 'Dream', which it names\. Add its model"):
        build_model.build_from_config({"architectures": ["Dream"]})
