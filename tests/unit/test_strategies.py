"""The table of backends: what each hands to its engine, and what it refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import nbdist
from nbdist.errors import OptionError
from nbdist.strategies import (
    BACKENDS,
    STRATEGIES,
    Hardware,
    Options,
    canonical_backend,
    config_files,
    load_config,
)

if TYPE_CHECKING:
    from pathlib import Path

CPU = Hardware(kind="cpu", world_size=2)
AMPERE = Hardware(kind="cuda", bf16=True, world_size=4)
NODES = Hardware(kind="cpu", world_size=8, nodes=4)
TURING = Hardware(kind="cuda", world_size=4)


def checked(**chosen: Any) -> Options:
    return Options(**chosen).validate(CPU)


def test_every_backend_has_a_row_and_accepts_no_option_at_all() -> None:
    assert {canonical_backend(name) for name in BACKENDS} == set(STRATEGIES)
    for name in BACKENDS:
        assert checked(backend=name).strategy.name == canonical_backend(name)


def test_options_and_hardware_survive_a_message() -> None:
    options = Options(backend="zero3", clip=0.5, deepspeed_config={"a": {"b": 1}})
    assert Options(**json.loads(json.dumps(options.to_json()))) == options
    assert Hardware(**json.loads(json.dumps(AMPERE.to_json()))) == AMPERE


def test_replicas_are_said_in_accelerates_words() -> None:
    hybrid = Options(backend="fsdp", replicate_across="nodes").validate(NODES)
    sizes = {"dp_replicate_size": 4, "dp_shard_size": 2}
    assert hybrid.strategy.parallelism_kwargs(hybrid, NODES) == sizes
    assert hybrid.describe() == "fsdp2, replicate across nodes"
    whole = Options(backend="fsdp").validate(NODES)
    assert whole.strategy.parallelism_kwargs(whole, NODES) == {}
    assert Hardware(**json.loads(json.dumps(NODES.to_json()))) == NODES


@pytest.mark.parametrize(("hardware", "precision"), [(CPU, "no"), (AMPERE, "bf16"), (TURING, "no")])
def test_precision_defaults_to_what_the_hardware_is_best_at(
    hardware: Hardware, precision: str
) -> None:
    assert Options().validate(hardware).precision == precision


@pytest.mark.parametrize(
    ("chosen", "hardware", "expected"),
    [
        ({"backend": "fsdp3"}, CPU, "Use one of ddp, fsdp, fsdp2"),
        ({"precision": "fp16"}, CPU, "Use one of no, bf16"),
        ({"precision": "bf16"}, TURING, "Use one of no, fp16"),
        ({"precision": "fp8"}, AMPERE, "transformer-engine"),
        ({"precision": "int4"}, CPU, "Use one of no, fp16, bf16, fp8"),
        ({"offload": "cpu"}, CPU, "Use fsdp2, fsdp1, zero1, zero2, zero3, or offload none"),
        ({"backend": "fsdp", "offload": "nvme:/x"}, CPU, "Use zero3, or offload none"),
        ({"backend": "zero2", "offload": "nvme:/x"}, CPU, "Use zero3, or offload none"),
        ({"backend": "zero3", "offload": "nvme"}, CPU, "nvme:/path/to/folder"),
        ({"backend": "zero3", "offload": "disk"}, CPU, "Use one of none, cpu, nvme:PATH"),
        ({"backend": "zero3", "offload_params": True}, CPU, "Add offload cpu"),
        ({"backend": "zero2", "offload": "cpu", "offload_params": True}, CPU, "fsdp1, zero3."),
        ({"accumulate": 0}, CPU, "an integer >= 1, got 0"),
        ({"clip": 0.0}, CPU, "finite number > 0"),
        ({"clip": -1.0}, CPU, "finite number > 0"),
        ({"clip": float("nan")}, CPU, "finite number > 0"),
        ({"clip": "tight"}, CPU, "finite number > 0"),
        ({"backend": ["ddp"]}, CPU, "backend must be text, not ['ddp']"),
        ({"activation_checkpointing": "yes"}, CPU, "must be True or False, not 'yes'"),
        ({"backend": "fsdp", "fsdp_config": "x.yaml"}, CPU, "must be a mapping"),
        ({"backend": "fsdp1", "fsdp_config": {"sharding_strategy": "ALL"}}, CPU, "FULL_SHARD"),
        pytest.param(
            {"backend": "zero1"},
            Hardware(deepspeed=False),
            "pip install deepspeed",
            marks=pytest.mark.fault("A11"),
        ),
        ({"fsdp_config": {}}, CPU, "only with fsdp2, fsdp1"),
        ({"backend": "fsdp", "replicate_across": "racks"}, NODES, "Use one of none, nodes"),
        ({"backend": "fsdp", "replicate_across": "nodes"}, CPU, "but all ranks are on one"),
        ({"backend": "fsdp1", "replicate_across": "nodes"}, NODES, "Use fsdp2"),
        ({"replicate_across": "nodes"}, NODES, "Backend ddp cannot replicate across nodes"),
        (
            {"backend": "fsdp", "replicate_across": "nodes"},
            Hardware(world_size=5, nodes=2),
            "5 ranks on 2 nodes are not the same number on each. Leave it out.",
        ),
        (
            {"backend": "fsdp", "replicate_across": "nodes"},
            Hardware(world_size=2, nodes=2),
            "2 ranks on 2 nodes are one rank on each. Leave it out, or use ddp.",
        ),
        ({"backend": "fsdp", "deepspeed_config": {}}, CPU, "only with zero1, zero2, zero3"),
    ],
)
def test_what_an_engine_lacks_is_said_in_one_sentence(
    chosen: dict[str, Any], hardware: Hardware, expected: str
) -> None:
    with pytest.raises(OptionError) as caught:
        Options(**chosen).validate(hardware)
    message = str(caught.value)
    assert expected in message
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"deepspeed_config": {"zero_optimization": {"stage": 2}}}, "Use backend zero2"),
        ({"clip": 1.0, "deepspeed_config": {"gradient_clipping": 0.5}}, "Remove one of them"),
        ({"accumulate": 2, "deepspeed_config": {"gradient_accumulation_steps": 4}}, "accumulate"),
        ({"precision": "bf16", "deepspeed_config": {"fp16": {"enabled": True}}}, "precision"),
    ],
)
def test_a_deepspeed_file_must_agree_with_the_options(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        checked(backend="zero3", **chosen)


def test_a_deepspeed_file_fills_the_options_and_keeps_its_own_keys() -> None:
    zero = {
        "stage": 3,
        "overlap_comm": False,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/fast", "buffer_count": 7},
    }
    options = checked(
        backend="zero3",
        deepspeed_config={
            "gradient_clipping": 0.5,
            "gradient_accumulation_steps": 2,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
        },
    )
    assert (options.clip, options.accumulate, options.precision) == (0.5, 2, "bf16")
    assert options.offload == "nvme:/fast"
    config = options.strategy.deepspeed_config(options, CPU)
    assert config["gradient_clipping"] == 0.5
    assert config["zero_optimization"]["overlap_comm"] is False
    offload = config["zero_optimization"]["offload_optimizer"]
    assert offload == {
        "device": "nvme",
        "pin_memory": False,
        "nvme_path": "/fast",
        "buffer_count": 7,
    }


def test_auto_values_of_a_deepspeed_file_are_ours_to_fill() -> None:
    options = checked(
        backend="zero2",
        deepspeed_config={"gradient_clipping": "auto", "zero_optimization": {"stage": "auto"}},
    )
    config = options.strategy.deepspeed_config(options, CPU)
    assert config["gradient_clipping"] == "auto"  # until prepare()
    assert config["zero_optimization"]["stage"] == 2


def test_an_fsdp_file_is_read_in_the_names_of_accelerate_config() -> None:
    options = checked(
        backend="fsdp",
        fsdp_config={
            "fsdp_version": 2,
            "fsdp_offload_params": True,
            "fsdp_transformer_layer_cls_to_wrap": "GPT2Block",
            "fsdp_activation_checkpointing": True,
        },
    )
    assert options.offload == "cpu"
    assert options.activation_checkpointing
    assert options.fsdp_config == {"transformer_cls_names_to_wrap": "GPT2Block"}
    assert options.strategy.fsdp_kwargs(options)["cpu_offload"] is True


@pytest.mark.parametrize(
    ("content", "message"),
    [({"fsdp_version": 1}, "Use backend fsdp1"), ({"wrap_everything": 1}, "wrap_everything")],
)
def test_an_fsdp_file_must_fit(content: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        checked(backend="fsdp2", fsdp_config=content)


@pytest.mark.parametrize(
    ("backend", "config", "resharded"),
    [
        ("ddp", None, True),
        ("fsdp2", None, True),
        ("fsdp2", {"fsdp_reshard_after_forward": "false"}, False),
        ("fsdp2", {"reshard_after_forward": True}, True),
        ("fsdp1", {"sharding_strategy": "SHARD_GRAD_OP"}, False),
        ("fsdp1", {"reshard_after_forward": "SHARD_GRAD_OP"}, True),
    ],
)
def test_whether_fsdp_keeps_parameters_gathered(
    backend: str, config: dict[str, Any] | None, *, resharded: bool
) -> None:
    # accelerate 1.15: FSDP1 looks at sharding_strategy first, which has a default.
    options = checked(backend=backend, fsdp_config=config)
    assert options.reshard_after_forward == resharded
    assert ("no reshard" in options.describe()) != resharded


@pytest.mark.parametrize(
    ("backend", "value", "message"),
    [("fsdp2", "FULL_SHARD", "must be true or false"), ("fsdp1", False, "use sharding_strategy")],
)
def test_each_fsdp_has_its_own_word_for_resharding(backend: str, value: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        checked(backend=backend, fsdp_config={"reshard_after_forward": value})


@pytest.mark.parametrize(
    ("backend", "config", "message"),
    [
        ("zero2", {"gradient_accumulation_steps": 0}, "accumulate .* >= 1, got 0"),
        ("zero2", {"gradient_accumulation_steps": "4"}, "accumulate .* >= 1, got '4'"),
        ("zero2", {"gradient_clipping": -1}, "clip .* > 0, got -1"),
        ("zero3", {"zero_optimization": {"stage": "3"}}, "must be 1, 2 or 3, got '3'"),
        ("zero2", {"fp16": True}, "fp16 of the .* must be a section of keys and values, got True"),
        ("zero2", {"bf16": {"enabled": "yes"}}, "bf16.enabled .* be true, false .*, got 'yes'"),
        ("zero2", {"zero_optimization": {"overlap_comm": "yes"}}, "overlap_comm of .*, got 'yes'"),
        ("zero2", {"zero_optimization": {"offload_param": "cpu"}}, "offload_param .* got 'cpu'"),
        ("zero3", {"zero_optimization": {"sub_group_size": "big"}}, "a number >= 0 .*, got 'big'"),
        ("zero2", {"train_batch_size": 2.5}, "an integer >= 1 .*, got 2.5"),
        ("zero2", {"optimizer": {"type": ["Adam"]}}, "optimizer.type .* be text, got .'Adam'.."),
        ("fsdp2", {1: 2}, "Unknown keys in the fsdp_config: 1"),
        ("fsdp2", {"fsdp_version": 3}, "must be 1 or 2, got 3"),
        ("fsdp2", {"cpu_offload": "x"}, "must be true or false, got 'x'"),
        ("fsdp1", {"reshard_after_forward": "maybe"}, "must be FULL_SHARD, got 'maybe'"),
    ],
)
def test_values_of_config_files_are_checked(backend: str, config: Any, message: str) -> None:
    given = "deepspeed_config" if backend.startswith("zero") else "fsdp_config"
    with pytest.raises(OptionError, match=message):
        checked(backend=backend, **{given: config})


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, 1),
        ({"train_batch_size": 64}, 1),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4}, 1),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, 8),
        ({"train_batch_size": 63}, "63, which is not N samples x 1 micro-batches x 2 ranks"),
        ({"train_batch_size": 63, "train_micro_batch_size_per_gpu": 4}, "not 4 samples x 7 micro"),
        (
            {
                "train_batch_size": 64,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 1,
            },
            "not 4 samples x 1 micro-batches x 2 ranks",
        ),
    ],
)
def test_two_batch_sizes_give_the_accumulation_as_in_deepspeed(
    config: dict[str, Any], steps: int | str
) -> None:
    if isinstance(steps, int):
        options = checked(backend="zero2", deepspeed_config=config)
        assert options.accumulate == options.validate(CPU).accumulate == steps
        return
    with pytest.raises(OptionError, match=steps):
        checked(backend="zero2", deepspeed_config=config)


def test_types_of_zero_keys_are_those_of_deepspeed() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = {item.alias or key: item for key, item in DeepSpeedZeroConfig.model_fields.items()}
    for key, kind in config_files.DEEPSPEED_TYPES.items():
        section, _, name = key.rpartition(".")
        if section == "zero_optimization" and kind in (bool, float):
            assert {bool: "bool", float: "int"}[kind] in str(fields[name].annotation), key


def test_auto_and_null_stand_for_the_defaults_of_deepspeed() -> None:
    zero = {"stage": 2, "reduce_bucket_size": 10**6}
    plain = nbdist.plan("350m", "2x24GB", deepspeed_config={"zero_optimization": zero}).rows
    unset = {"overlap_comm": "auto", "sub_group_size": None, "offload_param": None}
    config = {"train_batch_size": None, "optimizer": None, "zero_optimization": zero | unset}
    rows = nbdist.plan("350m", "2x24GB", deepspeed_config=config).rows
    assert [(row.memory, row.cost) for row in rows] == [(row.memory, row.cost) for row in plain]


def test_switches_of_an_fsdp_config_may_be_text() -> None:
    config = {"activation_checkpointing": "false", "fsdp_cpu_offload": "True", "fsdp_version": None}
    options = checked(backend="fsdp2", fsdp_config=config)
    assert (options.activation_checkpointing, options.offload) == (False, "cpu")


def test_no_engine_clips_unless_asked() -> None:
    for name in STRATEGIES:
        options = checked(backend=name)
        strategy = options.strategy
        assert strategy.training_arguments(options, CPU)["max_grad_norm"] == 0.0
        # filled with 0 at prepare(), or by a Trainer with its max_grad_norm
        assert strategy.deepspeed_config(options, CPU)["gradient_clipping"] == "auto"


def test_only_an_offload_under_deepspeed_builds_anything() -> None:
    def ops(**chosen: Any) -> tuple[str, ...]:
        options = checked(**chosen)
        return options.strategy.required_ops(options)

    assert all(ops(backend=name) == () for name in STRATEGIES)
    assert ops(backend="fsdp", offload="cpu") == ()
    assert ops(backend="zero1", offload="cpu") == ("cpu_adam",)
    assert ops(backend="zero3", offload="nvme:/x")[-1] == "async_io"


def test_a_config_may_be_json_in_the_line() -> None:
    assert load_config('{"reshard_after_forward": false}') == {"reshard_after_forward": False}
    with pytest.raises(OptionError, match="Put it in single quotes, or name a file"):
        load_config("{reshard_after_forward:false}")


def test_config_files_are_json_or_yaml(tmp_path: Path) -> None:
    js, yml = tmp_path / "a.json", tmp_path / "b.yaml"
    js.write_text('{"zero_optimization": {"stage": 2}}')
    yml.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n")
    assert load_config(js) == {"zero_optimization": {"stage": 2}}
    assert load_config(yml) == {"fsdp_version": 2}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "not JSON"),
        ("a.yaml", "a: [", "not YAML"),
        ("a.json", "[1]", "must contain a mapping"),
        pytest.param(
            "a.yaml",
            "!!python/object/apply:os.getcwd []",
            "not YAML",
            marks=pytest.mark.fault("A12"),
        ),
    ],
)
def test_an_unreadable_config_file_is_refused(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(OptionError, match=message):
        load_config(file)
    with pytest.raises(OptionError, match="Cannot read"):
        load_config(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"zero_optimization": {"zero_hpz_partition_size": 2}}, "zero_hpz_partition_size"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "zero_quantized_gradients"),
        ({"zero_optimization": {"cpu_offload": True}}, "cpu_offload"),
        ({"optimizer": {"type": "OneBitAdam"}}, "OneBitAdam"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel"),
    ],
)
def test_settings_that_change_the_training_state_are_refused_by_name(
    config: dict[str, Any], named: str
) -> None:
    with pytest.raises(OptionError, match=f"{named}, which nbdist can neither plan") as caught:
        checked(backend="zero3", deepspeed_config=config)
    assert "\n" not in str(caught.value)


def test_a_misspelled_section_is_refused() -> None:
    with pytest.raises(OptionError, match=r"no setting zero_optimisation\. Did you mean zero_opt"):
        checked(backend="zero2", deepspeed_config={"zero_optimisation": {"stage": 2}})


def test_settings_of_zeropp_that_are_off_are_accepted() -> None:
    zero = {"zero_hpz_partition_size": 1, "zero_quantized_weights": False}
    assert checked(backend="zero3", deepspeed_config={"zero_optimization": zero})


def test_settings_that_are_not_planned_are_named() -> None:
    config = {"activation_checkpointing": {}, "zero_optimization": {"reduce_scatter": False}}
    zero = checked(backend="zero2", deepspeed_config=config)
    names = "activation_checkpointing, zero_optimization.reduce_scatter"
    assert zero.unplanned_note.endswith(f": {names}")
    plan = nbdist.plan("350m", devices="2x24GB", backend="zero3", deepspeed_config=config)
    assert f"{zero.unplanned_note}." in str(plan)
    fsdp = checked(backend="fsdp2", fsdp_config={"fsdp_forward_prefetch": True})
    assert fsdp.unplanned_note.endswith(": forward_prefetch")
    assert not checked(backend="zero3", deepspeed_config={"bf16": {}}).unplanned_note
    with pytest.raises(OptionError, match="or fsdp2 with replicate_across nodes"):
        checked(backend="fsdp1", fsdp_config={"sharding_strategy": "HYBRID_SHARD"})
