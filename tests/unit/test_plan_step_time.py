from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.planner import optimizers, step_time, target_devices
from nbdist.planner.memory.timeline import TrainingSetup
from nbdist.planner.model_spec import (
    BackwardPeakCandidate,
    LayerActivations,
    LayerGroup,
    MicroBatchActivations,
    ModelSpec,
    WeightShape,
    Workload,
)
from nbdist.strategies import STRATEGIES, Options

if TYPE_CHECKING:
    from nbdist.planner.step_time import StepCost


@dataclass(frozen=True)
class Blocks:
    """Equal square layers: activations and work are proportional to tokens."""

    layers: int = 32
    params: int = 200_000_000
    frozen: int = 0
    element: int = 4
    trainable_element: int = 4
    tied: bool = False
    name: str = "blocks"
    depth: str = "closed form"

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        weights = WeightShape(1000, self.params), WeightShape(1000, self.frozen, trainable=False)
        return (LayerGroup(name="block", role="block", count=self.layers, tensors=weights),)

    def micro_batch_activations(self, workload: Workload) -> MicroBatchActivations:
        saved = 180_000 * workload.num_tokens
        return MicroBatchActivations(
            layers=(
                LayerActivations(
                    saved_bytes=saved,
                    forward_peaks=(saved,),
                    backward_moments=(BackwardPeakCandidate(saved, 0),),
                ),
            ),
            loss_bytes=0,
            output_bytes=0,
        )

    def flops(self, workload: Workload) -> float:
        again = 4 / 3 if workload.activation_checkpointing else 1
        return 6.0 * again * self.layers * self.params * workload.num_tokens

    def to_json(self) -> dict[str, Any]:
        return {}


BIG = Blocks()
SMALL = Blocks(layers=12, params=7_000_000)
ADAM = optimizers.find_optimizer("adamw")


def priced(
    model: ModelSpec = BIG,
    machine: str = "8xA100-80GB,nvlink",
    tokens: int = 2048,
    *,
    backend: str = "fsdp2",
    optimizer: optimizers.OptimizerSpec = ADAM,
    reshard: bool = True,
    **options: Any,
) -> StepCost:
    cluster = target_devices.parse_devices(machine)
    if not reshard:
        options["fsdp_config"] = {"reshard_after_forward": False}
    chosen = Options(backend=backend, **{"precision": "bf16", **options})
    setup = TrainingSetup(
        options=chosen,
        world_size=cluster.world_size,
        optimizer=optimizer,
        kind=cluster.kind,
        num_nodes=cluster.num_nodes,
    )
    workload = setup.workload(model, 1, tokens, keep_outputs=True)
    return step_time.step_cost(model, setup, cluster, workload)


# ------------------------------------------------------------------- bytes on the wire


@pytest.mark.parametrize(
    ("backend", "steps", "per_parameter"),
    [
        ("ddp", 1, 8),
        ("ddp", 4, 8),
        ("zero1", 1, 6),
        ("zero1", 4, 6),
        ("zero2", 1, 6),
        ("zero2", 4, 4 * 4 + 2),
        ("zero3", 1, 6),
        ("zero3", 4, 4 * 6),
        ("fsdp2", 1, 8),
        ("fsdp2", 4, 4 * 4 + 4),
        ("fsdp1", 4, 4 * 4 + 4),
    ],
)
def test_bytes_on_the_wire(backend: str, steps: int, per_parameter: int) -> None:
    elements = BIG.layers * BIG.params
    sent = priced(backend=backend, accumulate=steps).bytes_on_wire
    kept = 5e8 * 2 * steps if backend == "zero3" else 0  # what ZeRO-3 does not gather twice
    assert sent == pytest.approx(7 / 8 * (per_parameter * elements - kept))


def test_without_resharding_parameters_are_gathered_once() -> None:
    elements = BIG.layers * BIG.params
    assert priced(reshard=False).bytes_on_wire == pytest.approx(7 / 8 * (2 + 4) * elements)


def test_frozen_parameters_are_gathered_and_never_reduced() -> None:
    lora = Blocks(params=1_000_000, frozen=199_000_000)
    moved = priced(lora).bytes_on_wire
    assert moved == pytest.approx(7 / 8 * (4 * 200e6 + 4 * 1e6) * 32)
    assert priced(lora, backend="ddp").bytes_on_wire == pytest.approx(7 / 8 * 8 * 32e6)


@pytest.mark.parametrize("backend", STRATEGIES)
def test_one_device_sends_nothing(backend: str) -> None:
    alone = priced(machine="H100", backend=backend)
    assert alone.bytes_on_wire == alone.communication_s == alone.threshold_tokens == 0


# -------------------------------------------------------------------- time of its parts


@pytest.mark.parametrize("backend", STRATEGIES)
@pytest.mark.parametrize("offload", ["none", "cpu", "nvme:/fast"])
def test_parts_sum_up_to_the_step(backend: str, offload: str) -> None:
    if offload.partition(":")[0] not in STRATEGIES[backend].offloads:
        return
    one = priced(backend=backend, offload=offload, accumulate=3)
    parts = one.compute_s + one.exposed_communication_s + one.optimizer_s + one.offload_s
    assert one.step_time_s == pytest.approx(parts)
    assert one.tokens_per_s == pytest.approx(8 * 3 * 2048 / one.step_time_s)
    assert 0 < one.mfu < 1
    assert 0.1 < one.uncertainty < 0.5
    assert one.exposed_communication_s <= 1.2 * one.communication_s


def test_checkpointing_costs_a_third_of_the_compute() -> None:
    plain, again = priced(tokens=8192), priced(tokens=8192, activation_checkpointing=True)
    assert again.compute_s / plain.compute_s == pytest.approx(4 / 3, rel=0.03)
    assert again.mfu < plain.mfu


def test_compute_grows_with_tokens_and_small_models_wait_for_launches() -> None:
    assert priced(tokens=8192).compute_s == pytest.approx(4 * priced().compute_s, rel=0.15)
    few, more = priced(SMALL, tokens=64), priced(SMALL, tokens=128)
    assert few.compute_s == pytest.approx(more.compute_s, rel=0.05)


def test_precision_and_compile_make_it_faster() -> None:
    assert priced(precision="no").compute_s > 5 * priced().compute_s
    assert priced(compile=True).compute_s < priced().compute_s
    hopper = "8xH100"
    assert priced(machine=hopper, precision="fp8").compute_s < priced(machine=hopper).compute_s


def test_a_fused_optimizer_moves_a_third() -> None:
    fused = optimizers.find_optimizer("adamw_fused")
    loops, once = priced(backend="ddp"), priced(backend="ddp", optimizer=fused)
    assert once.optimizer_s == pytest.approx(28 / 80 * loops.optimizer_s, rel=0.02)
    # 6.4e9 parameters, 28 bytes each, at 85 % of 2.039 TB/s.
    assert once.optimizer_s == pytest.approx(0.103, rel=0.03)


def test_slow_links_are_seen() -> None:
    fast, slow = priced(), priced(machine="8xA100-80GB,pcie")
    assert fast.bound == "compute"
    assert slow.bound == "communication"
    assert slow.step_time_s > 3 * fast.step_time_s


def test_accumulation_pays_where_gradients_wait_for_the_last_micro_batch() -> None:
    machine = "2x8xA100-80GB,100Gb"
    for backend, gain in {"ddp": 2.0, "zero1": 2.0, "zero3": 1.1}.items():
        one = priced(machine=machine, backend=backend)
        eight = priced(machine=machine, backend=backend, accumulate=8)
        speedup = eight.tokens_per_s / one.tokens_per_s
        assert speedup > gain if gain > 1.5 else speedup < gain, backend


def test_zero1_waits_for_what_fsdp_hides() -> None:
    one, other = priced(backend="zero1"), priced(backend="fsdp2")
    assert one.communication_s < other.communication_s
    assert one.exposed_communication_s > other.exposed_communication_s
    assert one.exposed_communication_s == one.communication_s


def test_small_messages_are_slower_than_their_size() -> None:
    tiny = priced(SMALL, tokens=64)
    bandwidth = target_devices.parse_devices("8xA100").link_bytes_per_s("all_gather")
    assert tiny.communication_s > 1.5 * tiny.bytes_on_wire / bandwidth


# --------------------------------------------------------------------------- nodes

FOUR = "4x(8xH100-80GB,nvlink),400Gb/s"


def hybrid(steps: int = 1, **given: Any) -> StepCost:
    """FSDP2 with shards inside each node."""
    return priced(**{"machine": FOUR, "accumulate": steps, "replicate_across": "nodes"} | given)


def test_replicas_gather_inside_a_node_and_sum_shards_across() -> None:
    elements = BIG.layers * BIG.params
    inside, across = 7 / 8 * (4 + 4), 2 * 3 / 4 * 4 / 8
    assert hybrid().bytes_on_wire == pytest.approx((inside + across) * elements)
    # fp32 shards of all eight ranks of a node cross its adapters, there and back
    slowest = 2 * 3 / 4 * 4 * elements / (0.8 * 50e9)
    rest = hybrid().communication_s - slowest
    alone = priced(machine="8xH100-80GB,nvlink").communication_s
    assert rest == pytest.approx(alone, rel=0.35)


def test_others_pay_the_network_for_all_they_send() -> None:
    elements = BIG.layers * BIG.params
    for backend, per_parameter in {"ddp": 8, "fsdp2": 8, "zero1": 6}.items():
        cost_ = priced(machine=FOUR, backend=backend)
        ideal = 31 / 32 * per_parameter * elements / (0.8 * 50e9)
        assert ideal < cost_.communication_s < 1.5 * ideal, backend


def test_with_accumulation_replicas_use_the_network_once_a_step() -> None:
    whole, replicated = priced(machine=FOUR, accumulate=8), hybrid(8)
    assert replicated.tokens_per_s > 2 * whole.tokens_per_s
    assert hybrid(8).communication_s < 2 * hybrid().communication_s
    fast = "4x(8xH100-80GB,nvlink),8x800Gb/s"
    assert hybrid(machine=fast).step_time_s == pytest.approx(
        priced(machine=fast).step_time_s, rel=0.1
    )


def test_replicas_step_the_shards_of_a_node() -> None:
    shared = priced(machine="8xH100-80GB,nvlink")
    assert hybrid().optimizer_s == shared.optimizer_s > 3 * priced(machine=FOUR).optimizer_s


# -------------------------------------------------------------------------- offload


def test_cpu_optimizer_is_bound_by_the_hosts_memory() -> None:
    # 6.4e9 parameters at 28 bytes and 50 GB/s on one node, half of that on two.
    assert priced(backend="zero2", offload="cpu").optimizer_s == pytest.approx(3.58, rel=0.01)
    two = priced(machine="2x4xA100-80GB,8x200Gb", backend="zero2", offload="cpu")
    assert two.optimizer_s == pytest.approx(1.79, rel=0.01)


def test_offload_is_slower_and_nvme_slower_still() -> None:
    none, cpu, nvme = (
        priced(backend="zero3", offload=where) for where in ("none", "cpu", "nvme:/fast")
    )
    assert none.offload_s == 0
    assert none.step_time_s < cpu.step_time_s < nvme.step_time_s
    assert nvme.bound == "offload"
    # Master copy and two moments, read and written: 24 bytes each at 6 GB/s.
    assert nvme.offload_s - cpu.offload_s == pytest.approx(24 * 6.4e9 / 6e9)


def test_offloaded_parameters_are_copied_for_each_use() -> None:
    def copied(steps: int, **options: Any) -> float:
        return priced(backend="zero3", offload="cpu", accumulate=steps, **options).offload_s

    assert copied(1, offload_params=True) > copied(1)
    assert copied(4, offload_params=True) > 3 * copied(1, offload_params=True)


def test_torch_loops_are_slower_on_the_cpu_than_deepspeeds_kernel() -> None:
    fsdp = priced(backend="fsdp2", offload="cpu").optimizer_s
    assert fsdp > 2 * priced(backend="zero3", offload="cpu").optimizer_s


# ------------------------------------------------------------------------ threshold


def test_threshold_does_not_depend_on_the_models_size() -> None:
    large = replace(BIG, layers=120)
    assert priced(large).threshold_tokens == pytest.approx(priced().threshold_tokens, rel=0.01)


@pytest.mark.parametrize(
    ("machine", "low", "high"),
    [
        ("8xA100-80GB,nvlink", 500, 1500),
        ("8xH100,nvlink", 800, 2000),
        ("8xB200,nvlink", 800, 2500),
        ("8xA100-80GB,pcie", 6000, 15_000),
    ],
)
def test_threshold_is_speed_over_bandwidth(machine: str, low: float, high: float) -> None:
    assert low < priced(machine=machine).threshold_tokens < high


def test_threshold_is_said_in_one_sentence() -> None:
    assert step_time.threshold_text(priced(), 2048).endswith("% of the time is waiting.")
    slow = step_time.threshold_text(priced(machine="8xA100-80GB,pcie"), 2048)
    assert "yours has 2,048, so communication limits the speed" in slow
    assert "T* = " in slow
    many = step_time.threshold_text(priced(tokens=65536), 65536)
    assert many.endswith("times that: less than 1% of the time is waiting.")
    alone = step_time.threshold_text(priced(machine="H100"), 2048)
    assert alone.startswith("A single device does not communicate")
