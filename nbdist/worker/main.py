"""Entry point of a rank: sets up the process group and the kernel, then serves cells.

`rank_main` runs on the main thread of the process forked by the launcher; the user's cells
run on the same thread.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from IPython.display import display

from nbdist import strategies
from nbdist.errors import OptionError
from nbdist.hardware import discovery
from nbdist.launcher import device_visibility, process_tree
from nbdist.protocol import messages, serialization
from nbdist.signal_handling import TerminationSignal
from nbdist.worker import (
    collective_check,
    library_patches,
    output_streams,
    output_widget,
    process_group,
    rendezvous_store,
)
from nbdist.worker.collective_check import CollectiveLog
from nbdist.worker.engines import accelerator_patch, trainer
from nbdist.worker.engines.auto_strategy import AutoStrategy
from nbdist.worker.kernel import RankApp
from nbdist.worker.memory import memory_probe
from nbdist.worker.operations import RankContext
from nbdist.worker.operations import load as load_operation
from nbdist.worker.operations.save import CheckpointSaver
from nbdist.worker.profiling import kineto, profile_window
from nbdist.worker.report import Reporter
from nbdist.worker.training import unprepared_optimizers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.launcher.kernel_link import KernelLink
    from nbdist.launcher.process_tree import RankExitWatch
    from nbdist.worker.kernel import RankKernel


def rank_main(
    launch: messages.LaunchRanksRequest,
    link: KernelLink,
    watch: RankExitWatch,
    shown: Mapping[str, str],
) -> None:
    """Serve cells until the launcher ends this process."""
    process_tree.die_with_parent()
    device_visibility.take(shown)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # the fork inherited torch elastic's handlers
    rank = launch.first + int(os.environ["LOCAL_RANK"])
    # For all nodes: torch elastic runs separately on each of them. Across nodes it would use a
    # TCPStore, which listens on every interface, and it does not support different numbers of
    # ranks per node.
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(launch.world_size),
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=str(launch.world_size),
        GROUP_RANK=str(launch.node),
        GROUP_WORLD_SIZE=str(launch.nodes),
    )
    watch.announce_rank(rank)
    process_tree.install_crash_dump(launch.run_dir, f"rank{rank}")
    link.close_in_rank()
    tempfile.tempdir = None  # the launcher set it to its own folder
    os.environ["NBDIST_RANK"] = str(rank)
    try:
        app = set_up_rank(launch, rank)
        watch.share_pipes(rank, output_streams.c_output_pipes())
    except Exception:
        messages.startup_error_file(launch.run_dir, rank).write_text(traceback.format_exc())
        raise
    # Instead of ending: the notebook's kernel has all ranks save.
    TerminationSignal(lambda: app.kernel.publish(messages.TERMINATION, {}))
    app.start()


def set_up_rank(launch: messages.LaunchRanksRequest, rank: int) -> RankApp:
    """Create the process group, the kernel and the namespace; pass the first barrier."""
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = launch.devices is not None
    set_num_threads(launch)
    log = None
    if not on_gpu and launch.nodes == 1:  # the collective log needs shared memory
        log = CollectiveLog(Path(launch.run_dir), rank=rank)
    barrier = collective_check.patch_collectives(log)
    if on_gpu:
        memory_probe.before_context(torch.device("cuda", local_rank))
    process_group.create_default_group(rendezvous_store.open_store(launch), on_gpu=on_gpu)
    options = strategies.Options(**launch.options)
    hardware = strategies.Hardware(**launch.hardware)
    nodes = discovery.nodes_from_json(launch.machines)
    chooser = None if launch.auto is None else AutoStrategy(launch.auto, options, hardware, nodes)
    accelerator = accelerator_patch.patch_accelerator(
        options, hardware, nodes=nodes, chooser=chooser
    )
    names: dict[str, Any] = {
        "accelerator": accelerator,
        "rank": rank,
        "local_rank": local_rank,
        "world_size": launch.world_size,
        "device": accelerator.device,
        "torch": torch,
    }
    use_common_cell_files(launch)
    app = RankApp.for_rank(rank, run_dir=Path(launch.run_dir), user_ns=names, barrier=barrier)
    if chooser is not None:
        chooser.show = lambda text, page: display({"text/plain": text, "text/html": page}, raw=True)
        chooser.tell = lambda chosen: app.kernel.publish(
            messages.AUTO_DECISION, messages.AutoDecision(options=chosen.to_json())
        )
    add_kernel_functions(app.kernel, launch)
    unprepared_optimizers.watch_steps()
    context = app.kernel.operation_context
    load = functools.partial(load_operation.load_in_cell, context=context)
    trainer.install(context.reporter, load, app.kernel.saver.wait)
    output_widget.install()
    process_group.verify_group()
    return app


def use_common_cell_files(launch: messages.LaunchRanksRequest) -> None:
    """Give the files of cells the same names on all ranks.

    Warnings and tracebacks contain them, and equal lines of the ranks are shown once.
    """
    number = os.getppid() if launch.nodes == 1 else launch.generation
    folder = str(Path(tempfile.gettempdir()) / f"ipykernel_{number}")
    for module in ("ipykernel.compiler", "ipykernel.debugger"):  # the latter needs debugpy
        if module in sys.modules:
            library_patches.patch(f"{module}:get_tmp_directory", lambda _: lambda: folder)


def add_kernel_functions(kernel: RankKernel, launch: messages.LaunchRanksRequest) -> None:
    """Add `report`, `send` and `save` to the namespace, and what the kernel needs for them."""
    run_dir, cwd = Path(launch.run_dir), Path(launch.cwd or Path.cwd())
    # The notebook's kernel accepts payload files from the launcher's two folders only, not from
    # the run folder of a single start.
    folders = [Path(launch.bulk_dir), run_dir.parent]

    def publish_rows(rows: list[dict[str, float]]) -> None:
        encoded = [{k: messages.to_json_number(v) for k, v in row.items()} for row in rows]
        kernel.publish(messages.METRICS_REPORT, messages.MetricsReport(rows=encoded))

    def send(name: str, value: object) -> None:
        """Set the notebook variable `name` to `value` while the cell is still running.

        Tensors arrive as CPU tensors of the same dtype and shape. Blocks until the value is
        copied; does not wait for the notebook.

        Raises:
            OptionError: `name` is not a Python identifier.
            PayloadError: the value cannot be transferred; the message names the part.
        """
        if not str(name).isidentifier():
            raise OptionError(
                f"send({name!r}, ...): the name must be a Python identifier, such as 'sample'."
            )
        path = serialization.write_payload_to_free_folder({name: value}, folders)
        kernel.publish(messages.SENT_VALUE, messages.SentValue(name=name, path=str(path)))

    send.__qualname__ = "send"  # a wrong call names it
    kineto.quiet()
    # IPython's advice after sys.exit() in a cell: a rank refuses to exit.
    warnings.filterwarnings("ignore", "To exit: use 'exit', 'quit', or Ctrl-D.", UserWarning)
    reporter = Reporter(publish_rows)
    publish_save = functools.partial(kernel.publish, messages.SAVE_STATUS)
    kernel.saver = saver = CheckpointSaver(launch.checkpoints, cwd, publish_save, kernel.warn_async)
    kernel.profile_context = profile_window.ProfileContext(
        rank=kernel.shell.user_ns["rank"],
        folder=run_dir,
        cell_of=kernel.shell.compile.format_code_name,
        publish=functools.partial(kernel.publish, messages.PROFILE_RESULT),
        show_progress=kernel.publish_phase,
    )
    kernel.shell.push({"report": reporter.report, "send": send, "save": saver.save})
    kernel.operation_context = RankContext(
        variables=kernel.shell.user_ns,
        predefined=dict(kernel.shell.user_ns),
        initial_environ=dict(os.environ),
        reporter=reporter,
        on_phase=kernel.publish_phase,
        begin_save=saver.begin,
        barrier=kernel.collective_barrier,
        folder=run_dir,
    )


def set_num_threads(launch: messages.LaunchRanksRequest) -> None:
    """Divide the CPU cores among the ranks of this node, unless OMP_NUM_THREADS is set.

    This matters on GPUs too: ZeRO-Offload's Adam and FSDP2's CPU offload use OpenMP, whose thread
    count this sets for every library. torch elastic 2.13 does not set it; torchrun sets it to 1.
    """
    chosen = launch.env.get("OMP_NUM_THREADS", "")
    share = max(1, len(os.sched_getaffinity(0)) // launch.local_world_size)
    torch.set_num_threads(int(chosen) if chosen.isdecimal() and int(chosen) else share)
