"""Provides report(), save(), load() and export() to a script that nbdist wrote.

Needs torch and accelerate only. Importing it applies accelerate.yaml, which lies beside it, if the
script was started by torchrun, srun or mpirun instead of `accelerate launch`; without a GPU it
makes Accelerate run FSDP and DeepSpeed on CPU processes, to try a script out.
"""

from __future__ import annotations

import atexit
import copy
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, recursively_apply
from torch.distributed.fsdp import FullyShardedDataParallel

FOLDER = Path(__file__).parent
CHECKPOINTS = Path("checkpoints")
"""Folder of save() and load()."""
ROWS_AT_ONCE = 20
"""Number of rows after which report() writes them, which waits for the device."""

display = print
"""A script has no notebook to display in."""
_settings: dict[str, Any] = {}
_accelerators: list[Accelerator] = []
"""The Accelerator that prepared a model last."""
_rows: list[dict[str, Any]] = []


def setup(*, clip: float | None = None, activation_checkpointing: bool = False) -> None:
    """Apply options of the session that Accelerate's config file does not have.

    Args:
        clip: maximum gradient norm at every optimizer step.
        activation_checkpointing: recompute activations of transformers' models.
    """
    _settings.update(clip=clip, activation_checkpointing=activation_checkpointing)


def report(step: int | None = None, **scalars: Any) -> None:
    """Append scalars to metrics/rank0.jsonl, metrics/rank1.jsonl, ...; rank 0 prints them."""
    for name, value in scalars.items():
        is_scalar = value.numel() == 1 if torch.is_tensor(value) else hasattr(value, "__float__")
        if not is_scalar:
            message = f"report({name}=...) must be a number or a tensor with one element, got"
            raise TypeError(f"{message} {value!r}.")
    step = report.__dict__.get("next", 0) if step is None else step
    report.__dict__["next"] = step + 1
    values = {k: v.detach().clone() if torch.is_tensor(v) else v for k, v in scalars.items()}
    _rows.append({"step": step, **values})
    if len(_rows) >= ROWS_AT_ONCE:
        _write_rows()


@atexit.register
def _write_rows() -> None:
    rows = [{name: float(value) for name, value in row.items()} for row in _rows]
    _rows.clear()
    if not rows:
        return
    rank = int(os.environ.get("RANK", "0"))
    file = Path("metrics") / f"rank{rank}.jsonl"
    file.parent.mkdir(exist_ok=True)
    with file.open("a" if report.__dict__.get("wrote") else "w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row | {"step": int(row["step"])}) + "\n" for row in rows)
    report.__dict__["wrote"] = True
    if rank == 0:
        last = dict(rows[-1])
        shown = ", ".join(f"{name} {value:.4g}" for name, value in last.items() if name != "step")
        print(f"step {last['step']:.0f}: {shown}", flush=True)  # noqa: T201


def send(name: str, value: object) -> None:
    """Do nothing: there is no notebook to send a variable to."""


def save(name: str, *_: object, **__: object) -> None:
    """Save the training state to checkpoints/NAME with Accelerate; call it on all ranks."""
    accelerator = _accelerator()
    accelerator.save_state(str(CHECKPOINTS / name))
    accelerator.wait_for_everyone()


def load(name: str) -> None:
    """Load the training state that save() wrote, after the models are prepared."""
    _accelerator().load_state(str(CHECKPOINTS / name))


def export(folder: str, *, model: str | None = None, dtype: str | None = None) -> None:
    """Write the model of a variable, or the one prepared last, as a `from_pretrained` folder."""
    accelerator = _accelerator()
    variables = vars(sys.modules["__main__"])
    prepared = variables[model] if model else accelerator._models[-1]  # noqa: SLF001 - no public name
    prepared = getattr(prepared, "model_wrapped", prepared)  # of a Trainer
    if isinstance(prepared, FullyShardedDataParallel) and accelerator.device.type == "cpu":
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        # accelerate 1.15 asks to move it to the CPU, which torch 2.13 does only from a GPU.
        state: Any = get_model_state_dict(prepared, options=StateDictOptions(full_state_dict=True))
    else:
        state = accelerator.get_state_dict(prepared)
    if dtype and state:  # ZeRO-3 gathers it on rank 0 only
        chosen = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
        state = {k: v.to(chosen) if v.is_floating_point() else v for k, v in state.items()}
    bare = accelerator.unwrap_model(prepared)
    if hasattr(bare, "save_pretrained"):
        bare.save_pretrained(
            folder,
            state_dict=state,
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
        )
    else:
        Path(folder).mkdir(parents=True, exist_ok=True)
        accelerator.save(state, Path(folder) / "model.safetensors", safe_serialization=True)
    accelerator.wait_for_everyone()


def _accelerator() -> Accelerator:
    if not _accelerators:
        raise RuntimeError("No model is prepared yet. Call accelerator.prepare(model, ...) before.")
    return _accelerators[-1]


# Accelerate


def _prepare_like_a_session(prepare: Any) -> Any:
    @functools.wraps(prepare)
    def prepared(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        models = [arg for arg in args if isinstance(arg, torch.nn.Module)]
        for model in models:
            if _settings.get("activation_checkpointing"):
                model.gradient_checkpointing_enable(  # type: ignore[operator]
                    gradient_checkpointing_kwargs={"use_reentrant": False}
                )
            if self.distributed_type == DistributedType.FSDP:
                _broadcast_from_rank_0(model, self.device)
        is_deepspeed = self.distributed_type == DistributedType.DEEPSPEED
        if models and is_deepspeed:
            _fill_deepspeed_config(self, args)
        result = prepare(self, *args, **kwargs)
        if models:
            _accelerators[:] = [self]
            if is_deepspeed:
                _cast_inputs(self.deepspeed_engine_wrapped.engine)
        if _settings.get("clip") and not is_deepspeed:  # DeepSpeed clips by itself
            _clip_before_steps(self)
        return result

    return prepared


def _broadcast_from_rank_0(model: torch.nn.Module, device: torch.device) -> None:
    """Give all ranks the weights of rank 0 before FSDP shards them, as DDP and DeepSpeed do."""
    for tensor in (*model.parameters(), *model.buffers()):
        if hasattr(tensor, "full_tensor") or tensor.is_meta:
            return  # sharded already, or loaded later
        whole = tensor.detach().to(device)
        torch.distributed.broadcast(whole, src=0)
        tensor.data.copy_(whole)


def _fill_deepspeed_config(accelerator: Accelerator, args: Any) -> None:
    """Set the "auto" values that accelerate 1.15 does not, and let a model replace the last one."""
    plugin = accelerator.state.deepspeed_plugin
    accelerator.deepspeed_engine_wrapped = None  # backward() would use the first model
    before = accelerator.__dict__.setdefault("_before", copy.deepcopy(plugin.deepspeed_config))
    plugin.deepspeed_config.update(copy.deepcopy(before))
    if plugin.is_auto("gradient_clipping"):
        plugin.deepspeed_config["gradient_clipping"] = 0.0  # Accelerate would clip at 1.0
    key = "train_micro_batch_size_per_gpu"
    has_size = any(isinstance(getattr(arg, "batch_size", None), int) for arg in args)
    if plugin.is_auto(key) and not has_size:
        plugin.deepspeed_config[key] = 1


def _cast_inputs(engine: Any) -> None:
    """Cast inputs of the model to bf16 or fp16, as FSDP does and deepspeed 0.19.8 does not."""
    if not (engine.bfloat16_enabled() or engine.fp16_enabled()):
        return
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float16

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    engine.register_forward_pre_hook(
        lambda _, args, kwargs: recursively_apply(cast, (args, kwargs)), with_kwargs=True
    )


def _clip_before_steps(accelerator: Accelerator) -> None:
    for wrapper in accelerator._optimizers:  # noqa: SLF001
        optimizer = wrapper.optimizer
        if not vars(optimizer).get("_clips"):
            vars(optimizer)["_clips"] = True
            optimizer.register_step_pre_hook(functools.partial(_clip, accelerator))


def _clip(accelerator: Accelerator, optimizer: Any, *_: object) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for model in accelerator._models:  # noqa: SLF001
        if isinstance(model, FullyShardedDataParallel):
            model.clip_grad_norm_(_settings["clip"])  # reduces the norm over the ranks
            return
    torch.nn.utils.clip_grad_norm_(parameters, _settings["clip"])


def _read_config_file() -> None:
    """Set the variables that `accelerate launch --config_file accelerate.yaml` sets."""
    from accelerate.commands.launch import (
        _validate_launch_command,  # accelerate 1.15 has no public name
        launch_command_parser,
    )
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    file = str(FOLDER / "accelerate.yaml")
    line = ["--config_file", file, "--main_process_port", "0", sys.argv[0]]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(line))
    args.num_machines = 1  # torchrun knows
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        variables = prepare_deepspeed_cmd_env(args)[1]
    else:
        variables = prepare_multi_gpu_env(args)
    own = {k: v for k, v in variables.items() if k.startswith(("ACCELERATE_", "FSDP_"))}
    os.environ.update(own)
    config = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if config:
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(FOLDER / config)


# Processes without a GPU: accelerate 1.15 would train with DDP, or each process by itself.


def _on_cpu(init: Any) -> Any:
    def __init__(self: PartialState, cpu: bool = False, **kwargs: Any) -> None:  # noqa: ARG001, FBT001, FBT002, N807
        is_new = not PartialState._shared_state  # noqa: SLF001
        init(self, cpu=True, **{k: v for k, v in kwargs.items() if k != "backend"})
        if is_new:
            self.device = torch.device("cpu")  # accelerate 1.15: "cpu:0", which FSDP1 rejects

    return __init__


def _with_plugins(init: Any) -> Any:
    def __init__(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        PartialState()
        shared = PartialState._shared_state  # noqa: SLF001
        is_multi = shared["distributed_type"] == DistributedType.MULTI_CPU
        if is_multi and kwargs.get("fsdp_plugin") is not None:
            shared["distributed_type"] = DistributedType.MULTI_GPU  # which becomes FSDP
        init(self, *args, **kwargs | {"cpu": False})

    return __init__


def _prepare_for_cpu() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.pop("ACCELERATE_USE_CPU", None)
    PartialState.__init__ = _on_cpu(PartialState.__init__)
    AcceleratorState.__init__ = _with_plugins(AcceleratorState.__init__)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        # deepspeed 0.19 compiles it for a minute, but training does not use it.
        vars(deepspeed.ops)["__compatible_ops__"] = {"deepspeed_shm_comm": False}


if "ACCELERATE_MIXED_PRECISION" not in os.environ:
    _read_config_file()
if not torch.cuda.is_available():
    _prepare_for_cpu()
Accelerator.prepare = _prepare_like_a_session(Accelerator.prepare)
