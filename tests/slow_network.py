"""A slow link between two network namespaces that loses packets, made of two TUN devices.

    python -m tests.slow_network DELAY_S LOSS BYTES_S SPACE=ADDRESS SPACE=ADDRESS

In place of `tc netem`, which many kernels come without: real packets are kept for a while, and
some thrown away. Says "ready", and ends with its input.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field

DEVICE = "cable"
TUNSETIFF = 0x400454CA
TUN_WITHOUT_HEADER = 0x0001 | 0x1000
PACKET = 1 << 16
BACKLOG_S = 1.0
"""What would wait longer for its turn is thrown away, as by a router."""


@dataclass
class End:
    """One end: packets that are written here come out of it."""

    space: str
    address: str
    free_at: float = 0.0
    """When what has come in here before is through."""
    fd: int = field(init=False)

    def __post_init__(self) -> None:
        """Make the device, and move it there."""
        self.fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        made = f"nb{os.getpid()}{self.address.rpartition('.')[2]}"
        fcntl.ioctl(self.fd, TUNSETIFF, struct.pack("16sH", made.encode(), TUN_WITHOUT_HEADER))
        _ip("link", "set", made, "netns", self.space)
        _ip("-n", self.space, "link", "set", made, "name", DEVICE)
        _ip("-n", self.space, "address", "add", f"{self.address}/24", "dev", DEVICE)
        _ip("-n", self.space, "link", "set", DEVICE, "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["/usr/bin/env", "ip", *arguments], check=True, capture_output=True)


def carry(ends: list[End], *, delay_s: float, loss: float, bytes_s: float) -> None:
    dice = random.Random(1)  # noqa: S311 - no secret
    way: list[tuple[float, int, End, bytes]] = []
    number = 0
    others = {ends[0].fd: (ends[0], ends[1]), ends[1].fd: (ends[1], ends[0])}
    while True:
        wait_s = max(0.0, way[0][0] - time.monotonic()) if way else None
        ready, _, _ = select.select([sys.stdin, *others], [], [], wait_s)
        if sys.stdin in ready:
            return
        now = time.monotonic()
        for fd in ready:
            packet = os.read(fd, PACKET)
            here, there = others[fd]
            through = max(now, here.free_at) + len(packet) / bytes_s
            if dice.random() < loss or through - now > BACKLOG_S:
                continue
            here.free_at = through
            number += 1
            heapq.heappush(way, (through + delay_s, number, there, packet))
        while way and way[0][0] <= now:
            _, _, end, packet = heapq.heappop(way)
            os.write(end.fd, packet)


if __name__ == "__main__":
    delay, share, rate, *places = sys.argv[1:]
    both = [End(*place.split("=")) for place in places]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    carry(both, delay_s=float(delay), loss=float(share), bytes_s=float(rate))
