"""IPython's debugger and `input()` on a rank, whose lines come from the notebook.

A rank has no stdin. It publishes each prompt on iopub, with the cell as its parent, and the thread
that asked waits for the answer, which arrives on the control thread. The notebook's kernel shows
the prompts of several ranks one after another (`session.prompts`).

An interrupt releases a prompt (`optimizer_step_gate` chooses the step): a rank that has made its
last step raises KeyboardInterrupt there, another one continues without further stops.
"""

from __future__ import annotations

import ast
import code
import contextlib
import gc
import linecache
import os
import pdb  # noqa: T100
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from IPython.core import debugger

from nbdist.errors import SessionError
from nbdist.protocol import messages
from nbdist.worker import stacks
from nbdist.worker.optimizer_step_gate import optimizer_step_gate

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from IPython.core.interactiveshell import InteractiveShell

PDB_VARIABLES = ("__return__", "__exception__", "__pdb_convenience_variables")
"""What pdb adds to the variables of a cell; it would keep frames and their tensors alive."""
SKIPPED_MODULES = ("nbdist.*", "contextlib", "threading")
"""`step` does not stop in nbdist's own code, nor in the contexts and timers that it uses, because a
lock may be held there that an interrupt needs."""
SIGINT_S = 1.0
"""Time for the SIGINT of an interrupt to arrive, which is sent shortly before the release."""


class InputReleased(BaseException):
    """An interrupt has ended a prompt; pdb catches KeyboardInterrupt itself in several places."""


class _Thread(threading.local):
    debugger: RankDebugger | None = None
    """The debugger that reads commands in this thread, or None."""


class Keyboard:
    """Asks the user for lines of input, from any thread of this rank."""

    def __init__(self) -> None:
        self.publish: Callable[[str, Any], None]
        """Sends a message with the running cell as its parent; set by the kernel."""
        self.while_waiting: Callable[[], object] = lambda: None
        """Called by the thread that asks after each `wake`."""
        self.thread = _Thread()
        """The debugger of this thread."""
        self.num_stops = 0
        """Number of times that a debugger has stopped."""
        self.is_asking = False
        """True while a prompt waits for its answer."""
        self._lock = threading.Lock()
        self._number = 0
        self.begin_cell(has_user=False)

    def begin_cell(self, *, has_user: bool) -> None:
        """Start a cell.

        Args:
            has_user: whether a user can answer prompts of this cell.
        """
        self.has_user = has_user
        self._pid = os.getpid()
        self.released = False
        """True after an interrupt of the cell."""
        self._answers: SimpleQueue[messages.InputAnswer | None] = SimpleQueue()

    def end_cell(self) -> None:
        """End a cell, and the debugger's tracing of it; later prompts of its threads fail."""
        self.has_user = False
        self._answers.put(None)
        if _is_rank_debugger(sys.gettrace()):
            sys.settrace(None)
        # bdb traces all outer frames too. They refer to the debugger, and it to the cell's frames.
        for frame in stacks.frames_outwards(sys._getframe()):  # noqa: SLF001
            if _is_rank_debugger(frame.f_trace):
                frame.f_trace = None
        for name in PDB_VARIABLES:
            vars(sys.modules["__main__"]).pop(name, None)

    def require_user(self, call: str) -> None:
        """Raise if no user can answer prompts.

        Args:
            call: what was called, as the subject of a sentence.

        Raises:
            SessionError: the reason.
        """
        if os.getpid() != self._pid:
            raise SessionError(
                f"{call} was called in a child process of a rank, such as a DataLoader worker,"
                " which cannot ask for input. Use num_workers=0 to run this code in the rank."
            )
        if not self.has_user:
            raise SessionError(
                f"{call} was called on a rank, but this cell cannot ask for input: it runs in the"
                " background, or its front end does not support input. Run the cell in a notebook"
                " without --background."
            )

    def ask(self, prompt: str, *, password: bool = False) -> str:
        """Return the line that the user enters.

        Raises:
            SessionError: there is no user.
            EOFError: the user ended the input.
            KeyboardInterrupt: the cell was interrupted.
            InputReleased: the same, at a prompt of the debugger.
        """
        debugging = self.thread.debugger
        kind: messages.DebuggerKind = ""
        if debugging is not None and prompt == debugging.prompt:
            kind = debugging.kind
        self.require_user("The debugger" if kind else f"input({prompt!r})")
        try:
            text = self._ask(prompt, kind, password=password)
            if text is None:
                if kind == "breakpoint" and not optimizer_step_gate.is_interrupted:
                    return "continue"  # the other ranks have made a step that this one has not
                raise KeyboardInterrupt  # noqa: TRY301 - as SIGINT does
        except KeyboardInterrupt:
            if debugging is None:
                raise
            # `interact` would ask again after KeyboardInterrupt; the next command ends the debugger
            raise (InputReleased if kind else EOFError) from None
        if text == messages.END_OF_INPUT:
            raise EOFError
        return text

    def _ask(
        self, prompt: str, debugger: messages.DebuggerKind, *, password: bool = False
    ) -> str | None:
        """Return the answer; None if the prompt was released."""
        with self._lock:
            self._number += 1
            request = messages.InputRequest(
                id=self._number,
                prompt=prompt,
                password=password,
                debugger=debugger,
                stop=self.num_stops,
            )
            sys.stdout.flush()
            sys.stderr.flush()
            self.is_asking = True
            try:
                self.publish(messages.INPUT, request)
                while self.has_user and not self.released:
                    answer = self._answers.get()
                    self.while_waiting()
                    if answer is not None and answer["id"] == request["id"]:
                        if answer["error"]:
                            raise SessionError(answer["error"])
                        return answer["text"]
                if optimizer_step_gate.is_interrupted:
                    # SIGINT is on its way to the main thread, unless it has arrived earlier and
                    # has ended a command of the debugger.
                    threading.Event().wait(SIGINT_S)
            finally:
                self.is_asking = False
        return None

    # -- the control thread

    def answer(self, answer: messages.InputAnswer) -> dict[str, Any]:
        """Pass an answer to the thread that asked."""
        self._answers.put(answer)
        return {}

    def wake(self) -> None:
        """Have a thread that waits for an answer call `while_waiting`."""
        self._answers.put(None)

    def release(self) -> None:
        """End this prompt and all further ones of the cell."""
        self.released = True
        self._answers.put(None)


keyboard = Keyboard()
"""The keyboard of this rank."""


class RankDebugger(debugger.InterruptiblePdb):
    """IPython's debugger; its prompt names the line at which the rank has stopped."""

    kind: messages.DebuggerKind = "breakpoint"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        keyboard.require_user("The debugger")
        self._has_left_statement = False
        """True between two statements of a cell."""
        # nosigint: `continue` would install a handler for SIGINT, and Stop would open the debugger.
        super().__init__(*args, **{**kwargs, "nosigint": True, "skip": SKIPPED_MODULES})

    def setup(self, frame: FrameType | None, tb: Any) -> Any:
        """Read the stack and set the prompt."""
        result = super().setup(frame, tb)
        stopped, line = self.stack[self.curindex]
        filename = stopped.f_code.co_filename
        self.prompt = f"{self._cell_name(filename) or Path(filename).name} line {line} ipdb> "
        return result

    def interaction(self, frame: FrameType | None, tb_or_exc: Any) -> None:
        """Read and carry out commands until one of them continues or quits.

        Raises:
            KeyboardInterrupt: the cell was interrupted.
        """
        self.kind = "post-mortem" if frame is None else "breakpoint"
        outer, keyboard.thread.debugger = keyboard.thread.debugger, self
        keyboard.num_stops += 1
        try:
            super().interaction(frame, tb_or_exc)  # type: ignore[no-untyped-call]
        except InputReleased:
            self.forget()
            sys.settrace(None)
            raise KeyboardInterrupt from None
        finally:
            keyboard.thread.debugger = outer
        # IPython 9 continues after an interrupt that arrives while a command prints.
        if keyboard.released and optimizer_step_gate.is_interrupted:
            raise KeyboardInterrupt

    def do_interact(self, _: str) -> None:
        """Open a console in the frame; exit() leaves it, because a front end may have no Ctrl-D."""
        leave = {"exit": sys.exit, "quit": sys.exit}
        variables = self.curframe.f_globals if self.curframe else {}
        names = {**variables, **self._curframe_locals, **leave}
        with contextlib.suppress(SystemExit):
            code.interact("exit() leaves the console.", local=names, exitmsg="")

    # IPython runs each statement of a cell as a module of its own. Stepping out of one leads to the
    # next, not into IPython's code between them.

    def user_call(self, frame: FrameType, argument_list: Any) -> None:
        """Stop at the start of a function; a statement has no line before its first one."""
        if not self._is_statement(frame):
            super().user_call(frame, argument_list)

    def user_return(self, frame: FrameType, return_value: object) -> None:
        """Stop at the end of a function or of the cell, not at that of each statement."""
        is_statement = self._is_statement(frame)
        if is_statement:
            cell = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
        if not is_statement or stacks.line_of(frame) >= cell.body[-1].lineno:
            super().user_return(frame, return_value)
        self._has_left_statement = is_statement

    def stop_here(self, frame: FrameType) -> bool:
        """Return whether to stop in a frame; between two statements in code of a cell only."""
        if self._has_left_statement and not self._cell_name(frame.f_code.co_filename):
            return False
        self._has_left_statement = False
        # IPython prints a line for each call of a skipped module, although nothing stops there
        if self.is_skipped_module(frame.f_globals.get("__name__", "")):
            return False
        return bool(super().stop_here(frame))  # type: ignore[no-untyped-call]

    def format_stack_entry(self, frame_lineno: Any, lprefix: str = ": ") -> str:
        """Format a frame as IPython does; a cell's file has a different name on each rank."""
        text: str = super().format_stack_entry(frame_lineno, lprefix)
        filename = frame_lineno[0].f_code.co_filename
        text = text.replace(filename, self._cell_name(filename) or filename).rstrip("\n")
        return text + "\n" if lprefix else text  # with a prefix for `where`, which joins frames

    def _is_statement(self, frame: FrameType) -> bool:
        code = frame.f_code
        return code.co_name == "<module>" and bool(self._cell_name(code.co_filename))

    def _cell_name(self, filename: str) -> str:
        """Return "In[3]" for the file name of a cell; "" for other files."""
        cell = self.shell.compile.format_code_name(filename)
        return cell[1] if cell else ""


def _is_rank_debugger(trace: object) -> bool:
    return isinstance(getattr(trace, "__self__", None), RankDebugger)


def set_trace(frame: Any = None, header: Any = None) -> None:  # noqa: ARG001 - pdb's signature
    """Stop in the debugger at the next line; `breakpoint()` and `pdb.set_trace()` of a rank."""
    keyboard.require_user("breakpoint()")
    if not keyboard.released:
        stopped = frame or sys._getframe().f_back  # noqa: SLF001
        RankDebugger().set_trace(stopped)  # type: ignore[no-untyped-call]


def use_rank_debugger() -> None:
    """Make it the debugger of pdb, of IPython, and of `breakpoint()`."""
    debugger.Pdb = pdb.Pdb = RankDebugger  # type: ignore[misc]
    debugger.set_trace = pdb.set_trace = set_trace
    sys.breakpointhook = sys.__breakpointhook__  # calls pdb's, or what PYTHONBREAKPOINT names


def is_debuggable(shell: InteractiveShell) -> bool:
    """Return whether the last error can be debugged later: not an interrupt, and memory is left."""
    error = getattr(shell.last_execution_result, "error_in_exec", None)
    return not isinstance(error, KeyboardInterrupt | MemoryError)


def release_error(shell: InteractiveShell) -> None:
    """Release the frames of a failed cell and so the tensors they hold.

    IPython 9 and the interpreter keep the last traceback in several places.
    """
    result = shell.last_execution_result
    if not hasattr(sys, "last_value") and (result is None or result.success):
        return
    # An error refers to its frames, and a frame often to its error. The garbage collector would
    # find such a cycle, but wait 5 s for each worker of a DataLoader whose iterator is in it.
    error = getattr(sys, "last_value", None)
    while error is not None:
        error.__traceback__, error = None, error.__cause__ or error.__context__
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    for view in (shell.InteractiveTB, shell.SyntaxTB):
        vars(view).update(tb=None, evalue=None, etype=None, pdb=None, last_syntax_error=None)
    result = shell.last_execution_result = None
    gc.collect()
