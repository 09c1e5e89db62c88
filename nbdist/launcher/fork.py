"""Fork the ranks of one start and stay with them until they end.

Runs on the launcher's main thread. A rank's first failure takes its peers within 0.1 s:
that is torch elastic's gang rule.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING

from accelerate import notebook_launcher
from accelerate.utils import check_cuda_p2p_ib_support, patch_environment
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nbdist import strategies
from nbdist.launcher import (
    deepspeed_builds,
    device_visibility,
    nvme_folder,
    process_tree,
    rendezvous,
)
from nbdist.launcher.exit_watch import Watch
from nbdist.protocol import messages
from nbdist.worker.main import rank_main

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.launcher.kernel_link import Link

POLL_S = 0.02
"""How often torch elastic looks at the ranks; its default 0.1 s is felt at a restart."""

rendezvous.register()
# a page of agent's traceback for each rank that was ended on purpose; exit codes are reported
logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)


def run(launch: messages.Launch, link: Link) -> messages.Ended:
    """Start the ranks, wait for their end, and say how they ended."""
    take_over(launch)
    options = strategies.Options.from_json(launch.options)
    hardware = strategies.Hardware.from_json(launch.hardware)
    # auto decides on the ranks, which then load what they need
    ops = options.strategy.extensions(options, hardware) if launch.auto is None else ()
    shown = device_visibility.shown(launch.devices)
    deepspeed_builds.ensure(
        ops, progress=lambda text: link.send(messages.Progress(text)), shown=shown
    )
    device_visibility.close_nvml()
    gc.collect()
    gc.freeze()  # a collection on a rank would copy every page it shares with the launcher
    try:
        with nvme_folder.folder(options) as own, watched(launch, link) as watch:
            if own.offload_path is not None:
                link.remove_at_end(own.offload_path)
            fork(replace(launch, options=own.to_json()), link, watch, shown)
    except ChildFailedError as error:
        codes = {str(launch.first + n): failure.exitcode for n, failure in error.failures.items()}
        return messages.Ended(launch.generation, codes)
    return messages.Ended(launch.generation)


@contextlib.contextmanager
def watched(launch: messages.Launch, link: Link) -> Iterator[Watch]:
    """Tell the kernel of each rank that begins and ends; at the end all of them are ended."""
    watch = Watch(launch.generation, link.send)
    try:
        yield watch
    except ChildFailedError:
        raise
    except BaseException:
        watch.mute()
        raise
    finally:
        process_tree.end_descendants()
        watch.close()


def take_over(launch: messages.Launch) -> None:
    """Put on the kernel's environment, but for the GPUs, its folder and import path."""
    os.environ.update(launch.env)
    os.environ.update(
        GLOO_SOCKET_IFNAME=launch.interface,
        NCCL_SOCKET_IFNAME=launch.interface,
    )
    device_visibility.hide()
    os.chdir(launch.cwd)
    sys.path[:] = launch.path
    # torch elastic makes log folders and error files; ranks reset this (rank.main)
    tempfile.tempdir = launch.run_dir


def fork(launch: messages.Launch, link: Link, watch: Watch, shown: Mapping[str, str]) -> None:
    """Fork this launcher's ranks and wait for them; those of other nodes are not its business.

    Args:
        launch: what was asked for.
        link: to the kernel.
        watch: of the ranks.
        shown: environment variables that show the ranks their GPUs.
    """
    if launch.ranks_here > 1:
        notebook_launcher(
            rank_main,
            (launch, link, watch, shown),
            num_processes=launch.ranks_here,
            rdzv_backend=rendezvous.NAME,
            rdzv_endpoint=rendezvous.ENDPOINT,
            rdzv_id=f"nbdist-{launch.generation}",
            monitor_interval=POLL_S,
        )
        return
    # accelerate 1.15: notebook_launcher(num_processes=1) calls the function in this very
    # process and sets no RANK; this is what it does for more
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=1,
        run_id=f"nbdist-{launch.generation}",
        rdzv_backend=rendezvous.NAME,
        rdzv_endpoint=rendezvous.ENDPOINT,
        max_restarts=0,
        monitor_interval=POLL_S,
        start_method="fork",
    )
    with patch_environment(**_nccl_for_one(shown)):
        elastic_launch(config, rank_main)(launch, link, watch, shown)


def _nccl_for_one(shown: Mapping[str, str]) -> dict[str, str]:
    """What NCCL needs beside several RTX 40 under an old driver.

    accelerate 1.15 sets it in notebook_launcher for more ranks than one, and its PartialState
    refuses to work without.
    """
    if not device_visibility.is_gpu(shown) or check_cuda_p2p_ib_support():
        return {}
    names = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
    return {name: "1" for name in names if name not in os.environ}
