"""One cell on some ranks: its source, the messages received for it, and its result.

Messages arrive on the reader thread. They are rendered by the main thread while the cell
blocks, and by the reader thread for background cells and for output after a cell's end.
"""

from __future__ import annotations

import ast
import functools
import threading
import time
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar

from IPython.core.inputtransformer2 import TransformerManager

from nbdist import rank_sets
from nbdist.errors import CellError, OptionError, RankDied
from nbdist.output import tracebacks
from nbdist.output.ansi import strip_ansi
from nbdist.output.rate_limit import display_chars
from nbdist.output.sink import RankComms
from nbdist.protocol import messages, serialization
from nbdist.session.interrupt import Interruptible

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.cluster.rank_channels import Channel, Message
    from nbdist.output.renderer import OutputRenderer
    from nbdist.output.sink import OutputSink

    Handler = Callable[["Cell", int, Message], None]

IDLE_DEADLINE_S = 2.0
"""Timeout for a rank's `idle` status after its reply, when no more output arrives."""
TICK_S = 0.05
SLOW_TICK_S = 0.25
MAX_STREAM_CHARS = 1_000_000
"""Maximum number of stream characters per rank in `CellResult.outputs`."""
MAX_OUTPUTS = 1_000
MAX_OUTPUT_CHARS = 50_000_000
"""Maximum number of characters of each rank's displays and values."""
BATCH_S = 0.1
"""Rendering interval while messages arrive continuously."""
QUIET_S = 1.0
"""Maximum delay before late output is shown."""
PROMPT_ERROR_S = 1.0
"""Delay before the error of a rank is shown while other ranks are still running."""
CELL_FILE_NAME = "<cell>"
"""File name of a cell in the syntax errors of `check_code`."""


@functools.lru_cache(maxsize=1)  # the magic checks a cell before it starts ranks, then `run` does
def check_code(code: str) -> None:
    """Check that code can run, before it is sent to the ranks.

    Raises:
        OptionError: the cell is empty.
        SyntaxError: as the notebook would raise it.
    """
    lines = [line.strip() for line in code.splitlines()]
    if all(not line or line.startswith("#") for line in lines):
        msg = "The cell is empty. Write the code for the ranks below the %%distribute line."
        raise OptionError(msg)
    if code.lstrip().startswith("%%"):
        return  # only the cell magic can parse its body
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        compile(code, CELL_FILE_NAME, "exec", flags=flags, dont_inherit=True)
    except SyntaxError:
        # Magics and !shell. Not transformed first: that costs half a millisecond per cell.
        python = TransformerManager().transform_cell(code)
        compile(python, CELL_FILE_NAME, "exec", flags=flags, dont_inherit=True)


@dataclass
class RankCellState:
    """Progress of one rank with the cell."""

    replied_at: float | None = None
    last_message_at: float = 0.0
    """Time of its last message; output may continue long after the reply."""
    is_idle: bool = False
    outputs: list[dict[str, Any]] = field(default_factory=list)
    num_stream_chars: int = 0
    num_output_chars: int = 0
    value: object = None
    error: messages.RankError | None = None

    def add_output(self, output: dict[str, Any]) -> None:
        """Store an output in nbformat; consecutive text is merged, and the total is bounded."""
        if output["output_type"] != "stream":
            if len(self.outputs) < MAX_OUTPUTS and self.num_output_chars < MAX_OUTPUT_CHARS:
                self.num_output_chars += display_chars(output.get("data", {}))
                self.outputs.append(output)
            return
        text = output["text"][: max(0, MAX_STREAM_CHARS - self.num_stream_chars)]
        self.num_stream_chars += len(text)
        last = self.outputs[-1] if self.outputs else {}
        if last.get("output_type") == "stream" and last["name"] == output["name"]:
            last["text"] += text
        elif text:
            self.outputs.append({"output_type": "stream", "name": output["name"], "text": text})


class Cell(Interruptible):
    """A cell that was sent to `ranks`.

    Args:
        ranks: ranks that run the cell.
        renderer: shows the output.
        on_send: called with rank, name and path of each value of send().
        on_done: called with the cell when it has finished.
        on_comm: called with the cell, a rank and the front end's message for a widget that the rank
            has opened in this cell; on any thread.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        renderer: OutputRenderer,
        *,
        on_send: Callable[[int, str, str], None],
        on_done: Callable[[Cell], None],
        on_comm: Callable[[Cell, int, Message], None],
    ) -> None:
        super().__init__(ranks)
        self.renderer = renderer
        self.rank_states = {rank: RankCellState() for rank in ranks}
        self._unfinished = list(self.rank_states.values())
        """Progress of the ranks up to the last one that is not done."""
        self.count = 0
        """Number of the cell in the notebook."""
        self.code = ""
        self.started_at = time.time()
        """Unix time in seconds."""
        self.failed_at: float | None = None
        """`time.monotonic()` of the first error; interrupts do not count."""
        self.detached = False
        self.joined = False
        """True if the result has been reported to the user, who may have waited for it."""
        self.termination = ""
        """How the run was ended from outside during the cell, and its checkpoint."""
        self.input_requests: dict[int, messages.InputRequest] = {}
        """Prompts that wait for an answer, by rank, in the order of arrival."""
        self.oom_advice: dict[int, messages.OomAdvice] = {}
        """Out-of-memory advice, by rank."""
        self._on_send = on_send
        self._on_done = on_done
        self._on_front_end_comm = on_comm
        self.comms = RankComms(self._forward)
        """Comms of the widgets that the ranks show in this cell."""
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        """What to do next, in the order of arrival, on the thread that renders."""
        self._lock = threading.Lock()
        self._ranks_with_shown_errors: frozenset[int] = frozenset()
        """Ranks whose errors were shown while others were running."""
        self._heard_at = time.monotonic()

    def on_message(self, ranks: Sequence[int], channel: Channel, message: Message) -> None:
        """Queue a message that these ranks sent; called on the reader thread."""
        kind = channel, message["header"]["msg_type"]
        if kind in self.HANDLERS:
            self._heard_at = time.monotonic()
            self._inbox.put(functools.partial(self._handle, self.HANDLERS[kind], ranks, message))

    def _forward(self, rank: int, message: Message) -> None:
        self._heard_at = time.monotonic()  # the reader thread shows the answer soon
        self._on_front_end_comm(self, rank, message)

    def fail(self, death: RankDied) -> None:
        """Fail the cell because its ranks have ended."""
        self._inbox.put(lambda: setattr(self, "failure", death))

    def print_line(self, line: str) -> None:
        """Print a line of the session below the cell; callable from any thread."""
        self._inbox.put(lambda: self.renderer.show_lines([line]))

    def show_bundle(self, bundle: dict[str, str]) -> None:
        """Display a mime bundle of the session below the cell; callable from any thread."""
        self._inbox.put(lambda: self.renderer.show_bundle(bundle))

    def detach(self, screen: OutputSink) -> None:
        """Have the reader thread show all further output on `screen`."""
        with self._lock:
            self.renderer.recorder.sink = screen
            self.detached = True

    def replay(self, screen: OutputSink) -> None:
        """Show the output again on `screen`; a running cell continues there."""
        with self._lock:
            self.renderer.recorder.replay(screen)
            if not self.finished.is_set():
                self.renderer.recorder.sink = screen
                return
            lines = list(filter(None, [str(self.failure or ""), self.termination]))
            if not lines and self.errors and not self._ranks_with_shown_errors:
                lines = self._error_lines()  # the notebook's cell has raised them
            screen.write("stderr", "".join(f"{line}\n" for line in lines))
            screen.flush()

    @property
    def has_no_pending_output(self) -> bool:
        """True if there is no pending output."""
        idle_s = time.monotonic() - self._heard_at
        return self.finished.is_set() and self._inbox.empty() and idle_s > QUIET_S

    def render_pending(self, timeout_s: float | None = None) -> None:
        """Render pending messages.

        Args:
            timeout_s: how long to wait for the first one. Default: until output that is held back
                may be due.
        """
        if timeout_s is None:
            # A long timeout saves CPU time, which CPU ranks need for the training.
            lately = time.monotonic() - self._heard_at < QUIET_S
            timeout_s = TICK_S if lately else SLOW_TICK_S
        with self._lock:
            try:
                act = self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait()
                until = time.monotonic() + BATCH_S
                while True:
                    act()
                    if self._ends() or time.monotonic() > until:
                        break
                    act = self._inbox.get_nowait()
            except Empty:
                self._show_error_while_others_run()
            self.renderer.set_status_line("" if self.finished.is_set() else self.notice)
            self.renderer.tick()
            if self._ends():
                if self._has_own_error() if self.failure is not None else self.detached:
                    self.show_errors()
                self.renderer.set_status_line("")
                self.renderer.tick(final=True)
                self.finished.set()
                self._on_done(self)

    def show_all_output(self, line: str = "") -> None:
        """Show all output received so far, also what is held back to be merged, then a line."""
        with self._lock:
            self.renderer.set_status_line("")
            self.renderer.tick(final=True)
            if line:
                self.renderer.show_lines([line])

    @property
    def pending(self) -> tuple[int, ...]:
        """Ranks that have not replied yet."""
        return tuple(rank for rank, state in self.rank_states.items() if state.replied_at is None)

    @property
    def running(self) -> tuple[int, ...]:
        """Ranks whose code has not finished yet.

        After an out-of-memory error a rank takes a few seconds to reply: it searches for a
        configuration that fits.
        """
        return tuple(rank for rank in self.pending if self.rank_states[rank].error is None)

    @property
    def errors(self) -> dict[int, messages.RankError]:
        """Errors by rank."""
        return {rank: state.error for rank, state in self.rank_states.items() if state.error}

    @property
    def is_interrupted(self) -> bool:
        """True if every rank that did not finish by itself was interrupted.

        A rank that is blocked may fail with a connection error when its process groups are aborted.
        """
        interrupted = bool(self.interrupted_at) and self.failure is None
        kinds = {group.kind for group in tracebacks.group_errors(list(self.errors.values()))}
        return interrupted and bool(kinds) and "cause" not in kinds

    def raise_errors(self) -> None:
        """Raise the error that ended the cell, as a notebook cell would.

        Raises:
            RankDied: a rank ended during the cell.
            CellError: the code raised on a rank.
        """
        self.joined = True
        if self.failure is not None:
            raise self.failure
        if self.errors:
            groups = tracebacks.group_errors(list(self.errors.values()))
            causes = {
                rank for group in groups if group.kind == groups[0].kind for rank in group.ranks
            }
            if causes <= self._ranks_with_shown_errors:
                rendered = tracebacks.format_reminder(groups)
            else:
                rendered = self._error_lines()
            error = CellError(
                tracebacks.summarize_errors(groups), errors=self.errors, rendered=rendered
            )
            # Scripts print only the exception.
            error.add_note(strip_ansi("\n".join(self._error_lines())))
            raise error

    def show_errors(self) -> None:
        """Show the errors of a cell that no thread waits for, once."""
        if self.errors and not self._ranks_with_shown_errors:
            self._ranks_with_shown_errors = frozenset(self.errors)
            if self.is_interrupted:
                self.renderer.show_lines(self._error_lines())
                return
            self.renderer.show_errors(
                list(self.errors.values()), waiting=self.running, advice=self.oom_advice_lines()
            )

    def _error_lines(self) -> list[str]:
        """Return the tracebacks of all ranks and the advice; an interrupt is one line."""
        if self.is_interrupted:
            ranks = rank_sets.describe_ranks(tuple(self.errors))
            return [f"KeyboardInterrupt: {self.deadlock}Interrupted on {ranks}"]
        groups = tracebacks.group_errors(list(self.errors.values()))
        return [
            *tracebacks.format_tracebacks(groups, ranks=self.ranks),
            *self.oom_advice_lines(),
        ]

    def oom_advice_lines(self) -> list[str]:
        """Return the advice of the rank with the most memory in use."""
        if not self.oom_advice:
            return []
        rank = max(self.oom_advice, key=lambda member: self.oom_advice[member]["held_bytes"])
        first, *rest = self.oom_advice[rank]["lines"]
        others = len(self.oom_advice) - 1
        also = f" (as {others} more)" if others else ""
        return ["", f"rank {rank}{also}: {first}", *rest]

    def _ends(self) -> bool:
        """Return whether the cell has finished and the end was not handled yet."""
        while self._unfinished:
            state = self._unfinished[-1]
            if state.replied_at is None:
                break
            # reply and output have arrived, or the output has timed out
            silent_s = time.monotonic() - state.last_message_at
            if not state.is_idle and silent_s <= IDLE_DEADLINE_S:
                break
            self._unfinished.pop()
        over = self.failure is not None or not self._unfinished
        return over and not self.finished.is_set()

    def _has_own_error(self) -> bool:
        """Return whether a rank raised an error of its own, not caused by the death of another."""
        groups = tracebacks.group_errors(list(self.errors.values()))
        return any(group.kind == "cause" for group in groups)

    def _show_error_while_others_run(self) -> None:
        """Show an error of a rank that others may be waiting for."""
        if self.failed_at is None or not self.running:
            return
        if self.interrupted_at and not self._has_own_error():
            return  # the error is only the aborted process group of an interrupt
        if time.monotonic() - self.failed_at > PROMPT_ERROR_S:
            self.show_errors()

    # -- messages of the ranks

    def _handle(self, handle: Handler | None, ranks: Sequence[int], message: Message) -> None:
        """Handle a message of each rank; text, which has no handler, is rendered once for all."""
        now, content = time.monotonic(), message["content"]
        try:
            for rank in ranks:
                state = self.rank_states[rank]
                state.last_message_at = now
                if handle is None:
                    state.add_output({"output_type": "stream", **content})
                else:
                    handle(self, rank, message)
            if handle is None:
                self.renderer.write_text(ranks, content["name"], content["text"])
        except Exception as error:  # noqa: BLE001 - a cell may send anything; keep reading
            kind, error_text = message["header"]["msg_type"], f"{type(error).__name__}: {error}"
            ranks_text = rank_sets.describe_ranks(ranks)
            self.renderer.show_lines([f"{ranks_text}: invalid message ({kind}): {error_text}"])

    def _on_reply(self, rank: int, message: Message) -> None:
        state, content = self.rank_states[rank], message["content"]
        state.replied_at = time.monotonic()
        for page in content.get("payload", []):
            if page.get("source") == "page":  # `len?`: a front end opens a pager for it
                self.renderer.write_text(
                    (rank,), "stdout", page["data"].get("text/plain", "") + "\n"
                )
        if content["status"] == "error" and state.error is None:
            state.error = messages.RankError.from_message(rank, message)

    def _on_error(self, rank: int, message: Message) -> None:
        # It arrives before the reply.
        self.rank_states[rank].error = error = messages.RankError.from_message(rank, message)
        if self.failed_at is None and not error.is_interrupt:
            self.failed_at = time.monotonic()
        self.rank_states[rank].add_output(
            {
                "output_type": "error",
                "ename": error.ename,
                "evalue": error.evalue,
                "traceback": error.traceback,
            }
        )

    def _on_status(self, rank: int, message: Message) -> None:
        # After `idle` all output of the cell has arrived.
        if message["content"]["execution_state"] == "idle":
            self.rank_states[rank].is_idle = True

    def _on_display(self, rank: int, message: Message) -> None:
        content = message["content"]
        bundle, metadata = content["data"], content["metadata"]
        update = message["header"]["msg_type"] == "update_display_data"
        if not update:
            self.rank_states[rank].add_output(
                {"output_type": "display_data", "data": bundle, "metadata": metadata}
            )
        self.renderer.display(
            rank,
            bundle,
            metadata,
            display_id=content.get("transient", {}).get("display_id"),
            update=update,
        )

    def _on_result(self, rank: int, message: Message) -> None:
        content = message["content"]
        metadata = dict(content["metadata"])
        note = metadata.pop(messages.CELL_METADATA_KEY, None)
        text = content["data"].get("text/plain", "")
        self.rank_states[rank].value = (
            text if note is None else serialization.from_inline_json(note)
        )
        self.rank_states[rank].add_output(
            {
                "output_type": "execute_result",
                "execution_count": content["execution_count"],
                "data": content["data"],
                "metadata": metadata,
            }
        )
        self.renderer.result(rank, content["data"], metadata)

    def _on_clear_output(self, rank: int, message: Message) -> None:
        self.renderer.clear_output(rank, wait=message["content"].get("wait", False))

    def _on_comm(self, rank: int, message: Message) -> None:
        msg_type, content = message["header"]["msg_type"], message["content"]
        self.comms.follow(rank, msg_type, content["comm_id"])
        self.renderer.relay_comm(rank, msg_type, content, message["metadata"], message["buffers"])

    def _on_oom_advice(self, rank: int, message: Message) -> None:
        self.oom_advice[rank] = message["content"]
        # If the error was shown already, the advice follows below it.
        if self._ranks_with_shown_errors and len(self.oom_advice) == 1:
            self.renderer.show_lines(self.oom_advice_lines())

    def _on_sent_value(self, rank: int, message: Message) -> None:
        content = message["content"]
        self._on_send(rank, content["name"], content["path"])

    def _on_input_request(self, rank: int, message: Message) -> None:
        self.input_requests[rank] = message["content"]

    HANDLERS: ClassVar[dict[tuple[str, str], Handler | None]] = {
        ("shell", "execute_reply"): _on_reply,
        ("iopub", "status"): _on_status,
        ("iopub", "stream"): None,
        ("iopub", "display_data"): _on_display,
        ("iopub", "update_display_data"): _on_display,
        ("iopub", "execute_result"): _on_result,
        ("iopub", "error"): _on_error,
        ("iopub", "clear_output"): _on_clear_output,
        ("iopub", "comm_open"): _on_comm,
        ("iopub", "comm_msg"): _on_comm,
        ("iopub", "comm_close"): _on_comm,
        ("iopub", messages.SENT_VALUE): _on_sent_value,
        ("iopub", messages.INPUT): _on_input_request,
        ("iopub", messages.OOM_ADVICE): _on_oom_advice,
    }


class CellResult:
    """Result of a cell, by rank; fills while a background cell is running.

    Attributes by rank: `values` (of the last expression: the value itself if it is a plain
    Python value of at most 64 kB, else its text; None without one), `outputs` (in nbformat,
    streams limited to 1,000,000 characters), `errors`.
    """

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    @property
    def done(self) -> bool:
        """True if all ranks have finished the cell."""
        return self._cell.finished.is_set()

    @property
    def ok(self) -> bool:
        """True if all ranks have finished the cell without an error."""
        return self.done and not self._cell.errors and self._cell.failure is None

    @property
    def values(self) -> dict[int, object]:
        """Value of the last expression, by rank."""
        return {rank: state.value for rank, state in self._cell.rank_states.items()}

    @property
    def outputs(self) -> dict[int, list[dict[str, Any]]]:
        """Outputs in nbformat, by rank."""
        return {rank: state.outputs for rank, state in self._cell.rank_states.items()}

    @property
    def errors(self) -> dict[int, messages.RankError]:
        """Errors by rank."""
        return self._cell.errors

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until a background cell has finished; return False on timeout.

        Raises:
            CellError: the code raised on a rank.
            RankDied: a rank ended during the cell.
        """
        if not self._cell.finished.wait(timeout_s):
            return False
        self._cell.raise_errors()
        return True

    def __repr__(self) -> str:
        state = "ok" if self.ok else "failed" if self.done else "running"
        return f"CellResult({state}, ranks={list(self._cell.ranks)})"

    def _display_(self) -> object:
        """Return what marimo shows: in its notebooks the last value replaces all displays."""
        return getattr(self._cell.renderer.recorder.sink, "displays", None) or repr(self)
