"""What `%nbdist doctor --run` recognises, and that the engines have what it gives."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from nbdist import strategies
from nbdist.doctor import training_run
from nbdist.doctor.diagnosis import Diagnosis
from nbdist.doctor.training_run import RunErrors
from nbdist.magics.arguments import PARSERS
from nbdist.planner import cluster_spec, target_devices
from nbdist.profiler.measurements import CollectiveStats, RankProfile
from nbdist.profiler.profile import Profile
from nbdist.profiler.profile_data import ProfiledConfig
from nbdist.strategies import Hardware, Options
from tests.unit.profile_figures import MODEL

if TYPE_CHECKING:
    from nbdist.doctor.finding import Finding
    from nbdist.profiler.advice import Advice

MB = 1 << 20
CPU, GPU = Hardware(world_size=2), Hardware(kind="cuda", bf16=True, world_size=2)
OOM = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
GATHERED = (
    "File torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:212, in foreach_all_gather("
)


def figures(
    *,
    units: int = 8,
    params: int = 10**9,
    traffic: list[CollectiveStats] | None = None,
    **parts: float,
) -> RankProfile:
    """Of a rank with steps of a second; communication is what its collectives expose."""
    parts["communication"] = sum(one.exposed_s - one.waiting_s for one in traffic or [])
    parts["waiting"] = sum(one.waiting_s for one in traffic or [])
    largest = params // max(1, units)
    model = dataclasses.replace(MODEL, params=params, units=units, largest_unit=largest)
    return RankProfile(
        rank=0,
        kind="cuda",
        device="H200",
        ends=[0.0, 1.0],
        parts={"forward": 1.0 - sum(parts.values()), **parts},
        traffic=traffic or [],
        model=model,
    )


def traffic(
    name: str, count: int, each: int, exposed_s: float, waiting_s: float = 0.0
) -> CollectiveStats:
    return CollectiveStats(
        name=name,
        count=count,
        bytes=count * each,
        seconds=exposed_s,
        exposed_s=exposed_s,
        waiting_s=waiting_s,
    )


def failed(
    backend: str,
    message: str,
    frames: str = "",
    *,
    profiled: RankProfile | None = None,
    hardware: Hardware = GPU,
    **options: Any,
) -> RunErrors:
    return RunErrors(
        options=Options(backend=backend, **options).validate(hardware),
        hardware=hardware,
        model=profiled.model if profiled else None,
        messages=message,
        frames=frames,
    )


def only(run: RunErrors) -> tuple[Finding, dict[str, Any]]:
    """The one finding, and the config in its line."""
    (one,) = training_run.check_errors(run)
    return one, pasted(one.do, run.hardware, run.options.backend)


def profile(backend: str, *ranks: RankProfile, hardware: Hardware = GPU, **options: Any) -> Profile:
    """A profile of a model that the planner does not know."""
    cluster = (
        target_devices.parse_devices("2xH100-80GB,nvlink")
        if hardware is GPU
        else cluster_spec.cpu_cluster(2, host_memory_bytes=16 << 30, num_cpus=2)
    )
    chosen = Options(backend=backend, **options).validate(hardware)
    return Profile.of(ranks, ProfiledConfig(options=chosen, cluster=cluster))


def advised(found: Profile) -> tuple[Advice, dict[str, Any]]:
    (one,) = found.advice
    return one, pasted(one.line, GPU, found.setting.options.backend)


def pasted(line: str, hardware: Hardware, backend: str = "") -> dict[str, Any]:
    """Take a line as the magic does, and as the options are checked."""
    magic, switch, *rest = shlex.split(line)
    assert (magic, switch) == ("%nbdist", "switch")
    asked = PARSERS["switch"].parse_args(rest)
    (name,) = [one for one in ("fsdp_config", "deepspeed_config") if getattr(asked, one)]
    config = strategies.load_config(getattr(asked, name))
    named = {"offload": asked.offload or "none"} if asked.offload else {}
    options = Options(backend=asked.backend or backend, **named, **{name: config})
    options = options.validate(hardware)
    known_to_the_engine(options, hardware)
    return config


def known_to_the_engine(options: Options, hardware: Hardware) -> None:
    """Whether the installed engine has every key, with a value that it takes."""
    strategy = options.strategy
    if strategy.engine == "fsdp":
        from accelerate import FullyShardedDataParallelPlugin

        fields = {one.name for one in dataclasses.fields(FullyShardedDataParallelPlugin)}
        kwargs = strategy.fsdp_kwargs(options)
        assert kwargs.keys() <= fields
        # both look for a GPU here, where there may be none
        FullyShardedDataParallelPlugin(
            **{**kwargs, "cpu_offload": False, "sync_module_states": False}
        )
        return
    from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = strategy.deepspeed_config(options, hardware)
    zero = config["zero_optimization"]
    made = DeepSpeedZeroConfig(**zero)
    names = {one.alias or name for name, one in DeepSpeedZeroConfig.model_fields.items()}
    assert zero.keys() <= names
    for name in ("offload_optimizer", "offload_param"):
        if name in zero:
            assert zero[name].keys() <= type(getattr(made, name)).model_fields.keys()
    assert (options.deepspeed_config or {}).get("aio", {}).keys() <= get_aio_config({}).keys()


# -- out of memory while gathering


@pytest.mark.parametrize("backend", ["fsdp2", "fsdp1"])
def test_units_too_large_to_gather_are_made_smaller(backend: str) -> None:
    one, config = only(failed(backend, OOM, GATHERED, profiled=figures(units=4)))
    assert (one.level, one.topic) == ("problem", "all_gather")
    assert "CUDA out of memory" in one.says
    assert config["auto_wrap_policy"] == "SIZE_BASED_WRAP"
    assert config["min_num_params"] == 10_000_000


@pytest.mark.parametrize(
    ("ranks", "present", "smallest"),
    [
        (None, {}, 10_000),  # not profiled: whatever the units are, no layer is larger
        (figures(units=8, params=2_000_000), {}, 15_625),
        (None, {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 15_625}, 10_000),
        (
            figures(units=8, params=10**9),
            {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 4_000_000},
            2_000_000,
        ),
    ],
)
def test_units_that_did_not_fit_never_become_larger(
    ranks: RankProfile | None, present: dict[str, Any], smallest: int
) -> None:
    run = failed("fsdp2", OOM, GATHERED, profiled=ranks, fsdp_config=present or None)
    assert only(run)[1]["min_num_params"] == smallest


def test_fsdp1_gathers_less_ahead_when_memory_ends() -> None:
    config = {"backward_prefetch": "BACKWARD_PRE", "use_orig_params": True}
    _, config = only(failed("fsdp1", OOM, GATHERED, fsdp_config=config))
    assert config["backward_prefetch"] == "NO_PREFETCH"
    assert config["limit_all_gathers"] is True
    assert config["use_orig_params"] is True  # what was there stays


def test_zero3_keeps_fewer_parameters_live_when_memory_ends() -> None:
    frames = "File deepspeed/runtime/zero/partitioned_param_coordinator.py:9, in fetch_sub_module("
    zero = only(failed("zero3", OOM, frames))[1]["zero_optimization"]
    assert zero["stage3_max_live_parameters"] == 100_000_000
    assert zero["stage3_prefetch_bucket_size"] == 10_000_000
    present = {"zero_optimization": {"stage3_max_live_parameters": 1000}}
    zero = only(failed("zero3", OOM, frames, deepspeed_config=present))[1]["zero_optimization"]
    assert zero["stage3_max_live_parameters"] == 500


# -- advice of a profile: the engine's own options


def test_a_model_of_one_unit_is_reported() -> None:
    whole = figures(units=1, params=80_000, traffic=[traffic("all_gather", 1, 80_000, 0.3)])
    one, config = advised(profile("fsdp2", whole))
    assert one.title == "FSDP units"
    assert config == {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 10_000}
    cut = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 100_000}
    whole = figures(units=1, params=800_000, traffic=[traffic("all_gather", 1, 80_000, 0.3)])
    assert advised(profile("fsdp2", whole, fsdp_config=cut))[1]["min_num_params"] == 25_000


def test_many_small_units_are_reported_if_their_gathers_take_time() -> None:
    busy = figures(traffic=[traffic("all_gather", 200, 20_480, 0.3)])
    one, config = advised(profile("fsdp2", busy))
    assert "200 all_gathers of 20 KiB per step take 30 % of it" in one.why
    assert config["min_num_params"] == 10_000_000
    assert one.gain.faster == pytest.approx(1 / 0.85 - 1)
    assert one.gain.low < one.gain.faster < one.gain.high
    small = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 10_000_000}
    _, config = advised(profile("fsdp2", busy, fsdp_config=small))
    assert config["min_num_params"] == 20_000_000
    hidden = figures(traffic=[traffic("all_gather", 200, 20_000, 0.01)])
    assert profile("fsdp2", hidden).advice == ()


def test_a_late_rank_is_not_a_slow_gather() -> None:
    late = figures(traffic=[traffic("all_gather", 200, 20_000, 0.3, waiting_s=0.29)])
    for backend in ("fsdp2", "zero3"):
        assert profile(backend, late).advice == ()


def test_zero3_keeps_small_parameters_whole_where_they_take_time() -> None:
    busy = figures(traffic=[traffic("all_gather", 300, 9_000, 0.2)])
    one, config = advised(profile("zero3", busy))
    assert one.title == "small modules"
    assert one.changes == {"deepspeed_config": config}
    assert config["zero_optimization"] == {"stage3_param_persistence_threshold": 1_000_000}


def test_zero3_that_its_config_holds_back_gets_all_of_it_back() -> None:
    busy = figures(traffic=[traffic("all_gather", 300, 9_000, 0.2)])
    present = {
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
        "overlap_comm": False,
        "stage3_max_live_parameters": 1000,
    }
    found = profile("zero3", busy, deepspeed_config={"zero_optimization": present})
    one, config = advised(found)
    assert config["zero_optimization"] == {
        "stage3_param_persistence_threshold": 100_000,
        "stage3_prefetch_bucket_size": 50_000_000,
        "overlap_comm": True,
        "stage3_max_live_parameters": 10**9,
        "stage3_max_reuse_distance": 10**9,
    }
    assert "overlap_comm is off" in one.why
    again = profile("zero3", busy, deepspeed_config=config).advice
    assert all(two.changes["deepspeed_config"] != config for two in again)


def test_fsdp1_gathers_ahead_where_it_waits() -> None:
    slow = figures(traffic=[traffic("all_gather", 8, 400 * MB, 0.3)])
    one, config = advised(profile("fsdp1", slow))
    assert one.title == "prefetch"
    assert config == {"backward_prefetch": "BACKWARD_PRE", "forward_prefetch": True}


def test_a_slow_zero3_fetches_more_ahead_on_gpus() -> None:
    slow = figures(traffic=[traffic("all_gather", 40, 200 * MB, 0.4)])
    zero = {"overlap_comm": False, "sub_group_size": 10**8}
    one, config = advised(profile("zero3", slow, deepspeed_config={"zero_optimization": zero}))
    assert one.title == "slow ZeRO-3"
    assert "40 % of a step waits for all_gather" in one.why
    assert "overlap_comm is off" in one.why
    assert config["zero_optimization"] == {
        "stage3_prefetch_bucket_size": 200_000_000,
        "overlap_comm": True,
        "sub_group_size": 10**8,
    }
    on_cpu = dataclasses.replace(slow, kind="cpu")
    assert profile("zero3", on_cpu, hardware=CPU).advice == ()


@pytest.mark.parametrize("expected", [100_000, "auto"])
def test_small_buckets_are_reported_if_the_config_sets_them(expected: object) -> None:
    slow = figures(traffic=[traffic("reduce_scatter", 90, 200_000, 0.2)])
    given = {"zero_optimization": {"reduce_bucket_size": expected}}
    one, config = advised(profile("zero2", slow, deepspeed_config=given))
    assert one.title == "small buckets"
    assert config["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    assert profile("zero2", slow).advice == ()


def test_a_slow_disk_is_asked_for_more_at_a_time() -> None:
    one, config = advised(profile("zero3", figures(offload=0.5), offload="nvme:/tmp/x"))
    assert "50 % of a step moves state" in one.why
    assert config["aio"] == {"block_size": 8 * MB, "queue_depth": 32}
    assert config["zero_optimization"]["offload_optimizer"]["pipeline_read"] is True


# -- offload


def test_pinned_memory_that_ends_is_not_pinned_any_more() -> None:
    text = "RuntimeError: CUDA error: out of memory"
    frames = "File deepspeed/accelerator/cuda_accelerator.py:300, in pin_memory("
    one, config = only(failed("zero3", text, frames, offload="cpu", offload_params=True))
    assert (one.level, one.topic) == ("problem", "pinned memory")
    zero = config["zero_optimization"]
    assert zero == {
        "offload_optimizer": {"pin_memory": False},
        "offload_param": {"pin_memory": False},
    }


def test_fsdp_cannot_leave_memory_unpinned_and_zero3_can() -> None:
    run = failed("fsdp2", "RuntimeError: cudaHostAlloc failed", offload="cpu")
    one, config = only(run)
    assert "switch zero3 --offload cpu" in one.do
    assert config["zero_optimization"]["offload_optimizer"] == {"pin_memory": False}


# -- checkpoints


def test_parameter_names_that_do_not_match_are_reported_under_every_engine() -> None:
    text = (
        'RuntimeError: Error(s) in loading state_dict for Net:\n Missing key(s) in state_dict: "a"'
    )
    for backend in ("ddp", "fsdp2", "zero3"):
        (one,) = training_run.check_errors(failed(backend, text))
        assert (one.level, one.topic) == ("problem", "loading")
        assert "%nbdist load PATH" in one.do


def test_another_layout_of_a_checkpoint_is_asked_for() -> None:
    text = "FileNotFoundError: No such file or directory: 'out/pytorch_model_fsdp_0/.metadata'"
    one, config = only(failed("fsdp2", text))
    assert one.topic == "loading"
    assert config == {"state_dict_type": "FULL_STATE_DICT"}
    assert only(failed("fsdp1", text))[1]["sync_module_states"] is True
    full = {"state_dict_type": "FULL_STATE_DICT"}
    text = "FileNotFoundError: No such file or directory: 'out/pytorch_model_fsdp.bin'"
    _, config = only(failed("fsdp1", text, fsdp_config=full))
    assert config == {"state_dict_type": "SHARDED_STATE_DICT"}


def test_a_whole_checkpoint_under_fsdp1_is_sent_to_all_ranks() -> None:
    text = "ValueError: Set the `sync_module_states` flag to `True` so that model states are synced"
    full = {"state_dict_type": "FULL_STATE_DICT"}
    _, config = only(failed("fsdp1", text, fsdp_config=full))
    assert config == {"state_dict_type": "FULL_STATE_DICT", "sync_module_states": True}
    (one,) = training_run.check_errors(failed("fsdp1", text, hardware=CPU))
    assert one.do.startswith("%nbdist load PATH")


def test_the_layout_of_parameters_is_that_of_the_checkpoint() -> None:
    text = "RuntimeError: The ZeRO checkpoint parameter-alignment layout does not match the current"
    _, config = only(failed("zero2", text))
    assert config["zero_optimization"] == {"parameter_alignment": True}


def test_a_checkpoint_of_more_ranks_is_loaded_as_a_universal_one() -> None:
    text = (
        "ZeRORuntimeException: The checkpoint being loaded used a DP world size of 4 but the"
        " current world size is 2."
    )
    _, config = only(failed("zero2", text))
    assert config["checkpoint"] == {"load_universal": True}


# -- nothing to say, and the page


def test_a_healthy_run_gets_no_symptom() -> None:
    calm = figures(traffic=[traffic("all_gather", 20, 50 * MB, 0.02)])
    for backend in strategies.BACKENDS:
        assert list(training_run.check_errors(failed(backend, "ValueError: wrong shape"))) == []
        assert profile(backend, calm).advice == ()


def session(**changed: Any) -> Any:
    """A session as far as the doctor reads one."""
    given = {"options": Options().validate(CPU), "hardware": CPU, "death": None, "running": None}
    return SimpleNamespace(**{**given, "last": None, "profiles": [], **changed})


def test_the_verdict_and_the_advice_are_those_of_the_profile() -> None:
    options = Options(backend="zero3", offload="nvme:/tmp/x").validate(GPU)
    found = profile("zero3", figures(offload=0.5), offload="nvme:/tmp/x")
    verdict, one = training_run.check_training(
        session(options=options, hardware=GPU, profiles=[found])
    )
    assert (verdict.level, verdict.topic, verdict.says) == ("note", "run", found.verdict)
    assert (one.level, one.topic, one.do) == ("note", "NVMe", found.advice[0].line)
    assert "times as fast" in one.says or "faster" in one.says
    assert one.do in str(Diagnosis((one,)))  # in one line, to be pasted


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_profile_without_a_symptom_is_well(accumulate: int) -> None:
    calm = profile("ddp", dataclasses.replace(figures(), kind="cpu"), hardware=CPU)
    options = Options(accumulate=accumulate).validate(CPU)
    (one,) = training_run.check_training(session(options=options, profiles=[calm]))
    assert (one.level, one.says) == ("ok", "compute-bound, nothing cheap to gain")


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"backend": "fsdp2", "offload": "cpu"}, "is of zero3, and the engine is now fsdp2"),
        ({"backend": "zero3", "deepspeed_config": {"aio": {}}}, "is of zero3"),
    ],
)
def test_a_profile_of_another_engine_is_not_judged(now: dict[str, Any], words: str) -> None:
    busy = figures(traffic=[traffic("all_gather", 200, 20_000, 0.3)])
    older = profile("zero3", busy, hardware=CPU)
    options = Options(**now).validate(CPU)
    (one,) = training_run.check_training(session(options=options, profiles=[older]))
    assert words in one.says
    assert "%nbdist profile" in one.do


def test_lines_around_those_that_ran_are_no_frames() -> None:
    traceback = [
        "\x1b[0;31mOutOfMemoryError\x1b[0m  Traceback",
        "File \x1b[0;32m~/fully_sharded_data_parallel.py:855\x1b[0m, in forward(self)",
        "    850     _pre_forward_unshard,\n--> 855 output = self._fsdp_wrapped_module(*args)",
    ]
    error = SimpleNamespace(ename="OutOfMemoryError", evalue="no memory", traceback=traceback)
    run = RunErrors.of(session(last=SimpleNamespace(errors={0: error})), None)
    assert run.messages == "OutOfMemoryError: no memory"
    assert "unshard" not in run.frames
    assert "in forward(self)" in run.frames


TROUBLESHOOTING = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()


@pytest.mark.parametrize(
    "line", sorted(set(re.findall(r"%nbdist switch \w+ --\w+-config '[^']+'", TROUBLESHOOTING)))
)
def test_every_line_of_the_page_on_troubleshooting_can_be_pasted(line: str) -> None:
    pasted(line, GPU)
