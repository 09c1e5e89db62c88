"""`--auto`: chooses the engine's options at the first `prepare()`.

`worker.engines.accelerator_patch` calls this on every rank before it builds the engine. The ranks
all-gather the free memory of their devices; rank 0 inspects the model, optimizer and loader, runs
the planner and broadcasts its decision, so all ranks get the same options or the same error.
"""

from __future__ import annotations

import html
import itertools
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import distributed, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from nbdist.errors import NbdistError, OptionError, PlanError
from nbdist.hardware import discovery
from nbdist.launcher import offload_setup
from nbdist.planner import optimizers, search, target_devices
from nbdist.planner.plan_types import PlanInput
from nbdist.planner.tracing import trace_module
from nbdist.state import collectives, meta_model
from nbdist.strategies import Hardware, Options
from nbdist.worker.memory import memory_probe, model_description, tensor_categories

if TYPE_CHECKING:
    from nbdist.hardware.discovery import SessionNode
    from nbdist.planner.cluster_spec import ClusterSpec
    from nbdist.planner.result import Plan
    from nbdist.worker.memory.memory_probe import ForwardInputs

DisplayCallback = Callable[[str, str], object]
"""Displays text and HTML below the cell."""
ChoiceCallback = Callable[[Options], object]
"""Sends the chosen options to the notebook's kernel."""

FIRST_BATCH_TIMEOUT_S = 60.0
"""Timeout for the first batch of a loader, which may have to open large files."""
_MAX_LINES = 8
"""Maximum lines of an explanation."""
_ERASE_LINE = "\r\x1b[K"
_WITHOUT_A_LOADER = (
    " With --auto, pass the data loader to accelerator.prepare() too, so that its first batch is"
    " used as the example, or choose a --backend."
)
_WITHOUT_A_PLAN = " Or choose a --backend: --auto cannot decide without a plan."


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Micro-batch to plan for."""

    batch_size: int
    seq_len: int | None
    """Tokens per sample; None for the model's default."""
    forward_inputs: ForwardInputs = field(default_factory=dict)
    """Tensor arguments of a forward, as far as known from the loader."""
    assumption: str = ""
    """Assumptions made where no loader gives the value; a sentence for the user."""


class AutoStrategy:
    """Choice of the options under `--auto`, made once."""

    def __init__(
        self,
        given: Mapping[str, Any],
        placeholder: Options,
        hardware: Hardware,
        nodes: Sequence[SessionNode],
    ) -> None:
        """Create a search within the options that the user gave.

        Args:
            given: validated options that are fixed.
            placeholder: options of some backend that agree with them; its NVMe folder is that of
                this session.
            nodes: hardware of the nodes; empty if all ranks are on this machine.
        """
        self.show: DisplayCallback = lambda text, _: print(text)  # noqa: T201 - outside a notebook
        self.tell: ChoiceCallback = lambda _: None
        self._user_options, self._placeholder, self._hardware = given, placeholder, hardware
        self._nodes = nodes

    def __call__(self, objects: Sequence[object]) -> Options:
        """Decide from the arguments of the first `prepare()`.

        Raises:
            OptionError: there is no model among them.
            PlanError: nothing fits, or the model cannot be planned; the same on all ranks.
        """
        model = next((item for item in objects if isinstance(item, nn.Module)), None)
        if model is None:
            raise OptionError(
                "--auto decides at the first accelerator.prepare() with a model, but this cell"
                " uses the accelerator before it. Prepare the model first, with its optimizer"
                " and loader."
            )
        optimizer = next(
            (item for item in objects if isinstance(item, torch.optim.Optimizer)), None
        )
        loader = next((item for item in objects if isinstance(item, DataLoader)), None)
        description = (
            memory_probe.describe_optimizer(optimizer) if optimizer else {"class": "AdamW"}
        )
        return self.decide(model, description, lambda: inspect_loader(loader, model))

    def decide(
        self,
        model: nn.Module,
        optimizer: Mapping[str, Any],
        batch: Callable[[], MicroBatch],
        wanted: Mapping[str, Any] = MappingProxyType({}),
    ) -> Options:
        """Decide for a model; collective.

        Args:
            optimizer: description from ``memory_probe.describe_optimizer``.
            batch: called on rank 0 only.
            wanted: options that the training sets; those given to the session have precedence.
        """
        free = collectives.all_gather_values(available_bytes(model))
        own_answer: dict[str, Any] = {}
        if collectives.rank() == 0:
            own_answer = self._answer(model, optimizer, batch, wanted, free)
            print(_ERASE_LINE, end="", flush=True)  # noqa: T201 - the progress
        text, page = own_answer.pop("text", ""), own_answer.pop("html", "")
        answer = collectives.all_gather_values(own_answer)[0]
        if "stopped" in answer:
            raise KeyboardInterrupt
        if "error" in answer:
            raise PlanError(answer["error"])
        chosen = Options(**answer["options"])
        # Rank 0 has already built the DeepSpeed ops; the others load them from the cache.
        self._load(chosen)
        if collectives.rank() == 0:
            self.show(text, page)
            self.tell(chosen)
        if chosen.offload_device == "nvme":  # in this session's folder
            return replace(chosen, offload=self._placeholder.offload)
        return chosen

    def _answer(
        self,
        model: nn.Module,
        optimizer: Mapping[str, Any],
        batch: Callable[[], MicroBatch],
        wanted: Mapping[str, Any],
        free: Sequence[int],
    ) -> dict[str, Any]:
        """Return rank 0's decision, or the error that all ranks raise."""
        micro_batch: MicroBatch | None = None
        try:
            micro_batch = batch()
            plan = self._plan(model, optimizer, micro_batch, wanted, free)
            if plan.best is None:
                return {"error": "--auto: " + "\n".join(plan.explanation())}
            chosen = replace(plan.best.options, precision=self._placeholder.precision or "no")
            self._load(chosen)
        except KeyboardInterrupt:
            return {"stopped": True}  # the other ranks wait for a broadcast
        except PlanError as error:
            assumed = micro_batch is not None and micro_batch.assumption
            advice = _WITHOUT_A_LOADER if assumed else _WITHOUT_A_PLAN
            return {"error": f"{error}{advice}"}
        except NbdistError as error:
            return {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - the other ranks wait for a broadcast
            return {"error": f"--auto could not decide: {type(error).__name__}: {error}"}
        lines = [f"auto: {plan.explanation()[0]}", *plan.explanation()[1:]]
        lines += [micro_batch.assumption] if micro_batch.assumption else []
        # The last line names the assumptions.
        shown = lines if len(lines) <= _MAX_LINES else [*lines[: _MAX_LINES - 1], lines[-1]]
        rest = html.escape("\n".join(lines[1:]))
        return {
            "options": chosen.to_json(),
            "text": "\n".join(shown),
            "html": f"<details><summary>{html.escape(lines[0])}</summary><pre>{rest}</pre>"
            f"{plan._repr_html_()}</details>",
        }

    def _plan(
        self,
        model: nn.Module,
        optimizer: Mapping[str, Any],
        batch: MicroBatch,
        wanted: Mapping[str, Any],
        free: Sequence[int],
    ) -> Plan:
        length = batch.seq_len or model_description.default_seq_len(model)
        spec = model_description.describe_model(
            meta_model.try_meta_copy(model) or model,
            batch_size=batch.batch_size,
            seq_len=length,
            call=batch.forward_inputs,
            progress=_progress,
            kind=self._hardware.kind,
        )
        fixed = {**wanted, **self._user_options}
        question = PlanInput(
            model=spec,
            cluster=build_cluster_spec(free, self._hardware, self._nodes),
            batch_sizes=(batch.batch_size,),
            seq_len=length,
            precision=fixed.pop("precision", self._placeholder.precision or "no"),
            optimizer=optimizers.optimizer_from_torch(optimizer, self._hardware.kind),
            fixed_options=fixed,
            offload_candidates=("none", "cpu"),
        )
        return search.search_plan(question)

    def _load(self, chosen: Options) -> None:
        """Build and load the DeepSpeed ops that the options need; takes minutes the first time."""
        ops = chosen.strategy.required_ops(chosen)
        offload_setup.build_missing_ops(
            ops, progress=_progress if distributed.get_rank() == 0 else lambda _: None
        )


# ---------------------------------------------------------------------------- inputs


def inspect_loader(loader: DataLoader[Any] | None, model: nn.Module) -> MicroBatch:
    """Return the micro-batch of a loader, without changing its position or the random state."""
    if loader is None:
        return MicroBatch(
            batch_size=1,
            seq_len=None,
            assumption=(
                "prepare() got no loader: assumed a micro-batch of 1. Pass the loader too, to"
                " decide for your batch."
            ),
        )
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return inspect_first_batch(lambda: loader, model, size)


def inspect_first_batch(
    make_loader: Callable[[], DataLoader[Any]], model: nn.Module, batch_size: int | None
) -> MicroBatch:
    """Return the micro-batch of a loader.

    Args:
        make_loader: returns the loader; called in a forked child.
        batch_size: samples in a batch of it, if known.
    """
    # Reading from a data set changes its position and the random state, and may block forever; a
    # forked child has copies of both and a timeout.
    description = trace_module.call_in_fork(
        lambda _: {"batch": _describe_first_batch(make_loader(), model)},
        timeout_s=FIRST_BATCH_TIMEOUT_S,
    ).get("batch")
    if description is None:
        return MicroBatch(
            batch_size=batch_size or 1,
            seq_len=None,
            assumption="The loader's first batch does not show its sequence length: assumed it.",
        )
    samples, tokens, call = description
    named = {
        name: (torch.Size(shape), getattr(torch, dtype)) for name, (shape, dtype) in call.items()
    }
    return MicroBatch(batch_size=batch_size or samples, seq_len=tokens, forward_inputs=named)


def _describe_first_batch(
    loader: DataLoader[Any], model: nn.Module
) -> tuple[int, int, dict[str, Any]] | None:
    """Return batch size, tokens per sample and the arguments of a forward, as JSON types.

    None if the batch has no tensors.
    """
    # Loaded in this process, without the workers of the loader.
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        rows = list(itertools.islice(iter(loader.dataset), loader.batch_size or 1))
    else:
        indices = next(iter(loader.batch_sampler or ([0],)))
        rows = [loader.dataset[index] for index in indices]
    batch = loader.collate_fn(rows)
    if isinstance(batch, Mapping):
        batch = dict(batch)  # tree_leaves() does not know transformers' BatchEncoding
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    if not tensors:  # TRL tokenizes the prompts of GRPO in the training step
        return None
    samples, tokens = memory_probe.batch_shape_of(memory_probe.forward_inputs_of(tensors, {}))
    call: ForwardInputs = {}
    if isinstance(batch, Mapping):
        call = memory_probe.forward_inputs_of((), batch)
    elif not hasattr(model, "main_input_name"):
        # (inputs, labels), as in torch's examples
        call = memory_probe.forward_inputs_of(tensors[:1], {})
    plain = {
        name: (list(shape), str(dtype).removeprefix("torch."))
        for name, (shape, dtype) in call.items()
    }
    return samples, tokens, plain


def build_cluster_spec(
    free: Sequence[int], hardware: Hardware, nodes: Sequence[SessionNode]
) -> ClusterSpec:
    """Return the devices of all ranks with their free memory and the speeds measured here.

    Args:
        free: free bytes of each rank's device.
        nodes: hardware of the nodes; empty if all ranks are on this machine.
    """
    nodes = nodes or [
        discovery.SessionNode("", tuple(range(len(free))), discovery.discover_machine())
    ]
    readings: list[tuple[SessionNode, Sequence[discovery.GpuFreeMemory], int]] = []
    for node in nodes:
        free_of_node = [free[rank] for rank in node.ranks]
        if hardware.kind == "cpu":
            without_gpus = replace(node, machine=replace(node.machine, gpus=()))
            readings.append((without_gpus, (), sum(free_of_node)))
        else:
            usage = [discovery.GpuFreeMemory(size) for size in free_of_node]
            # of this node; the others' are unknown
            readings.append((node, usage, discovery.host_free_memory_bytes()))
    return target_devices.cluster_for_session_nodes(readings)


def available_bytes(model: nn.Module | None = None) -> int:
    """Return the bytes available to training on this rank's device, including those in use by it.

    Args:
        model: only its tensors count as used by training on a GPU; without it, all tensors do.
    """
    if torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
        total = torch.cuda.get_device_properties(device).total_memory
        others = 0
        if model is not None:
            tensors = [*model.parameters(), *model.buffers()]
            own = tensor_categories.total_bytes(item for item in tensors if item.device == device)
            others = torch.cuda.memory_allocated(device) - own
        return int(total - memory_probe.current_probe.device_before_bytes - others)
    memory = psutil.Process().memory_info()
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", distributed.get_world_size()))
    free = discovery.host_free_memory_bytes() // sharing
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        free = min(free, max(0, limit - memory.vms))
    return int(free + memory.rss)


def _progress(text: str) -> None:
    print(f"{_ERASE_LINE}auto: {text}", end="", flush=True)  # noqa: T201 - one line that changes
