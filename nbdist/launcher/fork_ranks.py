"""Forks the ranks of one start and waits until they end.

Runs on the launcher's main thread. When a rank fails, torch elastic ends its peers within 0.1 s.

torch elastic's rendezvous connects agents of several machines through a store; here one agent forks
all ranks. torch 2.13's TCPStore listens on every interface, whatever address it is given, without
authentication, and c10d's rendezvous unpickles data from it. So there is a rendezvous in memory
without a network, and the ranks use a file store (`worker.rendezvous_store`).
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING

from accelerate import notebook_launcher
from accelerate.utils import check_cuda_p2p_ib_support, patch_environment
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nbdist import strategies
from nbdist.launcher import device_visibility, offload_setup, process_tree
from nbdist.launcher.process_tree import RankExitWatch
from nbdist.protocol import messages
from nbdist.worker.main import rank_main

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.launcher.kernel_link import KernelLink

POLL_S = 0.02
"""Interval in which torch elastic checks the ranks; its default of 0.1 s slows a restart."""

# the agent logs a traceback for each rank that was ended on purpose; exit codes are reported
logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)


RENDEZVOUS_BACKEND = "nbdist"
RENDEZVOUS_ENDPOINT = "127.0.0.1:0"
"""Required by torch elastic; nothing listens there."""
_NO_RENDEZVOUS = RendezvousStoreInfo("127.0.0.1", -1)
"""MASTER_ADDR and MASTER_PORT of the ranks: connecting or listening fails immediately."""


class _InMemoryRendezvous(RendezvousHandler):
    """A single agent on one machine: rank 0 of 1 as torch elastic counts agents."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._store = HashStore()

    def get_backend(self) -> str:
        return RENDEZVOUS_BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True  # so that torch's rank 0 does not serve a TCPStore

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, 0, 1, _NO_RENDEZVOUS)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: there are no other agents."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        del self._store
        return True


rendezvous_handler_registry.register(RENDEZVOUS_BACKEND, _InMemoryRendezvous)


def run_ranks(launch: messages.LaunchRanksRequest, link: KernelLink) -> messages.AllRanksExited:
    """Start the ranks, wait until they end, and return their exit codes."""
    # the kernel's environment (except for its GPUs), working folder and import path
    interface = launch.interface
    os.environ.update(launch.env, GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface)
    device_visibility.hide_gpus()
    os.chdir(launch.cwd)
    sys.path[:] = launch.path
    # torch elastic creates log folders and error files here; ranks reset it in `worker.main`
    tempfile.tempdir = launch.run_dir
    options = strategies.Options(**launch.options)
    # auto chooses the backend on the ranks, which then load the ops they need
    ops = options.strategy.required_ops(options) if launch.auto is None else ()
    shown = device_visibility.shown(launch.devices)
    offload_setup.build_missing_ops(
        ops, progress=lambda text: link.send(messages.LauncherProgress(text)), shown=shown
    )
    device_visibility.close_nvml()
    gc.collect()
    gc.freeze()  # else a garbage collection on a rank copies all shared pages
    codes: dict[str, int] = {}
    with offload_setup.create_nvme_folder(options) as own:
        watch = RankExitWatch(launch.generation, link.send)
        try:
            if own.offload_path is not None:
                link.register_folder_cleanup(own.offload_path)
            fork_ranks(replace(launch, options=own.to_json()), link, watch, shown)
        except ChildFailedError as error:
            codes = {str(launch.first + n): end.exitcode for n, end in error.failures.items()}
        except BaseException:
            watch.stop_reporting()
            raise
        finally:
            process_tree.end_descendants()
            watch.close()
    return messages.AllRanksExited(launch.generation, codes)


def fork_ranks(
    launch: messages.LaunchRanksRequest,
    link: KernelLink,
    watch: RankExitWatch,
    shown: Mapping[str, str],
) -> None:
    """Fork this launcher's ranks and wait for them. Other nodes have their own launchers.

    Args:
        launch: the launch request.
        link: link to the kernel.
        watch: monitor of the ranks.
        shown: environment variables that show the ranks their GPUs.
    """
    if launch.local_world_size > 1:
        notebook_launcher(
            rank_main,
            (launch, link, watch, shown),
            num_processes=launch.local_world_size,
            rdzv_backend=RENDEZVOUS_BACKEND,
            rdzv_endpoint=RENDEZVOUS_ENDPOINT,
            rdzv_id=f"nbdist-{launch.generation}",
            monitor_interval=POLL_S,
        )
        return
    # accelerate 1.15: notebook_launcher(num_processes=1) calls the function in this process and
    # sets no RANK; this is what it does for several ranks
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=1,
        run_id=f"nbdist-{launch.generation}",
        rdzv_backend=RENDEZVOUS_BACKEND,
        rdzv_endpoint=RENDEZVOUS_ENDPOINT,
        max_restarts=0,
        monitor_interval=POLL_S,
        start_method="fork",
    )
    # NCCL needs these with RTX 40 GPUs and an old driver. accelerate 1.15 sets them in
    # notebook_launcher only for several ranks, and its PartialState raises without them.
    nccl = {}
    if device_visibility.is_gpu(shown) and not check_cuda_p2p_ib_support():
        names = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
        nccl = {name: "1" for name in names if name not in os.environ}
    with patch_environment(**nccl):
        elastic_launch(config, rank_main)(launch, link, watch, shown)
