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
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from nbdist import strategies, wire
from nbdist.launcher import family
from nbdist.rank import accelerator, namespace, store
from nbdist.rank.choose import Chooser
from nbdist.rank.kernel import RankApp

if TYPE_CHECKING:
    from collections.abc import Callable


def rank_main(launch: wire.Launch, close_link: Callable[[], None]) -> None:
    """Serve cells until the launcher ends this process."""
    family.die_with_parent()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # torch elastic's handlers came with the fork
    close_link()
    tempfile.tempdir = None  # the launcher's own folder is not the user's temp folder
    rank = int(os.environ["RANK"])
    os.environ["NBDIST_RANK"] = str(rank)
    try:
        app = get_ready(launch, rank)
    except Exception:
        wire.death_note(launch.run_dir, rank).write_text(traceback.format_exc())
        raise
    app.start()


def get_ready(launch: wire.Launch, rank: int) -> RankApp:
    """Join the group, open the sockets, fill the namespace, pass the first barrier."""
    local_rank = int(os.environ["LOCAL_RANK"])
    join_group(launch, local_rank)
    options = strategies.Options.from_json(launch.options)
    hardware = strategies.Hardware.from_json(launch.hardware)
    chooser = None if launch.auto is None else Chooser(launch.auto, options, hardware)
    names = namespace.initial(
        rank=rank,
        local_rank=local_rank,
        world_size=launch.world_size,
        accelerator=accelerator.install(options, hardware, chooser=chooser),
    )
    app = RankApp.for_rank(rank, run_dir=Path(launch.run_dir), user_ns=names)
    if chooser is not None:
        namespace.show_choice(app.kernel, chooser)
    # the kernel takes payload files from the launcher's two folders, not from one start's own
    spare = Path(launch.run_dir).parent
    checkpoints = Path(launch.cwd or Path.cwd()) / "checkpoints"
    bulk = Path(launch.bulk_dir)
    namespace.connect(app.kernel, bulk=bulk, spare=spare, checkpoints=checkpoints)
    pass_first_barrier()
    return app


def join_group(launch: wire.Launch, local_rank: int) -> None:
    """Make the default process group and choose this rank's device."""
    meeting: dict[str, Any] = {
        "store": store.open_in(launch.run_dir),
        "rank": int(os.environ["RANK"]),
        "world_size": launch.world_size,
    }
    if launch.devices is None:
        share_cores(launch)
        distributed.init_process_group("gloo", **meeting)
        return
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    distributed.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **meeting)


def share_cores(launch: wire.Launch) -> None:
    """Split the cores among CPU ranks, unless the user set OMP_NUM_THREADS."""
    # asked of the kernel's environment: in ours torch elastic has set 1 where it was unset
    chosen = launch.env.get("OMP_NUM_THREADS", "")
    share = max(1, len(os.sched_getaffinity(0)) // launch.world_size)
    torch.set_num_threads(int(chosen) if chosen.isdecimal() and int(chosen) else share)


def pass_first_barrier() -> None:
    """Return once every rank is here; "ready" is not said before."""
    distributed.all_reduce(torch.zeros(1))
