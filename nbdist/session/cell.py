"""One cell on some ranks: what was sent, what came back, when it is over.

Messages arrive on the reader thread and are rendered by whoever pumps: the main thread
while the cell blocks, the reader thread for background cells and for output that comes
after a cell's end.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from nbdist import rank_sets as rank_names
from nbdist.errors import CellError, RankDied
from nbdist.output import tracebacks
from nbdist.protocol import messages, serialization

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.cluster.rank_channels import Channel, Message
    from nbdist.output.renderer import Renderer
    from nbdist.output.sink import Screen

    Taker = Callable[["Cell", Sequence[int], Message], None]

IDLE_DEADLINE_S = 2.0
"""After a rank's reply its output may still be on the way; its `idle` ends the wait, or this
long without a word of it."""
TICK_S = 0.05
SLOW_TICK_S = 0.25
KEPT_TEXT = 1_000_000
"""Characters of each rank's streams kept in `CellResult.outputs`."""
KEPT_OUTPUTS = 1_000
KEPT_CHARS = 50_000_000
"""Of each rank's displays and values."""
BATCH_S = 0.1
"""Under a flood what has arrived is shown after this time, whatever else waits."""
QUIET_S = 1.0
"""Late output may be held this long before it is shown."""
PROMPT_ERROR_S = 1.0
"""A rank that failed while others run on is shown after this time."""


@dataclass
class RankState:
    """How far one rank is with the cell."""

    replied_at: float | None = None
    heard_at: float = 0.0
    """When its last message was taken; a flood may come in for long after the reply."""
    idle: bool = False
    status: str = ""
    outputs: list[dict[str, Any]] = field(default_factory=list)
    kept_text: int = 0
    kept_chars: int = 0
    value: object = None
    error: messages.RankError | None = None

    def done(self, now: float) -> bool:
        """Whether reply and output are here, or the output is overdue."""
        if self.replied_at is None:
            return False
        return self.idle or now - self.heard_at > IDLE_DEADLINE_S

    def keep(self, output: dict[str, Any]) -> None:
        """Keep an output as nbformat has it; consecutive text is joined, all is bounded."""
        if output["output_type"] == "stream":
            self._keep_text(output)
        elif len(self.outputs) < KEPT_OUTPUTS and self.kept_chars < KEPT_CHARS:
            self.kept_chars += sum(
                len(part) for part in output.get("data", {}).values() if isinstance(part, str)
            )
            self.outputs.append(output)

    def _keep_text(self, output: dict[str, Any]) -> None:
        text = output["text"][: max(0, KEPT_TEXT - self.kept_text)]
        self.kept_text += len(text)
        last = self.outputs[-1] if self.outputs else {}
        if last.get("output_type") == "stream" and last["name"] == output["name"]:
            last["text"] += text
        elif text:
            self.outputs.append({"output_type": "stream", "name": output["name"], "text": text})


class Cell:
    """A cell that was sent to `ranks`."""

    def __init__(
        self,
        ranks: Sequence[int],
        renderer: Renderer,
        *,
        on_send: Callable[[int, str, str], None],
        on_done: Callable[[Cell], None],
    ) -> None:
        """Wait for the messages of `ranks`; `on_send` takes the values of send()."""
        self.ranks = tuple(ranks)
        self.renderer = renderer
        self.states = {rank: RankState() for rank in ranks}
        self.requests: dict[int, str] = {}
        """Id of the execute_request, by rank."""
        self.count = 0
        """Its number in the notebook."""
        self.code = ""
        self.began = time.time()
        """Unix seconds."""
        self.notice = ""
        """A line to stand below the output while it holds: who waits for whom."""
        self.interrupted_at = 0.0
        """Unix seconds of when it was first asked to stop; 0: it was not."""
        self.detached = False
        self.joined = False
        """Whether its end has been told to the user, who may have waited for it."""
        self.death: RankDied | None = None
        self.advice: dict[int, messages.Advice] = {}
        """What ranks that ran out of memory say of it."""
        self.finished = threading.Event()
        self._on_send = on_send
        self._on_done = on_done
        self._inbox: SimpleQueue[tuple[Taker, Sequence[int], Message] | RankDied] = SimpleQueue()
        self._lock = threading.Lock()
        self._told: frozenset[int] = frozenset()
        """Ranks whose errors were shown while others ran."""
        self._heard_at = time.monotonic()

    def deliver(self, ranks: Sequence[int], channel: Channel, message: Message) -> None:
        """Take a message that these have sent; called on the reader thread."""
        take = _TAKERS.get((channel, message["header"]["msg_type"]))
        if take is None:
            return
        self._heard_at = time.monotonic()
        self._inbox.put((take, ranks, message))

    def die(self, death: RankDied) -> None:
        """End the cell because its ranks are gone."""
        self._inbox.put(death)

    def tell(self, line: str) -> None:
        """Show a line of the session's below the cell; from any thread."""
        self._inbox.put((Cell.take_notice, (), {"lines": [line]}))

    def show(self, bundle: dict[str, str]) -> None:
        """Display something of the session's below the cell; from any thread."""
        self._inbox.put((Cell.take_shown, (), {"bundle": bundle}))

    def detach(self, screen: Screen) -> None:
        """Let the reader thread show what comes from now on, on `screen`."""
        with self._lock:
            self.renderer.screen = screen
            self.detached = True

    @property
    def quiet(self) -> bool:
        """Whether there is nothing to show now."""
        idle_s = time.monotonic() - self._heard_at
        return self.finished.is_set() and self._inbox.empty() and idle_s > QUIET_S

    @property
    def patience_s(self) -> float:
        """How long `pump` may wait: briefly while output is held, else sparing the CPU.

        On CPU ranks the kernel takes its time from the training itself.
        """
        lately = time.monotonic() - self._heard_at < QUIET_S
        return TICK_S if lately else SLOW_TICK_S

    def pump(self, timeout_s: float) -> None:
        """Render what arrived; wait up to `timeout_s` for the first message."""
        with self._lock:
            try:
                item = self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait()
                until = time.monotonic() + BATCH_S
                while True:
                    self._take(item)
                    if self._ends() or time.monotonic() > until:
                        break
                    item = self._inbox.get_nowait()
            except Empty:
                self._tell_of_failure()
            self.renderer.notice("" if self.finished.is_set() else self.notice)
            self.renderer.tick()
            if self._ends():
                self._finish()

    @property
    def pending(self) -> tuple[int, ...]:
        """Ranks that have not answered yet."""
        return tuple(rank for rank, state in self.states.items() if state.replied_at is None)

    @property
    def running(self) -> tuple[int, ...]:
        """Ranks whose code has not ended yet.

        A rank that lacked memory has failed some seconds before it answers: it looks for what
        would fit.
        """
        return tuple(rank for rank in self.pending if self.states[rank].error is None)

    @property
    def errors(self) -> dict[int, messages.RankError]:
        """The error of each rank that failed."""
        return {rank: state.error for rank, state in self.states.items() if state.error}

    @property
    def stopped(self) -> bool:
        """Whether Stop ended it on every rank that did not end by itself.

        Stop may cut the connections of a rank that is stuck, and that is its error then.
        """
        asked = bool(self.interrupted_at) and self.death is None
        kinds = {group.kind for group in tracebacks.grouped(list(self.errors.values()))}
        return asked and bool(kinds) and "cause" not in kinds

    def raise_errors(self) -> None:
        """Raise what ended the cell, as a cell of the notebook would.

        Raises:
            RankDied: a rank ended during the cell.
            CellError: the code raised on a rank.
        """
        self.joined = True
        if self.death is not None:
            raise self.death
        if self.errors:
            groups = tracebacks.grouped(list(self.errors.values()))
            advice = self.advice_lines()
            causes = {rank for one in groups if one.kind == groups[0].kind for rank in one.ranks}
            if causes <= self._told:
                rendered = tracebacks.reminder(groups)
            else:
                rendered = [*tracebacks.render(groups, ranks=self.ranks), *advice]
            error = CellError(tracebacks.summary(groups), errors=self.errors, rendered=rendered)
            if advice:  # a script has no notebook that renders it
                error.add_note("\n".join(advice[1:]))
            raise error

    def show_errors(self) -> None:
        """Show the errors of a cell that nobody waits for, once."""
        if self.errors and not self._told:
            self._told = frozenset(self.errors)
            self.renderer.failure(
                list(self.errors.values()), waiting=self.running, advice=self.advice_lines()
            )

    def advice_lines(self) -> list[str]:
        """The advice of the fullest rank, which speaks for the others."""
        if not self.advice:
            return []
        rank = max(self.advice, key=lambda one: self.advice[one]["held_bytes"])
        first, *rest = self.advice[rank]["lines"]
        others = len(self.advice) - 1
        also = f" (as {others} more)" if others else ""
        return ["", f"rank {rank}{also}: {first}", *rest]

    def _ends(self) -> bool:
        """Whether it is over and nobody has been told yet."""
        now = time.monotonic()
        over = self.death is not None or all(state.done(now) for state in self.states.values())
        return over and not self.finished.is_set()

    def _finish(self) -> None:
        told = self._caused_something() if self.death is not None else self.detached
        if told:
            self.show_errors()
        self.renderer.notice("")
        self.renderer.close()
        self.finished.set()
        self._on_done(self)

    def _caused_something(self) -> bool:
        """Whether a rank failed for a reason of its own: else the death explains it."""
        groups = tracebacks.grouped(list(self.errors.values()))
        return any(group.kind == "cause" for group in groups)

    def _tell_of_failure(self) -> None:
        """Show an error at once while other ranks run on, perhaps waiting for the failed one."""
        failed = [error for error in self.errors.values() if not error.is_stop]
        if not failed or not self.running:
            return
        if self.interrupted_at and not self._caused_something():
            return  # a rank that was freed for Stop
        if time.time() - min(error.at for error in failed) > PROMPT_ERROR_S:
            self.show_errors()

    def _take(self, item: tuple[Taker, Sequence[int], Message] | RankDied) -> None:
        if isinstance(item, RankDied):
            self.death = item
            return
        take, ranks, message = item
        now = time.monotonic()
        try:
            for rank in ranks:
                self.states[rank].heard_at = now
            take(self, ranks, message)
        except Exception as error:  # noqa: BLE001 - a cell may send anything; the rest is to be read
            kind, why = message["header"]["msg_type"], f"{type(error).__name__}: {error}"
            who = rank_names.words(ranks)
            self.renderer.note([f"{who}: a message ({kind}) that cannot be taken: {why}"])

    def take_reply(self, rank: int, message: Message) -> None:
        """A rank has ended the cell."""
        state, content = self.states[rank], message["content"]
        state.replied_at = time.monotonic()
        state.status = content["status"]
        for page in content.get("payload", []):
            if page.get("source") == "page":  # `len?`: a front end would open its pager
                self.renderer.stream((rank,), "stdout", page["data"].get("text/plain", "") + "\n")
        if state.status == "error" and state.error is None:
            state.error = _rank_error(rank, message)

    def take_error(self, rank: int, message: Message) -> None:
        """The exception that ended the cell on a rank, as soon as it is raised."""
        self.states[rank].error = error = _rank_error(rank, message)
        self.states[rank].keep(
            {
                "output_type": "error",
                "ename": error.ename,
                "evalue": error.evalue,
                "traceback": error.traceback,
            }
        )

    def take_status(self, rank: int, message: Message) -> None:
        """A rank is idle: all its output of the cell is here."""
        if message["content"]["execution_state"] == "idle":
            self.states[rank].idle = True

    def take_stream(self, ranks: Sequence[int], message: Message) -> None:
        """Text that ranks printed."""
        content = message["content"]
        for rank in ranks:
            self.states[rank].keep({"output_type": "stream", **content})
        self.renderer.stream(ranks, content["name"], content["text"])

    def take_display(self, rank: int, message: Message) -> None:
        """A display of a rank, or the change of one."""
        content = message["content"]
        bundle, metadata = content["data"], content["metadata"]
        update = message["header"]["msg_type"] == "update_display_data"
        if not update:
            self.states[rank].keep(
                {"output_type": "display_data", "data": bundle, "metadata": metadata}
            )
        self.renderer.display(
            rank,
            bundle,
            metadata,
            display_id=content.get("transient", {}).get("display_id"),
            update=update,
        )

    def take_result(self, rank: int, message: Message) -> None:
        """The value of the last expression."""
        content = message["content"]
        metadata = dict(content["metadata"])
        note = metadata.pop(messages.NOTE, None)
        text = content["data"].get("text/plain", "")
        self.states[rank].value = text if note is None else serialization.from_inline(note)
        self.states[rank].keep(
            {
                "output_type": "execute_result",
                "execution_count": content["execution_count"],
                "data": content["data"],
                "metadata": metadata,
            }
        )
        self.renderer.result(rank, content["data"], metadata)

    def take_clear(self, rank: int, message: Message) -> None:
        """clear_output() on a rank."""
        self.renderer.clear(rank, wait=message["content"].get("wait", False))

    def take_comm(self, rank: int, message: Message) -> None:
        """A message of a widget that lives on a rank."""
        self.renderer.relay(
            rank,
            message["header"]["msg_type"],
            message["content"],
            message["metadata"],
            message["buffers"],
        )

    def take_advice(self, rank: int, message: Message) -> None:
        """What to do about memory that ran out; a failure that was shown before gets it late."""
        self.advice[rank] = message["content"]
        if self._told and len(self.advice) == 1:
            self.renderer.note(self.advice_lines())

    def take_notice(self, _ranks: Sequence[int], message: Message) -> None:
        """A line of the session's own."""
        self.renderer.note(message["lines"])

    def take_shown(self, _ranks: Sequence[int], message: Message) -> None:
        """A display of the session's own."""
        self.renderer.show(message["bundle"])

    def take_send(self, rank: int, message: Message) -> None:
        """A value of send(), while the cell runs."""
        content = message["content"]
        self._on_send(rank, content["name"], content["path"])


def _each(take: Callable[[Cell, int, Message], None]) -> Taker:
    """Take a message of several ranks one rank after the other."""

    def take_each(cell: Cell, ranks: Sequence[int], message: Message) -> None:
        for rank in ranks:
            take(cell, rank, message)

    return take_each


_TAKERS: dict[tuple[str, str], Taker] = {
    ("shell", "execute_reply"): _each(Cell.take_reply),
    ("iopub", "status"): _each(Cell.take_status),
    ("iopub", "stream"): Cell.take_stream,
    ("iopub", "display_data"): _each(Cell.take_display),
    ("iopub", "update_display_data"): _each(Cell.take_display),
    ("iopub", "execute_result"): _each(Cell.take_result),
    ("iopub", "error"): _each(Cell.take_error),
    ("iopub", "clear_output"): _each(Cell.take_clear),
    ("iopub", "comm_open"): _each(Cell.take_comm),
    ("iopub", "comm_msg"): _each(Cell.take_comm),
    ("iopub", "comm_close"): _each(Cell.take_comm),
    ("iopub", messages.SEND): _each(Cell.take_send),
    ("iopub", messages.ADVICE): _each(Cell.take_advice),
}


def _rank_error(rank: int, message: Message) -> messages.RankError:
    content = message["content"]
    return messages.RankError(
        rank=rank,
        ename=content["ename"],
        evalue=content["evalue"],
        traceback=content["traceback"] or [f"{content['ename']}: {content['evalue']}"],
        at=message["header"]["date"].timestamp(),
    )


class CellResult:
    """What a cell gave, by rank; fills while a background cell runs.

    Attributes by rank: `values` (of the last expression: the value itself where it is a
    plain Python value of at most 64 kB, else its text; None without one), `outputs` (as
    nbformat has them, streams bounded to 1,000,000 characters), `errors`.
    """

    def __init__(self, cell: Cell) -> None:
        """Show the state of `cell`."""
        self._cell = cell

    @property
    def done(self) -> bool:
        """Whether all ranks have ended the cell."""
        return self._cell.finished.is_set()

    @property
    def ok(self) -> bool:
        """Whether all ranks have ended the cell without an error."""
        return self.done and not self._cell.errors and self._cell.death is None

    @property
    def values(self) -> dict[int, object]:
        """Value of the last expression, by rank."""
        return {rank: state.value for rank, state in self._cell.states.items()}

    @property
    def outputs(self) -> dict[int, list[dict[str, Any]]]:
        """Outputs as nbformat has them, by rank."""
        return {rank: state.outputs for rank, state in self._cell.states.items()}

    @property
    def errors(self) -> dict[int, messages.RankError]:
        """Errors of the ranks that failed."""
        return self._cell.errors

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of a background cell; False when the time is up.

        Raises:
            CellError: the code raised on a rank.
            RankDied: a rank ended during the cell.
        """
        if not self._cell.finished.wait(timeout_s):
            return False
        self._cell.raise_errors()
        return True

    def __repr__(self) -> str:
        """Say how it stands."""
        state = "ok" if self.ok else "failed" if self.done else "running"
        return f"CellResult({state}, ranks={list(self._cell.ranks)})"
