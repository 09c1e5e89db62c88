"""Which process groups a cell can end, and how their memory is freed; runs on a rank.

The default process group and those of the session's engines belong to nbdist. A script ends with
`accelerator.end_training()` or `destroy_process_group()`, and may begin with
`init_process_group()`; in a cell these leave the session's groups in place and destroy the groups
that cells have made, so that the next cell can communicate and train.

A ProcessGroupGloo (torch 2.13) that is freed while its thread holds the GIL deadlocks: the
destructor joins a worker thread, and that thread may be waiting for the GIL, to free the tensors
of its last collective. Python's own reference to a group releases the GIL first. DDP's C++
Reducer does not, so Python keeps a reference for as long as a Reducer exists.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from typing import TYPE_CHECKING, Any

from torch import distributed
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from nbdist.errors import SessionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Group = distributed.ProcessGroup

init = distributed_c10d.init_process_group
"""torch's own."""
destroy = distributed_c10d.destroy_process_group
"""torch's own."""

_of_engines: weakref.WeakSet[Group] = weakref.WeakSet()


def known_groups() -> list[Group]:
    """Return the process groups that torch knows on this rank, the default one among them."""
    return list(distributed_c10d._world.pg_map)  # noqa: SLF001 - torch 2.13 has no public name


@contextlib.contextmanager
def owned_by_engines() -> Iterator[None]:
    """Protect the groups that are made in this context from cells that destroy all groups."""
    before = set(known_groups())
    try:
        yield
    finally:
        _of_engines.update(set(known_groups()) - before)


def install() -> None:
    """Protect the session's process groups; once in a rank's life."""
    for module in (distributed, distributed_c10d):
        vars(module).update(
            init_process_group=_init_process_group, destroy_process_group=_destroy_process_group
        )
    make_reducer = _outlived_by_its_group(DistributedDataParallel._ddp_init_helper)  # noqa: SLF001
    setattr(DistributedDataParallel, "_ddp_init_helper", make_reducer)  # noqa: B010 - as mypy wants


@functools.wraps(init)
def _init_process_group(*args: Any, **kwargs: Any) -> None:
    """Do nothing where the default group exists and is what is asked for.

    Raises:
        SessionError: the session's ranks have another backend or number, or this is another rank.
    """
    if not distributed.is_initialized():
        init(*args, **kwargs)
        return
    given = inspect.signature(init).bind(*args, **kwargs).arguments
    config = str(distributed.get_backend_config())
    has = {"world_size": distributed.get_world_size(), "rank": distributed.get_rank()}
    wrong = [f"{name}={given[name]}" for name in has if given.get(name, -1) not in {-1, has[name]}]
    backend = str(given.get("backend") or "").lower()
    if any(part not in config for part in backend.split(",")):
        wrong.append(f"backend={backend!r}")
    if wrong:
        message = (
            f"the ranks of this session are connected already ({config}, rank {has['rank']} of"
            f" {has['world_size']}) and init_process_group() asks for {wrong[0]}; leave it out, or"
            " make a group of your own with torch.distributed.new_group()."
        )
        raise SessionError(message)


@functools.wraps(destroy)
def _destroy_process_group(group: Group | None = None) -> None:
    """Destroy a group that a cell has made; all of them where no group is given."""
    world = distributed.group.WORLD
    if group is not None and group is not world:
        if group not in _of_engines:
            destroy(group)
        return
    for known in reversed(known_groups()):
        if known is not world and known not in _of_engines:
            destroy(known)


def _outlived_by_its_group(original: Callable[..., None]) -> Callable[..., None]:
    """Keep a reference to DDP's process group until its Reducer has been freed.

    torch 2.13 has two Python objects that keep the C++ Reducer: itself and its Logger. Neither
    takes part in garbage collection, so a finalizer runs after the C++ object is gone.
    """

    @functools.wraps(original)
    def make_reducer(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        original(ddp, *args, **kwargs)
        for holder in (ddp.reducer, ddp.logger):
            weakref.finalize(holder, _free, ddp.process_group).atexit = False

    return make_reducer


def _free(_: Group) -> None:
    """Drop the reference, which Python does when this returns."""
