"""`--auto`: the options of the engine, decided at the first `prepare()` by all ranks together.

Runs on every rank, called by `worker.engines.accelerator` before it builds the engine. The ranks
gather what is free on each device; rank 0 looks at the real model, optimizer and loader, asks the
planner and sends its decision to all, so all decide the same or fail with the same sentence.
"""

from __future__ import annotations

import html
import itertools
import json
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import distributed, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from nbdist.errors import NbdistError, OptionError, PlanError
from nbdist.hardware import discovery
from nbdist.launcher import deepspeed_builds
from nbdist.planner import cluster_spec, search, validation
from nbdist.state import meta_model
from nbdist.strategies import Hardware, Options
from nbdist.worker import forked_call
from nbdist.worker.memory import memory_probe, model_description

if TYPE_CHECKING:
    from nbdist.hardware.discovery import Node
    from nbdist.planner.cluster_spec import Cluster
    from nbdist.planner.result import Plan
    from nbdist.worker.memory.memory_probe import Call

Show = Callable[[str, str], object]
"""Displays text and HTML below the cell."""
Tell = Callable[[Options], object]
"""Tells the kernel what was chosen."""

LOOK_S = 60.0
"""For the first batch of a loader, which may have to open large files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The micro-batch to plan for."""

    batch_size: int
    seq_len: int | None
    """Tokens of a sample; None: what the model takes."""
    call: Call = field(default_factory=dict)
    """Tensors of a forward, as far as a look at the loader told."""
    guess: str = ""
    """What was assumed because no loader said it; a sentence for the reader."""


class Chooser:
    """Decides once, and keeps to it."""

    def __init__(
        self,
        given: Mapping[str, Any],
        placeholder: Options,
        hardware: Hardware,
        nodes: Sequence[Node] = (),
    ) -> None:
        """Search within what the user gave.

        Args:
            given: options that are not searched, checked.
            placeholder: options of some backend that agree with them; its NVMe folder is this
                session's own.
            hardware: what the ranks run on.
            nodes: what they have; none: all ranks are on this machine.
        """
        self.decided: Options | None = None
        self.show: Show = _print
        self.tell: Tell = _nobody
        self._given, self._placeholder, self._hardware = given, placeholder, hardware
        self._nodes = nodes

    def __call__(self, objects: Sequence[object]) -> Options:
        """Decide from what came to the first `prepare()`.

        Raises:
            OptionError: no model came.
            PlanError: nothing fits, or the model cannot be planned; the same on all ranks.
        """
        if self.decided is not None:
            return self.decided
        model = next((one for one in objects if isinstance(one, nn.Module)), None)
        if model is None:
            message = (
                "--auto decides at the first accelerator.prepare() with a model, and the engine is"
                " needed before it; prepare the model first, with its optimizer and loader."
            )
            raise OptionError(message)
        optimizer = next((one for one in objects if isinstance(one, torch.optim.Optimizer)), None)
        loader = next((one for one in objects if isinstance(one, DataLoader)), None)
        described = memory_probe.described(optimizer) if optimizer else {"class": "AdamW"}
        return self.decide(model, described, lambda: looked_at(loader, model))

    def decide(
        self, model: nn.Module, optimizer: Mapping[str, Any], batch: Callable[[], Batch]
    ) -> Options:
        """Decide for a bare model; a collective of all ranks.

        Args:
            model: bare, not yet prepared.
            optimizer: as `measure.described` has it.
            batch: called on rank 0 alone.
        """
        free = _gathered(free_bytes(model))
        mine: dict[str, Any] = {}
        if distributed.get_rank() == 0:
            mine = self._answer(model, optimizer, batch, free)
        answer = _from_rank_0({name: one for name, one in mine.items() if name not in _SHOWN})
        if "stopped" in answer:
            raise KeyboardInterrupt
        if "error" in answer:
            raise PlanError(answer["error"])
        chosen = Options.from_json(answer["options"])
        # Rank 0 has built what the options need; the others find it built.
        self._load(chosen)
        self.decided = self._in_own_folder(chosen)
        if distributed.get_rank() == 0:
            self.show(mine["text"], mine["html"])
            self.tell(chosen)
        return self.decided

    def _answer(
        self,
        model: nn.Module,
        optimizer: Mapping[str, Any],
        batch: Callable[[], Batch],
        free: Sequence[int],
    ) -> dict[str, Any]:
        """Rank 0's decision, or the error that all ranks raise."""
        seen: Batch | None = None
        try:
            seen = batch()
            plan = self._plan(model, optimizer, seen, free)
            if plan.best is None:
                return {"error": "--auto: " + "\n".join(plan.explanation())}
            chosen = plan.best.options
            self._load(chosen)
        except KeyboardInterrupt:
            return {"stopped": True}  # the other ranks wait for an answer, whatever it is
        except PlanError as error:
            return {"error": f"{error}{_WITHOUT_A_LOADER if seen and seen.guess else ''}"}
        except NbdistError as error:
            return {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - or the other ranks would wait for ever
            return {"error": f"--auto could not decide: {type(error).__name__}: {error}"}
        lines = [f"auto: {plan.explanation()[0]}", *plan.explanation()[1:]]
        lines += [seen.guess] if seen.guess else []
        return {
            "options": chosen.to_json(),
            "text": "\n".join(lines[-_LINES:] if len(lines) <= _LINES else _fewer(lines)),
            "html": _folded(lines, plan),
        }

    def _plan(
        self,
        model: nn.Module,
        optimizer: Mapping[str, Any],
        batch: Batch,
        free: Sequence[int],
    ) -> Plan:
        """Ask the planner."""
        length = batch.seq_len or model_description.default_length(model)
        spec = model_description.spec_of(
            meta_model.twin(model) or model,
            batch_size=batch.batch_size,
            seq_len=length,
            call=batch.call,
            progress=_progress,
            kind=self._hardware.kind,
        )
        question = search.Question(
            model=spec,
            cluster=cluster(free, self._hardware, self._nodes),
            batch_sizes=(batch.batch_size,),
            seq_len=length,
            precision=self._placeholder.precision or "no",
            optimizer=validation.optimizer_of(optimizer, self._hardware.kind),
            fixed={name: one for name, one in self._given.items() if name != "precision"},
            offloads=("none", "cpu"),
        )
        return search.search(question)

    def _load(self, chosen: Options) -> None:
        """Have DeepSpeed's ops built and loaded that the options need; minutes at first."""
        ops = chosen.strategy.extensions(chosen, self._hardware)
        deepspeed_builds.ensure(ops, progress=_progress if distributed.get_rank() == 0 else _nobody)

    def _in_own_folder(self, chosen: Options) -> Options:
        """The options with this session's own folder for an offload to NVMe."""
        if chosen.offload_device != "nvme":
            return chosen
        return replace(chosen, offload=self._placeholder.offload)


# ---------------------------------------------------------------------------- what there is


def looked_at(loader: DataLoader[Any] | None, model: nn.Module) -> Batch:
    """The micro-batch that a loader gives, without moving it or a random state."""
    if loader is None:
        return Batch(
            batch_size=1,
            seq_len=None,
            guess=(
                "no loader came to prepare(): a micro-batch of 1 was assumed; give it the loader"
                " too, and the choice is for your batch"
            ),
        )
    found = forked_call.answered(lambda: _described(_first(loader), model), within_s=LOOK_S)
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if found is None:
        return Batch(
            batch_size=size or 1,
            seq_len=None,
            guess="the loader's first batch could not be looked at: its length was assumed",
        )
    samples, tokens, call = found
    named = {
        name: (torch.Size(shape), getattr(torch, dtype)) for name, (shape, dtype) in call.items()
    }
    return Batch(batch_size=size or samples, seq_len=tokens, call=named)


def _first(loader: DataLoader[Any]) -> Any:
    """The first batch, made in this process; workers are not started."""
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        rows = itertools.islice(iter(loader.dataset), loader.batch_size or 1)
        return loader.collate_fn(list(rows))
    indices = next(iter(loader.batch_sampler or ([0],)))
    return loader.collate_fn([loader.dataset[index] for index in indices])


def _described(batch: Any, model: nn.Module) -> tuple[int, int, dict[str, Any]]:
    """Samples, tokens of each, and the arguments that a forward will get, as JSON has them."""
    tensors = [one for one in tree_leaves(batch) if isinstance(one, torch.Tensor)]
    samples, tokens = memory_probe.shape_of(memory_probe.call_of(tensors, {}))
    call: Call = {}
    if isinstance(batch, Mapping):
        call = memory_probe.call_of((), batch)
    elif not hasattr(model, "main_input_name"):
        call = memory_probe.call_of(
            tensors[:1], {}
        )  # (inputs, labels), as torch's own examples have it
    plain = {
        name: (list(one), str(dtype).removeprefix("torch.")) for name, (one, dtype) in call.items()
    }
    return samples, tokens, plain


def cluster(free: Sequence[int], hardware: Hardware, nodes: Sequence[Node] = ()) -> Cluster:
    """The devices of all ranks with what is free on each.

    Args:
        free: bytes of each rank's device.
        hardware: of the ranks.
        nodes: what they have; none: all ranks are on this machine.
    """
    there = nodes or [discovery.Node("", tuple(range(len(free))), discovery.found())]
    return cluster_spec.of_nodes({one.name: _of_node(one, free, hardware) for one in there})


def _of_node(node: Node, all_free: Sequence[int], hardware: Hardware) -> Cluster:
    """The devices of one node."""
    one, free = node.machine, [all_free[rank] for rank in node.ranks]
    if hardware.kind == "cpu":
        alone = replace(one, gpus=())
        return cluster_spec.of_machine(alone, cpu_ranks=len(free), host_free_bytes=sum(free))
    usage = [discovery.Usage(size) for size in free]
    host_free_bytes = discovery.host_free_bytes()  # of this node, the only one that is known
    return cluster_spec.of_machine(one, usage, host_free_bytes=host_free_bytes)


def free_bytes(model: nn.Module | None = None) -> int:
    """Bytes that this rank's training may use on its device, what it holds already included.

    Args:
        model: what else lies on a GPU is not free; without a model all of it is the training's.
    """
    if torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
        total = torch.cuda.get_device_properties(device).total_memory
        others = torch.cuda.memory_allocated(device) - _bytes_on(device, model) if model else 0
        return int(total - memory_probe.state.device_before - others)
    own = psutil.Process().memory_info()
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", distributed.get_world_size()))
    free = discovery.host_free_bytes() // sharing
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        free = min(free, max(0, limit - own.vms))
    return int(free + own.rss)


def _bytes_on(device: torch.device, model: nn.Module) -> int:
    """Bytes of a model that lie on a device already."""
    tensors = (*model.parameters(), *model.buffers())
    return sum(one.numel() * one.element_size() for one in tensors if one.device == device)


# ---------------------------------------------------------------------------- together


def _gathered(number: int) -> list[int]:
    """A number of each rank, by rank."""
    mine = torch.tensor([number], dtype=torch.int64)
    every = [torch.zeros_like(mine) for _ in range(distributed.get_world_size())]
    distributed.all_gather(every, mine)
    return [int(one) for one in every]


def _from_rank_0(answer: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 holds, on every rank; as JSON, so that nothing is unpickled.

    One collective of a fixed size: a Stop between two would leave the other ranks in the second.
    """
    room = torch.zeros(_ROOM, dtype=torch.uint8)
    text = json.dumps(answer).encode()
    if len(text) > _ROOM:
        text = json.dumps({"error": "--auto: the answer is too long to be sent."}).encode()
    room[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    distributed.broadcast(room, src=0)
    received: dict[str, Any] = json.loads(bytes(room.tolist()).rstrip(b"\0"))
    return received


_ROOM = 1 << 16
"""Bytes of an answer; options and an error's text take a few hundred."""
_WITHOUT_A_LOADER = (
    " With --auto, give the data loader to accelerator.prepare() as well, whose first batch is"
    " then the example; or name a --backend."
)
_SHOWN = ("text", "html")
"""What rank 0 keeps of its answer to show it."""


# ---------------------------------------------------------------------------- words

_LINES = 8
"""An explanation is no longer."""


def _fewer(lines: Sequence[str]) -> list[str]:
    """The first lines, and the last one, which says what was assumed."""
    return [*lines[: _LINES - 1], lines[-1]]


def _folded(lines: Sequence[str], plan: Plan) -> str:
    """The choice in a line, all else to be opened."""
    rest = html.escape("\n".join(lines[1:]))
    return (
        f"<details><summary>{html.escape(lines[0])}</summary><pre>{rest}</pre>"
        f"{plan._repr_html_()}</details>"
    )


def _progress(text: str) -> None:
    """Show that something is being built."""
    print(f"\rauto: {text}", end="", flush=True)  # noqa: T201 - one line that changes


def _print(text: str, _: str) -> None:
    """Show a text where there is no notebook."""
    print(text)  # noqa: T201 - what was chosen


def _nobody(_: object) -> None:
    """Tell nobody."""
