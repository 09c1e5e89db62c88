"""Runs a script that `%nbdist script --with-nbdist` wrote as cells of a session run.

`runtime.py` beside the script calls ``start`` in each process that accelerate, torchrun or Slurm
started: the same engines, checkpoints and `nbdist.generate`, without a notebook.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from IPython.display import display
from torch.distributed.rendezvous import rendezvous

from nbdist import checkpoint
from nbdist.protocol.operations import ExportRequest
from nbdist.strategies import Hardware, Options
from nbdist.worker import process_group
from nbdist.worker.engines import accelerator_patch, trainer
from nbdist.worker.operations import RankContext
from nbdist.worker.operations import export as export_operation
from nbdist.worker.operations import load as load_operation
from nbdist.worker.operations.save import CheckpointSaver
from nbdist.worker.report import Reporter

FLUSH_S = 10.0
"""Time that the end of the script waits for copies of reported device tensors."""
MAX_SHARD_SIZE = "5GB"
PRINT_INTERVAL_S = 5.0


def start(options: dict[str, Any]) -> tuple[Any, ...]:
    """Set up this process as a rank with these options of a session.

    Returns:
        `accelerator`, `report`, `save`, `load` and `export` for the script.
    """
    for name in [*os.environ]:
        if name.startswith(("ACCELERATE_", "FSDP_")):  # the session's options decide
            del os.environ[name]
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = os.environ["NBDIST_RANK"] = os.environ.get("RANK", "0")
    on_gpu = torch.cuda.is_available()
    hardware = Hardware(
        kind="cuda" if on_gpu else "cpu",
        bf16=on_gpu and torch.cuda.is_bf16_supported(including_emulation=False),
        fp8=options.get("precision") == "fp8",
        world_size=world_size,
        nodes=world_size // int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
    )
    chosen = Options.from_fields(options).validate(hardware)
    store, *_ = next(rendezvous("env://"))
    process_group.create_default_group(store, on_gpu=on_gpu)
    accelerator = accelerator_patch.patch_accelerator(chosen, hardware)
    reporter = Reporter(MetricsFile(Path("metrics") / f"rank{rank}.jsonl").append)
    saver = CheckpointSaver("", Path.cwd(), lambda _: None, lambda: sys.stderr.write)
    atexit.register(saver.wait)
    atexit.register(reporter.flush, FLUSH_S)
    context = RankContext(
        variables=vars(sys.modules["__main__"]),
        predefined={},
        initial_environ=dict(os.environ),
        reporter=reporter,
        on_phase=lambda _: None,
        begin_save=saver.begin,
        barrier=None,
        folder=Path(tempfile.mkdtemp(prefix="nbdist-script-")),
    )
    atexit.register(context.folder.rmdir)
    load = functools.partial(load_operation.load_in_cell, context=context)
    trainer.install(reporter, load, saver.wait)
    return (
        accelerator,
        reporter.report,
        saver.save,
        lambda name: load_checkpoint(name, saver, context),
        functools.partial(export, context),
    )


def load_checkpoint(name: str, saver: CheckpointSaver, context: RankContext) -> None:
    """Load the checkpoint NAME of the folder `checkpoints`, after the models are prepared."""
    saver.wait()
    process_group.verify_group()  # all ranks have finished the save
    folder = checkpoint.parse_location("checkpoints", Path.cwd())
    load_operation.load_in_cell(folder / name, context)


def export(
    context: RankContext, folder: str, *, model: str | None = None, dtype: str | None = None
) -> None:
    """Write the model of a variable, or the only one, as a `from_pretrained` folder."""
    request = ExportRequest(
        folder=str(Path(folder).absolute()),
        dtype=dtype,
        max_shard_size=MAX_SHARD_SIZE,
        overwrite=True,
        model=model,
    )
    export_operation.export(request, context)


class MetricsFile:
    """A file of rows as JSON lines; rank 0 also prints a row every few seconds."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._next_print_s = 0.0 if path.name == "rank0.jsonl" else math.inf

    def append(self, rows: list[dict[str, float]]) -> None:
        """Write rows; the reporter never calls this concurrently."""
        self._file.writelines(json.dumps(row) + "\n" for row in rows)
        self._file.flush()
        if time.monotonic() >= self._next_print_s:
            self._next_print_s = time.monotonic() + PRINT_INTERVAL_S
            values = [f"{k} {v:.4g}" for k, v in rows[-1].items() if k not in {"step", "time"}]
            print(f"step {rows[-1]['step']:.0f}: {', '.join(values)}", flush=True)  # noqa: T201


def send(name: str, value: object) -> None:
    """Do nothing: there is no notebook to send a variable to."""


__all__ = ["display", "send", "start"]
