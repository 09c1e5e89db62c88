"""DDP's and DeepSpeed's training step: bytes per parameter, measured peaks, what moves where."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.errors import PlanError
from nbdist.planner import memory, optimizers
from nbdist.planner.memory import zero3, zero_partitioning
from nbdist.planner.memory.timeline import TrainingSetup
from nbdist.planner.model_spec import (
    LayerActivations,
    LayerGroup,
    MicroBatchActivations,
    WeightShape,
    Workload,
)
from nbdist.planner.models import analytic
from nbdist.planner.models.decoder import LlamaSpec
from nbdist.strategies import Hardware, Options
from tests.unit import model_configs

if TYPE_CHECKING:
    from nbdist.planner.memory.timeline import MemoryUsage
    from nbdist.planner.model_spec import ModelSpec

PSI = 1_000_000
MIB = 2**20
LLAMA = model_configs.llama(256, 688, 6, 8, 4, 3000)
FROZEN = LayerGroup(
    name="base", role="block", tensors=(WeightShape(10, 1000, trainable=False),) * 1000
)


@dataclass(frozen=True)
class Weights:
    """A model whose activations weigh nothing: 1000 parameters of 1000 elements."""

    groups: tuple[LayerGroup, ...] = (
        LayerGroup(name="block", role="block", count=10, tensors=(WeightShape(10, 1000),) * 100),
    )
    name: str = "weights"
    depth: str = "closed form"
    tied: bool = False
    element: int = 4

    @property
    def trainable_element(self) -> int:
        """All parameters have one data type."""
        return self.element

    def micro_batch_activations(self, _: Workload) -> MicroBatchActivations:
        """Nothing at all."""
        nothing = LayerActivations(saved_bytes=0, forward_peaks=(0,), backward_moments=())
        return MicroBatchActivations(
            layers=(nothing,) * len(self.groups), loss_bytes=0, output_bytes=0
        )


def setup_of(
    backend: str,
    *,
    optimizer: str = "adamw",
    world_size: int = 4,
    zero: dict[str, Any] | None = None,
    **options: Any,
) -> TrainingSetup:
    """A setup; ZeRO's bucket is of one element unless `zero` says otherwise."""
    precision = options.pop("precision", "bf16")
    config = {"zero_optimization": {"reduce_bucket_size": 1} | (zero or {})}
    chosen = Options(
        backend=backend,
        precision=precision,
        deepspeed_config=config if backend.startswith("zero") else None,
        **options,
    ).validate(Hardware(kind="cpu", bf16=True, world_size=world_size))
    return TrainingSetup(
        options=chosen,
        world_size=world_size,
        optimizer=optimizers.find_optimizer(optimizer),
        kind="cpu",
    )


def moments(setup: TrainingSetup, model: ModelSpec | None = None) -> dict[str, MemoryUsage]:
    """The fullest moment of each name."""
    fullest: dict[str, MemoryUsage] = {}
    for moment in memory.step_memory_usage(model or Weights(), Workload(), setup):
        if moment.name not in fullest or moment.device_bytes > fullest[moment.name].device_bytes:
            fullest[moment.name] = moment
    return fullest


def step_bytes(setup: TrainingSetup) -> float:
    return moments(setup)["optimizer step"].device_bytes / PSI


@pytest.mark.parametrize(
    ("backend", "optimizer", "expected"),
    [
        ("ddp", "adamw", 24),
        ("ddp", "adamw_fused", 20),
        ("ddp", "sgd", 12),
        ("ddp", "adamw_8bit", 12 + 8),  # in fp32 for tensors of less than 4096 elements
        ("zero1", "adamw", 2 + 20 / 4),
        ("zero2", "adamw", 2 + 20 / 4),
        ("zero2", "adamw_fused", 2 + 16 / 4),
        ("zero2", "adamw_loop", 2 + 24 / 4),
        ("zero3", "adamw", 24 / 4),
        ("zero3", "adamw_loop", 28 / 4),
        ("zero3", "adafactor", (16 + 4) / 4),
    ],
)
def test_bytes_per_parameter_in_the_step(backend: str, optimizer: str, expected: float) -> None:
    assert step_bytes(setup_of(backend, optimizer=optimizer)) == pytest.approx(expected, abs=0.005)


def test_a_loop_needs_two_temporaries_and_holds_one_of_the_tensor_before() -> None:
    loop, fused = (
        step_bytes(setup_of("ddp", optimizer=f"adamw_{how}")) for how in ("loop", "fused")
    )
    assert loop - fused == pytest.approx((2 + 1) * 4 * 1000 / PSI)


def test_before_the_step_zero_casts_its_gradients() -> None:
    # 2 of the parameters; 12 of the state; 2 reduced, 2 flat and 4 in fp32, over 4 ranks.
    assert moments(setup_of("zero2"))["gradients to fp32"].device_bytes / PSI == pytest.approx(
        2 + 20 / 4
    )


def test_zero1_holds_all_gradients_when_it_begins_to_reduce() -> None:
    fullest = moments(setup_of("zero1"))["gradient reduction"]
    # 2 + 12/4, all gradients, and the partition of the rank that comes first.
    assert fullest.device_bytes / PSI == pytest.approx(2 + 3 + 2 + 2 / 4, abs=0.01)


def test_zero2_never_holds_them_all() -> None:
    fullest = moments(setup_of("zero2"))["gradient reduction"]
    assert fullest.device_bytes / PSI == pytest.approx(2 + 3 + 2 / 4, abs=0.01)


@pytest.mark.parametrize(
    ("backend", "more"), [("ddp", 4), ("zero1", 2), ("zero2", 2 / 4), ("zero3", 0)]
)
def test_accumulation_keeps_gradients_during_the_forward(backend: str, more: float) -> None:
    once, again = (moments(setup_of(backend, accumulate=count)) for count in (1, 4))
    name = "forward of block 9"
    assert (again[name].device_bytes - once[name].device_bytes) / PSI == pytest.approx(
        more, abs=0.01
    )


def test_the_default_bucket_is_a_gigabyte() -> None:
    small, default = (
        moments(setup_of("zero2", zero={"reduce_bucket_size": size}))["gradient reduction"]
        for size in (1, 500_000_000)
    )
    assert default.parts["buffers"] - small.parts["buffers"] == 2 * 499_999_999


@pytest.mark.parametrize(("backend", "buckets"), [("zero1", 2), ("zero2", 2), ("zero3", 1)])
def test_overlapped_communication_needs_a_second_bucket_below_stage_3(
    backend: str, buckets: int
) -> None:
    setup = setup_of(backend, zero={"overlap_comm": True, "reduce_bucket_size": 5000})
    assert moments(setup)["gradient reduction"].parts["buffers"] == buckets * 2 * 5000


@pytest.mark.parametrize("backend", ["zero1", "zero2", "zero3"])
def test_an_offload_moves_state_to_the_host(backend: str) -> None:
    here = moments(setup_of(backend))["optimizer step"]
    away = moments(setup_of(backend, offload="cpu"))["optimizer step"]
    assert not here.host_parts
    assert "optimizer" not in away.parts
    assert away.host_parts["optimizer"] == here.parts["optimizer"] == 8 * PSI // 4
    assert away.host_parts["master"] == here.parts["master"]
    # fp32 gradients as well, and one copy in 16 bits: 18 bytes over 4 ranks.
    assert sum(away.host_parts.values()) / PSI == pytest.approx(18 / 4, abs=0.01)


@pytest.mark.parametrize("backend", ["zero1", "zero2", "zero3"])
def test_page_locked_memory_of_an_offload_is_rounded_up_on_gpus(backend: str) -> None:
    on_cpu = setup_of(backend, offload="cpu")
    on_gpu = replace(on_cpu, kind="cuda")
    exact, rounded = (
        moments(setup)["optimizer step"].host_parts["buffers"] for setup in (on_cpu, on_gpu)
    )
    master, cast = 4 * PSI // 4, 2 * PSI // 4
    largest = 2 * 1000
    tensors = [cast, master] if backend == "zero3" else [master, master, cast, largest]
    more = sum((1 << (size - 1).bit_length()) - size for size in tensors)
    assert rounded - exact == pytest.approx(more, rel=0.01)


@pytest.mark.parametrize(("backend", "kept"), [("zero1", 0), ("zero2", 2 * PSI // 4)])
def test_stage_2_accumulates_offloaded_gradients_in_the_host(backend: str, kept: int) -> None:
    once, again = (
        moments(setup_of(backend, offload="cpu", accumulate=count))["optimizer step"].host_parts
        for count in (1, 4)
    )
    assert again["gradients"] - once["gradients"] == pytest.approx(kept, abs=2000)


def test_autocast_keeps_cast_weights_until_a_checkpointed_forward_ends() -> None:
    setup = setup_of("ddp", activation_checkpointing=True)
    workload = Workload(compute="autocast", activation_checkpointing=True)
    named = {moment.name: moment for moment in memory.step_memory_usage(Weights(), workload, setup)}
    assert named["forward of block 9"].parts["activations"] == 2 * 9 * PSI // 10
    assert named["loss"].parts["activations"] == 0
    traced = memory.step_memory_usage(Weights(depth="traced"), workload, setup)
    # A trace has counted them.
    assert not any(moment.parts["activations"] for moment in traced)


def test_zero3_offloads_parameters_too() -> None:
    away = moments(setup_of("zero3", offload="cpu", offload_params=True))["optimizer step"]
    assert away.device_bytes == away.parts["buffers"]
    assert away.host_parts["parameters"] == 2 * PSI // 4


def test_nvme_holds_state_and_the_host_its_buffers() -> None:
    setup = setup_of("zero3", offload="nvme:/fast", offload_params=True)
    run = Weights().micro_batch_activations(Workload())
    moment = memory.build_timeline(Weights(), setup).peak_memory(run)
    assert moment.nvme_bytes == (12 + 2) * PSI // 4
    # Four swap buffers of fp32, five of the largest parameter.
    assert moment.host_parts["buffers"] == 4 * 4 * PSI // 4 + 5 * 2 * 1000


def test_an_optimizer_without_a_cpu_version_needs_temporaries_in_the_host() -> None:
    own, other = (
        moments(setup_of("zero2", offload="cpu", optimizer=name))["optimizer step"].host_parts
        for name in ("adamw", "lion")
    )
    assert own["temporaries"] == 0
    assert other["temporaries"] == 4 * PSI // 4


def test_frozen_parameters_weigh_two_bytes_and_nothing_else() -> None:
    model = Weights(groups=(FROZEN, *Weights().groups))
    for backend, each in (("ddp", 4), ("zero2", 2), ("zero3", 2 / 4)):
        setup = setup_of(backend, zero={"stage3_param_persistence_threshold": 0})
        more = (
            moments(setup, model)["optimizer step"].device_bytes
            - moments(setup)["optimizer step"].device_bytes
        )
        assert more / PSI == pytest.approx(each), backend


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(PlanError, match="Unfreeze"):
        moments(setup_of("zero2"), Weights(groups=(FROZEN,)))


def test_state_of_a_model_loaded_in_16_bits_is_in_16_bits_under_ddp() -> None:
    setup = setup_of("ddp", precision="no")
    assert moments(setup, Weights(element=2))["optimizer step"].device_bytes / PSI == 12


def test_fp32_without_mixed_precision_has_a_master_copy_too() -> None:
    setup = setup_of("zero2", precision="no", optimizer="adamw_fused")
    assert step_bytes(setup) == pytest.approx(4 + (4 + 8 + 4) / 4)


MEASURED = [
    # backend, options, batch, seq_len, MiB of the fullest rank of 4, fake group, torch 2.13,
    # deepspeed 0.19.8, buckets of 300000 elements
    ("ddp", {}, 1, 16, 134.98),
    ("ddp", {"optimizer": "adamw_loop"}, 1, 16, 118.37),
    ("ddp", {"activation_checkpointing": True}, 2, 128, 137.73),
    ("zero1", {}, 1, 16, 42.83),
    ("zero1", {"precision": "no"}, 2, 128, 81.50),
    ("zero2", {}, 2, 128, 55.23),
    ("zero2", {"accumulate": 2, "optimizer": "adamw_loop"}, 1, 16, 45.02),
    ("zero2", {"offload": "cpu"}, 1, 16, 48.47),
    ("zero3", {}, 1, 16, 44.43),
    ("zero3", {"zero": {"stage3_max_live_parameters": 2_000_000}}, 1, 16, 34.36),
]
TIGHT = {
    "stage3_max_reuse_distance": 2_000_000,
    "stage3_prefetch_bucket_size": 400_000,
    "stage3_param_persistence_threshold": 1000,
}


@pytest.mark.parametrize(("backend", "options", "batch_size", "seq_len", "mib"), MEASURED)
def test_measured_peaks(
    backend: str, options: dict[str, Any], batch_size: int, seq_len: int, mib: float
) -> None:
    given = dict(options)
    zero = {"reduce_bucket_size": 300_000}
    if "zero" in given:
        zero |= TIGHT | given.pop("zero")
    setup = setup_of(backend, zero=zero, **given)
    assert planned(LLAMA, setup, batch_size, seq_len) == pytest.approx(mib, rel=0.02)


def planned(config: dict[str, Any], setup: TrainingSetup, batch_size: int, seq_len: int) -> float:
    """MiB of the peak, on the device and in the host's memory together."""
    model = analytic.spec_from_config(config)
    workload = setup.workload(model, batch_size, seq_len, keep_outputs=True)
    usage = memory.step_memory_usage(model, workload, setup)
    return max(moment.device_bytes + sum(moment.host_parts.values()) for moment in usage) / MIB


def llama(hidden: int, wide: int, blocks: int, words: int, **more: Any) -> dict[str, Any]:
    """A Llama whose heads are 64 elements wide."""
    heads = hidden // 64
    return model_configs.llama(hidden, wide, blocks, heads, heads, words, **more)


def gpt2(hidden: int, words: int, *, dropout: float = 0.0) -> dict[str, Any]:
    """A GPT-2 of five blocks, whose head is the embedding."""
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return model_configs.gpt2(hidden, 5, hidden // 32, words, n_positions=256, **rates)


@dataclass(frozen=True)
class Measured:
    """A step's peak as benchmarks/footprint.py counted it: torch 2.13, deepspeed 0.19.8."""

    config: dict[str, Any]
    setup: TrainingSetup
    batch_size: int
    seq_len: int
    mib: float
    """Of the fullest rank."""


RULES = {
    # The gradient of the tied head is complete at the end, so nothing is in the bucket yet.
    "the bucket appears with the first complete gradient": Measured(
        gpt2(256, 5547, dropout=0.1),
        setup_of(
            "zero1",
            world_size=2,
            precision="no",
            zero={"reduce_bucket_size": 2_382_884, "overlap_comm": False},
        ),
        4,
        64,
        120.03,
    ),
    # The tied head is larger than all that is in this bucket.
    "the norm is taken of one gradient of the bucket": Measured(
        llama(384, 1152, 2, 2321, num_key_value_heads=3, head_dim=64)
        | {"model_type": "qwen3", "tie_word_embeddings": True},
        setup_of(
            "zero2",
            world_size=3,
            offload="cpu",
            activation_checkpointing=True,
            zero={"reduce_bucket_size": 1_246_144, "overlap_comm": False},
        ),
        3,
        128,
        55.57,
    ),
    # DDP: the head's gradient, the embedding's and their sum, beside all earlier gradients.
    "a tied head's gradient is added to earlier ones": Measured(
        gpt2(192, 8241),
        setup_of("ddp", world_size=2, precision="no", accumulate=4, optimizer="adamw_loop"),
        1,
        16,
        92.16,
    ),
    # Rank 6 of 8: a second bucket is full when this rank has reduced gradients already.
    "any reduction may be the fullest": Measured(
        llama(384, 1360, 7, 1223, num_key_value_heads=3),
        setup_of(
            "zero2",
            world_size=8,
            optimizer="adamw_fused",
            activation_checkpointing=True,
            zero={"reduce_bucket_size": 6_343_261},
        ),
        2,
        128,
        85.68,
    ),
    # Forward of block 4 of 7: all of it is prefetched, and activations are still to come.
    "any block may be the fullest": Measured(
        llama(192, 496, 7, 1330, num_attention_heads=6, num_key_value_heads=6)
        | {"tie_word_embeddings": True},
        setup_of(
            "zero3",
            world_size=2,
            precision="no",
            optimizer="adamw_fused",
            zero={
                "reduce_bucket_size": 857_560,
                "stage3_param_persistence_threshold": 1000,
                "stage3_max_live_parameters": 2_272_687,
                "stage3_max_reuse_distance": 1_535_869,
            },
        ),
        3,
        32,
        59.50,
    ),
    # Rank 1 of 2: what is in the bucket is no gradient of its own any more.
    "the last micro-batch empties stage 1's gradients": Measured(
        gpt2(128, 1719, dropout=0.1),
        setup_of(
            "zero1",
            world_size=2,
            precision="no",
            accumulate=4,
            zero={"reduce_bucket_size": 276_987, "overlap_comm": True},
        ),
        1,
        32,
        23.18,
    ),
    # Rank 0 of 8: gradients above the bucket's size stay, which are all but the norms'.
    "stage 1 clears no gradient while the backward runs": Measured(
        llama(384, 1360, 7, 1223, num_key_value_heads=3),
        setup_of(
            "zero1",
            world_size=8,
            optimizer="adamw_fused",
            activation_checkpointing=True,
            zero={"reduce_bucket_size": 20_000, "overlap_comm": True},
        ),
        2,
        128,
        83.86,
    ),
    # The next gradient of 65536 elements and the head's of 220032 are both outside the bucket.
    "a tied head's gradient waits beside the next one": Measured(
        gpt2(128, 1719, dropout=0.1),
        setup_of("zero2", precision="no", optimizer="sgd", zero={"reduce_bucket_size": 700_000}),
        1,
        32,
        13.22,
    ),
    # Gloo, rank 1 of 2: the head is reduced when the final norm's gradient comes.
    "a large gradient waits for the next one": Measured(
        llama(192, 480, 3, 8861, num_attention_heads=6, num_key_value_heads=3),
        setup_of(
            "zero2",
            world_size=2,
            precision="no",
            accumulate=4,
            optimizer="sgd",
            zero={"reduce_bucket_size": 135_820, "overlap_comm": True},
        ),
        2,
        16,
        54.17,
    ),
    # Fake, rank 0 of 8: persistent parameters are not yet there in the micro-batch that decides
    # what is released, so less of it is prefetched.
    "what is released is decided once": Measured(
        llama(192, 416, 4, 639, model_type="qwen2", num_attention_heads=6, num_key_value_heads=6),
        setup_of(
            "zero3",
            world_size=8,
            accumulate=4,
            optimizer="sgd",
            zero={
                "reduce_bucket_size": 712_286,
                "stage3_max_reuse_distance": 243_592,
                "stage3_prefetch_bucket_size": 175_596,
            },
        ),
        2,
        64,
        11.448,
    ),
    # Fake, rank 1 of 2: gradients above the bucket's size stay until the micro-batch ends.
    "only the last micro-batch with offload clears a rank's own large gradients": Measured(
        llama(192, 480, 6, 330, num_attention_heads=6, num_key_value_heads=3),
        setup_of(
            "zero2",
            world_size=2,
            accumulate=4,
            offload="cpu",
            activation_checkpointing=True,
            zero={"reduce_bucket_size": 20_000},
        ),
        4,
        64,
        33.75,
    ),
    # Fake, 64 ranks: at the peak, the last gradient has already been added to an earlier one.
    "a gradient is extra until it is accumulated": Measured(
        llama(512, 1504, 2, 844, num_key_value_heads=4, head_dim=64)
        | {"model_type": "qwen3", "tie_word_embeddings": True},
        setup_of("fsdp2", world_size=64, precision="no", accumulate=2),
        4,
        128,
        109.95,
    ),
    # Fake, rank 0 of 4: the last layer's weight is still gathered when its gradient is made.
    "weight and bias are released after both gradients": Measured(
        gpt2(384, 5009)
        | {"n_head": 12, "n_layer": 2}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        setup_of(
            "zero3",
            precision="no",
            activation_checkpointing=True,
            clip=1.0,
            optimizer="adamw_fused",
            zero={
                "reduce_bucket_size": 2_919_438,
                "stage3_param_persistence_threshold": 100_000,
                "stage3_max_reuse_distance": 717_416,
                "stage3_prefetch_bucket_size": 359_601,
            },
        ),
        2,
        128,
        86.21,
    ),
    # Fake, rank 0 of 4: most is gathered when a block begins, and released before its MLP runs.
    "what is gathered at the start of a block does not meet its largest activations": Measured(
        llama(512, 1600, 5, 4902, num_key_value_heads=4, head_dim=64)
        | {"model_type": "qwen3", "tie_word_embeddings": True},
        setup_of(
            "zero3",
            precision="no",
            zero={
                "reduce_bucket_size": 243_871,
                "stage3_param_persistence_threshold": 100_000,
                "stage3_max_live_parameters": 9_587_240,
                "stage3_max_reuse_distance": 5_217_560,
                "stage3_prefetch_bucket_size": 50_000_000,
            },
        ),
        2,
        128,
        210.32,
    ),
    # Fake, rank 0 of 8: a bucket is reduced when a gradient is complete, after its operation.
    "what a layer has saved is gone when its gradient is reduced": Measured(
        llama(256, 992, 2, 2773, tie_word_embeddings=True),
        setup_of(
            "zero3",
            world_size=8,
            accumulate=2,
            activation_checkpointing=True,
            zero={
                "reduce_bucket_size": 965_439,
                "stage3_param_persistence_threshold": 0,
                "stage3_max_live_parameters": 739_801,
                "stage3_max_reuse_distance": 2_068_121,
                "stage3_prefetch_bucket_size": 880_373,
            },
        ),
        1,
        64,
        12.66,
    ),
    # Gloo, rank 0 of 2: only the head's norm needs a copy of the head's size.
    "a norm is taken of what is reduced": Measured(
        llama(384, 1104, 4, 6006, tie_word_embeddings=True),
        setup_of("zero2", world_size=2, offload="cpu", zero={"reduce_bucket_size": 566_370}),
        1,
        64,
        134.95,
    ),
} | {
    # Fake, rank 0 of 4. DeepSpeed lists a weight before its bias, and a checkpointed block that
    # ends with dropout runs again before its last matrix is gathered.
    f"DeepSpeed prefetches the weight first, recompute={recompute}": Measured(
        gpt2(352, 1429, dropout=0.1) | {"n_layer": 3},
        setup_of(
            "zero3",
            precision="no",
            accumulate=4,
            clip=1.0,
            activation_checkpointing=recompute,
            zero={
                "reduce_bucket_size": 135_158,
                "stage3_param_persistence_threshold": 0,
                "stage3_max_live_parameters": 533_995,
                "stage3_max_reuse_distance": 865_370,
                "stage3_prefetch_bucket_size": 632_900,
            },
        ),
        3,
        64,
        mib,
    )
    for recompute, mib in ((False, 64.62), (True, 50.36))
}


@pytest.mark.parametrize("one", RULES.values(), ids=RULES.keys())
def test_what_a_measured_peak_is_made_of(one: Measured) -> None:
    assert planned(one.config, one.setup, one.batch_size, one.seq_len) == pytest.approx(
        one.mib, rel=0.01
    )


def test_a_released_weight_stays_if_a_recomputed_graph_has_saved_it() -> None:
    def most(*, trainable: bool) -> int:
        weights = (WeightShape(10, size, trainable) for size in (100, 200, 400))
        head = LayerGroup(name="head", role="tail", tensors=(WeightShape(10, 20),))
        block = LayerGroup(name="block", role="block", count=2, tensors=tuple(weights))
        found = zero3.simulate_prefetch(
            (block, head),
            tied=False,
            recompute=True,
            rules=zero3.PrefetchLimits(
                prefetch_bucket_size=0, max_reuse_distance=0, param_persistence_threshold=0
            ),
        )
        return max(max(peaks) for peaks in found.max_at.values())

    # The last weight stays for its backward while the second one is gathered; the graph keeps
    # the first one if it is trainable.
    assert (most(trainable=False), most(trainable=True)) == (400 + 200, 400 + 200 + 100)


def test_pieces_of_a_large_gradient_are_reduced_together_until_they_exceed_a_bucket() -> None:
    tensors = (WeightShape(10, 10), WeightShape(9, 90))
    group = LayerGroup(name="head", role="tail", tensors=tensors)

    def copied(bucket: int, ranks: int) -> list[int]:
        found = zero_partitioning.bucket_reductions(
            (group,), tied=False, world_size=ranks, bucket=bucket, backward=True
        )
        return [reduction.num_copied for reduction in found]

    # Four partitions of 26 elements: pieces of 16, 26, 26 and 22, then the first parameter.
    assert copied(30, 4) == [48, 0]
    assert copied(45, 4) == [68, 0]
    assert copied(15, 4) == [0, 0]
    assert copied(100, 4) == [100]


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("backend", "zero"),
    [
        ("ddp", {}),
        ("zero1", {"reduce_bucket_size": 100_000}),
        ("zero1", {"reduce_bucket_size": 10_000, "overlap_comm": True}),
        ("zero2", {"reduce_bucket_size": 100_000}),
        ("zero2", {"reduce_bucket_size": 5_000_000}),
        (
            "zero3",
            TIGHT | {"stage3_max_live_parameters": 500_000, "stage3_max_reuse_distance": 300_000},
        ),
    ],
)
def test_a_block_that_a_story_leaves_out_is_not_the_fullest(
    backend: str, zero: dict[str, Any], *, tied: bool, rank: int
) -> None:
    model = analytic.spec_from_config(llama(128, 80, 17, 3000, tie_word_embeddings=tied))
    assert isinstance(model, LlamaSpec)
    model = model.with_lora(rank) if rank else model
    for accumulate, again in itertools.product((1, 4), (False, True)):
        more = {"accumulate": accumulate, "activation_checkpointing": again}
        setup = setup_of(backend, world_size=8, zero=zero, precision="no", **more)
        few, every = (memory.build_timeline(model, setup) for _ in range(2))
        every.visited_blocks = tuple(tuple(range(group.count)) for group in model.groups)
        for tokens in (8, 64, 512):
            run = model.micro_batch_activations(
                Workload(seq_len=tokens, compute="full", activation_checkpointing=again)
            )
            assert few.peak_memory(run).device_bytes == every.peak_memory(run).device_bytes


def test_more_ranks_never_need_more() -> None:
    model = analytic.spec_from_config(LLAMA)
    run = model.micro_batch_activations(Workload(seq_len=32))
    for backend in ("zero1", "zero2", "zero3"):
        setups = [setup_of(backend, world_size=world_size) for world_size in (1, 2, 4, 8)]
        timelines = [memory.build_timeline(model, setup) for setup in setups]
        peaks = [timeline.peak_memory(run).device_bytes for timeline in timelines]
        assert peaks == sorted(peaks, reverse=True), backend


def test_unknown_optimizers_are_refused() -> None:
    with pytest.raises(PlanError, match="Shampoo"):
        optimizers.optimizer_from_torch({"class": "Shampoo"})


@pytest.mark.parametrize(
    ("class_name", "defaults", "kind", "state", "how"),
    [
        ("AdamW", {"foreach": None, "fused": None}, "cuda", 8, "foreach"),
        ("AdamW", {"foreach": None, "fused": None}, "cpu", 8, "loop"),
        ("AdamW", {"foreach": True}, "cpu", 8, "foreach"),
        ("Adam", {"fused": True}, "cuda", 8, "fused"),
        ("Adam", {"amsgrad": True}, "cuda", 12, "foreach"),
        ("SGD", {"momentum": 0}, "cuda", 0, "foreach"),
        ("SGD", {"momentum": 0.9}, "cuda", 4, "foreach"),
        ("PagedAdamW8bit", {}, "cuda", 2.03125, "fused"),
        ("Adafactor", {"beta1": None}, "cuda", 0.004, "loop"),
    ],
)
def test_a_real_optimizer_finds_its_row(
    class_name: str, defaults: dict[str, Any], kind: Any, state: float, how: str
) -> None:
    found = optimizers.optimizer_from_torch({"class": class_name, **defaults}, kind)
    assert (found.state_bytes_per_element, found.implementation) == (state, how)


def test_weight_decay_costs_sgd_a_copy_of_its_gradients() -> None:
    plain = optimizers.optimizer_from_torch({"class": "SGD"})
    decays = optimizers.optimizer_from_torch({"class": "SGD", "weight_decay": 0.1})
    assert plain.num_temporaries(1000, 100) == 0
    assert decays.num_temporaries(1000, 100) == 1000
