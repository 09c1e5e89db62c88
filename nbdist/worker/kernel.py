"""The ipykernel embedded in each rank, which executes the user's cells.

Differences from a notebook kernel: no history file, no high-water mark on output, the notebook's
kernel asks the user for input (`worker.debugger`), cells use the notebook's execution counts, and
the frames of a failed cell are released when the next cell starts, so that its tensors are freed;
at once if no user can debug them, or if memory has run out.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import signal
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from ipykernel.displayhook import ZMQShellDisplayHook
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from ipykernel.zmqshell import ZMQDisplayPublisher, ZMQInteractiveShell
from IPython.core.error import UsageError
from traitlets import Bool, DottedObjectName, Float, Type
from traitlets.config import Config

from nbdist.errors import NbdistError, PayloadError, SessionError, StartError
from nbdist.hardware import process_identity
from nbdist.protocol import messages, serialization
from nbdist.protocol.operations import OPERATIONS, REBUILD_MODELS
from nbdist.protocol.signing import KEY_BYTES, MessageSigner, RejectedMessageLogFilter
from nbdist.worker import process_group, stacks
from nbdist.worker.debugger import (
    RankDebugger,
    is_debuggable,
    keyboard,
    release_error,
    use_rank_debugger,
)
from nbdist.worker.engines import accelerator_patch
from nbdist.worker.main_thread_requests import Inspection, WidgetMessages
from nbdist.worker.memory import memory_advice, memory_probe, model_description
from nbdist.worker.operations import pull
from nbdist.worker.operations.collective_phases import deferred_interrupts, error_text
from nbdist.worker.optimizer_step_gate import optimizer_step_gate
from nbdist.worker.output_streams import MAX_ERROR_CHARS, log_to_launcher, truncate
from nbdist.worker.profiling import profile_window
from nbdist.worker.stacks import MainThreadMonitor
from nbdist.worker.training import unprepared_optimizers, whole_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import zmq
    from IPython.core.history import HistoryManager

    from nbdist.protocol.operations import Operation
    from nbdist.worker.collective_check import CollectiveBarrier
    from nbdist.worker.operations import RankContext
    from nbdist.worker.operations.save import CheckpointSaver
    from nbdist.worker.profiling.profile_window import ProfileContext

log = logging.getLogger(__name__)

Message = dict[str, Any]
FLUSH_S = 10.0
"""Time that the end of a cell waits for copies of reported device tensors."""
PROMPT_S = 86_400.0
"""Estimated time until the next step of a rank at a prompt: the others do not wait for it."""
INTERRUPTED_REPLY = {"ename": "KeyboardInterrupt", "evalue": "", "traceback": ["KeyboardInterrupt"]}


class RankDisplayHook(ZMQShellDisplayHook):
    """Display hook that attaches small plain values to the output (`CellResult.values`)."""

    def compute_format_data(self, result: object) -> tuple[dict[str, Any], dict[str, Any]]:
        """Format as IPython does and add the value itself to the metadata."""
        bundle, metadata = super().compute_format_data(result)
        _shorten(bundle)
        try:
            metadata[messages.CELL_METADATA_KEY] = serialization.to_inline_json(result)
        except PayloadError:
            return bundle, metadata  # the notebook's kernel gets only the text
        return bundle, metadata

    def log_output(self, format_dict: dict[str, Any]) -> None:
        """Do nothing: IPython 9 would keep the text and HTML of every cell's value forever."""


class RankShell(ZMQInteractiveShell):
    """Interactive shell that a cell cannot exit."""

    displayhook_class = Type(RankDisplayHook)
    debugger_cls = RankDebugger
    display_pub: ZMQDisplayPublisher
    history_manager: HistoryManager

    def ask_exit(self) -> NoReturn:
        """Raise an error: a single rank cannot exit without the others."""
        raise SessionError(
            "exit() was called: a rank cannot exit alone. Use %nbdist stop to end all ranks."
        )

    def debugger(self, force: bool = False) -> None:  # noqa: FBT001, FBT002 - IPython's signature
        """Debug the last error, while its frames exist."""
        if force and not hasattr(sys, "last_value"):
            sys.stderr.write("The error cannot be debugged anymore: its frames were released.\n")
            return
        super().debugger(force=force)

    def showtraceback(self, *args: Any, **kwargs: Any) -> None:
        """Show an error; use plain tracebacks for interrupts and when the host is out of memory."""
        default_mode, error = self.InteractiveTB.mode, sys.exc_info()[1]
        whole_weights.add_advice(error)
        if isinstance(error, KeyboardInterrupt) or memory_advice.is_out_of_host_memory(error):
            # For the source around each frame IPython 9 parses whole modules (0.5 s in a training
            # loop, megabytes of small objects), and CPython 3.11's parser crashes with SIGSEGV if
            # an allocation fails.
            self.InteractiveTB.set_mode("Plain")
        try:
            super().showtraceback(*args, **kwargs)
        finally:
            self.InteractiveTB.set_mode(default_mode)

    def transform_cell(self, raw_cell: str) -> str:
        """Transform a cell, and note it where IPython looks for a `;` at its end."""
        cell: str = super().transform_cell(raw_cell)
        self.history_manager.input_hist_parsed[:] = [cell]  # without a history it stays empty
        return cell

    def init_magics(self) -> None:
        """Register IPython's magics, and a `%nbdist` that says where to use it."""
        super().init_magics()
        self.magics_manager.register_function(_nbdist_on_a_rank, magic_name="nbdist")

    def init_display_pub(self) -> None:
        """Truncate very long text in displays."""
        super().init_display_pub()
        self.display_pub.register_hook(_with_shorter_text)

    @contextmanager
    def _tee(self, channel: Literal["stdout", "stderr"]) -> Iterator[None]:  # noqa: ARG002 - IPython's
        yield  # IPython 9 would keep a copy of all printed output forever

    def _showtraceback(self, etype: type[BaseException], evalue: object, stb: list[str]) -> None:
        parts = [truncate(part, longest=MAX_ERROR_CHARS) for part in stb]
        if self.kernel.widget_messages.in_callback:  # an error message would end the running cell
            sys.stderr.write(f"{self.InteractiveTB.stb2text(parts)}\n")
            return
        super()._showtraceback(etype, truncate(str(evalue), longest=MAX_ERROR_CHARS), parts)


class RankKernel(IPythonKernel):
    """Kernel that runs cells and handles the requests of `nbdist.protocol.messages`."""

    shell: RankShell
    session: MessageSigner  # traitlets types both as optional; on a rank they are always set
    debug_just_my_code = Bool(default_value=True)  # ipykernel 7.4's default traces all libraries
    shell_class = Type(RankShell)
    _execute_sleep = Float(0.0)  # ipykernel 7.4 waits 0.5 ms per cell for old front ends

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self.collective_barrier: CollectiveBarrier | None = None
        """Barrier of CPU ranks before each collective; set by `for_rank`."""
        self.main_thread_monitor = MainThreadMonitor(None)
        # The following are set by ``main.add_kernel_functions``.
        self.profile_context: ProfileContext
        self.operation_context: RankContext
        self.saver: CheckpointSaver
        self.running_request: str | None = None
        """Message id of the request that is running."""
        self.finished_request: str | None = None
        """Message id of the cell that finished last."""
        self.interrupted_request: str | None = None
        """Message id of the request interrupted last; it may not have started yet."""
        self.shell_handlers |= {
            messages.JOIN: self.on_main_thread(self.join),
            messages.PUSH: self.on_main_thread(self.push),
            messages.PULL: self.on_main_thread(
                lambda request: pull.write_variables(request, self.shell.user_ns)
            ),
            messages.MODEL: self.on_main_thread(
                lambda request: model_description.model_reply(request, self.shell.user_ns)
            ),
        }
        self.shell_handlers |= {
            operation.message_type: self.on_main_thread(
                partial(self.run_operation, operation), in_phases=operation.in_phases
            )
            for operation in OPERATIONS
        }
        self.control_handlers |= {
            messages.MEASURED_MEMORY: self.on_control_thread(
                lambda _: messages.MeasuredMemoryReply(figures=memory_probe.get_measurements())
            ),
            messages.RANK_ACTIVITY: self.on_control_thread(
                lambda _: stacks.current_line_reply(
                    self.shell.compile.format_code_name, self.main_thread_monitor.sample()
                )
            ),
            messages.ABORT_COLLECTIVES: self.on_control_thread(self.release_collectives),
            messages.PAUSE: self.on_control_thread(self.pause_steps),
            messages.STACKS: self.on_control_thread(
                lambda _: messages.StacksReply(
                    text=stacks.format_stacks(self.shell.compile.format_code_name)
                )
            ),
            # The prepared model, by the analytic description of its meta copy: that takes
            # milliseconds, also during training.
            messages.MODEL: self.on_control_thread(
                lambda request: model_description.model_reply(
                    request | {"name": None, "quick": True}, {}
                )
            ),
            messages.PROFILE: self.on_control_thread(
                lambda request: profile_window.start_profile(
                    request,
                    self.profile_context,
                    running=self.running_request,
                    over=self.finished_request,
                )
            ),
            messages.INSPECT: self.on_control_thread(Inspection(self).queue),
            messages.ANSWER_INPUT: self.on_control_thread(keyboard.answer),
        }
        keyboard.publish = self.publish
        self.widget_messages = WidgetMessages(self)
        self.control_handlers |= dict.fromkeys(("comm_msg", "comm_close"), self.widget_messages.add)
        optimizer_step_gate.between_steps = self.widget_messages.run_callbacks

    def on_main_thread(
        self, work: Callable[[Any], Any], *, in_phases: bool = False
    ) -> Callable[..., None]:
        """Return a request handler that runs on the main thread and can be interrupted.

        Args:
            work: maps the content of the request to the content of the reply.
            in_phases: an interrupt takes effect between phases.
        """

        def handle(stream: Any, ident: Any, parent: Message) -> None:
            self.running_request = parent["header"]["msg_id"]
            try:
                if self.running_request == self.interrupted_request:
                    raise KeyboardInterrupt  # noqa: TRY301 - replied to as one of the work
                with deferred_interrupts.defer_interrupts() if in_phases else nullcontext():
                    reply = reply_to(work, parent["content"])
            except KeyboardInterrupt as error:  # raised after the work, outside its error handling
                reply = error_reply(error)
            finally:
                self.running_request = None
            self.reply(stream, ident, parent, reply)

        return handle

    def on_control_thread(self, work: Callable[[Any], Any]) -> Callable[..., None]:
        """Return a request handler that runs on the control thread."""

        def handle(stream: Any, ident: Any, parent: Message) -> None:
            self.reply(stream, ident, parent, reply_to(work, parent["content"]))

        return handle

    def reply(self, stream: Any, ident: Any, parent: Message, content: Any) -> None:
        """Send the reply to one of nbdist's requests."""
        kind = parent["header"]["msg_type"].replace("_request", "_reply")
        self.session.send(stream, kind, content, parent, ident=ident)

    async def execute_request(self, stream: Any, ident: Any, parent: Message) -> None:
        """Run a cell; always reply, even if interrupted outside the user's code."""
        try:
            await super().execute_request(stream, ident, parent)
        except KeyboardInterrupt:  # ipykernel 7.4 logs it and sends no reply
            content = {"status": "error", **INTERRUPTED_REPLY}
            self.session.send(stream, "execute_reply", content, parent, ident=ident)

    async def do_execute(  # ipykernel's signature
        self,
        code: str,
        silent: bool,  # noqa: FBT001
        store_history: bool = True,  # noqa: FBT001, FBT002
        user_expressions: Any = None,
        allow_stdin: bool = False,  # noqa: FBT001, FBT002
        **kwargs: Any,
    ) -> Message:
        """Run a cell under the notebook's execution count; free the frames of a failed one."""
        request = self.get_parent("shell")
        note = request["metadata"].get(messages.CELL_METADATA_KEY)
        if not (note and note["debugs_error"]):
            release_error(self.shell)
        if note:
            self.shell.execution_count = note["count"]
            self.saver.set_root(note["checkpoints"])
            process_group.set_cell_ranks(note["ranks"])
        optimizer_step_gate.begin_cell()
        unprepared_optimizers.begin_cell()
        keyboard.begin_cell(has_user=allow_stdin)
        process_group.set_timeouts(has_user=allow_stdin)
        self.running_request = request["header"]["msg_id"]
        if self.running_request == self.interrupted_request:
            raise KeyboardInterrupt
        try:
            reply: Message = await super().do_execute(
                code, silent, store_history, user_expressions, allow_stdin, **kwargs
            )
        finally:
            keyboard.end_cell()
            self.running_request, self.finished_request = None, self.running_request
            optimizer_step_gate.end_cell()
            process_group.set_cell_ranks(None)
            accelerator_patch.restore_shared_states()
            memory_probe.stop_tracking()
            if optimizer_step_gate.listener is not None:
                optimizer_step_gate.listener.on_cell_end()
        self.operation_context.reporter.flush(FLUSH_S)
        on_several = note and len(note["ranks"]) > 1
        if on_several and (text := unprepared_optimizers.note_separate_training()):
            self.warn_async()(text)
        if reply["status"] == "error":
            reply["evalue"] = truncate(reply["evalue"], longest=MAX_ERROR_CHARS)
            self.release_failed_cell(has_user=allow_stdin)
        return reply

    def release_failed_cell(self, *, has_user: bool) -> None:
        """Release the frames of a failed cell; publish advice if it ran out of memory.

        Args:
            has_user: whether a user can debug the error; then most frames are kept until the next
                cell starts.
        """
        try:
            # Do not bind the error to a local variable: it would keep the frames alive.
            make_advice = memory_advice.advice_for(
                getattr(self.shell.last_execution_result, "error_in_exec", None)
            )
            if make_advice is not None or not (has_user and is_debuggable(self.shell)):
                release_error(self.shell)
            if make_advice is not None:
                self.publish(messages.OOM_ADVICE, make_advice())
        except Exception:
            # All of this may fail when memory is short, and the reply must be sent anyway.
            log.exception("advice on an out-of-memory error failed")

    def _publish_execute_input(self, *_: object) -> None:
        """Send nothing: the notebook already has the code."""

    def _publish_status(self, status: str, channel: str, *args: Any, **kwargs: Any) -> None:
        # The kernel that sent the cell knows that the rank is busy. A widget's message on the
        # control channel has the id of a cell, which has not ended with it.
        if status != "busy" and channel != "control":
            super()._publish_status(status, channel, *args, **kwargs)

    async def interrupt_request(self, stream: Any, ident: Any, parent: Message) -> None:
        """Interrupt a running or queued cell in this process only.

        ipykernel would signal the process group and so the rank's DataLoader workers.
        """
        content: messages.InterruptRequest = parent["content"]
        if self.running_request == content["request"]:
            optimizer_step_gate.interrupt_after(content["after"])
            keyboard.release()
        else:
            self.interrupted_request = content["request"]
            if self.widget_messages.in_callback:  # the cell waits for a widget's callback
                os.kill(os.getpid(), signal.SIGINT)
        self.session.send(stream, "interrupt_reply", {"status": "ok"}, parent, ident=ident)

    def pause_steps(self, _: object) -> messages.PauseReply:
        """Pause before the next optimizer step until the kernel sends the step to stop after."""
        begun, next_s = optimizer_step_gate.pause_steps()
        return messages.PauseReply(
            begun=begun,
            next_s=PROMPT_S if keyboard.is_asking else next_s,
            is_training=optimizer_step_gate.is_training,
        )

    def raw_input(self, prompt: object = "") -> str:
        """Ask the user for a line; `input()` and pdb call it."""
        return keyboard.ask(str(prompt))

    def getpass(self, prompt: str = "Password: ", *_: object, **__: object) -> str:
        """Ask the user for a password."""
        return keyboard.ask(prompt, password=True)

    def join(self, _: object) -> messages.JoinReply:
        """Confirm that this rank has passed the first barrier."""
        return messages.JoinReply(
            pid=os.getpid(),
            start_ticks=process_identity.process_start_ticks(os.getpid()),
            device=str(self.shell.user_ns["device"]),
        )

    def push(self, request: messages.PushRequest) -> messages.PayloadFileReply:
        """Load the variables of a payload file into the user's namespace."""
        self.shell.push(serialization.read_payload(request["path"], delete=False))
        return messages.PayloadFileReply(status="ok", path=request["path"])

    def run_operation(self, operation: Operation[Any, Any], content: Any) -> dict[str, Any]:
        """Carry out a request to all ranks, a collective; return the content of the reply."""
        if operation is not REBUILD_MODELS:  # a recovery keeps the error for the debugger
            release_error(self.shell)
        if operation.in_phases:  # it replaces the state that the last cell left
            optimizer_step_gate.begin_cell()
        function = pkgutil.resolve_name(operation.function)
        report = function(operation.request(**content), self.operation_context)
        return {"status": "ok", "report": asdict(report)}

    def warn_async(self) -> Callable[[str], None]:
        """Return a function that writes to stderr below the current cell.

        It works from any thread and also after the cell has ended.
        """
        parent = self.get_parent("shell")

        def write_stderr(text: str) -> None:
            content = {"name": "stderr", "text": text}
            self.session.send(self.iopub_socket, "stream", content, parent=parent)

        return write_stderr

    def publish_phase(self, text: str) -> None:
        """Publish the progress of a long request from rank 0."""
        if os.environ["NBDIST_RANK"] == "0":  # during a rebuild there may be no process group
            self.publish(messages.PROGRESS, messages.RankProgress(text=text))

    def release_collectives(self, request: messages.AbortCollectivesRequest) -> dict[str, Any]:
        """Abort the collective that the main thread waits in; runs on the control thread."""
        if self.collective_barrier is not None:
            self.collective_barrier.abort()
        process_group.abort_collectives(request["pids"], request["id"])
        return {}

    def publish(self, kind: str, content: Any) -> None:
        """Send a message on iopub with the running cell as its parent; thread-safe."""
        self.session.send(self.iopub_socket, kind, content, parent=self.get_parent("shell"))


class RankApp(IPKernelApp):
    """Application that opens a rank's sockets from the kernel's connection file."""

    outstream_class = DottedObjectName("nbdist.worker.output_streams.BufferedOutStream")

    @classmethod
    def for_rank(
        cls, rank: int, *, run_dir: Path, user_ns: dict[str, Any], barrier: CollectiveBarrier | None
    ) -> RankApp:
        """Bind the sockets of `rank` and create its kernel; `start()` serves cells."""
        config = Config()
        config.HistoryManager.enabled = False  # no sqlite file per rank
        config.InteractiveShell.cache_size = 0  # Out[] would keep tensors alive
        config.IPCompleter.use_jedi = False  # it parses torch, which takes seconds
        app: RankApp = cls.instance(
            connection_file=str(run_dir / f"rank{rank}.json"),
            parent_handle=os.getppid(),  # in addition to PDEATHSIG; polls every second
            user_ns=user_ns,
            kernel_class=RankKernel,
            log_level="ERROR",
            config=config,
        )
        app.log.addFilter(RejectedMessageLogFilter())
        app.initialize([])
        log_to_launcher(rank)
        app.kernel.collective_barrier = barrier
        app.kernel.main_thread_monitor = MainThreadMonitor(barrier)
        use_rank_debugger()  # after ipykernel's debugpy has set its own breakpoint()
        return app

    def load_connection_file(self, connection_file: str | None = None) -> None:
        """Read the connection file, which must name Unix sockets and a signing key.

        Raises:
            StartError: the file names another transport or has no valid key.
        """
        super().load_connection_file(connection_file)
        if self.transport != "ipc" or len(self.session.key) < 2 * KEY_BYTES:
            raise StartError(
                f"Invalid connection file {self.connection_file}:"
                " expected ipc transport and a signing key."
            )

    def _session_default(self) -> MessageSigner:
        return MessageSigner(parent=self)

    def _ipython_dir_default(self) -> str:
        """Return an empty folder, so that no files of the user's profile are used."""
        folder = Path(self.connection_file).with_suffix("")
        folder.mkdir(mode=0o700)
        return str(folder)

    def init_iopub(self, context: zmq.Context[Any]) -> None:
        """Open iopub without a high-water mark."""
        context.SNDHWM = 0  # ZMQ silently drops messages above the mark
        super().init_iopub(context)


def reply_to(work: Callable[[Any], Any], request: Any) -> Any:
    """Do the work and return its reply, or an error reply if it raises anything.

    Without a reply the kernel would wait for its whole timeout.
    """
    try:
        return work(request)
    except BaseException as error:  # noqa: BLE001 - a model's own code may even call sys.exit
        return error_reply(error)


def error_reply(error: BaseException) -> messages.ErrorReply:
    """Return the error reply for an exception; unexpected exceptions are logged in full."""
    text = error_text(error) or ""
    if isinstance(error, NbdistError):
        text = str(error)
    else:
        log.error("a request of the kernel failed", exc_info=error)
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted before it finished"
    return messages.ErrorReply(status="error", error=text, ename=type(error).__name__)


def _nbdist_on_a_rank(line: str) -> NoReturn:
    raise UsageError(
        f"%nbdist {line} is a command of the notebook. Run it in a cell without %%distribute."
    )


def _shorten(bundle: dict[str, Any]) -> None:
    """Truncate the plain text of a display; images and HTML cannot be truncated."""
    if isinstance(text := bundle.get("text/plain"), str):
        bundle["text/plain"] = truncate(text)


def _with_shorter_text(message: Message) -> Message:
    _shorten(message["content"].get("data", {}))  # clear_output has none
    return message
