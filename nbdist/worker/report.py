"""`report()`: a row of scalars on its way to the kernel, without waiting for anything.

Runs on every rank. The training loop appends rows; one daemon thread publishes them in
batches and in order. A number is ready at once. A CUDA tensor is copied into pinned memory
on the stream that computes it, and its row is ready when an event behind the copy has
passed: no synchronisation, no collective.
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
from typing import TYPE_CHECKING, Any, Protocol

import torch

from nbdist.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

INTERVAL_S = 0.2
"""Shortest time between two batches."""
_BATCH_ROWS = 4096
_SLOTS = 1024
_MAX_STEP = 1 << 62
_OWN_NAMES = frozenset({"step", "time"})

_log = logging.getLogger(__name__)


class Copies(Protocol):
    """Values of one row that are on their way from a device."""

    def ready(self) -> bool:
        """Whether all have arrived."""

    def values(self) -> dict[str, float]:
        """Give the values by name; to be called once, when they are ready."""


class Reporter:
    """The user's `report`, and what publishes its rows.

    A row holds "step", "time" (unix seconds of the call) and the scalars by name.
    """

    def __init__(
        self,
        publish: Callable[[list[dict[str, float]]], None],
        *,
        copy: Callable[[Mapping[str, torch.Tensor]], Copies] | None = None,
    ) -> None:
        """Start the thread that calls `publish` with batches of rows.

        `publish` is called there or in `flush`, never twice at a time. `copy` begins to
        copy device tensors; tests give their own.
        """
        self._publish = publish
        self._copy = copy or PinnedMemory().copy
        self.next_step = 0
        """Of a call that gives none."""
        self._pending: deque[tuple[dict[str, float], Copies | None]] = deque()
        self._publishing = threading.Lock()
        self._wake, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="nbdist-report", daemon=True)
        self._thread.start()

    def report(self, step: int | None = None, **scalars: Any) -> None:
        """Send scalars of a training step to the notebook.

        `report(loss=loss)` arrives in `nbdist.session().metrics["loss"]`. Costs
        microseconds, waits for no device and no other rank; each rank reports its own.

        Args:
            step: where none is given, calls are counted from 0, on through later cells
                and on from a step that was given.
            **scalars: numbers, or tensors of one element on any device.

        Raises:
            OptionError: a value that is no scalar; nothing of the call is reported.
        """
        step = self.next_step if step is None else _checked_step(step)
        row: dict[str, float] = {"step": step, "time": time.time()}
        if not scalars or not _OWN_NAMES.isdisjoint(scalars):
            raise _refused_names(scalars)
        distant: dict[str, torch.Tensor] = {}
        for name, value in scalars.items():
            if type(value) is float:
                row[name] = value
            elif isinstance(value, torch.Tensor) and _is_distant(value):
                distant[name] = _one_element(name, value)
                row[name] = math.nan  # keeps its place among the names
            else:
                row[name] = _number(name, value)
        self._pending.append((row, self._copy(distant) if distant else None))
        self.next_step = step + 1
        if not self._wake.is_set():
            self._wake.set()

    def flush(self, timeout_s: float) -> bool:
        """Publish what is pending, waiting at most `timeout_s` for copies; True if all is."""
        deadline = time.monotonic() + timeout_s
        self._publish_ready()
        while self._pending and time.monotonic() < deadline:
            self._closed.wait(0.001)
            self._publish_ready()
        return not self._pending

    def close(self) -> None:
        """Publish what is ready and end the thread."""
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
                if self._pending:  # a row came in between
                    self._wake.set()
            self._closed.wait(INTERVAL_S)

    def _publish_ready(self) -> None:
        """Publish the rows in front that are ready: rows never overtake one another."""
        with self._publishing:
            while rows := self._take_ready():
                try:
                    self._publish(rows)
                except Exception:  # noqa: BLE001 - a lost socket must not end the thread
                    _log.exception("%d rows of report() could not be published", len(rows))

    def _take_ready(self) -> list[dict[str, float]]:
        rows: list[dict[str, float]] = []
        while self._pending and len(rows) < _BATCH_ROWS:
            row, copies = self._pending[0]
            if copies is not None:
                if not copies.ready():
                    break
                row.update(copies.values())
            self._pending.popleft()
            rows.append(row)
        return rows


# ---------------------------------------------------------------------------- devices


class PinnedMemory:
    """Slots of pinned memory for one number each, reused: pinning can stop the device."""

    def __init__(self) -> None:
        """Pin nothing yet."""
        self._free: deque[torch.Tensor] = deque()

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> Copies:
        """Begin to copy; returns at once."""
        if torch.cuda.is_current_stream_capturing():
            message = (
                "report() was called while a CUDA graph is captured, where values do not"
                " exist yet; call it after the replay."
            )
            raise OptionError(message)
        slots = {name: self._slot() for name in tensors}
        for name, tensor in tensors.items():
            slots[name].copy_(tensor.detach().reshape(()), non_blocking=True)
        events = [_event_behind(device) for device in {t.device for t in tensors.values()}]
        return _DeviceCopies(slots, events, self._free)

    def _slot(self) -> torch.Tensor:
        if not self._free:
            # In inference mode these would be tensors that nothing else may write into.
            with torch.inference_mode(mode=False):
                chunk = torch.empty(_SLOTS, dtype=torch.float64, device="cpu", pin_memory=True)
            self._free.extend(chunk[i] for i in range(_SLOTS))
        return self._free.popleft()


@dataclass(slots=True)
class _DeviceCopies:
    """Copies of one row into pinned slots, and the events behind them."""

    slots: dict[str, torch.Tensor]
    events: list[torch.cuda.Event]
    free: deque[torch.Tensor]
    """Where the slots go back to."""
    lost: bool = False

    def ready(self) -> bool:
        """Whether all events have passed."""
        _allow_captures()
        try:
            return all(event.query() for event in self.events)
        except RuntimeError as error:  # the device failed: nothing will arrive any more
            _log.warning("values of report() were lost with their device: %s", error)
            self.lost = True
            return True

    def values(self) -> dict[str, float]:
        """Read the slots and give them back; NaN where the device failed."""
        if self.lost:  # never used again: a copy may still come
            return dict.fromkeys(self.slots, math.nan)
        values = {name: slot.item() for name, slot in self.slots.items()}
        self.free.extend(self.slots.values())
        return values


def _allow_captures() -> None:
    """Let this thread ask for events while the main thread captures a CUDA graph.

    A capture in the default mode, "global", becomes invalid where another thread asks, unless
    that one's own mode is thread-local; ProcessGroupNCCL's watchdog does the same. The driver is
    asked, since the runtime could make a context on GPU 0.
    """
    if _thread.allows or threading.current_thread() is threading.main_thread():
        return
    _thread.allows = True
    mode = ctypes.c_int(_THREAD_LOCAL)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:  # another kind of GPU
        _log.info("report() leaves the capture mode of its thread: %s", error)
        return
    if status := driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)):
        _log.warning("report() may break the capture of a CUDA graph: CUDA error %d", status)


class _Thread(threading.local):
    """What this thread has done."""

    allows = False


_thread = _Thread()
_THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL."""


def _event_behind(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _is_distant(tensor: torch.Tensor) -> bool:
    """Whether reading the tensor would wait for a device."""
    return tensor.is_cuda


# ---------------------------------------------------------------------------- checking


def _number(name: str, value: Any) -> float:
    """The value as a float, where it is one number."""
    if isinstance(value, torch.Tensor):
        value = _item(name, value)
    elif getattr(value, "size", None) == 1 and hasattr(value, "item"):  # NumPy
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise _no_scalar(name, f"is {_called(value)}")
    try:
        return float(value)
    except OverflowError as error:
        raise _no_scalar(name, "is too large for a float") from error


def _item(name: str, tensor: torch.Tensor) -> object:
    """Read a tensor whose value is here; quick for the usual one."""
    if type(tensor) is torch.Tensor:
        try:
            return tensor.item()
        except (RuntimeError, ValueError):
            return _one_element(name, tensor).item()  # says what is wrong with it
    return _one_element(name, tensor).item()


def _one_element(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if hasattr(tensor, "full_tensor"):
        advice = "a DTensor; its value needs a collective, call .full_tensor() on all ranks first"
        raise _no_scalar(name, f"is {advice}")
    if tensor.numel() != 1:
        raise _no_scalar(name, f"has shape {tuple(tensor.shape)}, take its mean() or sum()")
    if tensor.is_complex() or tensor.is_meta or tensor.layout != torch.strided:
        raise _no_scalar(name, f"is a {tensor.layout} {tensor.dtype} tensor on {tensor.device}")
    return tensor


def _checked_step(step: Any) -> int:
    try:  # a tensor could wait for a device here
        number = -1 if isinstance(step, (bool, torch.Tensor)) else operator.index(step)
    except TypeError:
        number = -1
    if 0 <= number < _MAX_STEP:
        return number
    message = (
        f"step {_called(step)} is not allowed in report(); use a whole number from 0 as step"
        " and give scalars by name, as in report(loss=loss)."
    )
    raise OptionError(message)


def _refused_names(scalars: Mapping[str, object]) -> OptionError:
    if not scalars:
        return OptionError("report() got no scalars; give them by name, as in report(loss=loss).")
    return OptionError("report(time=...) is taken by the time of the row; use another name.")


def _no_scalar(name: str, given: str) -> OptionError:
    return OptionError(
        f"report({name}=...) {given}; allowed are real numbers and tensors of one element."
    )


def _called(value: object) -> str:
    text = repr(value)
    shown = f" ({text})" if isinstance(value, (str, int, float)) and len(text) <= 40 else ""  # noqa: PLR2004
    return f"of type {type(value).__name__}{shown}"
