"""A launcher whose ranks are a few sockets each, and no torch: real signed messages, no work.

    python -m benchmarks.simulated_nodes.ranks LINK_FD RUN_DIR

Stands where `nbdist.launcher` does. Cells are "pass", which ends at once, "wait()", which
does with Stop, "flood(LINES, EACH)", which prints, EACH lines in a message,
"apart(LINES, EACH)", which cuts them differently on each rank, "own(LINES, EACH)", where each
rank prints lines that no other prints, and "reports(ROWS)", which sends as many rows of report(),
one in a message.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import zmq

from nbdist.hardware.process_identity import process_start_ticks
from nbdist.protocol import messages
from nbdist.protocol.signing import DELIM

POLL_MS = 100
Packed = list[bytes]
_WORDS = re.compile(r"\w+")


class Rank:
    """One rank: three sockets."""

    def __init__(self, context: zmq.Context[Any], folder: Path, rank: int) -> None:
        """Bind them as the rank's connection file says."""
        given = json.loads((folder / f"rank{rank}.json").read_text())
        self.rank, self._key = rank, given["key"].encode()
        self._session, self._count = os.urandom(16).hex(), 0
        self.running: dict[str, Any] | None = None
        """Reply address and header of the cell that waits for Stop."""
        self.sockets: dict[str, zmq.Socket[bytes]] = {}
        kinds = {"iopub": zmq.XPUB, "control": zmq.ROUTER, "shell": zmq.ROUTER}
        for channel, kind in kinds.items():
            one = self.sockets[channel] = context.socket(kind)
            one.linger = 0
            one.set_hwm(0)
            one.bind(f"ipc://{given['ip']}-{given[f'{channel}_port']}")

    def close(self) -> None:
        for one in self.sockets.values():
            one.close(0)

    def read(self, channel: str) -> None:
        frames = self.sockets[channel].recv_multipart(zmq.DONTWAIT)
        if channel == "iopub":
            if frames[0][:1] == b"\x01":
                self.tell("iopub_welcome", {"subscription": ""}, {})
            return
        at = frames.index(DELIM)
        signature, *parts = frames[at + 1 :]
        assert hmac.compare_digest(signature, self._signature(parts[:4]))
        header, content = json.loads(parts[0]), json.loads(parts[3])
        asked = {"channel": channel, "to": frames[:at], "header": header}
        self.answer(asked, content)

    def answer(self, asked: dict[str, Any], content: dict[str, Any]) -> None:
        """Do what a request says."""
        kind = asked["header"]["msg_type"]
        if kind == "execute_request":
            self.execute(asked, _WORDS.findall(content["code"]))
            return
        if kind == "interrupt_request" and self.running is not None:
            error = {"ename": "KeyboardInterrupt", "evalue": "", "traceback": ["KeyboardInterrupt"]}
            running, self.running = self.running, None
            self.tell("error", error, running["header"])
            self.end(running, {"status": "error", "execution_count": 1, **error})
        self.end(asked, self.known(kind))

    def known(self, kind: str) -> dict[str, Any]:
        """What this rank says to requests that are no cell."""
        if kind == messages.JOIN:
            pid = os.getpid()
            return {"pid": pid, "start_ticks": process_start_ticks(pid), "device": "cpu"}
        if kind == messages.PAUSE:
            return {"begun": 0, "next_s": 0.0}
        if kind == messages.RANK_ACTIVITY:
            standing = messages.MainThreadStatus(
                waits_for="",
                missing=[],
                still_s=time.monotonic() // 0.5 * 0.5,
                sleeps=self.running is not None,
                failed="",
                counts={"0": 3},
                midway="",
            )
            return dict(
                messages.RankActivityReply(
                    cell="In[1]", line=1, source="", called="", collective="", standing=standing
                )
            )
        return {"status": "ok"}

    def execute(self, asked: dict[str, Any], words: list[str]) -> None:
        match words:
            case ["wait"]:
                self.running = asked
                return
            case ["flood" | "apart" | "own" as how, lines, each]:
                words = f"of rank {self.rank}" if how == "own" else "of a flood"
                shift = self.rank if how == "apart" else 0
                self.print(asked, int(lines), int(each), words, shift=shift)
            case ["reports", rows]:
                for step in range(int(rows)):
                    row = {"step": step, "time": time.time(), "loss": self.rank / 3 + step}
                    self.tell(messages.METRICS_REPORT, {"rows": [row]}, asked["header"])
        self.end(asked, {"status": "ok", "execution_count": 1, "user_expressions": {}})

    def print(
        self, asked: dict[str, Any], lines: int, each: int, words: str, *, shift: int
    ) -> None:
        first, until = 0, each - shift % each
        while first < lines:
            text = "".join(f"line {one} {words}\n" for one in range(first, min(until, lines)))
            self.tell("stream", {"name": "stdout", "text": text}, asked["header"])
            first, until = until, until + each

    def end(self, asked: dict[str, Any], content: dict[str, Any]) -> None:
        kind = asked["header"]["msg_type"].replace("_request", "_reply")
        frames = self._packed(kind, content, asked["header"], {"engine": self._session})
        self.sockets[asked["channel"]].send_multipart([*asked["to"], *frames])
        self.tell("status", {"execution_state": "idle"}, asked["header"])

    def tell(self, kind: str, content: dict[str, Any], parent: dict[str, Any]) -> None:
        topic = f"kernel.{self._session}.{kind}".encode()
        self.sockets["iopub"].send_multipart([topic, *self._packed(kind, content, parent, {})])

    def _packed(
        self, kind: str, content: dict[str, Any], parent: dict[str, Any], metadata: dict[str, Any]
    ) -> Packed:
        self._count += 1
        header = {
            "msg_id": f"{self._session}_{os.getpid()}_{self._count}",
            "msg_type": kind,
            "username": "nbdist",
            "session": self._session,
            "date": datetime.now(UTC).isoformat(),
            "version": "5.3",
        }
        parts = [json.dumps(part).encode() for part in (header, parent, metadata, content)]
        return [DELIM, self._signature(parts), *parts]

    def _signature(self, parts: Packed) -> bytes:
        return hmac.digest(self._key, b"".join(parts), "sha256").hex().encode()


class Ranks:
    """All ranks of one start, on this thread."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._places: dict[zmq.Socket[bytes], tuple[Rank, str]] = {}
        self._generation = 0
        self.lines: SimpleQueue[messages.LauncherMessage | None] = SimpleQueue()

    def serve(self) -> None:
        """Do what the link says until it ends."""
        self._say(messages.LauncherReady())
        while True:
            with suppress(Empty):  # nothing was said: wanted
                while line := self.lines.get_nowait():
                    self._take(line)
                return
            for one, _ in self._poller.poll(POLL_MS):
                rank, channel = self._places[one]
                with suppress(zmq.Again):  # nothing more to read: wanted
                    while True:
                        rank.read(channel)

    def _take(self, line: messages.LauncherMessage) -> None:
        if isinstance(line, messages.LaunchRanksRequest):
            self._generation = line.generation
            for number in range(line.first, line.first + line.local_world_size):
                self._begin(Rank(self._context, Path(line.run_dir), number))
        elif isinstance(line, messages.StopRanksRequest):
            for rank in {rank.rank: rank for rank, _ in self._places.values()}.values():
                rank.close()
            self._places.clear()
            self._poller = zmq.Poller()
            self._say(messages.AllRanksExited(self._generation))

    def _begin(self, rank: Rank) -> None:
        for channel, one in rank.sockets.items():
            self._places[one] = rank, channel
            self._poller.register(one, zmq.POLLIN)
        self._say(messages.RankForked(self._generation, rank.rank, os.getpid()))

    def _say(self, line: messages.LauncherMessage) -> None:
        self._link.sendall(messages.encode_line(line))


def read(link: socket.socket, into: SimpleQueue[messages.LauncherMessage | None]) -> None:
    with suppress(ConnectionResetError), link.makefile("rb") as lines:
        for line in lines:
            into.put(messages.decode_line(line))
    os._exit(0)


if __name__ == "__main__":
    ours = socket.socket(fileno=int(sys.argv[1]))
    ranks = Ranks(ours)
    threading.Thread(target=read, args=(ours, ranks.lines), daemon=True).start()
    ranks.serve()
