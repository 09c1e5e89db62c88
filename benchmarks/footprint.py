"""What one rank really holds in a training step, as torch's allocator reports it.

A case is prepared as a session prepares it: nbdist's options, Accelerate and the engine's own code,
with real tensors, as one rank of a fake process group of any size. The peak of the fourth optimizer
step is read from the allocator (in the third, nbdist measures on its own, which is not used here).
On CPU that are kineto's memory events, which contain every allocation and every free since before
the model existed. On a GPU they are the counters of the CUDA caching allocator, before it rounds
sizes up. Nothing of nbdist counts bytes.

Every case runs in a process of its own, forked from one that has imported the libraries.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import tempfile
import traceback
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers.modeling_outputs import ImageClassifierOutput

from nbdist.launcher import device_visibility

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

PHASES = ("forward", "backward", "optimizer step")
STEPS = 4
PLAIN = "plain_cnn"
"""`model_type` of a module that is not one of transformers' models."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training setup. `config` is a transformers config as `to_dict()` has it."""

    config: dict[str, Any]
    backend: str
    world_size: int
    batch_size: int
    seq_len: int
    precision: str = "bf16"
    offload: str = "none"
    activation_checkpointing: bool = False
    accumulate: int = 1
    clip: float | None = None
    optimizer: str = "adamw"
    """A name of nbdist.plan."""
    keep_outputs: bool = True
    """`outputs = model(**batch)`: the variable holds the outputs until the next ones exist."""
    fsdp_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    dtype: str = "float32"
    """Data type of the loaded weights."""
    lora: int = 0
    """Rank of PEFT's adapters; 0 trains everything."""
    target_modules: list[str] | str | None = None
    quantize: str | None = None
    """bitsandbytes: nf4, nf4-bf16 or int8."""
    fused_loss: bool = False
    """The loss of TRL's SFTTrainer, which never has all logits."""
    rank: int = 0
    """Which rank of the fake group to be."""
    kind: str = "cpu"
    """Device kind: cpu or cuda."""


class Peak(NamedTuple):
    """Peak of a training step."""

    num_bytes: int
    phase: str
    """One of PHASES."""


def measured(case: Case, *, timeout_s: float = 900) -> Peak:
    """Measure one case in a process of its own.

    Raises:
        RuntimeError: the case failed; with its traceback.
    """
    forks = multiprocessing.get_context("forkserver")
    preload = ["footprint", "deepspeed", "accelerate", "nbdist"]
    if case.kind == "cuda":  # libraries that look for a GPU at their import would break the fork
        os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cuda")
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    else:
        preload.append("peft")  # imports bitsandbytes, which looks for a GPU
    forks.set_forkserver_preload(preload)
    here, there = forks.Pipe()
    process = forks.Process(target=_child, args=(there, case))
    process.start()
    there.close()
    try:
        found = here.recv() if here.poll(timeout_s) else f"no result in {timeout_s:.0f} s"
    except EOFError:
        found = "the process ended without a result"
    finally:
        process.kill()
        process.join()
    if isinstance(found, Peak):
        return found
    raise RuntimeError(f"{case}\n{found}")


def _child(answer: Connection, case: Case) -> None:
    """Send the peak of a case, or the traceback; its output is discarded."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    try:
        answer.send(run(case))
    except BaseException:  # noqa: BLE001 - reported by the parent
        answer.send(traceback.format_exc())


def run(case: Case) -> Peak:
    """Be a rank of a fake group, prepare, train some steps."""
    torch.set_num_threads(1)
    _join_fake_group(case)
    from nbdist.strategies import Hardware, Options
    from nbdist.worker.engines import accelerator_patch as engines

    hardware = Hardware(kind=case.kind, bf16=True, world_size=case.world_size)
    options = Options(
        backend=case.backend,
        precision=case.precision,
        offload=case.offload,
        activation_checkpointing=case.activation_checkpointing,
        accumulate=case.accumulate,
        clip=case.clip,
        fsdp_config=case.fsdp_config,
        deepspeed_config=case.deepspeed_config,
    ).validate(hardware)
    ops = options.strategy.required_ops(options)
    if ops:  # loads what `plan_memory` has compiled
        from nbdist.launcher import offload_setup

        offload_setup.build_missing_ops(ops, progress=lambda _: None)
    late = engines.patch_accelerator(options, hardware)
    torch.manual_seed(0)
    return _on_gpu(case, late) if case.kind == "cuda" else _on_cpu(case, late)


def _join_fake_group(case: Case) -> None:
    """Be one rank of a group whose other ranks do not exist."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if case.kind == "cuda":
        device_visibility.take({"CUDA_VISIBLE_DEVICES": "0"})
    os.environ.update(
        RANK=str(case.rank),
        LOCAL_RANK="0" if case.kind == "cuda" else str(case.rank),
        WORLD_SIZE=str(case.world_size),
        LOCAL_WORLD_SIZE=str(case.world_size),
        LOCAL_SIZE="1",  # deepspeed: not WORLD_SIZE, or it waits for its shared memory op
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29599",
    )
    # The planner counts cuBLAS's workspaces with CUDA's context.
    os.environ.update(CUBLAS_WORKSPACE_CONFIG=":0:0", CUBLASLT_WORKSPACE_SIZE="0")
    distributed.init_process_group(
        "fake", rank=case.rank, world_size=case.world_size, store=FakeStore()
    )


class _Loop:
    """A prepared model with its optimizer and batch, as a cell has them."""

    def __init__(self, case: Case, late: Any) -> None:
        self.case, self.accelerator = case, late
        model = model_of(case).train()
        optimizer = _optimizer_of(case, model)
        self.batch = batch_of(case, model)
        self.model, self.optimizer = late.prepare(model, optimizer)
        if case.kind == "cuda":
            self.batch = {name: value.cuda() for name, value in self.batch.items()}
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            self.model.register_comm_hook(None, _finished)

    def step(self) -> Iterator[str]:
        """Run one optimizer step; yield the name of each phase before it begins."""
        for _ in range(self.case.accumulate):
            with self.accelerator.accumulate(self.model):
                yield "forward"
                if self.case.keep_outputs:
                    self.outputs = self.model(**self.batch)
                    self.loss = self.outputs.loss
                else:
                    self.loss = self.model(**self.batch).loss
                yield "backward"
                self.accelerator.backward(self.loss)
                yield "optimizer step"
                self.optimizer.step()
                self.optimizer.zero_grad()


def _on_cpu(case: Case, late: Any) -> Peak:
    """Peak from the events of torch's CPU allocator, counted from before the model exists."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        loop = _Loop(case, late)
        for number in range(STEPS):
            with contextlib.ExitStack() as running:
                for phase in loop.step():
                    running.close()
                    running.enter_context(record_function(f"{number} {phase}"))
    names = {f"{STEPS - 1} {phase}": phase for phase in PHASES}
    events = sorted(
        (event.start_ns(), event.nbytes(), event.name())
        # torch's own summaries leave memory events out.
        for event in recorded.profiler.kineto_results.events()
        if event.name() == "[memory]" or event.name() in names
    )
    total, phase, peak = 0, "", Peak(0, "")
    for _, size, name in events:
        phase = names.get(name, phase)
        total += size if name == "[memory]" else 0
        if phase and total > peak.num_bytes:
            peak = Peak(total, phase)
    return peak


def _on_gpu(case: Case, late: Any) -> Peak:
    """Peak from the counters of the CUDA caching allocator."""
    loop = _Loop(case, late)
    for _ in range(STEPS - 1):
        for _ in loop.step():
            pass
    peaks: list[Peak] = []
    before = ""
    for phase in chain(loop.step(), [""]):
        torch.cuda.synchronize()
        if before:
            peaks.append(Peak(torch.cuda.memory_stats()["requested_bytes.all.peak"], before))
        torch.cuda.reset_peak_memory_stats()
        before = phase
    return max(peaks)


def _finished(_, bucket):  # noqa: ANN001, ANN202 - torch reads the annotations
    """Reduce a DDP bucket over ranks that do not exist."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# -- models, optimizers, batches -------------------------------------------------------------


class PlainCnn(nn.Module):
    """Convolutions, group norms and two linear layers; nothing in it repeats."""

    def __init__(self, widths: list[int], picture: int, classes: int, hidden: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in zip((3, *widths), widths, strict=False):
            layers += [
                nn.Conv2d(before, after, 3, padding=1),
                nn.GroupNorm(8, after),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
        self.features = nn.Sequential(*layers)
        side = picture >> len(widths)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(widths[-1] * side**2, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> ImageClassifierOutput:
        # DeepSpeed leaves inputs as they are.
        logits = self.classifier(self.features(pixel_values.to(self.features[0].weight.dtype)))
        loss = nn.functional.cross_entropy(logits.float(), labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


def model_of(case: Case) -> Any:
    import transformers

    if case.config["model_type"] == PLAIN:
        sizes = {key: value for key, value in case.config.items() if key != "model_type"}
        return PlainCnn(**sizes)
    config = transformers.AutoConfig.for_model(**case.config)
    config.use_cache = False
    architecture = (case.config.get("architectures") or ["AutoModelForCausalLM"])[0]
    cls = getattr(transformers, architecture)
    model = cls.from_config(config) if architecture.startswith("Auto") else cls(config)
    model = model.to(getattr(torch, case.dtype))
    if case.quantize:
        model = _quantized(case, model)
    if case.fused_loss:
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    if case.lora:
        import peft

        adapters = peft.LoraConfig(
            r=case.lora, target_modules=case.target_modules, task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(model, adapters)
    return model


def _quantized(case: Case, model: Any) -> Any:
    """Store the linear layers as bitsandbytes does."""
    import safetensors.torch
    import transformers

    dtype = getattr(torch, case.dtype)
    four = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": torch.bfloat16 if case.quantize == "nf4-bf16" else torch.uint8,
    }
    how = {"load_in_8bit": True} if case.quantize == "int8" else four
    config = transformers.BitsAndBytesConfig(**how)
    with tempfile.TemporaryDirectory() as folder:
        # save_pretrained writes nothing on other ranks than the first.
        file = Path(folder) / "model.safetensors"
        safetensors.torch.save_file(model.state_dict(), file, metadata={"format": "pt"})
        model.config.to_json_file(Path(folder) / "config.json")
        model = type(model).from_pretrained(
            folder, quantization_config=config, dtype=dtype, device_map="cpu"
        )
    model.config.use_cache = False
    for parameter in model.parameters():  # views of the mapped file, which a GPU does not hold
        if parameter.is_floating_point():
            parameter.data = parameter.data.clone()
    gc.collect()
    return model


def _optimizer_of(case: Case, model: Any) -> torch.optim.Optimizer:
    classes = {"adamw": "AdamW", "adamw_fused": "AdamW", "sgd": "SGD", "adafactor": "Adafactor"}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    how = {"fused": True} if case.optimizer == "adamw_fused" else {}
    made: torch.optim.Optimizer = getattr(torch.optim, classes[case.optimizer])(
        parameters, lr=1e-4, **how
    )
    return made


def batch_of(case: Case, model: Any) -> dict[str, Any]:
    """Pictures or tokens, and labels for the loss."""
    size = case.batch_size
    if picture := case.config.get("picture") or case.config.get("image_size"):
        pixels = torch.zeros(size, 3, picture, picture)
        return {"pixel_values": pixels, "labels": torch.zeros(size, dtype=torch.long)}
    ids = torch.randint(0, model.config.vocab_size, (size, case.seq_len))
    classes = "SequenceClassification" in str(case.config.get("architectures"))
    labels = torch.zeros(size, dtype=torch.long) if classes else ids
    return {"input_ids": ids, "labels": labels} | (
        {"fused_lm_head": True} if case.fused_loss else {}
    )
