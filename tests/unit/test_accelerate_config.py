"""Accelerate's config file as options of a session, and the options as a file."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig

from nbdist import OptionError, Session
from nbdist.magics import arguments, magics
from nbdist.strategies import STRATEGIES, Hardware, Options, accelerate_config

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CPU = Hardware(world_size=2)
FSDP = {
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_processes": 2,
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_offload_params": True,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    },
}
ZERO = {
    "distributed_type": "DEEPSPEED",
    "num_processes": 2,
    "deepspeed_config": {
        "zero_stage": 3,
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 4,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "cpu",
    },
}


def file(folder: Path, content: Mapping[str, Any]) -> str:
    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump(dict(content)))
    return str(path)


def options(folder: Path, content: Mapping[str, Any], line: str = "") -> dict[str, Any]:
    parsed = magics.parse_distribute_line(f"--config {file(folder, content)} {line}")
    return arguments.session_options(parsed)


def test_every_key_of_accelerate_is_read_or_named() -> None:
    known = accelerate_config.READ_KEYS | accelerate_config.KEYS_WITHOUT_EFFECT.keys()
    assert known == {field.name for field in fields(ClusterConfig)}


def test_an_fsdp_section_becomes_options(tmp_path: Path) -> None:
    session = Session(config=file(tmp_path, FSDP))
    assert (session.backend, session.options.precision, session.world_size) == ("fsdp2", "bf16", 2)
    assert session.options.offload == "cpu"


def test_a_deepspeed_section_becomes_options(tmp_path: Path) -> None:
    chosen = Session(config=file(tmp_path, ZERO)).options
    assert (chosen.backend, chosen.clip, chosen.accumulate) == ("zero3", 0.5, 4)
    assert (chosen.offload, chosen.offload_params, chosen.precision) == ("cpu", True, "no")


def test_a_deepspeed_file_is_found_beside_the_config(tmp_path: Path) -> None:
    zero = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "gradient_clipping": 1.0}
    (tmp_path / "ds.json").write_text(json.dumps(zero))
    section = {"deepspeed_config": {"deepspeed_config_file": "ds.json", "zero3_init_flag": False}}
    named = Session(config=file(tmp_path, ZERO | section)).options
    alone = Session(config=tmp_path / "ds.json", nproc=2).options
    assert named == alone
    assert (named.backend, named.precision, named.clip) == ("zero2", "bf16", 1.0)


def test_auto_in_a_deepspeed_file_is_the_precision_beside_it(tmp_path: Path) -> None:
    zero = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}
    (tmp_path / "ds.json").write_text(json.dumps(zero))
    section = {"deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    named = file(tmp_path, ZERO | section | {"mixed_precision": "bf16"})
    assert Session(config=named).options.precision == "bf16"
    assert Session(config=file(tmp_path, ZERO | section)).options.precision == "no"
    assert Session(config=tmp_path / "ds.json", precision="bf16").options.precision == "bf16"


@pytest.mark.parametrize("backend", STRATEGIES)
def test_a_written_config_gives_the_same_options_back(backend: str, tmp_path: Path) -> None:
    before = Options(backend=backend, accumulate=2, precision="bf16").validate(CPU)
    if before.strategy.engine != "deepspeed":
        before = Options(backend=backend, precision="bf16").validate(CPU)  # not in the file
    content = accelerate_config.write_accelerate_config(
        before, CPU, devices=None, deepspeed_file="ds_config.json"
    )
    deepspeed = accelerate_config.write_deepspeed_config(before, CPU)
    (tmp_path / "ds_config.json").write_text(json.dumps(deepspeed))
    after = Session(config=file(tmp_path, content)).options
    names = ("backend", "precision", "accumulate", "clip", "offload")
    assert {n: getattr(after, n) for n in names} == {n: getattr(before, n) for n in names}


def test_a_file_without_an_engine_names_ddp(tmp_path: Path) -> None:
    assert options(tmp_path, {"distributed_type": "MULTI_GPU"})["backend"] == "ddp"
    with pytest.raises(OptionError, match="backend is 'zero2' but the config file has 'ddp'"):
        options(tmp_path, {"distributed_type": "MULTI_GPU"}, "--backend zero2")


def test_a_number_of_ranks_on_the_line_takes_precedence(tmp_path: Path) -> None:
    assert options(tmp_path, FSDP | {"num_processes": 512}, "-n 2")["nproc"] == 2


@pytest.mark.parametrize("name", ["NO", False])  # YAML reads NO without quotes as false
def test_without_a_distributed_type_there_is_one_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: object
) -> None:
    """As under `accelerate launch`; trl's single_gpu.yaml has 8 processes."""
    assert options(tmp_path, {"distributed_type": name, "num_processes": 8})["nproc"] == 1
    assert "nbdist: ignored keys of the config file: num_processes" in capsys.readouterr().out


def test_what_has_no_effect_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options(tmp_path, FSDP | {"machine_rank": 1, "main_process_ip": "10.0.0.1", "debug": False})
    assert capsys.readouterr().out.strip() == (
        "nbdist: ignored keys of the config file: machine_rank, main_process_ip"
    )
    options(tmp_path, FSDP | {"distributed_type": "MULTI_GPU"})
    assert capsys.readouterr().out.endswith("config file: fsdp_config\n")


@pytest.mark.parametrize(
    ("changes", "line", "message"),
    [
        ({"num_process": 2}, "", r"^Unknown keys in the config file: 'num_process'\. Remove"),
        ({"distributed_type": "XLA"}, "", r"^A session cannot run the config's .*XLA"),
        ({"distributed_type": "MEGATRON_LM"}, "", r"MEGATRON_LM'\. Use distributed_type NO"),
        ({}, "-b ddp", r"^backend is 'ddp' but the config file has 'fsdp2'\. Remove one"),
        ({"fsdp_config": {"fsdp_version": 3}}, "", r"^fsdp_version must be 1 or 2, got 3\.$"),
        (ZERO | {"deepspeed_config": {"zero_stage": 0}}, "", r"ZeRO stage 0\. Use stage 1, 2"),
        (ZERO | {"deepspeed_config": {"zero_stage": "3"}}, "", r"ZeRO stage '3'\. Use stage 1, 2"),
    ],
)
def test_what_a_session_cannot_run_is_refused(
    changes: Mapping[str, Any], line: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=message):
        options(tmp_path, FSDP | changes, line)


def test_more_ranks_than_the_machine_has_room_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"^512 (ranks need 512 GPUs|CPU ranks are too many)"):
        Session(config=file(tmp_path, FSDP | {"num_processes": 512}))


@pytest.mark.parametrize("kind", ["tp", "cp", "sp"])
def test_a_config_with_another_parallelism_is_refused(tmp_path: Path, kind: str) -> None:
    sizes = {f"parallelism_config_{kind}_size": 2, "parallelism_config_dp_shard_size": 1}
    with pytest.raises(OptionError, match=f"parallelism_config_{kind}_size is 2"):
        options(tmp_path, FSDP | {"parallelism_config": sizes})
