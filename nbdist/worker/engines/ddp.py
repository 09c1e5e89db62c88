"""Averages gradients that DDP leaves as each rank has computed them.

torch 2.13 averages them in the first backward after a forward outside of `no_sync()`, and in no
other. A step with the gradients of another backward would let the weights of the ranks diverge
without a message.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import distributed
from torch.utils._pytree import tree_leaves

from nbdist.checkpoint.name_validation import list_first
from nbdist.errors import OptionError

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel


class LocalGradients:
    """Tells whether a DDP model has gradients that are not averaged, and averages them."""

    def __init__(self, model: DistributedDataParallel, called: nn.Module) -> None:
        """Watch the forwards and backwards of a model, or of what torch.compile made of it."""
        self._model = weakref.ref(model)
        named = model.module.named_parameters()
        self._reduced_names = {name for name, each in named if each.requires_grad}
        self._reduced_names -= model.parameters_to_ignore
        self._will_average = False
        self._backward = -1
        self._exist = self._is_averaging = False
        called.register_forward_hook(self._after_forward)

    def _after_forward(self, _module: nn.Module, _inputs: object, outputs: object) -> None:
        model = self._model()
        if model is None or not torch.is_grad_enabled():
            return
        self._will_average |= model.require_backward_grad_sync
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                output.grad_fn.register_prehook(self._before_backward)

    def _before_backward(self, _: object) -> None:
        backward = torch._C._current_graph_task_id()  # noqa: SLF001 - as torch's own hooks do
        if backward != self._backward:  # the first output that it reaches
            self._exist, self._is_averaging = not self._will_average, self._will_average
            self._backward, self._will_average = backward, False

    def check_used(self) -> None:
        """Raise OptionError if the backward that has ended leaves DDP waiting for gradients.

        torch raises at the next forward, when a step has already used gradients of each rank.
        """
        model, was_averaging, self._is_averaging = self._model(), self._is_averaging, False
        if model is None or not was_averaging or model.find_unused_parameters or model.static_graph:
            return
        used = {
            name: each.requires_grad and each.grad is not None
            for name, each in model.module.named_parameters()
            if name in self._reduced_names
        }
        unused = [name for name, is_used in used.items() if not is_used]
        if unused and any(used.values()):  # LOMO steps in the backward and keeps no gradient
            raise OptionError(
                f"The loss does not use {list_first(unused)}, but ddp waits for all gradients."
                " Freeze them before accelerator.prepare(), use fsdp, or create"
                " Accelerator(kwargs_handlers=[DistributedDataParallelKwargs("
                "find_unused_parameters=True)])."
            )

    def average(self) -> None:
        """Average the gradients as DDP does; a parameter that no rank has used keeps None."""
        model, self._is_averaging = self._model(), False
        if model is None or not self._exist or not model.require_backward_grad_sync:
            return
        self._exist = False
        parameters = [each for each in model.parameters() if each.requires_grad]
        group = model.process_group
        has_gradient = [int(each.grad is not None) for each in parameters]
        used = torch.tensor(has_gradient, device=model.device)
        distributed.all_reduce(used, group=group)
        for parameter, num_ranks in zip(parameters, used.tolist(), strict=True):
            if not num_ranks:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            distributed.all_reduce(parameter.grad, group=group)
            parameter.grad /= group.size()
