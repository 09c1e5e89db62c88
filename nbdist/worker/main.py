"""A rank's life: join the group, serve cells, end with its launcher.

`rank_main` runs in the process that the launcher has just forked, on its main thread,
where the user's cells will run too.
"""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nbdist import strategies
from nbdist.hardware import discovery
from nbdist.launcher import crash_dump, process_tree
from nbdist.protocol import messages
from nbdist.worker import (
    collective_check,
    device_visibility,
    namespace,
    process_group,
    rendezvous_store,
    stream,
)
from nbdist.worker.collective_log import Board
from nbdist.worker.engines import accelerator, trainer
from nbdist.worker.engines.auto_strategy import Chooser
from nbdist.worker.kernel import RankApp
from nbdist.worker.memory import memory_probe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.launcher.exit_watch import Watch
    from nbdist.launcher.kernel_link import Link


def rank_main(launch: messages.Launch, link: Link, watch: Watch, shown: Mapping[str, str]) -> None:
    """Serve cells until the launcher ends this process."""
    process_tree.die_with_parent()
    device_visibility.take(shown)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # torch elastic's handlers came with the fork
    rank = take_place(launch)
    watch.announce(rank)
    crash_dump.install(launch.run_dir, f"rank{rank}")
    link.close_in_rank()
    tempfile.tempdir = None  # the launcher's own folder is not the user's temp folder
    os.environ["NBDIST_RANK"] = str(rank)
    try:
        app = get_ready(launch, rank)
        watch.share_pipes(rank, stream.pipes())
    except Exception:
        messages.death_note(launch.run_dir, rank).write_text(traceback.format_exc())
        raise
    app.start()


def take_place(launch: messages.Launch) -> int:
    """Set this rank's place among all ranks, which torch elastic does not know of.

    To it each node is a world of its own: it would bring nodes together through a TCPStore,
    which listens on every interface, and could not start unequal numbers of ranks.
    """
    rank = launch.first + int(os.environ["LOCAL_RANK"])
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(launch.world_size),
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=str(launch.world_size),
        GROUP_RANK=str(launch.node),
        GROUP_WORLD_SIZE=str(launch.nodes),
    )
    return rank


def get_ready(launch: messages.Launch, rank: int) -> RankApp:
    """Join the group, open the sockets, fill the namespace, pass the first barrier."""
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = launch.devices is not None
    meeting = None
    share_cores(launch)
    if not on_gpu and launch.nodes == 1:  # the board is memory that all ranks see
        board = Board(Path(launch.run_dir), rank=rank, world_size=launch.world_size)
        meeting = collective_check.install(board)
    if on_gpu:
        memory_probe.before_context(torch.device("cuda", local_rank))
    process_group.join(rendezvous_store.opened(launch), on_gpu=on_gpu)
    options = strategies.Options.from_json(launch.options)
    hardware = strategies.Hardware.from_json(launch.hardware)
    nodes = discovery.from_runs(launch.machines)
    chooser = None if launch.auto is None else Chooser(launch.auto, options, hardware, nodes)
    names = namespace.initial(
        rank=rank,
        local_rank=local_rank,
        world_size=launch.world_size,
        accelerator=accelerator.install(options, hardware, nodes=nodes, chooser=chooser),
    )
    trainer.install()
    run_dir = Path(launch.run_dir)
    app = RankApp.for_rank(rank, run_dir=run_dir, user_ns=names, meeting=meeting)
    if chooser is not None:
        namespace.show_choice(app.kernel, chooser)
    # the kernel takes payload files from the launcher's two folders, not from one start's own
    spare = Path(launch.run_dir).parent
    bulk, cwd = Path(launch.bulk_dir), Path(launch.cwd or Path.cwd())
    namespace.connect(
        app.kernel, run_dir=run_dir, bulk=bulk, spare=spare, checkpoints=launch.checkpoints, cwd=cwd
    )
    process_group.prove()
    return app


def share_cores(launch: messages.Launch) -> None:
    """Split the cores among this machine's ranks, unless the user set OMP_NUM_THREADS.

    On GPUs too: ZeRO-Offload's Adam and FSDP2's steps on the CPU use OpenMP, whose number of
    threads this sets for every library. torch elastic 2.13 leaves it alone, only torchrun sets 1.
    """
    chosen = launch.env.get("OMP_NUM_THREADS", "")
    share = max(1, len(os.sched_getaffinity(0)) // launch.ranks_here)
    torch.set_num_threads(int(chosen) if chosen.isdecimal() and int(chosen) else share)
