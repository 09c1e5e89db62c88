"""What one rank really holds: tensor bytes of a real training step, by torch's own trackers.

A case is run in a process of its own, which is rank 0 of a fake process group of any size:
nbdist's own preparation, Accelerate's and the engine's own code, three optimizer steps. FSDP2
runs under FakeTensorMode with `FSDPMemTracker`, so that a case may be larger than the
machine; the other engines run on real CPU tensors under nbdist's `Footprint`.

    python benchmarks/footprint.py '{"backend": "fsdp2", "world_size": 8, ...}' ...

prints one JSON object a case: peak bytes, by torch's category, from the third step. Cases
under fake tensors may share a process, which saves seven seconds of imports each.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One training setup. `config` is a transformers config as `to_dict()` has it."""

    config: dict[str, Any]
    backend: str = "fsdp2"
    world_size: int = 8
    batch_size: int = 1
    seq_len: int = 128
    precision: str = "bf16"
    offload: str = "none"
    activation_checkpointing: bool = False
    accumulate: int = 1
    optimizer: str = "adamw"
    """adamw (foreach, as on a GPU), fused, loop (as on a CPU), sgd."""
    attention: str = "sdpa"
    keep_outputs: bool = True
    """The cell's variable `out` holds the logits until the next step, as most cells do."""
    fsdp_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    nodes: int = 1
    """More than one: shards inside a node, replicas across nodes."""
    dtype: str = "float32"
    """Data type of the loaded weights."""
    lora: int = 0
    """Rank of PEFT's adapters; 0 trains everything."""
    target_modules: list[str] | str | None = None
    quantize: str | None = None
    """bitsandbytes: nf4 or int8."""
    fused_loss: bool = False
    """The loss of TRL's SFTTrainer, which never has all logits."""
    allocator: bool = False
    """Real tensors, and the peak of torch's CPU allocator (kineto's memory events)."""
    rank: int = 0
    """Which rank of the fake group to be."""
    real: bool = False
    """A real gloo group: start it with torchrun's variables set."""


def measured(case: Case, *, timeout_s: float = 300) -> dict[str, int]:
    """Run one case in a process of its own; bytes by category and "total"."""
    (parts,) = measured_together([case], timeout_s=timeout_s)
    return parts


def measured_together(cases: Sequence[Case], *, timeout_s: float = 600) -> list[dict[str, int]]:
    """Run cases one after the other in one process; FSDP2 on fake tensors only."""
    texts = [json.dumps(dataclasses.asdict(case)) for case in cases]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, __file__, *texts],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environ,
        check=False,
    )
    if done.returncode != 0:
        count = done.stdout.count("{")
        raise RuntimeError(f"{texts[count]}\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def fake_group(world_size: int, rank: int = 0) -> None:
    """Be one rank of a group whose other ranks do not exist."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        LOCAL_SIZE="1",  # deepspeed: not WORLD_SIZE, or it waits for its shared memory op
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29599",
    )
    if distributed.is_initialized():  # of the case before
        distributed.destroy_process_group()
    distributed.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


def model_of(case: Case) -> Any:
    """Build the model from its config."""
    import plan_modules
    import torch
    import transformers
    from transformers import masking_utils

    # transformers 5.23 takes FakeTensorMode for tracing and would build a mask of S x S.
    masking_utils.find_packed_sequence_indices = lambda _: None
    if (module := plan_modules.own(case.config)) is not None:
        return module
    config = transformers.AutoConfig.for_model(**case.config)
    config._attn_implementation = case.attention
    config.use_cache = False
    architecture = (case.config.get("architectures") or ["AutoModelForCausalLM"])[0]
    cls = getattr(transformers, architecture)
    model = cls.from_config(config) if architecture.startswith("Auto") else cls(config)
    return adapted(case, model.to(getattr(torch, case.dtype)))


def adapted(case: Case, model: Any) -> Any:
    """Quantize the model, give it TRL's loss and PEFT's adapters, as the case says."""
    import tempfile

    if case.quantize:
        import torch
        import transformers

        four = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": case.quantize,
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": getattr(torch, case.dtype),
        }
        how = transformers.BitsAndBytesConfig(
            **({"load_in_8bit": True} if case.quantize == "int8" else four)
        )
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            model = type(model).from_pretrained(
                folder, quantization_config=how, dtype=getattr(torch, case.dtype), device_map="cpu"
            )
        model.config.use_cache = False
        for parameter in model.parameters():  # views of the mapped file, which a GPU does not hold
            if parameter.is_floating_point():
                parameter.data = parameter.data.clone()
        gc.collect()
    if case.fused_loss:
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    if case.lora:
        import peft

        config = peft.LoraConfig(
            r=case.lora, target_modules=case.target_modules, task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(model, config)
    return model


def optimizer_of(case: Case, model: Any) -> Any:
    """Build the optimizer that the case names."""
    import torch

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if case.optimizer == "adamw_8bit":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(parameters, lr=1e-4)
    others = {"sgd": "SGD", "adafactor": "Adafactor", "muon": "Muon"}
    if case.optimizer in others:
        return getattr(torch.optim, others[case.optimizer])(parameters, lr=1e-4)
    how = {"adamw": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}
    return torch.optim.AdamW(parameters, lr=1e-4, **how[case.optimizer])


def batch_of(case: Case, model: Any) -> dict[str, Any]:
    """Tokens or pictures, and labels for the loss."""
    import plan_modules

    batch = plan_modules.batch_for(case.config, model, case.batch_size, case.seq_len)
    return batch | ({"fused_lm_head": True} if case.fused_loss else {})


def run(case: Case) -> dict[str, int]:
    """Prepare and train three steps; peak bytes of the third."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    if case.real:
        distributed.init_process_group("gloo")
    else:
        fake_group(case.world_size, case.rank)
    from nbdist.strategies import Hardware, Options
    from nbdist.worker.engines import accelerator_patch as engines

    hardware = Hardware(
        kind="cpu", bf16=True, world_size=distributed.get_world_size(), nodes=case.nodes
    )
    options = Options(
        backend=case.backend,
        precision=case.precision,
        offload=case.offload,
        activation_checkpointing=case.activation_checkpointing,
        accumulate=case.accumulate,
        replicate_across="nodes" if case.nodes > 1 else "none",
        fsdp_config=case.fsdp_config,
        deepspeed_config=case.deepspeed_config,
    ).validate(hardware)
    ops = options.strategy.required_ops(options, hardware)
    if ops:
        from nbdist.launcher import offload_setup

        offload_setup.build_missing_ops(ops, progress=lambda text: print(text, file=sys.stderr))
    late = engines.patch_accelerator(options, hardware)
    if case.allocator:
        return allocator_steps(case, late)
    if case.backend == "fsdp2" and not case.real:
        return fsdp2_steps(case, late)
    return engine_steps(case, late)


def fsdp2_steps(case: Case, late: Any) -> dict[str, int]:
    """FSDP2 without memory: fake tensors, the units that nbdist and Accelerate choose."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp._fully_shard import _fully_shard as fully_shard_module
    from transformers import initialization

    from nbdist.planner.tracing import wrap_units
    from nbdist.worker.engines import fsdp, wrap_policy

    late.distributed_type  # noqa: B018 - asking builds it
    # A mesh reads its ranks out of a tensor, which a fake one does not have.
    if case.nodes == 1:
        mesh = init_device_mesh("cpu", (case.world_size,))
        fully_shard_module._init_default_mesh = lambda: mesh
    # It draws until all values are small enough, which fake ones have not.
    initialization.TORCH_INIT_FUNCTIONS["trunc_normal_"] = lambda tensor, **_: tensor
    with FakeTensorMode():
        model = model_of(case)
        if case.activation_checkpointing:
            wrap_policy.add_activation_checkpointing(model, fsdp.find_units(model, {}))
        # What shard_ready() does, without its broadcast: fake weights are equal everywhere.
        late.state.fsdp_plugin.auto_wrap_policy = wrap_policy.UnitWrapPolicy(
            wrap_units.find_wrap_units(model)
        )
        # Accelerate's prepare() finds parameters by address, which fake tensors have not.
        with fsdp.keep_tied_embeddings_in_root(model):
            model = fsdp2_prepare_model(late, model).train()
        optimizer = optimizer_of(case, model)
        batch = batch_of(case, model)

        def step(tracker: Any = None) -> None:
            nonlocal out
            for micro in range(case.accumulate):
                if tracker is not None:
                    tracker.reset_mod_stats()  # it refuses a second forward otherwise
                model.set_requires_gradient_sync(micro == case.accumulate - 1)
                out = model(**batch)
                out.loss.backward()
                out = out if case.keep_outputs else None
            optimizer.step()
            optimizer.zero_grad()

        out = None
        step()  # torch 2.13: sharding propagation of a first step would be counted
        tracker = group_tracker(model, optimizer)
        # The logits of the step before are held in the next one.
        tracker.track_inputs((*batch.values(), *([out.logits] if out is not None else [])))
        with tracker:
            step(tracker)
        return peak(tracker)


def group_tracker(model: Any, optimizer: Any) -> Any:
    """FSDPMemTracker that leaves the hooks of grouped modules as they are.

    torch 2.13's own puts its hooks on each module of a group by itself: head and final norm,
    one unit in reality, then are gathered and reduced one after the other.
    """
    from torch.distributed._tools import fsdp2_mem_tracker as tools
    from torch.distributed.fsdp import FSDPModule

    def groups(module: Any) -> Any:
        return module._get_fsdp_state()._fsdp_param_group

    class Tracker(tools.FSDPMemTracker):
        def _instrument_fsdp_module(self) -> None:
            real = self._root_mod
            modules = list(real.modules())
            units = [one for one in modules if isinstance(one, FSDPModule) and groups(one)]
            grouped = [one for one in units if len(groups(one).modules) > 1]
            for group in {id(groups(one)): groups(one) for one in grouped}.values():
                self._instrument_fsdp_sharded_params_grads(group)
                for parameter in group.fsdp_params:
                    self._update_and_maybe_create_winfos(
                        parameter.unsharded_param, tools._FSDPRefType.UNSHARDED_PARAM
                    )
            single = [one for one in modules if one not in grouped]
            self._root_mod = Without(single, list(real.buffers()))
            super()._instrument_fsdp_module()
            self._root_mod = real

    class Without:
        """The model without its grouped modules, as far as the tracker asks."""

        def __init__(self, modules: list[Any], buffers: list[Any]) -> None:
            self.modules, self.buffers = (lambda: modules), (lambda: buffers)

    return Tracker(model, optimizer)


def engine_steps(case: Case, late: Any) -> dict[str, int]:
    """DDP, FSDP1 and DeepSpeed on real CPU tensors."""
    import torch

    from nbdist.planner.tracing.memory_tracker import MemoryTracker

    torch.manual_seed(0)
    footprint = MemoryTracker()
    with footprint:
        model = model_of(case).train()
        optimizer = optimizer_of(case, model)
        batch = batch_of(case, model)
        model, optimizer = late.prepare(model, optimizer)
        if isinstance(model, torch.nn.parallel.DistributedDataParallel) and not case.real:
            model.register_comm_hook(None, finished)
        for step in range(3):
            if step == 2:
                footprint.reset_peak()
            train_step(case, late, model, optimizer, batch)
    return {"total": footprint.peak, **footprint.at_peak}


_outputs: list[Any] = []
"""The cell's variable `out`, which holds the logits until the next forward has made others."""


def train_step(case: Case, late: Any, model: Any, optimizer: Any, batch: dict[str, Any]) -> None:
    """One optimizer step."""
    for _ in range(case.accumulate):
        with late.accumulate(model):
            _outputs[:] = [model(**batch)]
            late.backward(_outputs[0].loss)
            if not case.keep_outputs:
                _outputs.clear()
            optimizer.step()
            optimizer.zero_grad()


def allocator_steps(case: Case, late: Any) -> dict[str, int]:
    """Peak of torch's CPU allocator in the third step, counted from before the model exists."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    torch.manual_seed(0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        model = model_of(case).train()
        optimizer = optimizer_of(case, model)
        batch = batch_of(case, model)
        model, optimizer = late.prepare(model, optimizer)
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model.register_comm_hook(None, finished)
        for step in range(3):
            with record_function(f"training step {step}"):
                train_step(case, late, model, optimizer, batch)
    events = sorted(
        ((event.start_ns(), event.nbytes(), event.name()) for event in results_of(recorded)),
        key=lambda event: event[0],
    )
    total = highest = 0
    last = False
    for _, size, name in events:
        if name == "training step 2":
            last, highest = True, total
        if name == "[memory]":
            total += size
            highest = max(highest, total)
    assert last
    return {"total": highest}


def results_of(recorded: Any) -> Any:
    """Events of a profile, with memory events, which torch's own summaries leave out."""
    return recorded.profiler.kineto_results.events()


def finished(_, bucket):  # noqa: ANN001, ANN201 - torch reads the annotations
    """Reduce a DDP bucket over ranks that do not exist."""
    import torch

    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def peak(tracker: Any) -> dict[str, int]:
    """The tracker's peak on the CPU device, by category in lower case."""
    by_device = tracker.get_tracker_snapshot("peak")
    (parts,) = [parts for device, parts in by_device.items() if device.type == "cpu"]
    named = {getattr(key, "value", key): int(value) for key, value in parts.items() if value}
    return {name.lower(): value for name, value in named.items()}


def main() -> None:
    """Run the case given on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", nargs="+")
    for text in parser.parse_args().case:
        with contextlib.redirect_stdout(sys.stderr):
            parts = run(Case(**json.loads(text)))
        print(json.dumps(parts), flush=True)
    os._exit(0)  # a fake group has nobody to say goodbye to


if __name__ == "__main__":
    main()
