"""The search and what it says; figures themselves are tested with their engines."""

from __future__ import annotations

import json
import math
import shlex
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
from IPython.core.magic_arguments import parse_argstring

import nbdist
from nbdist import strategies
from nbdist.errors import OptionError, PlanError
from nbdist.magics import arguments, magics
from nbdist.planner import prediction_errors, search
from nbdist.planner.plan_types import PlanInput
from tests.unit import model_configs

if TYPE_CHECKING:
    from nbdist.planner.result import Plan

GIB = 1 << 30
LLAMA_8B = model_configs.llama(4096, 14336, 32, 32, 8, 128256)
SMALL = model_configs.llama(512, 1376, 4, 8, 8, 8000)


@pytest.fixture(scope="module", autouse=True)
def no_calibration(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Plan with the defaults, whatever was learned on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def eight() -> Plan:
    return nbdist.plan(LLAMA_8B, devices="8xA100-80GB,nvlink", seq_len=4096)


# ---- the choice


def test_the_best_row_is_the_simplest_that_is_not_surely_slower(eight: Plan) -> None:
    assert eight.best is not None
    fitting = [row for row in eight.rows if row.fits]
    top = max(row.tokens_per_s for row in fitting)
    doubt = prediction_errors.comparison_uncertainty("cuda")
    assert eight.best.tokens_per_s * (1 + doubt) >= top
    assert eight.best.options.offload == "none"
    for row in fitting:
        if row.backend == "ddp":
            assert row.tokens_per_s * (1 + doubt) < top or eight.best.backend == "ddp"


def test_a_tiny_model_on_cpu_ranks_gets_ddp_although_others_are_predicted_faster() -> None:
    shape = model_configs.gpt2(64, 2, 4, 256, n_positions=64)
    plan = nbdist.plan(shape, devices="8xcpu", precision="no")
    assert max(plan.rows, key=lambda row: row.tokens_per_s).backend != "ddp"
    assert plan.best is not None
    assert plan.best.backend == "ddp"
    assert plan.best.why.startswith("the simplest that fits, and none is faster by more")


def test_fsdp1_is_chosen_only_if_it_is_asked_for() -> None:
    plan, asked = (
        nbdist.plan(SMALL, devices="8xA100-80GB,nvlink", seq_len=512, **given)
        for given in ({}, {"backend": "fsdp1"})
    )
    assert "used only with --backend fsdp1" in plan.row("fsdp1").why
    assert asked.best is not None
    assert asked.best.backend == "fsdp1"


def test_the_explanation_names_the_runner_up_and_why_it_lost(eight: Plan) -> None:
    assert eight.best is not None
    assert eight.runner_up is not None
    assert eight.runner_up.backend != eight.best.backend
    named = f"runner-up: {eight.runner_up.variant}: {eight.runner_up.why}"
    assert named in str(eight)
    assert any(named in line for line in eight.explanation())
    assert "runner-up: none" in str(nbdist.plan(SMALL, devices="2x24GB", backend="ddp"))


@pytest.mark.parametrize("model", [LLAMA_8B, SMALL])
@pytest.mark.parametrize("devices", ["8xA100-80GB,nvlink", "2xA100-80GB,nvlink", "2x96GB,pcie"])
def test_the_fastest_is_called_so_and_a_simpler_one_is_not(model: Any, devices: str) -> None:
    plan = nbdist.plan(model, devices=devices, batch_size=1, seq_len=512)
    assert plan.best is not None
    top = max(row.tokens_per_s for row in plan.rows if row.fits and row.backend != "fsdp1")
    is_called_fastest = plan.best.why.startswith("the fastest that fits; ")
    assert is_called_fastest == (top <= 1.01 * plan.best.tokens_per_s)


def test_a_small_model_that_fits_everywhere_gets_the_simplest_backend() -> None:
    plan = nbdist.plan(SMALL, devices="2xA100-80GB,nvlink", batch_size=4, seq_len=512)
    assert all(row.fits for row in plan.rows)
    assert plan.best is not None
    assert not plan.best.options.activation_checkpointing
    assert plan.best.options.offload == "none"


def test_every_row_says_why(eight: Plan) -> None:
    for row in eight.rows:
        if row.fits:
            assert row.why.startswith(("the fastest", "the simplest", "fits, ")), row.why
        else:
            free = eight.question.cluster.smallest_device.free_bytes / GIB
            assert f"of {free:.1f} GiB" in row.why
            assert f"{row.device_bytes / GIB:.1f}" in row.why


def test_a_row_that_needs_the_margin_does_not_fit(eight: Plan) -> None:
    free = eight.question.cluster.smallest_device.free_bytes
    for row in eight.rows:
        assert row.fits == (row.device_bytes * (1 + row.margin.total) <= free)


def test_the_margin_is_made_of_measured_errors(eight: Plan) -> None:
    margin = eight.row("fsdp2").margin

    assert margin.total == pytest.approx(margin.tensors.share + margin.device)
    assert margin.tensors.num_cases >= 20
    assert f"{margin.tensors.num_cases} measured cases" in str(eight)


def test_kept_outputs_are_planned_and_shown(eight: Plan) -> None:
    dropped = nbdist.plan(
        LLAMA_8B, devices="8xA100-80GB,nvlink", seq_len=4096, keep_outputs=False
    ).row("fsdp2")
    kept = eight.row("fsdp2")
    logits = 2 * 4096 * LLAMA_8B["vocab_size"]

    assert (kept.output_bytes, dropped.output_bytes) == (logits, 0)
    assert kept.allocated_bytes - dropped.allocated_bytes == logits  # the peak is at the loss
    assert "keeps 1002 MiB of outputs" in str(eight)


def test_dropping_outputs_is_named_where_it_helps() -> None:
    given: dict[str, Any] = {"backend": "fsdp2", "offload": "none", "seq_len": 4096}
    kept, dropped = (
        nbdist.plan(LLAMA_8B, devices="8x80GB", keep_outputs=keep, **given)
        for keep in (True, False)
    )
    rows = [plan.row("fsdp2", activation_checkpointing=True) for plan in (kept, dropped)]
    between = sum(row.device_bytes * (1 + row.margin.total) for row in rows) / 2
    size = 80 * between / kept.question.cluster.smallest_device.free_bytes
    plan = nbdist.plan(LLAMA_8B, devices=f"8x{size:.2f}GB,nvlink", **given)

    assert plan.best is None
    assert any(sentence.startswith("del outputs") for sentence in plan.advice)


def test_parts_sum_up_to_the_device(eight: Plan) -> None:
    for row in eight.rows:
        assert sum(row.memory.values()) == row.device_bytes
        parts = {
            name: size for name, size in row.memory.items() if name not in {"context", "margin"}
        }
        assert sum(parts.values()) == row.allocated_bytes


# ---- what is fixed and what is searched


def test_fixed_options_are_kept_in_every_row() -> None:
    plan = nbdist.plan(
        SMALL, devices="2x24GB,pcie", offload="cpu", activation_checkpointing=True, accumulate=4
    )
    for row in plan.rows:
        options = row.options
        assert (options.offload, options.activation_checkpointing, options.accumulate) == (
            "cpu",
            True,
            4,
        )


def test_a_fixed_offload_that_a_backend_lacks_is_refused_in_its_row() -> None:
    plan = nbdist.plan(SMALL, devices="2x24GB,pcie", offload="nvme:/scratch")
    refused = [row for row in plan.rows if row.cost is None]
    assert {row.backend for row in refused} == {"ddp", "fsdp1", "fsdp2", "zero1", "zero2"}
    assert all("Use zero3, or offload none" in row.why for row in refused)
    assert plan.best is not None
    assert plan.best.backend == "zero3"


def test_fsdp2_may_keep_parameters_gathered(eight: Plan) -> None:
    kept, plain = (
        eight.row("fsdp2", activation_checkpointing=True, reshard_after_forward=reshard)
        for reshard in (False, True)
    )
    assert kept.variant == "fsdp2, activation checkpointing, no reshard"
    assert plain == eight.row("fsdp2", activation_checkpointing=True)
    assert kept.memory["gathered"] > 2 * plain.memory["gathered"]
    assert kept.cost is not None
    assert plain.cost is not None
    assert kept.cost.communication_s < plain.cost.communication_s
    variants = [row.variant for row in eight.rows if "no reshard" in row.variant]
    assert variants == ["fsdp2, no reshard", "fsdp2, activation checkpointing, no reshard"]
    alone = nbdist.plan(SMALL, devices="A100-80GB", seq_len=512)
    assert not any("no reshard" in row.variant for row in alone.rows)


def test_keeping_parameters_gathered_is_as_simple_as_not_to() -> None:
    # 3 % faster it is taken; as fast as the plain one, that is.
    fast, slow = (nbdist.plan("7b", devices="8xA100-80GB,nvlink", seq_len=n) for n in (1024, 8192))
    assert fast.best is not None
    assert slow.best is not None
    assert not fast.best.options.reshard_after_forward
    assert slow.best.options.reshard_after_forward


def test_the_line_to_paste_has_the_config_that_its_row_needs(eight: Plan) -> None:
    row = eight.row("fsdp2", reshard_after_forward=False)
    line = row.command.removeprefix("%%distribute ")
    asked = parse_argstring(magics.NbDist.distribute, line)
    options = strategies.Options.from_fields(arguments.session_options(asked))
    settled = options.validate(strategies.Hardware(kind="cuda", bf16=True))
    assert settled == row.options
    assert settled.strategy.fsdp_kwargs(settled)["reshard_after_forward"] is False


@pytest.fixture(scope="module")
def nodes() -> Plan:
    return nbdist.plan("7b", devices="2x(8xH100-80GB,nvlink),400Gb/s", seq_len=2048)


def test_several_machines_have_rows_with_replicas(nodes: Plan, eight: Plan) -> None:
    hybrid, whole = nodes.row("fsdp", replicate_across="nodes"), nodes.row("fsdp2")
    assert hybrid.memory["optimizer"] == 2 * whole.memory["optimizer"]
    assert hybrid.tokens_per_s > whole.tokens_per_s
    assert {row.backend for row in nodes.rows if "replicate" in row.variant} == {"fsdp2"}
    assert not [row for row in eight.rows if row.options.replicate_across != "none"]
    with pytest.raises(PlanError, match=r"replicate_across='nodes'\. It has fsdp2"):
        eight.row("fsdp2", replicate_across="nodes")


def test_replicas_are_in_the_line_to_paste_and_in_what_is_shown(nodes: Plan) -> None:
    row = nodes.row("fsdp2", replicate_across="nodes", offload="cpu")
    line = row.command.removeprefix("%%distribute ")
    asked = parse_argstring(magics.NbDist.distribute, line)
    options = strategies.Options.from_fields(arguments.session_options(asked))
    hardware = strategies.Hardware(kind="cuda", bf16=True, world_size=16, nodes=2)
    assert options.validate(hardware) == row.options
    for shown in (str(nodes), nodes._repr_html_()):
        assert "fsdp2, replicate across nodes" in shown
        assert "2 x (8 x H100-80GB, nvlink), 400 Gb/s" in shown
    assert nodes.best is not None
    assert nodes.best.options.replicate_across == "nodes"
    assert "%%distribute --backend fsdp2 --replicate-across nodes" in str(nodes)
    assert "over the network between nodes" in nodes.row("zero1").why
    assert row.to_dict()["replicate_across"] == "nodes"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"devices": "8xH100"}, "needs ranks on several machines, but all ranks are on one"),
        ({"devices": "4x(H100),400Gb/s"}, "4 ranks on 4 nodes are one rank on each"),
        ({"devices": "2x(4xH100)", "world_size": 7}, "are not the same number on each"),
        ({"devices": "2x(4xH100)", "backend": "zero3"}, "zero3 cannot replicate across nodes"),
    ],
)
def test_replicas_that_cannot_be_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        nbdist.plan(SMALL, replicate_across="nodes", **given)


def test_fixed_replicas_are_searched_alone() -> None:
    fixed = {"devices": "2x(4xA100-80GB),100Gb/s", "replicate_across": "nodes"}
    plan = nbdist.plan(SMALL, seq_len=512, **fixed)
    assert {row.options.replicate_across for row in plan.rows} == {"nodes"}
    assert {row.backend for row in plan.rows} == {"fsdp2"}
    assert all(row.cost is not None for row in plan.rows)
    apart = nbdist.plan(SMALL, seq_len=512, devices="4x(A100-80GB),100Gb/s")
    assert {row.options.replicate_across for row in apart.rows} == {"none"}


def test_a_fixed_fsdp_config_is_kept_and_is_for_fsdp_alone() -> None:
    config = {"fsdp_reshard_after_forward": False, "fsdp_activation_checkpointing": True}
    plan = nbdist.plan(SMALL, devices="2x24GB,pcie", seq_len=512, fsdp_config=config)
    assert {row.backend for row in plan.rows} == {"fsdp2", "fsdp1"}
    assert not plan.row("fsdp2").options.reshard_after_forward
    assert plan.row("fsdp2").options.activation_checkpointing
    assert "of fsdp1 must be FULL_SHARD" in plan.rows[-1].why


def test_several_batch_sizes_are_several_rows(eight: Plan) -> None:
    both = nbdist.plan(LLAMA_8B, devices="8xA100-80GB,nvlink", batch_size=[1, 4], seq_len=4096)
    assert len(both.rows) == 2 * len(eight.rows)
    one, four = (both.row("zero3", batch_size=size) for size in (1, 4))
    assert four.allocated_bytes > one.allocated_bytes


def test_devices_that_lack_the_precision_are_named() -> None:
    text = str(nbdist.plan(SMALL, devices="2xV100-32GB", precision="bf16"))
    assert "V100-32GB does not support bf16" in text
    assert "It supports fp16" in text


def test_assumed_host_memory_is_labeled_as_assumed() -> None:
    silent = nbdist.plan(LLAMA_8B, devices="2x24GB,pcie", seq_len=2048).best
    stated = nbdist.plan(LLAMA_8B, devices="2x24GB,pcie,512GB host", seq_len=2048).best
    assert silent is not None
    assert stated is not None
    assert "assumed to be available" in silent.why
    assert "assumed to be available" not in stated.why


def test_an_offload_needs_the_space_that_is_given_on_nvme() -> None:
    machine = "8xH100-80GB,nvlink,2TB host"
    plans = [
        nbdist.plan("7b", devices=f"{machine},{size} nvme", offload="nvme:/fast", backend="zero3")
        for size in ("1TB", "50GB")
    ]
    large, small = (plan.rows[0] for plan in plans)
    assert (large.fits, small.fits) == (True, False)
    assert small.why == "does not fit on NVMe: 75.3 of 46.6 GiB"


# ---- rows by name


def test_a_row_is_found_by_backend_and_options(eight: Plan) -> None:
    row = eight.row("fsdp", activation_checkpointing=True, offload="none")
    assert (row.backend, row.options.activation_checkpointing) == ("fsdp2", True)
    assert eight.row("zero3", offload="nvme").options.offload == "nvme:PATH"


def test_a_row_that_is_not_there_says_which_are(eight: Plan) -> None:
    with pytest.raises(PlanError, match=r"no row ddp .*offload='cpu'\. It has ddp"):
        eight.row("ddp", offload="cpu")
    with pytest.raises(OptionError, match=r"Unknown option ofload\. Did you mean offload"):
        eight.row("ddp", ofload="cpu")


def test_a_data_frame_has_a_line_for_each_row(eight: Plan) -> None:
    frame = eight.to_pandas()
    assert len(frame) == len(eight.rows)
    assert frame.filter(like="memory.").notna().all(axis=None)


# ---- what it shows


def test_text_has_a_line_for_each_backend_and_the_command_to_paste(eight: Plan) -> None:
    text = str(eight)
    assert eight.best is not None
    assert f"\n{eight.best.command}\n" in text
    assert all(name in text for name in ("ddp", "fsdp2", "fsdp1", "zero1", "zero2", "zero3"))
    assert "T* =" in text


def test_an_explanation_has_at_most_eight_lines(eight: Plan) -> None:
    nothing = nbdist.plan("70b", devices="8x80GB,nvlink", offload="none")
    for plan in (eight, nothing):
        assert 2 <= len(plan.explanation()) <= 8
    assert nothing.explanation()[0].startswith("nothing fits")


def test_html_marks_the_best_row_and_escapes_what_users_wrote(eight: Plan) -> None:
    shown = eight._repr_html_()
    assert shown.count("font-weight:600") == 2, "in the short and in the long table"
    named = nbdist.plan(SMALL | {"model_type": "llama"}, devices="2x24GB", offload="nvme:<b>")
    assert "<b>" not in named._repr_html_().replace("<div><b>", "").replace("</b></div>", "")


# ---- where nothing fits


def question(**changes: Any) -> PlanInput:
    plan = nbdist.plan("70b", devices="8x80GB,nvlink", batch_size=8, offload="none")
    fields = {
        name: getattr(plan.question, name) for name in PlanInput.__dataclass_fields__
    } | changes
    return PlanInput(**fields)


def test_the_smallest_number_of_devices_that_fits_is_named() -> None:
    asked = question(batch_sizes=(1,))
    advice = list(search.suggest_changes(asked))
    ranks = next(
        ranks
        for ranks in (16, 32, 64, 128)
        if search.best_row(question(batch_sizes=(1,), cluster=asked.cluster.with_num_ranks(ranks)))
    )
    assert all(" fits with " in sentence for sentence in advice)
    assert advice[-1].startswith(f"{ranks} of these devices instead of 8: ")


def test_where_nothing_helps_it_says_so() -> None:
    plan = nbdist.plan("405b", devices="1x11GB", seq_len=100_000)
    assert plan.advice == (search.NO_CHANGE_FITS,)
    assert f"what would help:\n  {search.NO_CHANGE_FITS}" in str(plan)


# ---- bad input


def test_the_stage_of_a_deepspeed_config_is_the_backend() -> None:
    plan = nbdist.plan(
        SMALL, devices="2x24GB", deepspeed_config={"zero_optimization": {"stage": 2}}
    )
    assert {row.backend for row in plan.rows} == {"zero2"}


def test_the_command_has_the_settings_of_the_plan() -> None:
    config = {"gradient_clipping": 0.5, "zero_optimization": {"reduce_bucket_size": 1_000_000}}
    row = nbdist.plan(SMALL, devices="2x24GB", deepspeed_config=config).row("zero1")
    words = shlex.split(row.command)
    assert words[1:6] == ["--backend", "zero1", "--clip", "0.5", "--deepspeed-config"]
    assert json.loads(words[6]) == {"zero_optimization": {"reduce_bucket_size": 1_000_000}}


@pytest.mark.parametrize(
    ("config", "given", "planned"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, None, "4; the deepspeed_config has 4"),
        ({"train_micro_batch_size_per_gpu": 4}, [2, 1, 2], "2, 1; the deepspeed_config has 4"),
        ({"train_batch_size": 16}, None, "8; the deepspeed_config has 8"),
        ({"train_batch_size": "auto"}, None, '1; the deepspeed_config has "auto"'),
    ],
)
def test_the_batch_size_is_that_of_a_deepspeed_config(
    config: dict[str, Any], given: Any, planned: str
) -> None:
    plan = nbdist.plan(SMALL, "2x24GB", batch_size=given, deepspeed_config=config)
    assert f"Planned with batch_size {planned}, and a session takes" in str(plan)
    machines = nbdist.plan(SMALL, "any", only="T4", deepspeed_config={"train_batch_size": 16})
    assert "micro-batch 1 " in str(machines)


def test_the_precision_is_that_of_a_deepspeed_config() -> None:
    config = {"fp16": {"enabled": True}}
    assert nbdist.plan(SMALL, "2x24GB", deepspeed_config=config).question.precision == "fp16"
    assert nbdist.plan(SMALL, "2x24GB", deepspeed_config={}).question.precision == "bf16"
    with pytest.raises(OptionError, match=r"precision is 'bf16' but .* 'fp16'\. Remove one"):
        nbdist.plan(SMALL, "2x24GB", precision="bf16", deepspeed_config=config)


def test_an_option_that_is_none_is_searched() -> None:
    given = dict.fromkeys(("backend", "offload", "activation_checkpointing", "fsdp_config"))
    assert len(nbdist.plan(SMALL, devices="2x24GB", **given).rows) == len(
        nbdist.plan(SMALL, devices="2x24GB").rows
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_size": 0}, "batch_size must be an integer from 1 to .*, got 0"),
        ({"batch_size": [1, -2]}, "batch_size .*, got -2"),
        ({"batch_size": []}, r"batch_size .*, got \[\]"),
        ({"batch_size": True}, "batch_size .*, got True"),
        ({"seq_len": math.nan}, "seq_len .*, got nan"),
        ({"seq_len": 2.5}, "seq_len .*, got 2.5"),
        ({"world_size": 1e30}, "world_size .*, got 1e.30"),
        ({"world_size": "8"}, "world_size .*, got '8'"),
        ({"optimizer": "adamx"}, "adamx"),
        ({"precision": "int3"}, "int3"),
        ({"devices": "8xPotato"}, "Potato"),
        ({"devices": 8}, "devices must be text, not 8"),
        ({"keep_outputs": "no"}, "keep_outputs must be True or False"),
        ({"offload": "tape"}, "tape"),
        ({"accumulate": 0}, "accumulate"),
        ({"accumulate": 10**20}, "accumulate must be an integer from 1 to 10,000,000"),
        ({"inputs": "x"}, "inputs needs the model itself"),
        ({"colour": "red"}, "colour"),
        ({"backend": "horovod"}, "horovod"),
        ({"deepspeed_config": {"zero_optimization": {"stage": 7}}}, "no version or stage 7"),
        ({"deepspeed_config": {"fp16": True}}, "fp16 of the .* be a section .*, got True"),
    ],
)
@pytest.mark.fault("F6")
def test_bad_arguments_are_one_sentence(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((PlanError, OptionError), match=words) as caught:
        nbdist.plan(SMALL, **{"devices": "2x24GB", **arguments})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (42, "Cannot plan an object of class int"),
        ("no/such/folder", "nbdist does not download models"),
        ({"model_type": "llama"}, "hidden_size"),
        (SMALL | {"tie_word_embeddings": "false"}, "embeddings must be true or false, got 'false'"),
        (SMALL | {"hidden_act": "new"}, "cannot build LlamaForCausalLM .*no entry 'new'"),
    ],
)
@pytest.mark.fault("F6")
def test_a_model_that_cannot_be_read_is_one_sentence(model: object, words: str) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        nbdist.plan(model, devices="2x24GB")
    assert "\n" not in str(caught.value)


def test_a_torn_config_file_is_one_sentence(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(PlanError, match=r"Cannot read .* as a config"):
        nbdist.plan(tmp_path, devices="2x24GB")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(PlanError, match="expected a JSON object, got list"):
        nbdist.plan(str(tmp_path), devices="2x24GB")


def test_functions_keep_their_names_beside_packages_of_the_same_name() -> None:
    import_module("nbdist.session.session")
    import_module("nbdist.doctor.diagnosis")

    assert nbdist.session() is None
    assert callable(nbdist.doctor)


def test_host_memory_is_counted_while_the_model_is_loaded() -> None:
    plan = nbdist.plan(LLAMA_8B, devices="8xH100,150GB host", seq_len=2048)
    rows = {row.backend: row for row in plan.rows if row.options.offload == "none"}
    whole = rows["fsdp2"].load_bytes
    assert rows["zero1"].load_bytes == rows["ddp"].load_bytes == 8 * whole
    assert "in host memory while it is loaded" in rows["zero1"].why
    assert rows["fsdp2"].fits
