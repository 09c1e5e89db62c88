"""Every patch of torch, accelerate, deepspeed, transformers, peft and Jupyter on a rank.

A patch replaces one attribute of a library, where the library has no hook for what a session needs.
``PATCHES`` says for each why the patch exists and where upstream discusses it, ``VERSIONS`` which
version was read. When a library does the same by itself, delete the entry and the call of
``patch``. An attribute that is not in the table cannot be patched, and a unit test fails if one is
assigned elsewhere. ``when_imported`` delays patches of a library until a cell imports it.

Not in the table are patches that are undone after a few steps or made in a child process: the
instrumentation of a running profile (`worker.profiling`), and tracing (`planner.tracing`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.util
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

VERSIONS = {
    "accelerate": "1.15",
    "deepspeed": "0.19",
    "peft": "0.21",
    "torch": "2.13",
    "transformers": "5.23",
}
"""Library -> version whose source was read for the reasons."""


class LibraryPatch(NamedTuple):
    """Reason for a patch."""

    reason: str
    upstream: str = ""
    """Issue or pull request; empty if none is known."""


PATCHES: Mapping[str, LibraryPatch] = {
    # -- the session's engine, for an Accelerator of a cell or of a Trainer
    "accelerate.accelerator:Accelerator.__init__": LibraryPatch(
        "use the session's options; a second Accelerator silently keeps the first one's engine",
        "https://github.com/huggingface/accelerate/issues/47",
    ),
    "accelerate.accelerator:Accelerator.prepare": LibraryPatch(
        "record what is needed to rebuild a model; FSDP2 refuses a model without its optimizer",
        "https://github.com/huggingface/accelerate/pull/3394",
    ),
    "accelerate.accelerator:Accelerator.prepare_model": LibraryPatch(
        "a model prepared for evaluation counts as prepared for training"
    ),
    "accelerate.accelerator:Accelerator.clip_grad_norm_": LibraryPatch(
        "with two models FSDP compares lists of tensors by value; DeepSpeed's norm is not returned",
        "https://github.com/huggingface/accelerate/pull/4294",
    ),
    "accelerate.accelerator:Accelerator.free_memory": LibraryPatch(
        "destroys DeepSpeed's engine at the start of a Trainer's second train()",
        "https://github.com/huggingface/transformers/issues/35073",
    ),
    "accelerate.accelerator:Accelerator.backward": LibraryPatch(
        "count micro-batches, detect an interrupted pass; there is no hook"
    ),
    "accelerate.accelerator:Accelerator.save_state": LibraryPatch(
        "release models of earlier runs of a cell before they are saved"
    ),
    "accelerate.accelerator:Accelerator.load_state": LibraryPatch(
        "release models of earlier runs of a cell before they are loaded"
    ),
    "accelerate.optimizer:AcceleratedOptimizer.step": LibraryPatch(
        "stop all ranks after the same step, measure a step; there is no hook"
    ),
    "accelerate.optimizer:AcceleratedOptimizer.zero_grad": LibraryPatch(
        "reset the count of micro-batches that wait for a step"
    ),
    "accelerate.data_loader:DataLoaderShard.__iter__": LibraryPatch(
        "the position within an epoch is not saved",
        "https://github.com/huggingface/accelerate/issues/2016",
    ),
    "accelerate.data_loader:DataLoaderDispatcher.__iter__": LibraryPatch(
        "as for DataLoaderShard",
        "https://github.com/huggingface/accelerate/issues/2016",
    ),
    "accelerate.utils.fsdp_utils:fsdp2_prepare_auto_wrap_policy": LibraryPatch(
        "accepts only its two named policies; the size-based one wraps ModuleLists"
    ),
    # -- accelerate on CPU ranks
    "accelerate.state:PartialState.__init__": LibraryPatch(
        'CPU ranks: sets the device "cpu:0", which FSDP1 rejects'
    ),
    "accelerate.state:AcceleratorState.__init__": LibraryPatch(
        "CPU ranks: silently ignores an FSDP or DeepSpeed plugin"
    ),
    "torch.distributed.fsdp._flat_param:FlatParamHandle.to_cpu": LibraryPatch(
        "CPU ranks: frees a gathered parameter that is on the CPU already, and reading the state"
        " dict then ends the process",
    ),
    # -- deepspeed
    "accelerate.accelerator:DeepSpeedEngineWrapper": LibraryPatch(
        "steps inside backward(), before the cell can clip. deepspeed's"
        " managed_gradient_accumulation=false does not help: accelerate then raises, stage 1"
        " refuses overlap_comm, and the norm is known only after the step",
        "https://github.com/huggingface/accelerate/issues/2951",
    ),
    "accelerate.accelerator:DeepSpeedOptimizerWrapper": LibraryPatch(
        "step() and zero_grad() do nothing",
        "https://github.com/huggingface/accelerate/issues/2951",
    ),
    "torch.nn.modules.module:Module.zero_grad": LibraryPatch(
        "does not see what FSDP2 keeps between a forward and its backward, or without a reduction"
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._register_pre_backward_hook": (
        LibraryPatch("an output that is an object with tensors: the model is not trained")
    ),
    "torch.distributed.fsdp._runtime_utils:_register_pre_backward_hooks": LibraryPatch(
        "an output that is an object with tensors: the backward fails"
    ),
    "torch.optim.optimizer:Optimizer.add_param_group": LibraryPatch(
        "FSDP2: takes parameters of a root unit that is whole, and the steps do nothing",
    ),
    "torch.distributed.tensor:DTensor.data": LibraryPatch(
        "FSDP2: parameter.data = value changes nothing, without a message"
    ),
    "torch.distributed.tensor:DTensor._op_dispatcher._custom_op_handlers": LibraryPatch(
        "FSDP2: parameter.grad.norm().item() is the norm of this rank's shard"
    ),
    "torch.nn.utils:clip_grad_norm_": LibraryPatch(
        "silently returns 0 and clips nothing where a DeepSpeed engine keeps the gradients"
    ),
    "torch.nn.utils:clip_grads_with_norm_": LibraryPatch(
        "silently clips nothing where a DeepSpeed engine keeps the gradients"
    ),
    "torch.nn.utils:clip_grad_value_": LibraryPatch(
        "raises an error about an empty list where a DeepSpeed engine keeps the gradients"
    ),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
    ".independent_gradient_partition_epilogue": LibraryPatch(
        "each backward() replaces the gradients of the one before"
    ),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.copy_grads_in_partition": (
        LibraryPatch("each backward() replaces the offloaded gradients of the one before")
    ),
    "deepspeed.runtime.engine:DeepSpeedEngine.zero_grad": LibraryPatch(
        "does not drop the gradients that the optimizer keeps, and has no set_to_none"
    ),
    "deepspeed.runtime.engine:DeepSpeedEngine._backward_prologue": LibraryPatch(
        "loss.backward() of several forwards leaves gradients unreduced without a message"
    ),
    "deepspeed.runtime.engine:DeepSpeedEngine._backward_post_hook": LibraryPatch(
        "autograd.grad() fails, because there are no gradients to reduce"
    ),
    "deepspeed.runtime.utils:OutputBackwardHookManager._make_backward_hook": LibraryPatch(
        "only the first backward of a forward begins, also if it is an autograd.grad()"
    ),
    "deepspeed.runtime.engine:DeepSpeedEngine._broadcast_model": LibraryPatch(
        "views parameters as bytes, which torch refuses for those of no dimension"
    ),
    "deepspeed.runtime.zero.partition_parameters:GatheredParameters._exit": LibraryPatch(
        "as in _broadcast_model"
    ),
    "deepspeed.runtime.zero.partition_parameters:Init._convert_to_deepspeed_param": LibraryPatch(
        "the same in ZeRO-3, which broadcasts what it converts"
    ),
    "deepspeed.runtime.engine:DeepSpeedEngine.train": LibraryPatch("does not return the engine"),
    "deepspeed.runtime.engine:DeepSpeedEngine.eval": LibraryPatch("does not return the engine"),
    "deepspeed.runtime.bf16_optimizer:register_grad_hook": LibraryPatch(
        "gradient hooks keep an engine alive, because torch hides them from garbage collection",
        "https://github.com/deepspeedai/DeepSpeed/issues/4856",
    ),
    "deepspeed.runtime.zero.stage_1_and_2:register_grad_hook": LibraryPatch(
        "as for bf16", "https://github.com/deepspeedai/DeepSpeed/issues/4856"
    ),
    "deepspeed.runtime.zero.stage3:register_grad_hook": LibraryPatch(
        "as for bf16", "https://github.com/deepspeedai/DeepSpeed/issues/4856"
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator:"
    "PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release": (
        LibraryPatch("an lru_cache of the class keeps every ZeRO-3 engine alive")
    ),
    "deepspeed.runtime.swap_tensor.optimizer_utils:"
    "OptimizerSwapper._adjust_for_misaligned_lengths": LibraryPatch(
        "with gradients on NVMe, about half of the elements of a large weight move in the wrong"
        " direction at the first step (measured; the cause is unknown)",
    ),
    "deepspeed.accelerator.cuda_accelerator:pynvml": LibraryPatch(
        "parses CUDA_VISIBLE_DEVICES as integers, which fails for the UUID of a MIG instance",
        "https://github.com/deepspeedai/DeepSpeed/issues/5278",
    ),
    "deepspeed.comm:broadcast": LibraryPatch(
        "while a model without weights is prepared: broadcasts each parameter"
    ),
    "deepspeed.runtime.zero.partition_parameters:Init._all_gather": LibraryPatch(
        "while a model without weights is prepared: gathers each parameter"
    ),
    # -- whole weights of sharded parameters
    "torch.nn.modules.module:Module.load_state_dict": LibraryPatch(
        "FSDP2, ZeRO-3: refuses whole tensors"
    ),
    "torch.nn.modules.module:Module.state_dict": LibraryPatch(
        "ZeRO-3: returns empty tensors, which load_state_dict() then takes without a message"
    ),
    "safetensors.torch:save": LibraryPatch("writes shards or empty tensors without a message"),
    "safetensors.torch:save_file": LibraryPatch("as for save"),
    "safetensors.torch:save_model": LibraryPatch("as for save"),
    "torch:save": LibraryPatch(
        "FSDP2, ZeRO-3: writes shards or empty tensors of a state dict without a message",
        "https://github.com/huggingface/accelerate/issues/3238",
    ),
    # -- transformers
    "transformers.trainer:Trainer.__init__": LibraryPatch(
        "--auto reads a batch, but a Trainer creates its accelerator before it sets its data"
    ),
    "transformers.trainer:Trainer.create_accelerator_and_postprocess": LibraryPatch(
        "take clipping, accumulation and precision from the session"
    ),
    "transformers.training_args:TrainingArguments.__new__": LibraryPatch(
        "nothing records which arguments the user wrote and which are defaults"
    ),
    "transformers.training_args:TrainingArguments.__post_init__": LibraryPatch(
        "CPU ranks: bf16=True is refused without use_cpu=True; deepspeed= builds a plugin and"
        " makes from_pretrained() partition parameters before the session's backend is compared",
    ),
    "transformers.trainer:Trainer.train": LibraryPatch(
        "a resume from a checkpoint of another engine continues without the optimizer's state, or"
        " fails with an internal error; resume from a checkpoint of the session",
    ),
    "transformers.trainer:deepspeed_load_checkpoint": LibraryPatch(
        "during a resume from a checkpoint of the session: reads DeepSpeed's own files only"
    ),
    "transformers.trainer:Trainer.evaluation_loop": LibraryPatch(
        "ZeRO-1 and ZeRO-2: evaluate() and predict() before train() raise ValueError; FSDP1 and"
        " ZeRO-3: a later train() has no optimizer",
    ),
    "transformers.trainer:Trainer._wrap_model": LibraryPatch(
        "ZeRO: in a second train(), the new optimizer of a user's create_optimizer() is prepared"
        " without its model"
    ),
    "transformers.trainer:Trainer.save_model": LibraryPatch(
        "FSDP with SHARDED_STATE_DICT: writes nothing, and load_best_model_at_end then misses the"
        " checkpoint or hangs",
        "https://github.com/huggingface/transformers/issues/30491",
    ),
    "transformers.trainer:MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": LibraryPatch(
        "FSDP2 renames the model's class, so that label smoothing does not shift the labels",
        "https://github.com/huggingface/transformers/issues/27161",
    ),
    "transformers.trainer:load_fsdp_optimizer": LibraryPatch(
        "FSDP1 with SHARDED_STATE_DICT: accelerate 1.15 loads nothing into an optimizer that has"
        " not stepped, without a message",
    ),
    "transformers.trainer:DEFAULT_PROGRESS_CALLBACK": LibraryPatch(
        "the progress table of notebooks is displayed by every rank"
    ),
    "transformers.trainer:get_fsdp_ckpt_kwargs": LibraryPatch(
        "FSDP1: a resume loads an adapter alone into flat parameters incompletely"
    ),
    "transformers.trainer:deepspeed_init": LibraryPatch(
        "a second train() creates a new optimizer for an engine that has one, and"
        " Trainer(optimizers=...) is silently replaced",
        "https://github.com/huggingface/transformers/issues/35073",
    ),
    "transformers.generation.utils:GenerationMixin.generate": LibraryPatch(
        "ZeRO-3: synced_gpus is off, and ranks whose texts end earlier hang the others; FSDP1: the"
        " root's parameters are not gathered",
        "https://github.com/huggingface/transformers/pull/22242",
    ),
    "transformers.modeling_utils:PreTrainedModel._load_pretrained_model": LibraryPatch(
        "record the files of from_pretrained, to load them as shards"
    ),
    "transformers.modeling_utils:PreTrainedModel.save_pretrained": LibraryPatch(
        "ZeRO-3: writes empty tensors; every rank writes to the same file"
    ),
    "transformers.core_model_loading:_materialize_copy": LibraryPatch(
        "every rank casts the whole model in host memory",
        "https://github.com/huggingface/transformers/issues/43749",
    ),
    "transformers.core_model_loading:set_param_for_module": LibraryPatch(
        "copies a weight that is read later to make it a parameter"
    ),
    # -- peft
    "peft.peft_model:PeftModel.named_modules": LibraryPatch(
        "FSDP1: the names of modules in nested units do not match those of the state dict, and an"
        " adapter is saved without its tensors",
    ),
    "peft.peft_model:PeftModel.save_pretrained": LibraryPatch(
        "ZeRO-3: writes empty tensors; FSDP2: RuntimeError"
    ),
    "peft.tuners.tuners_utils:BasePromptEncoder._get_adapter_state_dict": LibraryPatch(
        "ignores the gathered state dict and runs the prompt encoder on rank 0, which fails under"
        " FSDP and hangs under ZeRO-3",
    ),
    "peft.tuners.tuners_utils:BaseTuner._unload_and_optionally_merge": LibraryPatch(
        "ZeRO-3: drops the adapter without a message, since the base's tensors are empty"
    ),
    "peft.tuners.tuners_utils:BaseTuner.merge_adapter": LibraryPatch(
        "as for _unload_and_optionally_merge"
    ),
    # -- ipykernel and ipywidgets
    "ipykernel.compiler:get_tmp_directory": LibraryPatch(
        "names files of cells after the process, so that warnings of several ranks differ"
    ),
    "ipykernel.debugger:get_tmp_directory": LibraryPatch("as in ipykernel.compiler"),
    "ipywidgets.widgets.widget_output:Output.__enter__": LibraryPatch(
        "the page gets no output whose parent is a rank's request"
    ),
    "ipywidgets.widgets.widget_output:Output.__exit__": LibraryPatch("as for __enter__"),
    # -- process groups
    "torch.distributed:init_process_group": LibraryPatch(
        "scripts call it at their start; the session's group exists already"
    ),
    "torch.distributed.distributed_c10d:init_process_group": LibraryPatch(
        "as for torch.distributed"
    ),
    "torch.distributed:destroy_process_group": LibraryPatch(
        "scripts call it at their end; the session's groups stay"
    ),
    "torch.distributed.distributed_c10d:destroy_process_group": LibraryPatch(
        "as for torch.distributed"
    ),
    "torch.distributed.distributed_c10d:_get_default_timeout": LibraryPatch(
        "collectives of the other ranks time out while one is stopped in the debugger"
    ),
    "torch.nn.parallel:DistributedDataParallel._ddp_init_helper": LibraryPatch(
        "freeing a gloo group in C++ while holding the GIL can deadlock",
        "https://github.com/pytorch/pytorch/issues/56297",
    ),
    # -- collectives; those of CPU ranks are compared
    "torch.distributed:ProcessGroup.*": LibraryPatch(
        "a collective hangs in a cell on some ranks; gloo: a mismatched one may end the process",
        "https://github.com/pytorch/gloo/issues/227",
    ),
    "torch.distributed.distributed_c10d:_new_group_with_tag": LibraryPatch(
        "gloo: blocks in C++ for 30 minutes if a rank does not call it"
    ),
    "torch.distributed:Work.wait": LibraryPatch(
        "gloo: a wait cannot be interrupted",
        "https://github.com/pytorch/gloo/issues/227",
    ),
}
"""Attribute, as "module:name" -> why it is patched. A name may end with ".*"."""

_patched: set[str] = set()


def patch(target: str, wrap: Callable[[Any], Any]) -> None:
    """Replace an attribute of a library for the rest of the process; a second call does nothing.

    Args:
        target: key of ``PATCHES``, or a member of a key that ends with ".*".
        wrap: maps the attribute to its replacement.

    Raises:
        KeyError: the target is not listed.
        AttributeError: the library has no such attribute.
    """
    if target in _patched:
        return
    owner, name = resolve(target)
    setattr(owner, name, _wrapped(getattr(owner, name), wrap))
    _patched.add(target)


@contextlib.contextmanager
def patched(target: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute of a library in this context."""
    owner, name = resolve(target)
    original = vars(owner)[name]
    setattr(owner, name, _wrapped(getattr(owner, name), wrap))
    try:
        yield
    finally:
        setattr(owner, name, original)


def resolve(target: str) -> tuple[Any, str]:
    """Return the owner of a listed attribute, and the attribute's name."""
    if target not in PATCHES and f"{target.rpartition('.')[0]}.*" not in PATCHES:
        raise KeyError(target)
    module, _, path = target.partition(":")
    *classes, name = path.split(".")
    return functools.reduce(getattr, classes, importlib.import_module(module)), name


def _wrapped(original: Any, wrap: Callable[[Any], Any]) -> Any:
    replacement = wrap(original)
    is_function = callable(replacement) and not isinstance(replacement, type | staticmethod)
    return functools.update_wrapper(replacement, original) if is_function else replacement


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Call `action` after the module `name` is imported, or now if it is imported already."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _PostImportHook(name, action))


class _PostImportHook(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name, self._action = name, action

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - importlib's signature
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Find the module with the other finders, and call the function after its execution."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._action()

        loader.exec_module = exec_module
        return spec
