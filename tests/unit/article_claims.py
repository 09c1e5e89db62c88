"""What articles claim about choosing a strategy, and what the planner computes to each.

Every claim has a function that asks the planner and says whether it agrees. The table is asserted
by `test_plan_claims`; `python tests/unit/article_claims.py` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import published_runs
from published_runs import LLAMA_7B, LLAMA_13B, LLAMA_34B, LLAMA_70B, Setting

from nbdist.planner import model_spec, step_time
from nbdist.planner.models import analytic

if TYPE_CHECKING:
    from collections.abc import Callable

GIB = 1 << 30
GB = 1e9
Verdict = Literal["agrees", "differs"]


@dataclass(frozen=True)
class Answer:
    """What the planner computed."""

    says: str
    agrees: bool


@dataclass(frozen=True)
class Claim:
    """One claim, the expected verdict and why."""

    number: int
    text: str
    verdict: Verdict
    why: str
    ask: Callable[[], Answer]


CLAIMS: list[Claim] = []


def claim(
    number: int, text: str, verdict: Verdict, why: str
) -> Callable[[Callable[[], Answer]], Callable[[], Answer]]:
    def enter(ask: Callable[[], Answer]) -> Callable[[], Answer]:
        CLAIMS.append(Claim(number, text, verdict, why, ask))
        return ask

    return enter


def setting(model: model_spec.ModelSpec, machine: str, backend: str, **more: Any) -> Setting:
    """One sample of 2048 tokens, activations recomputed, unless said otherwise."""
    given = {"batch_size": 1, "seq_len": 2048, "recompute": "full"} | more
    return Setting(case=0, title="", model=model, devices=machine, backend=backend, **given)


def gib(one: Setting) -> float:
    return one.peak.device_bytes / GIB


def slower(model: model_spec.ModelSpec, machine: str, **more: Any) -> float:
    """How many times as long a step of ZeRO-3 takes as one of FSDP2."""
    steps = [
        setting(model, machine, name, **more).cost().step_time_s for name in ("zero3", "fsdp2")
    ]
    return steps[0] / steps[1]


def span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


SEVENTY = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "fsdp1")
EIGHT = "8xA100-80GB,nvlink"
MANY = "4x8xH100-80GB,nvlink,8x400Gb"
PRO = "4xRTX PRO 6000,pcie"


def seventy_fits(machine: str, **more: Any) -> list[str]:
    return [name for name in SEVENTY if setting(LLAMA_70B, machine, name, **more).fits]


@claim(
    1,
    "FSDP is up to 5 times as fast per iteration as ZeRO-3 below 1B",
    "differs",
    "both send about the same bytes; ZeRO-3's hooks cost time only where kernels are tiny",
)
def _one() -> Answer:
    model = analytic.spec_from_parameter_count("350m")
    found = [slower(model, EIGHT, seq_len=length) for length in (128, 512, 2048, 8192)]
    return Answer(f"ZeRO-3 takes {span(found)} times as long (350M, 8 A100)", max(found) > 4)


@claim(
    2,
    "7B on 4 A100: FSDP 3158.7, DeepSpeed 3094.5 tokens/s",
    "differs",
    "the figures are of one device, the source says",
)
def _two() -> Answer:
    runs = published_runs.RUNS[:2]
    totals = [run.cost().tokens_per_s for run in runs]
    each = ", ".join(f"{run.tokens_per_s:.0f}" for run in runs)
    agrees = all(abs(total / run.tokens - 1) < 0.5 for run, total in zip(runs, totals, strict=True))
    return Answer(f"{each} tokens/s a GPU, {totals[0]:.0f} together", agrees)


@claim(
    3,
    "at 70B and more the scales tip back to DeepSpeed",
    "differs",
    "at many tokens both hide their communication",
)
def _three() -> Answer:
    ratio = slower(LLAMA_70B, MANY, batch_size=2, seq_len=4096)
    return Answer(f"ZeRO-3 takes {ratio:.2f} times as long (70B, 32 H100)", ratio < 0.95)


@claim(
    4,
    "below 10B take FSDP, above ZeRO-3",
    "differs",
    "what hides communication is tokens per GPU, not parameters",
)
def _four() -> Answer:
    many = "8x8xA100-80GB,nvlink,8x200Gb"
    ratios = [slower(one, many, seq_len=4096) for one in (LLAMA_7B, LLAMA_13B, LLAMA_34B)]
    thresholds = [
        setting(one, many, "fsdp2").cost().threshold_tokens for one in (LLAMA_7B, LLAMA_34B)
    ]
    crosses = ratios[0] > 1.05 and ratios[-1] < 0.95
    says = f"ZeRO-3/FSDP2 {span(ratios)} for 7B to 34B; T* {thresholds[0]:.0f}"
    return Answer(f"{says} and {thresholds[1]:.0f} tokens", crosses)


def per_parameter(backend: str, ranks: int, parts: tuple[str, ...] = (), **more: Any) -> float:
    """Bytes a parameter at the peak of a model without activations to speak of."""
    given = {"batch_size": 1, "seq_len": 8, "recompute": "full"} | more
    one = setting(LLAMA_7B, f"{ranks}xA100-80GB", backend, **given).peak
    size = sum(one.parts.get(name, 0) for name in parts) if parts else one.device_bytes
    return size / model_spec.num_params(LLAMA_7B)


@claim(
    6,
    "DDP with mixed precision and AdamW holds 16 bytes a parameter",
    "differs",
    "Accelerate keeps fp32 weights and gradients; DDP's buckets and the step's copies come on top",
)
def _six() -> Answer:
    most, fused = (per_parameter("ddp", 8, optimizer=name) for name in ("adamw", "adamw_fused"))
    return Answer(f"{most:.1f} bytes in the step, {fused:.1f} fused", abs(fused - 16) < 1)


def largest_ddp(machine: str) -> float:
    """Billions of parameters of the largest Llama-like that fits under DDP."""
    sizes = [f"{tenths / 10:.1f}b" for tenths in range(4, 45)]
    models = [analytic.spec_from_parameter_count(size) for size in sizes]
    fitting = [
        model_spec.num_params(one)
        for one in models
        if setting(one, machine, "ddp", seq_len=128).fits
    ]
    return max(fitting) / 1e9


@claim(
    8,
    "largest model under DDP: 1B on 24 GB, 1.5-2B on 40 GB, 3.5B on 80 GB",
    "agrees",
    "by luck: 16 bytes with slack come near 24 without",
)
def _eight() -> Answer:
    machines = ("8x4090", "8xA100-40GB", EIGHT)
    found = [largest_ddp(machine) for machine in machines]
    agrees = all(
        abs(one / said - 1) < 0.25 for one, said in zip(found, (1, 1.75, 3.5), strict=True)
    )
    return Answer(", ".join(f"{one:.1f}B" for one in found), agrees)


@claim(
    10,
    "FSDP needs 4 to 6 times less memory than DDP",
    "differs",
    "it depends on the number of GPUs and on activations, which are not sharded",
)
def _ten() -> Answer:
    model = analytic.spec_from_parameter_count("1b")
    ratios = [
        gib(setting(model, f"{ranks}xA100-80GB", "ddp"))
        / gib(setting(model, f"{ranks}xA100-80GB", "fsdp2"))
        for ranks in (2, 4, 8, 64)
    ]
    words = ", ".join(f"{one:.1f}" for one in ratios)
    return Answer(f"{words} times on 2, 4, 8, 64 GPUs", all(4 <= one <= 6 for one in ratios))


@claim(
    11,
    "GPT-2 1.5B on 2 Titan RTX: FSDP with batch 5, DDP out of memory",
    "agrees",
    "Hugging Face 2022",
)
def _eleven() -> Answer:
    two = [one for one in published_runs.FEASIBLE if "1.56B parameters, 2 Titan RTX" in one.title]
    ddp, fsdp = two[0], next(one for one in two if one.backend == "fsdp1" and not one.options)
    says = f"DDP {gib(ddp):.1f} GiB, FSDP with 5 samples {gib(fsdp):.1f} GiB, of 23.6"
    return Answer(says, fsdp.fits and not ddp.fits)


@claim(
    12,
    "T5-3B on 8 A100-40: 2.3 TFLOPS; FULL_SHARD 1.5 times as fast as SHARD_GRAD_OP",
    "differs",
    "0.7 % of one A100 cannot be; FULL_SHARD gathers twice, a larger batch may win",
)
def _twelve() -> Answer:
    model = analytic.spec_from_parameter_count("3b")
    one = setting(model, "8xA100-40GB", "fsdp2", seq_len=512, batch_size=14)
    tflops = one.cost().mfu * 312
    setup = one.setup(checkpointing=True)
    config = {"reshard_after_forward": False}
    kept = replace(setup, options=replace(setup.options, fsdp_config=config))
    other = step_time.StepCostModel(model, kept, one.cluster).cost_for(
        one.workload(checkpointing=True)
    )
    ratio = other.step_time_s / one.cost().step_time_s
    says = f"{tflops:.0f} TFLOP/s; keeping parameters gathered takes {ratio:.2f} of the time"
    return Answer(says, tflops < 5 or ratio > 1.2)


GPT_175B = published_runs.gpt2(12288, 96, 96, n_positions=2048)


def gpt_175b(nodes: int) -> Setting:
    """The FSDP paper's run: batch 2, recomputing."""
    fast = replace(GPT_175B, attention="sdpa")
    return setting(fast, f"{nodes}x8xA100-40GB,nvlink,8x200Gb", "fsdp1", batch_size=2)


@claim(
    13,
    "GPT-175B on 128 A100-40: 159 to 186 TFLOPS",
    "agrees",
    "arXiv 2304.11277, which counts recomputation as work",
)
def _thirteen() -> Answer:
    done = gpt_175b(16).cost().mfu * 312 * 4 / 3
    return Answer(f"{done:.0f} TFLOP/s", 159 * 0.75 < done < 186 * 1.25)


@claim(14, "7B on 128 A100: 3,700 tokens/s a GPU, 57 % of peak", "agrees", "PyTorch and IBM 2024")
def _fourteen() -> Answer:
    run = next(run for run in published_runs.RUNS if run.tokens == 3700)
    says = f"{run.tokens_per_s:.0f} tokens/s a GPU, {run.cost().mfu:.0%} (causal attention)"
    return Answer(says, abs(run.tokens_per_s / 3700 - 1) < 0.25)


@claim(
    15,
    "175B scales linearly from 128 to 512 GPUs",
    "agrees",
    "the bytes a GPU sends hardly grow with the number of GPUs",
)
def _fifteen() -> Answer:
    few, many = (gpt_175b(nodes).cost().tokens_per_gpu_s for nodes in (16, 64))
    return Answer(f"{many / few:.0%} of the speed per GPU", many / few > 0.95)


_STATES = ("parameters", "master", "gradients", "optimizer")


def reduction(backend: str, ranks: int) -> float:
    """How much less of states than 16 bytes a parameter."""
    return 16 / per_parameter(backend, ranks, _STATES, optimizer="adamw_fused", precision="bf16")


@claim(
    16,
    "ZeRO reduces memory 4, 8 and N times in stages 1, 2, 3",
    "differs",
    "4 and 8 are the limits for many GPUs",
)
def _sixteen() -> Answer:
    found = [reduction(name, 8) for name in ("zero1", "zero2", "zero3")]
    words = ", ".join(f"{one:.1f}" for one in found)
    return Answer(f"{words} times on 8 GPUs", found[0] > 3.6 and found[1] > 7.2)


@claim(
    17,
    "64 GPUs: stage 1 trains 7.5B, stage 2 14B, stage 3 128B",
    "agrees",
    "on V100 of 32 GB, states alone (arXiv 1910.02054)",
)
def _seventeen() -> Answer:
    sizes = [32 / 16 * reduction(name, 64) for name in ("zero1", "zero2", "zero3")]
    agrees = all(abs(one / said - 1) < 0.1 for one, said in zip(sizes, (7.5, 14, 128), strict=True))
    return Answer(", ".join(f"{one:.1f}B" for one in sizes), agrees)


def sent(backend: str, **options: Any) -> float:
    """Bytes a parameter that one GPU sends in a step."""
    found = setting(LLAMA_70B, "64xA100-80GB", backend, options=options).cost()
    return found.bytes_on_wire / model_spec.num_params(LLAMA_70B) * 64 / 63


@claim(
    18,
    "stages 1 and 2 send as much as DDP, stage 3 adds 1.5 times more",
    "differs",
    "DDP sends fp32 gradients under Accelerate; with one micro-batch all stages send the same",
)
def _eighteen() -> Answer:
    names = ("ddp", "zero1", "zero2", "zero3")
    one = {name: sent(name) for name in names}
    four = {name: sent(name, accumulate=4) for name in names}
    says = ", ".join(f"{name} {one[name]:.0f} ({four[name]:.0f})" for name in names)
    agrees = abs(one["zero3"] / one["ddp"] - 2.5) < 0.2 or abs(one["zero1"] - one["ddp"]) < 0.1
    return Answer(f"{says} bytes a parameter (with 4 micro-batches)", agrees)


@claim(
    21,
    "CPU offload costs 20 to 40 %",
    "differs",
    "the optimizer is bound by the host's memory: twice to 14 times as long is published",
)
def _twenty_one() -> Answer:
    plain = setting(LLAMA_7B, "4xA100-80GB", "zero2", recompute="off")
    moved = replace(plain, options={"offload": "cpu"})
    ratio = moved.cost().step_time_s / plain.cost().step_time_s
    return Answer(f"{ratio:.1f} times as long (7B, 4 A100, 2048 tokens)", ratio < 1.5)


@claim(
    25,
    "8 A100-80: 7B 10,500 and 70B 1,100 tokens/s with FSDP",
    "differs",
    "7B is three times as fast, 70B cannot run there",
)
def _twenty_five() -> Answer:
    seven = setting(LLAMA_7B, EIGHT, "fsdp2", batch_size=4).cost().tokens_per_s
    says = f"7B {seven:,.0f} tokens/s; 70B needs {gib(setting(LLAMA_70B, EIGHT, 'fsdp2')):.0f} GiB"
    return Answer(says, seven < 10500 * 1.5 or bool(seventy_fits(EIGHT)))


@claim(
    28,
    "7B on one node: FSDP; for the least memory: ZeRO-3",
    "differs",
    "both shard the same; which one's buffers are larger depends on the model",
)
def _twenty_eight() -> Answer:
    fsdp, zero = (gib(setting(LLAMA_7B, EIGHT, name)) for name in ("fsdp2", "zero3"))
    return Answer(f"FSDP2 {fsdp:.1f} GiB, ZeRO-3 {zero:.1f} GiB", zero < 0.9 * fsdp)


@claim(
    34,
    "FSDP is the default for 7-70B on 2-8 GPUs",
    "differs",
    "70B needs more than 16 GPUs of 80 GB, or offload",
)
def _thirty_four() -> Answer:
    counts = (8, 16, 24, 32, 64)
    enough = [n for n in counts if setting(LLAMA_70B, f"{n}xH100-80GB", "fsdp2").fits]
    return Answer(f"70B fits under FSDP2 from {enough[0]} GPUs of 80 GB", enough[0] <= 8)


@claim(
    36,
    "checkpointing with offload in DeepSpeed can need less memory than FSDP",
    "differs",
    "ZeRO-3 keeps a bucket and what it will soon use again; it can place parameters and "
    "optimizer apart, which FSDP cannot",
)
def _thirty_six() -> Answer:
    cpu = {"offload": "cpu"}
    fsdp = gib(setting(LLAMA_7B, EIGHT, "fsdp2", options=cpu))
    variants = [cpu, {**cpu, "offload_params": True}]
    zero = [gib(setting(LLAMA_7B, EIGHT, "zero3", options=one)) for one in variants]
    words = " and ".join(f"{one:.1f}" for one in zero)
    return Answer(f"ZeRO-3 {words} GiB, FSDP2 {fsdp:.1f} GiB", min(zero) < fsdp)


def main() -> None:
    for one in CLAIMS:
        answer = one.ask()
        text = f"{one.number:2} {one.verdict:8} {one.text}\n     {answer.says}; {one.why}"
        print(text)  # noqa: T201 - it is run to be read


if __name__ == "__main__":
    main()
