"""`report()`: sends rows of scalars to the notebook without blocking the training loop.

The training loop appends rows; one daemon thread publishes them in batches and in order. A
number is ready at once. A CUDA tensor is copied to pinned memory on the current stream, and
its row is ready when an event recorded after the copy has completed: no synchronization and
no collective.
"""

from __future__ import annotations

import ctypes
import logging
import math
import numbers
import operator
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nbdist.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PUBLISH_INTERVAL_S = 0.2
"""Shortest time between two batches."""
_BATCH_ROWS = 4096
_SLOTS = 1024
_MAX_STEP = 1 << 62
_OWN_NAMES = frozenset({"step", "time"})

_log = logging.getLogger(__name__)


class Reporter:
    """Implementation of the user's `report`, with the thread that publishes its rows.

    A row holds "step", "time" (Unix time of the call in seconds) and the scalars by name.
    """

    def __init__(self, publish: Callable[[list[dict[str, float]]], None]) -> None:
        """Start the thread that calls `publish` with batches of rows.

        Args:
            publish: called on that thread or in `flush`, never concurrently.
        """
        self._publish, self._pool = publish, PinnedScalarPool()
        self.next_step = 0
        """Step of the next call without an explicit one."""
        self._pending: deque[tuple[dict[str, float], PendingScalarCopies | None]] = deque()
        self._publishing = threading.Lock()
        self._wake, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="nbdist-report", daemon=True)
        self._thread.start()

    def report(self, step: int | None = None, **scalars: Any) -> None:
        """Send scalars of a training step to the notebook.

        `report(loss=loss)` appears in `nbdist.session().metrics["loss"]`. A call takes
        microseconds and does not synchronize with the device or other ranks; each rank
        reports its own values.

        Args:
            step: by default, one more than in the previous call, starting at 0; the count
                continues across cells.
            **scalars: numbers, or tensors with one element on any device.

        Raises:
            OptionError: a value is not a scalar; nothing from the call is reported.
        """
        step = self.next_step if step is None else _checked_step(step)
        row: dict[str, float] = {"step": step, "time": time.time()}
        if not scalars:
            raise OptionError(
                "report() got no scalars. Pass them by name, as in report(loss=loss)."
            )
        if not _OWN_NAMES.isdisjoint(scalars):
            raise OptionError(
                "report(time=...) is reserved for the time of the row. Use another name."
            )
        distant: dict[str, torch.Tensor] = {}
        for name, value in scalars.items():
            if type(value) is float:
                row[name] = value
            elif isinstance(value, torch.Tensor) and value.is_cuda:  # reading it would synchronize
                distant[name] = _one_element(name, value)
                row[name] = math.nan  # placeholder that keeps the order of the names
            else:
                row[name] = _number(name, value)
        self._pending.append((row, self._pool.copy_async(distant) if distant else None))
        self.next_step = step + 1
        if not self._wake.is_set():
            self._wake.set()

    def flush(self, timeout_s: float) -> bool:
        """Publish pending rows, waiting at most `timeout_s` for copies; True if none is left."""
        deadline = time.monotonic() + timeout_s
        self._publish_ready()
        while self._pending and time.monotonic() < deadline:
            self._closed.wait(0.001)
            self._publish_ready()
        return not self._pending

    def close(self) -> None:
        """Publish the rows that are ready and stop the thread."""
        self._closed.set()
        self._wake.set()
        self._thread.join(timeout=1.0)
        self._publish_ready()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.wait()
            self._publish_ready()
            if not self._pending:
                self._wake.clear()
                if self._pending:  # a row was added in between
                    self._wake.set()
            self._closed.wait(PUBLISH_INTERVAL_S)

    def _publish_ready(self) -> None:
        """Publish the rows up to the first one that is not ready, which keeps their order."""
        with self._publishing:
            while rows := self._pop_ready_rows():
                try:
                    self._publish(rows)
                except Exception:  # noqa: BLE001 - a closed socket must not end the thread
                    _log.exception("%d rows of report() could not be published", len(rows))

    def _pop_ready_rows(self) -> list[dict[str, float]]:
        rows: list[dict[str, float]] = []
        while self._pending and len(rows) < _BATCH_ROWS:
            row, copies = self._pending[0]
            if copies is not None:
                if not copies.is_ready():
                    break
                row.update(copies.values())
            self._pending.popleft()
            rows.append(row)
        return rows


# ---------------------------------------------------------------------------- devices


class PinnedScalarPool:
    """Pool of one-element pinned tensors, reused because pinning can synchronize the device."""

    def __init__(self) -> None:
        self._free: deque[torch.Tensor] = deque()

    def copy_async(self, tensors: Mapping[str, torch.Tensor]) -> PendingScalarCopies:
        """Start the copies and return immediately."""
        if torch.cuda.is_current_stream_capturing():
            raise OptionError(
                "report() was called during CUDA graph capture, where tensors have no values"
                " yet. Call it after the replay."
            )
        slots: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if not self._free:
                # Inference tensors could not be written to outside inference mode.
                with torch.inference_mode(mode=False):
                    chunk = torch.empty(_SLOTS, dtype=torch.float64, device="cpu", pin_memory=True)
                self._free.extend(chunk[i] for i in range(_SLOTS))
            slots[name] = self._free.popleft()
            slots[name].copy_(tensor.detach().reshape(()), non_blocking=True)
        devices = {tensor.device for tensor in tensors.values()}
        events = [torch.cuda.current_stream(device).record_event() for device in devices]
        return PendingScalarCopies(slots, events, self._free)


@dataclass(slots=True)
class PendingScalarCopies:
    """Asynchronous copies of one row into pinned slots, with the events recorded after them."""

    slots: dict[str, torch.Tensor]
    events: list[torch.cuda.Event]
    free: deque[torch.Tensor]
    """Pool that the slots return to."""
    lost: bool = False

    def is_ready(self) -> bool:
        """Return whether all events have completed."""
        _allow_captures()
        try:
            return all(event.query() for event in self.events)
        except RuntimeError as error:  # the device failed: the copies will never complete
            _log.warning("values of report() were lost with their device: %s", error)
            self.lost = True
            return True

    def values(self) -> dict[str, float]:
        """Read the slots and return them to the pool; NaN if the device failed. Call it once."""
        if self.lost:  # do not reuse the slots: a copy may still write to them
            return dict.fromkeys(self.slots, math.nan)
        values = {name: slot.item() for name, slot in self.slots.items()}
        self.free.extend(self.slots.values())
        return values


_thread = threading.local()
"""Has `allows` once the capture mode of the thread is set."""
_THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL."""


def _allow_captures() -> None:
    """Allow this thread to query events while the main thread captures a CUDA graph.

    An event query on another thread invalidates a capture in the default "global" mode unless
    that thread's own capture mode is thread-local; ProcessGroupNCCL's watchdog does the same.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main or getattr(_thread, "allows", False):
        return
    _thread.allows = True
    mode = ctypes.c_int(_THREAD_LOCAL)
    try:
        # The driver API, because the runtime API could create a context on GPU 0.
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:  # not an NVIDIA GPU
        _log.info("report() does not change the capture mode of its thread: %s", error)
        return
    if status := driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)):
        _log.warning("report() may invalidate a CUDA graph capture: CUDA error %d", status)


# ---------------------------------------------------------------------------- checking


def _number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor):
        # A plain tensor is checked only if it has no item: the check has a more precise error.
        tensor = value if type(value) is torch.Tensor else _one_element(name, value)
        try:
            value = tensor.item()
        except (RuntimeError, ValueError):
            value = _one_element(name, tensor).item()
    elif getattr(value, "size", None) == 1 and hasattr(value, "item"):  # NumPy
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise _no_scalar(name, _describe(value))
    try:
        return float(value)
    except OverflowError as error:
        raise _no_scalar(name, "a number too large for a float") from error


def _one_element(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if hasattr(tensor, "full_tensor"):
        description = (
            "a DTensor. Its value needs a collective: call .full_tensor() on all ranks first"
        )
        raise _no_scalar(name, description)
    if tensor.numel() != 1:
        description = f"a tensor of shape {tuple(tensor.shape)}. Take its mean() or sum()"
        raise _no_scalar(name, description)
    if tensor.is_complex() or tensor.is_meta or tensor.layout != torch.strided:
        raise _no_scalar(name, f"a {tensor.layout} {tensor.dtype} tensor on {tensor.device}")
    return tensor


def _checked_step(step: Any) -> int:
    try:  # not for a tensor: its __index__ could synchronize with a device
        number = -1 if isinstance(step, (bool, torch.Tensor)) else operator.index(step)
    except TypeError:
        number = -1
    if 0 <= number < _MAX_STEP:
        return number
    raise OptionError(
        f"step of report() must be an integer >= 0 and < 2**62, got {_describe(step)}."
        " Pass scalars by name, as in report(loss=loss)."
    )


def _no_scalar(name: str, description: str) -> OptionError:
    return OptionError(
        f"report({name}=...) must be a real number or a tensor with one element, got {description}."
    )


def _describe(value: object) -> str:
    """Return the type of a value for an error message, with a short value in parentheses."""
    text = repr(value)
    shown = f" ({text})" if isinstance(value, (str, int, float)) and len(text) <= 40 else ""  # noqa: PLR2004
    return f"{type(value).__name__}{shown}"
