"""The process group of all ranks: made at the start, and made anew when it is broken.

Runs on a rank, on its main thread.
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
"""For all ranks to come to a renewal: none of them has anything else to do."""
_NAMES_APART = 10_000
"""Between the first names of groups of two eras: a stuck rank may have named more than others."""


def join(store: Store, *, on_gpu: bool) -> None:
    """Make the default process group and choose this rank's device.

    Args:
        store: where the ranks find one another.
        on_gpu: NCCL for tensors of the GPU, gloo for others.
    """
    # CleanUpOnly. torch elastic (2.13) gives ranks 1, TearDown: NCCL's watchdog would end a rank
    # whose peer has aborted its groups, also after a release.
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


def join_anew(era: int, *, on_gpu: bool) -> list[distributed.ProcessGroup]:
    """Make another default group beside the broken one, and prove it.

    The old groups are aborted first: NCCL would launch the proof on a stream that may wait for a
    collective which another rank has never begun. Engines look up their old groups by name and
    rank while they are taken apart, so those stay known until `forget`.

    Args:
        era: number of this renewal, the same on all ranks.
        on_gpu: as for `join`.

    Returns:
        The old groups.

    Raises:
        RuntimeError: an old group cannot be aborted, or the new one does not work either.
    """
    abort_collectives.release_together(f"era{era}")
    old = process_group_lifetime.known_groups()
    world = distributed.group.WORLD
    distributed_c10d._update_default_pg(None)  # noqa: SLF001
    distributed_c10d._world.group_count = era * _NAMES_APART  # noqa: SLF001
    store: Store = stores.store()
    usual = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(_MEET)
    try:
        join(PrefixStore(f"era{era}", store), on_gpu=on_gpu)
        prove(on_gpu=on_gpu)
    except BaseException:
        if not distributed.is_initialized():  # what asks for its rank still gets an answer
            distributed_c10d._update_default_pg(world)  # noqa: SLF001
        raise
    finally:
        store.set_timeout(usual)
    _let_deepspeed_ask_again()
    # torch 2.13 takes meshes of equal shape for the same: results would be laid out on the old one
    debug._clear_sharding_prop_cache()  # noqa: SLF001
    return old


def _let_deepspeed_ask_again() -> None:
    """Let DeepSpeed build its next engine on the new group.

    deepspeed 0.19.8 keeps a clone of the default group for ever, and builds every engine on it;
    only its own `destroy_process_group` drops that.
    """
    known = sys.modules.get("deepspeed.utils.groups")
    if known is not None:
        known._release_process_group_references()  # noqa: SLF001


def prove(*, on_gpu: bool = False) -> None:
    """Return once every rank is here and they can add.

    Raises:
        RuntimeError: they cannot.
    """
    for device in ["cpu", *(["cuda"] if on_gpu else [])]:
        one = torch.ones(1, device=device)
        distributed.all_reduce(one)
        if one.item() != distributed.get_world_size():
            message = f"an all_reduce of ones over {distributed.get_world_size()} ranks gave {one}"
            raise RuntimeError(message)


def forget(groups: list[distributed.ProcessGroup]) -> None:
    """Take down groups that nobody uses any more."""
    for group in groups:
        if group in distributed_c10d._world.pg_map:  # noqa: SLF001
            process_group_lifetime.destroy(group)
