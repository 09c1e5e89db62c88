"""What an open panel costs the training, and whether it keeps up with a flood of `report()`.

Training rounds with and without a panel take turns on the same ranks, some seconds each, so that
a slow moment of the machine meets both. The kernel's client stands for the front end: it reads
every message of the panel, as a page would.
"""

from __future__ import annotations

import struct
import sys
import time
from typing import TYPE_CHECKING, Any

from kernels import Kernel
from results import Row, middle
from training import LOOP, our_seconds, speed_row

if TYPE_CHECKING:
    from collections.abc import Iterator

FLOOD_S = 60
RATE = 1000
WARM_S = 10.0
"""Into the flood: memory is compared from then on."""
GROWTH = 32 << 20
"""Bytes: all rows are kept in `Session.metrics`, 2 ranks x 1,000/s x 60 s x 28 bytes are 3 MiB."""
WIDGET = "application/vnd.jupyter.widget-view+json"
BUNDLE = """
import pathlib, nbdist.panel.protocol as bundled
if not bundled.has_built_assets():
    bundled.SCRIPT = pathlib.Path("panel.js")
    bundled.SCRIPT.write_text("export default () => ({})")
    bundled.STYLE = pathlib.Path("panel.css")
    bundled.STYLE.write_text("")
"""
FLOOD = f"""%%distribute
import time
begin = time.perf_counter()
for i in range({FLOOD_S * RATE}):
    report(flood=float(i))
    wait = begin + (i + 1) / {RATE} - time.perf_counter()
    if wait > 0:
        time.sleep(wait)
"""
CLOSE = "from nbdist import panel as _p; _p.panel_data(nbdist.session()).panel.freeze()"


def measure() -> Iterator[Row]:
    with Kernel(sys.executable) as kernel:
        kernel.run("%load_ext nbdist")
        kernel.run(f"import nbdist\n{BUNDLE}")
        kernel.run(f"%%distribute -n 2 --precision no\n{LOOP.setup}")
        yield training(kernel)
        kernel.run("%nbdist panel")
        yield from flood(kernel)


def training(kernel: Kernel) -> Row:
    """Steps a second with a panel against none."""

    def beside_panel() -> float:
        kernel.run("%nbdist panel")  # makes the plan, too
        seconds = our_seconds(kernel, LOOP)
        kernel.run(CLOSE)
        return seconds

    name = "training with report() every step: panel open against none"
    return speed_row(name, beside_panel, lambda: our_seconds(kernel, LOOP), limit=0.98)


def flood(kernel: Kernel) -> Iterator[Row]:
    """1,000 calls a second on each rank: how late the panel is, what it keeps, how much it says."""
    seen = Flood()
    request = kernel.client.execute(FLOOD)
    begin = time.monotonic()
    ended = memory = 0.0
    while not ended or time.monotonic() - ended < 2:  # what was still on its way
        message = next_message(kernel)
        if message is not None:
            seen.take(message)
            if message["parent_header"].get("msg_id") == request and is_idle(message):
                ended = time.monotonic()
        if not memory and time.monotonic() - begin > WARM_S:
            memory = kernel.resident_bytes()
    grown = kernel.resident_bytes() - memory
    text = f"{seen.points} points of {FLOOD_S * RATE}, {seen.messages} messages"
    yield Row(
        name=f"{RATE} report()/s a rank for {FLOOD_S} s: the panel is late by",
        value=max(seen.lags),
        unit="s",
        limit=1.0,
        detail=f"median {middle(seen.lags):.2f} s; {text}",
    )
    yield Row(
        name=f"{RATE} report()/s a rank: points that did not arrive",
        value=float(FLOOD_S * RATE - seen.points),
        unit="",
        limit=0,
        detail=text,
    )
    yield Row(
        name=f"{RATE} report()/s a rank: messages of the panel a second",
        value=seen.messages / (ended - begin),
        unit="/s",
        limit=5.5,
    )
    yield Row(
        name=f"{RATE} report()/s a rank: growth of the kernel from second {WARM_S:.0f} on",
        value=grown / (1 << 20),
        unit="MiB",
        limit=GROWTH / (1 << 20),
    )


class Flood:
    """What the panel said of it."""

    def __init__(self) -> None:
        self.lags: list[float] = []
        """Of the newest point of each message with rows, in seconds."""
        self.steps: set[float] = set()
        self.messages = 0

    @property
    def points(self) -> int:
        return len(self.steps)

    def take(self, message: dict[str, Any]) -> None:
        if message["msg_type"] != "comm_msg":
            return
        self.messages += 1
        content = message["content"]["data"].get("content", {})
        if content.get("kind") not in {"rows", "reset"}:
            return
        triples = list(struct.iter_unpack("<ddd", bytes(message["buffers"][0])))
        at = 0
        for one in content["series"]:
            points = triples[at : at + one["points"]]
            at += one["points"]
            if one["name"] == "flood" and content["kind"] == "rows":
                self.steps.update(step for step, _, _ in points)
                self.lags.append(time.time() - max(stamp for _, stamp, _ in points))
            elif one["name"] == "flood" and points:  # a reset: the history, downsampled
                self.steps.update(range(int(points[0][0]), int(points[-1][0]) + 1))


def next_message(kernel: Kernel) -> dict[str, Any] | None:
    import queue

    try:
        message: dict[str, Any] = kernel.client.get_iopub_msg(timeout=0.1)
    except queue.Empty:
        return None
    return message


def is_idle(message: dict[str, Any]) -> bool:
    return bool(message["msg_type"] == "status" and message["content"]["execution_state"] == "idle")
