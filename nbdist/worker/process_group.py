"""Creates the default process group, and recreates it after an abort.

Runs on the main thread of a rank.
"""

from __future__ import annotations

import datetime as dt
import os
import sys

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d
from torch.distributed.tensor import debug

from nbdist.worker import process_group_lifetime
from nbdist.worker import rendezvous_store as stores
from nbdist.worker.interrupt import abort_collectives

_MEET = dt.timedelta(seconds=30)
"""Timeout for all ranks to recreate the group, when none of them has other work to do."""
_NAMES_APART = 10_000
"""Offset of the group counter per era: a rank that hung may have created more groups."""


def create_default_group(store: Store, *, on_gpu: bool) -> None:
    """Create the default process group and set this rank's device.

    Args:
        store: store for the rendezvous.
        on_gpu: use NCCL for CUDA tensors and gloo for CPU tensors, otherwise only gloo.
    """
    # CleanUpOnly. torch elastic (2.13) sets 1 (TearDown), with which NCCL's watchdog terminates a
    # rank whose peer has aborted its groups, even after its own collectives were aborted.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
    device = None
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    process_group_lifetime.init(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        device_id=device,
    )


def recreate_default_group(era: int, *, on_gpu: bool) -> list[distributed.ProcessGroup]:
    """Create a new default group while the old one still exists, and verify it.

    Engines look up their old groups by name and rank while their models are detached, so the old
    groups stay registered until ``destroy_groups``.

    Args:
        era: number of times the group was recreated, the same on all ranks.
        on_gpu: as for ``create_default_group``.

    Returns:
        The old groups.

    Raises:
        RuntimeError: an old group cannot be aborted, or the new one does not work either.
    """
    # Abort first: NCCL would run the verification on a stream that may wait for a collective
    # which another rank has never started.
    abort_collectives.release_together(f"era{era}")
    old = process_group_lifetime.known_groups()
    world = distributed.group.WORLD
    distributed_c10d._update_default_pg(None)  # noqa: SLF001
    distributed_c10d._world.group_count = era * _NAMES_APART  # noqa: SLF001
    store: Store = stores.get_store()
    default_timeout = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(_MEET)
    try:
        create_default_group(PrefixStore(f"era{era}", store), on_gpu=on_gpu)
        verify_group(on_gpu=on_gpu)
    except BaseException:
        if not distributed.is_initialized():  # so that get_rank() still works
            distributed_c10d._update_default_pg(world)  # noqa: SLF001
        raise
    finally:
        store.set_timeout(default_timeout)
    _clear_deepspeed_group_cache()
    # torch 2.13 treats meshes of equal shape as the same: results would be placed on the old mesh.
    debug._clear_sharding_prop_cache()  # noqa: SLF001
    return old


def _clear_deepspeed_group_cache() -> None:
    """Make DeepSpeed build its next engine on the new group.

    deepspeed 0.19.8 caches a clone of the default group and builds every engine on it; only its
    own `destroy_process_group` clears the cache.
    """
    groups = sys.modules.get("deepspeed.utils.groups")
    if groups is not None:
        groups._release_process_group_references()  # noqa: SLF001


def verify_group(*, on_gpu: bool = False) -> None:
    """Verify the group with an all-reduce.

    Raises:
        RuntimeError: the result is wrong.
    """
    for device in ["cpu", *(["cuda"] if on_gpu else [])]:
        total = torch.ones(1, device=device)
        distributed.all_reduce(total)
        world_size = distributed.get_world_size()
        if total.item() != world_size:
            message = f"all_reduce of ones over {world_size} ranks returned {total}."
            raise RuntimeError(message)


def destroy_groups(groups: list[distributed.ProcessGroup]) -> None:
    """Destroy groups that are no longer used."""
    for group in groups:
        if group in distributed_c10d._world.pg_map:  # noqa: SLF001
            process_group_lifetime.destroy(group)
