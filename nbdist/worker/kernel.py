"""The ipykernel embedded in a rank: the user's cells run here as in any notebook.

Differences from a notebook's kernel: no history file, no stdin, output without a
high-water mark, cells numbered as the notebook numbers them, and frames of a failed cell
let go so that its tensors are freed.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import psutil
from ipykernel.displayhook import ZMQShellDisplayHook
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from ipykernel.zmqshell import ZMQDisplayPublisher, ZMQInteractiveShell
from traitlets import DottedObjectName, Float, Type
from traitlets.config import Config

from nbdist.checkpoint import located
from nbdist.errors import (
    PayloadError,
    SessionError,
    StartError,
)
from nbdist.protocol import messages, serialization
from nbdist.protocol.signing import KEY_BYTES, Briefly, Signer
from nbdist.strategies import Options
from nbdist.worker import stacks
from nbdist.worker.interrupt import abort_collectives, current_line
from nbdist.worker.interrupt.interrupt_flag import stops
from nbdist.worker.interrupt.progress_status import Standing
from nbdist.worker.interrupt.step_gate import gate
from nbdist.worker.memory import memory_probe, model_description, oom_advice
from nbdist.worker.output_truncation import LONGEST_ERROR, shortened
from nbdist.worker.profiling import requests
from nbdist.worker.request_handler import answered, failed
from nbdist.worker.stream import log_to_launcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import zmq

    from nbdist.worker.collective_check import Meeting
    from nbdist.worker.namespace import Beginning
    from nbdist.worker.operations.save import Saver
    from nbdist.worker.profiling.window import Surroundings

log = logging.getLogger(__name__)

Message = dict[str, Any]
STOPPED = {"ename": "KeyboardInterrupt", "evalue": "", "traceback": ["KeyboardInterrupt"]}


class RankDisplayHook(ZMQShellDisplayHook):
    """Sends a small plain value along with its representation (`CellResult.values`)."""

    def compute_format_data(self, result: object) -> tuple[dict[str, Any], dict[str, Any]]:
        """Format as IPython does; note the value itself in the metadata."""
        bundle, metadata = super().compute_format_data(result)
        _shorten(bundle)
        try:
            metadata[messages.NOTE] = serialization.inline(result)
        except PayloadError:
            return bundle, metadata  # its text is what the kernel gets
        return bundle, metadata

    def log_output(self, format_dict: dict[str, Any]) -> None:
        """Keep nothing: IPython 9 would hold every cell's value, as text and page, for ever."""


class RankShell(ZMQInteractiveShell):
    """A shell that a cell cannot end."""

    displayhook_class = Type(RankDisplayHook)
    display_pub: ZMQDisplayPublisher

    def ask_exit(self) -> NoReturn:
        """Refuse `exit()`: one rank cannot leave alone."""
        msg = "exit() was called: a rank cannot leave alone. Use %nbdist stop to end all ranks."
        raise SessionError(msg)

    def showtraceback(self, *args: Any, **kwargs: Any) -> None:
        """Show an error; one for lack of memory without the source around each frame.

        For that IPython 9 builds syntax trees of whole modules, megabytes of small objects,
        and CPython 3.11's ends by SIGSEGV where memory fails in the middle of one.
        """
        usual = self.InteractiveTB.mode
        if oom_advice.is_out_of_host_memory(sys.exc_info()[1]):
            self.InteractiveTB.set_mode("Plain")
        try:
            super().showtraceback(*args, **kwargs)
        finally:
            self.InteractiveTB.set_mode(usual)

    def init_display_pub(self) -> None:
        """Have the text of displays cut where it is very long."""
        super().init_display_pub()
        self.display_pub.register_hook(_with_shorter_text)

    @contextmanager
    def _tee(self, channel: Literal["stdout", "stderr"]) -> Iterator[None]:  # noqa: ARG002 - IPython's
        """Keep no copy of what a cell prints: IPython 9 would hold all of it for ever."""
        yield

    def _showtraceback(self, etype: type[BaseException], evalue: object, stb: list[str]) -> None:
        """Send an error, its message cut where it is very long."""
        parts = [shortened(part, longest=LONGEST_ERROR) for part in stb]
        super()._showtraceback(etype, shortened(str(evalue), longest=LONGEST_ERROR), parts)


class RankKernel(IPythonKernel):
    """Runs cells and answers the requests of `wire`."""

    shell: RankShell
    saver: Saver
    """Set when the namespace is filled."""
    session: Signer  # traitlets' types say that both may be None; on a rank they never are
    shell_class = Type(RankShell)
    _execute_sleep = Float(0.0)  # ipykernel 7.4 waits 0.5 ms per cell for old front ends

    def __init__(self, **traits: Any) -> None:
        """Register the requests that Jupyter does not have."""
        super().__init__(**traits)
        self.before_reply: Callable[[], object] = _nothing
        self.after_code: Callable[[], object] = _nothing
        """Called when a cell's code has ended, in whatever way."""
        self.advice_on: Callable[[BaseException | None], Callable[[], messages.Advice] | None] = (
            _no_advice
        )
        """Looks at an error while its frames live; what it returns is called without them."""
        self.beginning: Beginning
        """What the namespace had before the first cell; `namespace.connect` sets it."""
        self.meeting: Meeting | None = None
        """Where CPU ranks meet before collectives; `for_rank` sets it."""
        self.standing = Standing(None)
        self.surroundings: Surroundings
        """What a profile needs of this rank; `namespace.connect` sets it."""
        self.running: str | None = None
        """Request of the cell that runs now."""
        self.over: str | None = None
        """Request of the cell that ended last."""
        self.unwanted: str | None = None
        """Request of the cell that was interrupted last; it may not have begun."""
        self.shell_handlers |= {
            messages.JOIN: self.answering(self.join),
            messages.PUSH: self.answering(self.push),
            messages.PULL: self.answering(self.pull),
            messages.MODEL: self.answering(self.model),
            messages.SAVE: self.answering(self.save),
            messages.RENEW: self.answering(self.renew, in_phases=True),
            messages.SWITCH: self.answering(self.switch, in_phases=True),
            messages.LOAD: self.answering(self.load, in_phases=True),
            messages.LEAVE: self.answering(self.leave, in_phases=True),
            messages.ARRIVE: self.answering(self.arrive, in_phases=True),
            messages.EXPORT: self.answering(self.export, in_phases=True),
            messages.GATHER: self.answering(self.gather, in_phases=True),
            messages.FOREIGN: self.answering(self.foreign, in_phases=True),
            messages.BANDWIDTH: self.answering(self.bandwidth),
        }
        self.control_handlers |= {
            messages.MEASURED: self.answering_beside(self.measured),
            messages.WHERE: self.answering_beside(self.where),
            messages.RELEASE: self.answering_beside(self.release),
            messages.HOLD: self.answering_beside(self.hold),
            messages.STACKS: self.answering_beside(self.stacks),
            messages.MODEL: self.answering_beside(self.prepared_model),
            messages.PROFILE: self.answering_beside(self.profile),
        }

    def answering(
        self, work: Callable[[Any], Any], *, in_phases: bool = False
    ) -> Callable[..., None]:
        """Make a handler of what answers a request on the main thread, where Stop can end it.

        Args:
            work: takes the content of the request, returns that of the reply.
            in_phases: Stop is heard between phases.
        """

        def wanted(content: Any, request: str) -> Any:
            if request == self.unwanted:
                raise KeyboardInterrupt
            with stops.in_phases() if in_phases else nullcontext():
                return work(content)

        def handle(stream: Any, ident: Any, parent: Message) -> None:
            request = parent["header"]["msg_id"]
            self.running = request
            try:
                reply = answered(lambda content: wanted(content, request), parent["content"])
            except KeyboardInterrupt as late:
                reply = failed(late)
            finally:
                self.running = None
            self.reply(stream, ident, parent, reply)

        return handle

    def answering_beside(self, work: Callable[[Any], Any]) -> Callable[..., None]:
        """Make a handler of what answers a request on the control thread."""

        def handle(stream: Any, ident: Any, parent: Message) -> None:
            self.reply(stream, ident, parent, answered(work, parent["content"]))

        return handle

    def reply(self, stream: Any, ident: Any, parent: Message, content: Any) -> None:
        """Send the reply to a request of ours."""
        kind = parent["header"]["msg_type"].replace("_request", "_reply")
        self.session.send(stream, kind, content, parent, ident=ident)

    async def execute_request(self, stream: Any, ident: Any, parent: Message) -> None:
        """Answer every cell, also one that is interrupted outside of the user's code.

        ipykernel 7.4 only logs such a KeyboardInterrupt and sends no reply.
        """
        try:
            await super().execute_request(stream, ident, parent)
        except KeyboardInterrupt:
            content = {"status": "error", **STOPPED}
            self.session.send(stream, "execute_reply", content, parent, ident=ident)

    async def do_execute(self, code: str, silent: bool, *args: Any, **kwargs: Any) -> Message:  # noqa: FBT001
        """Run a cell under the notebook's own In[count]; free its frames if it failed."""
        request = self.get_parent("shell")
        note = request["metadata"].get(messages.NOTE)
        if note:
            self.shell.execution_count = note["count"]
            self.saver.go_to(note["checkpoints"])
        gate.begin_cell()
        self.running = request["header"]["msg_id"]
        if self.running == self.unwanted:
            raise KeyboardInterrupt
        try:
            reply: Message = await super().do_execute(code, silent, *args, **kwargs)
        finally:
            self.running, self.over = None, self.running
            gate.begin_cell()
            self.after_code()
        self.before_reply()
        if reply["status"] == "error":
            reply["evalue"] = shortened(reply["evalue"], longest=LONGEST_ERROR)
            self.let_go()
        return reply

    def let_go(self) -> None:
        """Release the frames of a failed cell; say what to do where it lacked memory."""
        try:
            # The error gets no name here: it would outlive its release, and its frames with it.
            told = self.advice_on(getattr(self.shell.last_execution_result, "error_in_exec", None))
            release_frames(self.shell)
            if told is not None:
                self.publish(messages.ADVICE, told())
        except Exception:
            # With hardly any memory left all of this may fail, and the reply must be sent.
            log.exception("no advice on a failure")

    def _publish_execute_input(self, *_: object) -> None:
        """Send nothing: the notebook has the code, and 1,000 ranks need not repeat it."""

    def _publish_status(self, status: str, *args: Any, **kwargs: Any) -> None:
        """Say `idle`; that a rank is busy is known to the one who sent the cell."""
        if status != "busy":
            super()._publish_status(status, *args, **kwargs)

    async def interrupt_request(self, stream: Any, ident: Any, parent: Message) -> None:
        """Interrupt one cell, running or still on its way, and this process alone.

        ipykernel would signal the whole group, and so the rank's DataLoader processes.
        """
        content: messages.Interrupt = parent["content"]
        if self.running == content["request"]:
            gate.stop(content["after"])
        else:
            self.unwanted = content["request"]
        self.session.send(stream, "interrupt_reply", {"status": "ok"}, parent, ident=ident)

    def hold(self, _: object) -> messages.HoldReply:
        """Let no optimizer step begin until the kernel says after which one to stop."""
        begun, next_s = gate.hold()
        return messages.HoldReply(begun=begun, next_s=next_s)

    def raw_input(self, prompt: str = "") -> NoReturn:
        """Refuse `input()` at once: it could never be answered."""
        msg = (
            f"input({prompt!r}) was called on a rank, which has no keyboard."
            " Ask in a plain cell of the notebook and pass the answer with --push NAME."
        )
        raise SessionError(msg)

    def getpass(self, prompt: str = "", *_: object, **__: object) -> NoReturn:
        """Refuse `getpass.getpass()` in the same way."""
        self.raw_input(prompt)

    def join(self, _: object) -> messages.JoinReply:
        """Answer that this rank has passed the first barrier."""
        own = psutil.Process()
        return messages.JoinReply(
            pid=own.pid, created=own.create_time(), device=str(self.shell.user_ns["device"])
        )

    def push(self, request: messages.PushRequest) -> messages.FileReply:
        """Bind the variables of a payload file in the user's namespace."""
        self.shell.push(serialization.read(request["path"], delete=False))
        return messages.FileReply(status="ok", path=request["path"])

    def pull(self, request: messages.PullRequest) -> messages.FileReply:
        """Write variables of the user's namespace into a payload file."""
        from nbdist.worker.operations import pull as operations_pull

        values = self._named(request["names"])
        if prepared := operations_pull.prepared(values):
            return messages.FileReply(status="ok", prepared=prepared)
        plain = {name: operations_pull.plain(value) for name, value in values.items()}
        path = serialization.write_where_room(plain, request["folders"])
        return messages.FileReply(status="ok", path=str(path))

    def model(self, request: messages.ModelRequest) -> messages.ModelReply:
        """Describe a model of the user's namespace, or the prepared one, to the planner."""
        return model_description.reply(request, self.shell.user_ns)

    def switch(self, request: messages.SwitchRequest) -> messages.SwitchReply:
        """Give the living models another engine; all ranks do it together."""
        from nbdist.worker.operations import switch

        change = switch.Switch(
            Options.from_json(request["options"]),
            self.shell.user_ns,
            tell=self.tell_phase,
            reset_optimizer=request["reset_optimizer"],
        )
        return messages.SwitchReply(status="ok", report=change.run().to_json())

    def export(self, request: messages.ExportRequest) -> messages.ExportReply:
        """Write the prepared model as a folder; all ranks do it together."""
        from nbdist.worker.operations.export import Export

        export = Export(
            request["folder"],
            names=self.shell.user_ns,
            tell=self.tell_phase,
            dtype=request["dtype"],
            max_shard_size=request["max_shard_size"],
            overwrite=request["overwrite"],
            model=request["model"],
        )
        return messages.ExportReply(status="ok", report=export.run().to_json())

    def gather(self, request: messages.GatherRequest) -> messages.FileReply:
        """Write a prepared model into a payload file; all ranks do it together."""
        from nbdist.worker.operations import pull as operations_pull

        name = request["name"]
        value, folders = self.shell.user_ns.get(name), request["folders"]
        path = operations_pull.pull(name, value, folders, tell=self.tell_phase)
        return messages.FileReply(status="ok", path=str(path))

    def leave(self, request: messages.LeaveRequest) -> messages.HandoverReply:
        """Write everything that new ranks need; all ranks do it together."""
        from nbdist.worker.operations import resize

        leaving = resize.Leaving(
            Options.from_json(request["options"]),
            self.shell.user_ns,
            self.beginning,
            tell=self.tell_phase,
            world_size=request["world_size"],
            reset_optimizer=request["reset_optimizer"],
        )
        folders = [Path(folder) for folder in request["folders"]]
        report = asdict(leaving.run(folders))
        return messages.HandoverReply(status="ok", report=report)

    def arrive(self, request: messages.ArriveRequest) -> messages.HandoverReply:
        """Make everything again that the ranks before have written; all do it together."""
        from nbdist.worker.operations import resize

        arriving = resize.Arriving(
            Path(request["folder"]),
            self.shell.user_ns,
            self.beginning,
            tell=self.tell_phase,
            old_world_size=request["world_size"],
        )
        return messages.HandoverReply(status="ok", report=asdict(arriving.run()))

    def save(self, request: messages.SaveRequest) -> messages.SaveReply:
        """Copy the training state and begin to write it; all ranks do it together."""
        from nbdist.worker.operations.save import Order

        return messages.SaveReply(status="ok", id=self.saver.begin(Order(**request)))

    def load(self, request: messages.LoadRequest) -> messages.LoadReply:
        """Bring a checkpoint into the prepared models; all ranks do it together."""
        from nbdist.worker.operations.load import Load

        load = Load(
            located(request["path"]),
            request["id"],
            folder=self.surroundings.folder,
            tell=self.tell_phase,
            weights_only=request["weights_only"],
        )
        return messages.LoadReply(status="ok", report=load.run().to_json())

    def complain_later(self) -> Callable[[str], None]:
        """Give what writes below the cell that runs now, from any thread, also after its end."""
        parent = self.get_parent("shell")

        def complain(text: str) -> None:
            content = {"name": "stderr", "text": text}
            self.session.send(self.iopub_socket, "stream", content, parent=parent)

        return complain

    def foreign(self, request: messages.ForeignRequest) -> messages.ForeignReply:
        """Load what something else wrote; all ranks do it together."""
        from nbdist.worker.operations import import_checkpoint

        report = import_checkpoint.load(
            request["path"],
            names=self.shell.user_ns,
            tell=self.tell_phase,
            trust=request["trust"],
            model=request["model"],
        )
        return messages.ForeignReply(status="ok", report=report.to_json())

    def tell_phase(self, text: str) -> None:
        """Say what a long request is doing; one rank speaks for all."""
        if os.environ["NBDIST_RANK"] == "0":  # a renewal has no process group for a moment
            self.publish(messages.PHASE, messages.Phase(text=text))

    def bandwidth(self, request: messages.BandwidthRequest) -> messages.BandwidthReply:
        """Measure links, devices and a disk; all ranks do it together."""
        from nbdist.worker.benchmarks import communication

        figures = communication.measure(
            memory_probe.state.device,
            kinds=request["kinds"],
            disk=request["disk"],
            tell=self.tell_phase,
        )
        return messages.BandwidthReply(status="ok", figures=figures)

    def measured(self, _: object) -> messages.MeasuredReply:
        """Tell what the training held; on the control thread, also while a cell runs."""
        return messages.MeasuredReply(figures=memory_probe.figures())

    def prepared_model(self, request: messages.ModelRequest) -> messages.ModelReply:
        """Describe the prepared model; on the control thread, while it trains.

        What is looked at is its twin without data, by its closed form: milliseconds.
        """
        request["name"], request["quick"] = None, True
        return model_description.reply(request, {})

    def where(self, _: object) -> messages.WhereReply:
        """Tell the line that a cell is at; on the control thread, while it runs."""
        return current_line.reply(self.shell.compile.format_code_name, self.standing.look())

    def release(self, request: messages.ReleaseRequest) -> messages.ReleaseReply:
        """Free the main thread from a collective; on the control thread."""
        if self.meeting is not None:
            self.meeting.give_up()
        closed = abort_collectives.release(request["pids"], request["id"])
        return messages.ReleaseReply(closed=closed)

    def renew(self, request: messages.RenewRequest) -> messages.RenewReply:
        """Make the process groups anew; all ranks do it together."""
        from nbdist.worker.operations import recover

        renewal = recover.Renewal(self.shell.user_ns, self.meeting, tell=self.tell_phase)
        report = renewal.run(request["era"], groups=request["groups"])
        return messages.RenewReply(status="ok", report=report.to_json())

    def stacks(self, _: object) -> messages.StacksReply:
        """Tell what every thread is doing; on the control thread, while a cell runs."""
        text = stacks.text(self.shell.compile.format_code_name)
        return messages.StacksReply(text=text)

    def profile(self, request: messages.ProfileRequest) -> messages.ProfileReply:
        """Let steps of a cell be recorded; on the control thread, also while it runs."""
        return requests.arm(request, self.surroundings, running=self.running, over=self.over)

    def _named(self, names: list[str]) -> dict[str, object]:
        missing = [name for name in names if name not in self.shell.user_ns]
        if missing:
            msg = (
                f"No variable {', '.join(missing)} on this rank; define it in a %%distribute cell."
            )
            raise PayloadError(msg)
        return {name: self.shell.user_ns[name] for name in names}

    def publish(self, kind: str, content: Any) -> None:
        """Send a message of `wire` on iopub, under the cell that runs; from any thread."""
        self.session.send(self.iopub_socket, kind, content, parent=self.get_parent("shell"))


class RankApp(IPKernelApp):
    """Opens a rank's sockets from a connection file that the kernel wrote."""

    outstream_class = DottedObjectName("nbdist.worker.stream.RankStream")

    @classmethod
    def for_rank(
        cls, rank: int, *, run_dir: Path, user_ns: dict[str, Any], meeting: Meeting | None
    ) -> RankApp:
        """Bind the sockets of `rank` and make its kernel; `start()` serves cells."""
        config = Config()
        config.HistoryManager.enabled = False  # no sqlite file per rank
        config.InteractiveShell.cache_size = 0  # Out[] would keep tensors alive unseen
        app: RankApp = cls.instance(
            connection_file=str(run_dir / f"rank{rank}.json"),
            parent_handle=os.getppid(),  # a second guard beside PDEATHSIG; polls every second
            user_ns=user_ns,
            kernel_class=RankKernel,
            log_level="ERROR",
            config=config,
        )
        app.log.addFilter(Briefly())
        app.initialize([])
        log_to_launcher(rank)
        app.kernel.meeting, app.kernel.standing = meeting, Standing(meeting)
        sys.breakpointhook = refuse_breakpoint  # after ipykernel's debugpy has set its own
        return app

    def load_connection_file(self, connection_file: str | None = None) -> None:
        """Read where to listen: nowhere but at Unix sockets, and under a key.

        Raises:
            StartError: the file says otherwise.
        """
        super().load_connection_file(connection_file)
        if self.transport != "ipc" or len(self.session.key) < 2 * KEY_BYTES:
            msg = f"{self.connection_file} is none of this session: it has to name ipc and a key."
            raise StartError(msg)

    def _session_default(self) -> Signer:
        """Sign as the kernel does."""
        return Signer(parent=self)

    def _ipython_dir_default(self) -> str:
        """Keep IPython's files out of the user's home; no start-up files run."""
        folder = Path(self.connection_file).with_suffix("")
        folder.mkdir(mode=0o700)
        return str(folder)

    def init_iopub(self, context: zmq.Context[Any]) -> None:
        """Open iopub without a high-water mark: ZMQ drops silently what exceeds it."""
        context.SNDHWM = 0
        super().init_iopub(context)


def refuse_breakpoint(*_: object, **__: object) -> NoReturn:
    """Refuse `breakpoint()`: the prompt could never be answered."""
    msg = "breakpoint() was called on a rank, which has no keyboard. Print what you need to see."
    raise SessionError(msg)


def release_frames(shell: ZMQInteractiveShell) -> None:
    """Let go of the frames of a failed cell, and so of its tensors.

    IPython 9 and the interpreter keep the last traceback in several places.
    """
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    for view in (shell.InteractiveTB, shell.SyntaxTB):
        vars(view).update(tb=None, evalue=None, etype=None, last_syntax_error=None)
    shell.last_execution_result = None
    gc.collect()  # exception and frame often refer to each other


def _no_advice(_: BaseException | None) -> None:
    """Have nothing to say of an error."""


def _shorten(bundle: dict[str, Any]) -> None:
    """Cut the plain text of a display; pictures and pages cannot be cut."""
    if isinstance(text := bundle.get("text/plain"), str):
        bundle["text/plain"] = shortened(text)


def _with_shorter_text(message: Message) -> Message:
    _shorten(message["content"]["data"])
    return message


def _nothing() -> None:
    """Do nothing."""
