"""Protects the session's process groups from cells, and frees groups without a deadlock.

The default process group and those of the engines belong to nbdist. Scripts often end with
`accelerator.end_training()` or `destroy_process_group()` and start with `init_process_group()`.
In a cell these calls keep the session's groups and destroy only the groups created by cells, so
that the next cell can communicate and train.

Freeing a ProcessGroupGloo (torch 2.13) while holding the GIL can deadlock: the destructor joins
a worker thread, which may be waiting for the GIL to free the tensors of its last collective.
Python's reference to a group releases the GIL first. DDP's C++ Reducer does not, so Python keeps
a reference for as long as a Reducer exists.
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
"""The original torch function."""
destroy = distributed_c10d.destroy_process_group
"""The original torch function."""

_of_engines: weakref.WeakSet[Group] = weakref.WeakSet()


def known_groups() -> list[Group]:
    """Return the process groups registered on this rank, including the default group."""
    return list(distributed_c10d._world.pg_map)  # noqa: SLF001 - torch 2.13 has no public name


@contextlib.contextmanager
def owned_by_engines() -> Iterator[None]:
    """Protect the groups created in this context from `destroy_process_group` in cells."""
    before = set(known_groups())
    try:
        yield
    finally:
        _of_engines.update(set(known_groups()) - before)


def install() -> None:
    """Patch torch to protect the session's process groups; call it once per process."""
    for module in (distributed, distributed_c10d):
        vars(module).update(
            init_process_group=_init_process_group, destroy_process_group=_destroy_process_group
        )
    make_reducer = _outlived_by_its_group(DistributedDataParallel._ddp_init_helper)  # noqa: SLF001
    setattr(DistributedDataParallel, "_ddp_init_helper", make_reducer)  # noqa: B010 - as mypy wants


@functools.wraps(init)
def _init_process_group(*args: Any, **kwargs: Any) -> None:
    """Do nothing if the default group exists and matches the arguments.

    Raises:
        SessionError: the backend, world size or rank differs from the session's.
    """
    if not distributed.is_initialized():
        init(*args, **kwargs)
        return
    given = inspect.signature(init).bind(*args, **kwargs).arguments
    config = str(distributed.get_backend_config())
    own = {"world_size": distributed.get_world_size(), "rank": distributed.get_rank()}
    wrong = [f"{name}={given[name]}" for name in own if given.get(name, -1) not in {-1, own[name]}]
    backend = str(given.get("backend") or "").lower()
    if any(part not in config for part in backend.split(",")):
        wrong.append(f"backend={backend!r}")
    if wrong:
        message = (
            f"The session already has a process group ({config}, rank {own['rank']} of"
            f" {own['world_size']}), but init_process_group() got {wrong[0]}. Remove the call or"
            " create a group with torch.distributed.new_group()."
        )
        raise SessionError(message)


@functools.wraps(destroy)
def _destroy_process_group(group: Group | None = None) -> None:
    """Destroy a group created by a cell; without a group, all groups created by cells."""
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

    In torch 2.13 two Python objects own the C++ Reducer: its wrapper and the Logger. Neither
    takes part in garbage collection, so a finalizer runs after the C++ object is freed.
    """

    @functools.wraps(original)
    def make_reducer(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        original(ddp, *args, **kwargs)
        for holder in (ddp.reducer, ddp.logger):
            weakref.finalize(holder, _free, ddp.process_group).atexit = False

    return make_reducer


def _free(_: Group) -> None:
    """Drop the reference, which is the argument itself."""
