"""Creates the default process group, recreates it after an abort, and protects it from cells.

The default process group and those of the engines belong to nbdist. Scripts often end with
`accelerator.end_training()` or `destroy_process_group()` and start with `init_process_group()`.
In a cell these calls keep the session's groups and destroy only the groups created by cells, so
that the next cell can communicate and train.

A collective that waits for a rank that never calls it ends only when its process group is aborted.
The procedure is the same on CPU and GPU ranks: abort all process groups, then close the
connections between the ranks.

    NCCL (torch 2.13)   `abort` ends its kernels and closes its connections; all ranks must call it
    gloo (torch 2.13)   has no `abort`: the call does nothing, and closing its sockets ends its
                        collectives within milliseconds

The order matters: NCCL's watchdog reports a connection closed before the abort as an error. The
groups stay in torch's registry, because FSDP2 and DeepSpeed look them up by name and rank while
`worker.operations.recover` detaches their engines and creates new groups. A second abort is
harmless.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import inspect
import json
import os
import socket
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

# torch 2.13: its scaler keeps the default group of the time of its import, here none.
from torch.distributed.fsdp import sharded_grad_scaler  # noqa: F401
from torch.distributed.tensor import debug

from nbdist import rank_sets
from nbdist.errors import OptionError, SessionError
from nbdist.worker import rendezvous_store
from nbdist.worker.library_patches import patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.nn.parallel import DistributedDataParallel

Group = distributed.ProcessGroup
Address = tuple[str, int]

_RECREATE_TIMEOUT = dt.timedelta(seconds=30)
"""Timeout for all ranks to recreate the group, when none of them has other work to do."""
PEER_REPLY_S = dt.timedelta(seconds=1.5)
"""Timeout for the other ranks to publish their connections. A suspended rank does not publish
them; a late rank closes the connections from its side."""
ABORT_S = 20.0
"""Timeout of NCCL's abort, which waits for its kernels; torch's default is the group's timeout."""
_PROMPT_TIMEOUT = dt.timedelta(days=7)
"""Timeout of collectives while a user can stop ranks at a prompt."""
STEP_END_S = 1.0
"""Delay of an abort for an optimizer step that the GPU still runs."""
_GROUP_NAMES_PER_ERA = 10_000
"""Offset of the group counter per era: a rank that hung may have created more groups."""

# torch's functions, which ``protect_groups`` replaces
_init, _destroy = distributed_c10d.init_process_group, distributed_c10d.destroy_process_group
_default_timeout = distributed_c10d._get_default_timeout  # noqa: SLF001

_of_engines: weakref.WeakSet[Group] = weakref.WeakSet()

_num_aborts = 0
_step_end: torch.cuda.Event | None = None
"""Recorded after the last optimizer step."""
_was_step_cut = False
"""True if the groups were aborted while the GPU ran an optimizer step."""

_has_user = False
"""True while a cell runs whose ranks a user can stop in the debugger."""

_cell_ranks: Sequence[int] | None = None
"""Ranks that run the current cell; None outside of a cell."""


def set_cell_ranks(ranks: Sequence[int] | None) -> None:
    """Record which ranks run the cell that starts; None at its end."""
    global _cell_ranks  # noqa: PLW0603 - a rank runs one cell at a time
    _cell_ranks = ranks


def set_timeouts(*, has_user: bool) -> None:
    """Extend torch's default timeouts of collectives while ranks can stop in the debugger.

    A running collective keeps the timeout with which it was called, so that it must be long before
    another rank stops. The session detects hangs itself. Timeouts that a user chose are kept.

    Args:
        has_user: whether a user can answer prompts of the cell that starts.
    """
    global _has_user  # noqa: PLW0603 - a rank runs one cell at a time
    _has_user = has_user
    for group in known_groups():
        for device in group._device_types:  # noqa: SLF001
            backend: Any = group._get_backend(device)  # noqa: SLF001
            if backend.name() not in {"gloo", "nccl"}:
                continue
            # torch 2.13 has 10 minutes for "nccl", but 30 for NCCL in "cpu:gloo,cuda:nccl".
            usual = {distributed_c10d.default_pg_timeout, _default_timeout(backend.name())}
            if backend.options._timeout in {_PROMPT_TIMEOUT, *usual}:  # noqa: SLF001
                backend._set_default_timeout(  # noqa: SLF001
                    _PROMPT_TIMEOUT if has_user else distributed_c10d.default_pg_timeout
                )


def require_all_ranks(action: str, advice: str = "", group: Group | None = None) -> None:
    """Raise if the current cell runs on some of the ranks only.

    Args:
        action: what is called, as the subject of a sentence.
        advice: what to use instead of all ranks, such as ", or use ...".
        group: the ranks that communicate. Default: all.

    Raises:
        OptionError: the cell has --ranks, so that a collective would wait forever.
    """
    if _cell_ranks is None or len(_cell_ranks) == distributed.get_world_size():
        return
    members = distributed.get_process_group_ranks(group)
    if not set(members) <= set(_cell_ranks):
        raise OptionError(
            f"{action} communicates with {rank_sets.describe_ranks(members)}, but this cell runs on"
            f" {rank_sets.describe_ranks(_cell_ranks)} only and would wait forever. Run the cell"
            f" without --ranks{advice}."
        )


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


def protect_groups() -> None:
    """Protect the session's process groups from cells; call it once per process."""
    for module in ("torch.distributed", "torch.distributed.distributed_c10d"):
        patch(f"{module}:init_process_group", lambda _: _check_init)
        patch(f"{module}:destroy_process_group", lambda _: _destroy_groups_of_cells)
    patch(
        "torch.distributed.distributed_c10d:_get_default_timeout",
        lambda original: lambda backend: _PROMPT_TIMEOUT if _has_user else original(backend),
    )
    patch("torch.nn.parallel:DistributedDataParallel._ddp_init_helper", _keep_group_alive)


def _check_init(*args: Any, **kwargs: Any) -> None:
    """Do nothing if the default group exists and matches the arguments.

    Raises:
        SessionError: the backend, world size or rank differs from the session's.
    """
    if not distributed.is_initialized():
        _init(*args, **kwargs)
        return
    arguments = inspect.signature(_init).bind(*args, **kwargs).arguments
    config = str(distributed.get_backend_config())
    own = {"world_size": distributed.get_world_size(), "rank": distributed.get_rank()}
    wrong = [
        f"{name}={arguments[name]}"
        for name in own
        if arguments.get(name, -1) not in {-1, own[name]}
    ]
    backend = str(arguments.get("backend") or "").lower()
    if any(part not in config for part in backend.split(",")):
        wrong.append(f"backend={backend!r}")
    if wrong:
        raise SessionError(
            f"The session already has a process group ({config}, rank {own['rank']} of"
            f" {own['world_size']}), but init_process_group() got {wrong[0]}. Remove the call or"
            " create a group with torch.distributed.new_group()."
        )


def _destroy_groups_of_cells(group: Group | None = None) -> None:
    """Destroy a group created by a cell; without a group, all groups created by cells."""
    world = distributed.group.WORLD
    if group is not None and group is not world:
        if group not in _of_engines:
            _destroy(group)
        return
    for known in reversed(known_groups()):
        if known is not world and known not in _of_engines:
            _destroy(known)


def _keep_group_alive(original: Callable[..., None]) -> Callable[..., None]:
    """Keep a reference to DDP's process group until its Reducer has been freed.

    Freeing a ProcessGroupGloo (torch 2.13) while holding the GIL can deadlock: the destructor
    joins a worker thread, which may be waiting for the GIL to free the tensors of its last
    collective. Python's reference to a group releases the GIL first; DDP's C++ Reducer does not.
    Two Python objects own the Reducer: its wrapper and the Logger. Neither takes part in garbage
    collection, so a finalizer runs after the C++ object is freed.
    """

    def make_reducer(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        original(ddp, *args, **kwargs)
        for holder in (ddp.reducer, ddp.logger):
            # The finalizer itself holds the reference.
            weakref.finalize(holder, lambda _: None, ddp.process_group).atexit = False

    return make_reducer


def create_default_group(store: Store, *, on_gpu: bool) -> None:
    """Create the default process group and set this rank's device.

    Args:
        store: store for the rendezvous.
        on_gpu: use NCCL for CUDA tensors and gloo for CPU tensors, otherwise only gloo.
    """
    # CleanUpOnly. torch elastic (2.13) sets 1 (TearDown), with which NCCL's watchdog terminates a
    # rank whose peer has aborted its groups, even after its own collectives were aborted.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
    # Otherwise the heartbeat monitor terminates a rank 8 minutes after an error of a collective,
    # and the end of a group waits for the dump of its traces.
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "100"
    device = None
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    _init(
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
    abort_groups()
    _close_connections(_exchange_addresses(rendezvous_store.get_store(), f"era{era}"))
    old = known_groups()
    world = distributed.group.WORLD
    distributed_c10d._update_default_pg(None)  # noqa: SLF001
    distributed_c10d._world.group_count = era * _GROUP_NAMES_PER_ERA  # noqa: SLF001
    store: Store = rendezvous_store.get_store()
    default_timeout = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(_RECREATE_TIMEOUT)
    try:
        create_default_group(PrefixStore(f"era{era}", store), on_gpu=on_gpu)
        verify_group(on_gpu=on_gpu)
    except BaseException:
        if not distributed.is_initialized():  # so that get_rank() still works
            distributed_c10d._update_default_pg(world)  # noqa: SLF001
        raise
    finally:
        store.set_timeout(default_timeout)
    # deepspeed 0.19.8 caches a clone of the default group and builds every engine on it; only its
    # own `destroy_process_group` clears the cache.
    groups = sys.modules.get("deepspeed.utils.groups")
    if groups is not None:
        groups._release_process_group_references()  # noqa: SLF001
    # torch 2.13 treats meshes of equal shape as the same: results would be placed on the old mesh.
    debug._clear_sharding_prop_cache()  # noqa: SLF001
    return old


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
            raise RuntimeError(f"all_reduce of ones over {world_size} ranks returned {total}.")


def destroy_groups(groups: list[distributed.ProcessGroup]) -> None:
    """Destroy groups that are no longer used."""
    for group in groups:
        if group in known_groups():
            _destroy(group)


# -- optimizer steps, whose kernels may still be enqueued behind collectives


def finish_backward() -> None:
    """Wait until this rank's GPU has the gradients of all ranks; called before a step.

    NCCL's collectives are only enqueued, so that the step would run with incomplete gradients if
    they are aborted, and ranks that wait for a failed one would be a step ahead of it.

    Raises:
        RuntimeError: the process groups were aborted meanwhile.
    """
    if not _uses_gpu() or distributed.get_world_size() == 1:
        return
    num_aborts = _num_aborts
    torch.cuda.current_stream().synchronize()
    if _num_aborts != num_aborts:
        raise RuntimeError("The process groups were aborted before this optimizer step.")


def record_step() -> None:
    """Record that an optimizer step has been enqueued."""
    global _step_end  # noqa: PLW0603 - a rank has one GPU
    if _uses_gpu():
        _step_end = torch.cuda.current_stream().record_event()


def was_step_cut() -> bool:
    """Return whether an abort has ended collectives of an optimizer step, since the last call."""
    global _was_step_cut
    was_cut, _was_step_cut = _was_step_cut, False
    return was_cut


def _uses_gpu() -> bool:
    return torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()


def _is_step_running() -> bool:
    """Return whether the GPU still runs the last step; one whose collectives work ends soon."""
    if _step_end is None:
        return False
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # on this thread
    deadline = time.monotonic() + STEP_END_S
    try:
        while not _step_end.query():
            if time.monotonic() > deadline:
                return True
            time.sleep(0.01)
    except RuntimeError:  # the device failed
        return True
    return False


# -- abort; on the control thread, except while all ranks recreate the default group


def abort_collectives(pids: Iterable[int], name: str) -> None:
    """Abort all collectives of this rank and close its connections to the others.

    Args:
        pids: process ids of all ranks.
        name: name of this abort, the same on all ranks.

    Raises:
        RuntimeError: a group was not aborted; the connections are closed nevertheless.
    """
    try:
        abort_groups()
    finally:
        _close_connections(_peer_addresses(pids, name))


def abort_groups() -> None:
    """Abort every process group without removing it from torch's registry.

    Raises:
        RuntimeError: aborting a group failed or timed out.
    """
    global _num_aborts, _was_step_cut  # noqa: PLW0603 - one process has one default group
    _num_aborts += 1
    _was_step_cut |= _is_step_running()
    names: dict[Any, str] = dict(distributed_c10d._world.pg_names)  # noqa: SLF001
    # the same order as in torch 2.13's _abort_process_group
    groups = sorted(names, key=names.__getitem__, reverse=True)
    errors: list[BaseException] = []

    def abort() -> None:
        try:
            with _nccl_calls_grouped(groups):
                for group in groups:
                    group.abort()
        except Exception as error:  # noqa: BLE001 - raised again on the thread that waits
            errors.append(error)

    # In a thread: NCCL's abort may hang, and this rank must reply nevertheless.
    thread = threading.Thread(target=abort, name="nbdist-abort", daemon=True)
    thread.start()
    thread.join(ABORT_S)
    if thread.is_alive():
        raise RuntimeError(f"aborting the process groups takes more than {ABORT_S:.0f} s")
    if errors:
        raise RuntimeError(f"the process groups could not be aborted: {errors[0]}") from errors[0]


@contextlib.contextmanager
def _nccl_calls_grouped(groups: Iterable[distributed.ProcessGroup]) -> Iterator[None]:
    """Abort several NCCL communicators without waiting for each other.

    https://github.com/pytorch/pytorch/issues/119797
    """
    backend: Any = None
    for group in groups:
        with contextlib.suppress(RuntimeError):  # CPU ranks have no NCCL backend
            backend = group._get_backend(torch.device("cuda"))  # noqa: SLF001
        if hasattr(backend, "_group_start"):
            break
    else:
        yield
        return
    backend._group_start()  # noqa: SLF001
    try:
        yield
    finally:
        backend._group_end()  # noqa: SLF001


def _peer_addresses(pids: Iterable[int], name: str) -> set[Address]:
    store = rendezvous_store.get_store()
    if not isinstance(store, rendezvous_store.NodeAgentStore):
        with contextlib.suppress(psutil.AccessDenied):  # /proc may be mounted with hidepid
            others = [pid for pid in pids if pid != os.getpid()]
            return {local for pid in others for local, _, _ in _connections(pid)}
    return _exchange_addresses(store, name)


def _exchange_addresses(store: Store, name: str) -> set[Address]:
    """Exchange the local addresses through the store: a pid is only valid on its node."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    keys = [f"release/{name}/{number}" for number in range(world_size)]
    addresses = [local for local, _, _ in _connections(os.getpid())]
    store.set(keys[rank], json.dumps(addresses))
    with contextlib.suppress(RuntimeError):  # some ranks do not publish: use what is available
        store.wait(keys, PEER_REPLY_S)
    others = [key for key in keys if key != keys[rank] and store.check([key])]
    return {(ip, port) for key in others for ip, port in json.loads(store.get(key))}


def _close_connections(peer_addresses: set[Address]) -> None:
    """Close this rank's connections to these addresses."""
    for _, remote, fd in _connections(os.getpid()):
        # A duplicate of torch's descriptor; OSError if the connection is already closed.
        with contextlib.suppress(OSError):
            if remote in peer_addresses:
                with socket.socket(fileno=os.dup(fd)) as duplicate:
                    duplicate.shutdown(socket.SHUT_RDWR)


def _connections(pid: int) -> list[tuple[Address, Address, int]]:
    """Return the TCP connections of a process: local address, remote address, descriptor."""
    with contextlib.suppress(psutil.NoSuchProcess):
        connections: list[Any] = psutil.Process(pid).net_connections("tcp")
        return [
            (_address(connection.laddr), _address(connection.raddr), connection.fd)
            for connection in connections
            if connection.raddr
        ]
    return []


def _address(end: Any) -> Address:
    return end.ip.removeprefix("::ffff:"), end.port  # IPv4 on an IPv6 socket
