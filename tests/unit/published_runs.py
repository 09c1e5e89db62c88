"""Published training runs, and what the planner says to them.

`RUNS` have a published speed or memory, `FEASIBLE` whether it ran, `PICKS` what was best. All are
put to the planner as they are, with one set of constants. The tests assert on these tables and
`benchmarks/plan_published.py` prints them.

What `nbdist.plan` has fitted: how much of their peak an A100 and an H100 sustain and how often
activations go through memory, to the eager runs of cases 1, 2 and 3 (eleven figures, three
constants); the gain of fp8, to one run of case 3. The other speeds of case 3 (compiled, 128 GPUs
in fp8, 32768 tokens, H200) and all of memory, feasibility and picks were not fitted to.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from nbdist.planner import (
    cluster_spec,
    measurement_store,
    memory,
    optimizers,
    prediction_errors,
    search,
    step_time,
    target_devices,
)
from nbdist.planner.memory.timeline import TrainingSetup, compute_mode
from nbdist.planner.model_spec import Workload
from nbdist.planner.models import analytic
from nbdist.planner.plan_types import PlanInput
from nbdist.strategies import STRATEGIES, Options
from tests.unit import model_configs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.planner.memory.timeline import MemoryUsage
    from nbdist.planner.model_spec import MicroBatchActivations, ModelSpec
    from nbdist.planner.result import Plan
    from nbdist.planner.step_time import StepCost

GIB = 1 << 30


def llama(hidden: int, ff: int, layers: int, heads: int, kv: int, vocab: int, **more: Any) -> Any:
    """A Llama-like of published shape."""
    config = model_configs.llama(hidden, ff, layers, heads, kv, vocab, **more)
    return analytic.spec_from_config(config)


def gpt2(hidden: int, layers: int, heads: int, **more: Any) -> Any:
    """A GPT-2-like; attention as it was before fused kernels."""
    config = model_configs.gpt2(hidden, layers, heads, **more)
    return replace(analytic.spec_from_config(config), attention="eager")


LLAMA_7B = llama(4096, 11008, 32, 32, 32, 32000)
"""Llama-2-7B; Granite-7B has its shape."""
LLAMA_13B = llama(5120, 13824, 40, 40, 40, 32000)
LLAMA_34B = llama(8192, 22016, 48, 64, 8, 32000)
LLAMA_70B = llama(8192, 28672, 80, 64, 8, 32000)
LLAMA3_8B = llama(4096, 14336, 32, 32, 8, 128256)
LLAMA3_70B = llama(8192, 28672, 80, 64, 8, 128256)
QWEN3_14B = llama(5120, 17408, 40, 40, 8, 151936, model_type="qwen3", head_dim=128)
GPT2_SMALL = gpt2(768, 12, 12)
GPT2_LARGE = gpt2(1280, 36, 20)
GPT2_XL = gpt2(1600, 48, 25)
OPT_13B = gpt2(5120, 40, 40, vocab=50272, n_positions=2048)
OPT_30B = gpt2(7168, 48, 56, vocab=50272, n_positions=2048)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model was trained."""

    case: int
    """The number under which docs/planner.md lists it."""
    title: str
    model: ModelSpec
    devices: str
    backend: str
    batch_size: int
    seq_len: int
    recompute: Literal["off", "full", "selective"] = "off"
    """selective: about half of a block is computed again. Its time is taken to be in the middle
    of off and full."""
    precision: str = "bf16"
    optimizer: str = "adamw"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cluster(self) -> cluster_spec.ClusterSpec:
        return target_devices.parse_devices(self.devices)

    def setup(self, *, checkpointing: bool) -> TrainingSetup:
        """The same in the planner's terms."""
        options = Options(
            backend=self.backend,
            precision=self.precision,
            activation_checkpointing=checkpointing,
            **self.options,
        )
        return TrainingSetup(
            options=options,
            world_size=self.cluster.world_size,
            optimizer=optimizers.find_optimizer(self.optimizer),
        )

    def workload(self, *, checkpointing: bool) -> Workload:
        """One rank's micro-batch."""
        return Workload(
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            compute=compute_mode(self.setup(checkpointing=checkpointing).options),
            activation_checkpointing=checkpointing,
        )

    def cost(self, *, checkpointing: bool | None = None) -> StepCost:
        again = self.recompute == "full" if checkpointing is None else checkpointing
        work, setup = self.workload(checkpointing=again), self.setup(checkpointing=again)
        return step_time.step_cost(self.model, setup, self.cluster, work)

    @property
    def tokens_per_s(self) -> float:
        """The planner's, of one GPU."""
        if self.recompute != "selective":
            return self.cost().tokens_per_s / self.cluster.world_size
        both = [self.cost(checkpointing=again).tokens_per_s for again in (False, True)]
        return 2 / sum(1 / one for one in both) / self.cluster.world_size

    @property
    def peak(self) -> MemoryUsage:
        """The planner's, of tensors."""
        again = self.recompute != "off"
        work, setup = self.workload(checkpointing=again), self.setup(checkpointing=again)
        model = HalfRecomputed(self.model) if self.recompute == "selective" else self.model
        return memory.build_timeline(model, setup).peak_memory(model.micro_batch_activations(work))

    @property
    def calibration(self) -> measurement_store.DeviceOverhead:
        """The default one, of a device that was never measured."""
        return measurement_store.default_overhead("cuda", self.cluster.world_size)

    @property
    def _device_bytes(self) -> int:
        peak = self.peak
        return self.calibration.device_bytes(peak.device_bytes, peak.idle_pool_bytes)

    @property
    def reserved_gib(self) -> float:
        """What the allocator holds, as training logs tell it: without CUDA's own context."""
        return (self._device_bytes - self.calibration.context_bytes) / GIB

    @property
    def fits(self) -> bool:
        """Whether the planner says that it runs."""
        margin = prediction_errors.margin_of(
            self.setup(checkpointing=False).options.strategy.name, "closed form", calibrated=False
        )
        return self._device_bytes * (1 + margin.total) <= self.cluster.smallest_device.free_bytes


@dataclass(frozen=True)
class HalfRecomputed:
    """A Llama of which torchtitan recomputes every second matrix product ("op" selective mode).

    Of q, k, v, o, gate, up, down it keeps q, v, gate and down, and attention's own output with
    its log-sum-exp. Its root unit holds the embedding beside the head, so that both stay gathered.
    """

    plain: Any

    def __getattr__(self, name: str) -> Any:
        """Everything else is the model's own."""
        return getattr(self.plain, name)

    def micro_batch_activations(self, workload: Workload) -> MicroBatchActivations:
        """Each block keeps what is not recomputed, and the embedding stays whole."""
        model = self.plain
        kept = 2 * (
            2 * model.hidden
            + model.heads * model.head_dim
            + model.heads * model.head_dim
            + model.kv_heads * model.head_dim
            + model.ff
        )
        kept += 4 * model.heads
        run = model.micro_batch_activations(workload)
        saved = {"embedding": 2 * model.groups[0].num_params, "block": kept * workload.num_tokens}
        passes = (
            replace(one, saved_bytes=saved.get(group.role, one.saved_bytes))
            for group, one in zip(model.groups, run.layers, strict=True)
        )
        return replace(run, layers=tuple(passes))


# ------------------------------------------------------------------ speed and memory


@dataclass(frozen=True, kw_only=True)
class Run(Setting):
    """A run with figures."""

    tokens: float | None = None
    """Tokens per second and GPU."""
    gib: float | None = None
    """Peak GiB that the allocator held."""


def _granite(backend: str, tokens: float) -> Run:
    """Hugging Face and IBM 2024: Granite-7B on 4 A100, batch 8, 10.4 s a step."""
    return Run(
        case=1,
        title=f"Granite-7B, 4 A100, {backend}",
        model=LLAMA_7B,
        devices="4xA100-80GB,nvlink",
        backend=backend,
        batch_size=8,
        seq_len=4096,
        recompute="full",
        tokens=tokens,
    )


def _pretrained(size: str, machine: str, recompute: Any, tokens: float) -> Run:
    """PyTorch and IBM 2024: Llama 2, FSDP1, batch 2 of 4096 tokens; one network link a node."""
    models = {"7B": LLAMA_7B, "13B": LLAMA_13B, "34B": LLAMA_34B, "70B": LLAMA_70B}
    where = {"A100": "16x8xA100-80GB,nvlink,400Gb", "H100": "12x8xH100-80GB,nvlink,800Gb"}
    return Run(
        case=2,
        title=f"Llama 2 {size}, {'128' if machine == 'A100' else '96'} {machine}",
        model=models[size],
        devices=where[machine],
        backend="fsdp1",
        batch_size=2,
        seq_len=4096,
        recompute=recompute,
        tokens=tokens,
    )


def _titan(title: str, machine: str, tokens: float, gib: float | None, **more: Any) -> Run:
    """torchtitan 2024 and 2025: Llama 3.1 8B, FSDP2; H100 of 96 GB at 500 W."""
    setting = {"batch_size": 2, "seq_len": 8192, "recompute": "selective"} | more
    return Run(
        case=3,
        title=f"Llama 3.1 8B, {title}",
        model=LLAMA3_8B,
        devices=machine,
        backend="fsdp2",
        tokens=tokens,
        gib=gib,
        **setting,
    )


_EIGHT = "8xH100-96GB,nvlink"
_MANY = "16x8xH100-96GB,nvlink,8x400Gb"
_FUSED = {"compile": True}

RUNS = (
    _granite("fsdp1", 3158.7),
    _granite("zero3", 3094.5),
    _pretrained("7B", "A100", "off", 3700),
    _pretrained("13B", "A100", "selective", 1800),
    _pretrained("34B", "A100", "full", 700),
    _pretrained("70B", "A100", "full", 370),
    _pretrained("7B", "H100", "off", 7500),
    _pretrained("13B", "H100", "selective", 3800),
    _pretrained("34B", "H100", "full", 1550),
    _pretrained("70B", "H100", "full", 800),
    _titan("8 H100", _EIGHT, 5762, 82.4),
    _titan("8 H100, compiled", _EIGHT, 6667, 77.0, options=_FUSED),
    _titan("8 H100, compiled, fp8", _EIGHT, 8532, 76.8, options=_FUSED, precision="fp8"),
    _titan("128 H100", _MANY, 5605, 67.0),
    _titan("128 H100, compiled", _MANY, 6514, 62.0, options=_FUSED),
    _titan("128 H100, compiled, fp8", _MANY, 8380, 61.8, options=_FUSED, precision="fp8"),
    _titan(
        "8 H100, compiled, fp8, 32768 tokens",
        _EIGHT,
        3890,
        83.9,
        options=_FUSED,
        precision="fp8",
        batch_size=1,
        seq_len=32768,
        recompute="full",
    ),
    # Its loss is compiled too and makes no full logits, which nbdist's plans do not know.
    _titan(
        "32 H200, compiled, fp8",
        "4x8xH200,nvlink,8x400Gb",
        10938,
        None,
        options=_FUSED,
        precision="fp8",
    ),
    _titan(
        "64 H200, compiled, fp8",
        "8x8xH200,nvlink,8x400Gb",
        10753,
        None,
        options=_FUSED,
        precision="fp8",
    ),
)


# ---------------------------------------------------------------------- feasibility


@dataclass(frozen=True, kw_only=True)
class Ran(Setting):
    """A setup that ran, or ran out of memory."""

    ran: bool


def _titan_rtx(
    model: ModelSpec, count: int, backend: str, batch: int, *, ran: bool, **more: Any
) -> Ran:
    """Hugging Face 2022: GPT-2 on Titan RTX without mixed precision.

    The page's sequence length (--block_size 12) cannot be: 128 is taken, with which both the
    largest batch under DDP and that under FSDP come out. AdamW was a loop over tensors then.
    """
    options = {"precision": "no", "optimizer": "adamw_loop"} | more
    return Ran(
        case=4,
        title=f"{model.name}, {count} Titan RTX, {backend} {batch}, {options['precision']}",
        model=model,
        devices=f"{count}xTitanRTX",
        backend=backend,
        batch_size=batch,
        seq_len=128,
        ran=ran,
        **options,
    )


_CPU = {"offload": "cpu"}
_ALL_CPU = {"offload": "cpu", "offload_params": True}


def _large(case: int, model: ModelSpec, machine: str, backend: str, **more: Any) -> Ran:
    """A model that is large for its machine; one sample, activations recomputed."""
    setting = {"batch_size": 1, "seq_len": 1024, "recompute": "full", "options": {}} | more
    words = ", ".join(f"{key} {value}" for key, value in setting["options"].items())
    return Ran(
        case=case,
        title=f"{model.name}, {machine}, {backend} {words}".strip(),
        model=model,
        devices=machine,
        backend=backend,
        **setting,
    )


_PRO = "4xRTX PRO 6000,pcie"

FEASIBLE = (
    *(
        Ran(**{**{name: getattr(run, name) for name in Setting.__dataclass_fields__}, "ran": True})
        for run in RUNS
    ),
    _titan_rtx(GPT2_LARGE, 2, "ddp", 7, ran=True),
    _titan_rtx(GPT2_LARGE, 2, "ddp", 7, ran=True, precision="fp16"),
    _titan_rtx(GPT2_LARGE, 2, "fsdp1", 15, ran=True),
    _titan_rtx(GPT2_LARGE, 2, "fsdp1", 22, ran=True, options=_CPU),
    _titan_rtx(GPT2_XL, 1, "ddp", 1, ran=False),
    _titan_rtx(GPT2_XL, 2, "ddp", 1, ran=False),
    _titan_rtx(GPT2_XL, 1, "ddp", 1, ran=False, precision="fp16"),
    _titan_rtx(GPT2_XL, 2, "fsdp1", 5, ran=True),
    _titan_rtx(GPT2_XL, 1, "fsdp1", 10, ran=True, options=_CPU),
    _titan_rtx(GPT2_XL, 2, "fsdp1", 14, ran=True, options=_CPU),
    # DeepSpeed's autotuner, GPT-2 large on 16 V100: ZeRO-1 with micro-batches up to 3.
    _large(
        5,
        GPT2_LARGE,
        "16xV100-32GB",
        "zero1",
        batch_size=3,
        recompute="off",
        precision="fp16",
        ran=True,
    ),
    # ZenFlow 2025: Llama-2-7B on 4 A100 with and without ZeRO-Offload.
    _large(6, LLAMA_7B, "4xA100-80GB", "zero2", ran=True),
    _large(6, LLAMA_7B, "4xA100-80GB", "zero2", options=_CPU, ran=True),
    # DeepCompile 2025: "70B with ZeRO-3 needs 32 GPUs of 80 GB"; with offload 16 do.
    _large(7, LLAMA3_70B, "4x8xH100-80GB", "zero3", ran=True),
    _large(7, LLAMA3_70B, "2x8xH100-80GB", "zero3", ran=False),
    _large(7, LLAMA3_70B, "2x8xH100-80GB", "zero3", options=_CPU, ran=True),
    # ZeRO-Offload++ 2023: what Twin-Flow was compared to.
    _large(8, OPT_30B, "8xH100-80GB", "zero3", options=_CPU, ran=True),
    _large(8, OPT_13B, "8xA100-40GB", "zero3", options=_CPU, ran=True),
    # A student's report on 4 GH200 with a model of 6.7B.
    _large(9, LLAMA_7B, "4xGH200", "ddp", ran=False),
    _large(9, LLAMA_7B, "4xGH200", "zero1", ran=True),
    _large(9, LLAMA_7B, "4xGH200", "zero2", ran=True),
    _large(9, LLAMA_7B, "4xGH200", "zero3", ran=True),
    # SuperOffload 2025: Qwen3-14B on one GH200, Llama 70B on four.
    _large(10, QWEN3_14B, "GH200", "zero3", ran=False),
    _large(10, QWEN3_14B, "GH200", "zero3", options=_CPU, ran=True),
    _large(10, LLAMA_70B, "4xGH200", "zero3", ran=False),
    _large(10, LLAMA_70B, "4xGH200", "zero3", options=_ALL_CPU, ran=True),
    # What articles claim of 70B with a full AdamW, and what cannot be.
    *(
        _large(13, LLAMA_70B, machine, backend, ran=False)
        for machine in ("8xA100-80GB", "8xH100-80GB", _PRO)
        for backend in ("ddp", "zero1", "zero2", "zero3", "fsdp2")
    ),
    _large(13, LLAMA_70B, _PRO, "zero3", optimizer="adamw_8bit", ran=False),
)


# ---------------------------------------------------------------------------- picks


@dataclass(frozen=True, kw_only=True)
class Pick:
    """What was best, as the backends that count as the same class."""

    case: int
    title: str
    model: ModelSpec
    devices: str
    candidates: tuple[str, ...]
    """What was compared; empty for all that nbdist has. FSDP2 was, resharding, its default."""
    batch_sizes: tuple[int, ...]
    seq_len: int
    best: tuple[str, ...]
    precision: str = "bf16"
    optimizer: str = "adamw"

    @property
    def plan(self) -> Plan:
        """The planner's, without offload or recomputation."""
        plans = [
            self._plan(_AS_COMPARED.get(one, {}) | {"backend": one}) for one in self.candidates
        ]
        plans = plans or [self._plan({})]
        return max(plans, key=lambda one: one.best.tokens_per_s if one.best else 0)

    def _plan(self, fixed: dict[str, Any]) -> Plan:
        question = PlanInput(
            model=self.model,
            cluster=target_devices.parse_devices(self.devices),
            batch_sizes=self.batch_sizes,
            seq_len=self.seq_len,
            precision=self.precision,
            optimizer=optimizers.find_optimizer(self.optimizer),
            fixed_options={"activation_checkpointing": False, **fixed},
            offload_candidates=("none",),
        )
        return search.search_plan(question)


_AS_COMPARED: dict[str, dict[str, Any]] = {
    "fsdp2": {"fsdp_config": {"reshard_after_forward": True}},
}


def _small(machine: str, precision: str) -> Pick:
    """arXiv 2505.12832: DDP is 2 to 3 times as fast as FSDP for models that fit anyway.

    Its abstract tells neither batch nor optimizer. Taken here: 128 tokens, one kernel for the
    optimizer. With a foreach AdamW sharding its state gains more than it costs (ZeRO-1), and on
    PCIe in bf16 FSDP2 hides more of the same bytes than DDP does. One that keeps parameters
    gathered was not compared: on PCIe it would lead DDP by 18 %.
    """
    return Pick(
        case=11,
        title=f"GPT-2 small, few tokens, {machine}, {precision}",
        model=replace(GPT2_SMALL, attention="sdpa"),
        devices=machine,
        candidates=tuple(STRATEGIES),
        batch_sizes=(1,),
        seq_len=128,
        best=("ddp",),
        precision=precision,
        optimizer="adamw_fused",
    )


PICKS = (
    Pick(
        case=5,
        title="GPT-2 large on 16 V100, the autotuner's candidates",
        model=GPT2_LARGE,
        devices="16xV100-32GB",
        # The published bests are of these stages. Of all that nbdist has, FSDP2 leads by 6 %.
        candidates=("ddp", "zero1", "zero2"),
        batch_sizes=(1, 2, 3, 4),
        seq_len=1024,
        best=("zero1",),
        precision="fp16",
    ),
    _small("8xA100-40GB", "no"),
    _small("8xA100-40GB", "bf16"),
    _small("4xA10G", "no"),
)
