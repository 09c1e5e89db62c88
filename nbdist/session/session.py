"""A session: ranks that live between cells. Runs in the notebook's kernel, without torch.

The magics are a thin skin over `Session`; a script uses it directly. The one global of
the package is the current session, behind `current()`.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from nbdist import rank_sets as rank_names
from nbdist import strategies
from nbdist.checkpoint import Url, full
from nbdist.cluster.local import LocalEngine
from nbdist.cluster.orphan_cleanup import of_this_kernel
from nbdist.errors import (
    CellInterrupted,
    OptionError,
    PlanError,
    RankDied,
    SessionBusy,
    SessionError,
    StartError,
    SwitchError,
)
from nbdist.hardware import discovery
from nbdist.operations import calibrate as operations_calibrate
from nbdist.operations import export as operations_export
from nbdist.operations import import_checkpoint, resize
from nbdist.operations import switch as operations_switch
from nbdist.operations.switch import SwitchReport
from nbdist.output.rank_log import RankLog
from nbdist.output.renderer import Renderer
from nbdist.output.sink import LiveScreen, PinnedScreen
from nbdist.output.status_line import StatusLine
from nbdist.planner.validation import Measured
from nbdist.protocol import messages
from nbdist.redaction import redacted
from nbdist.session import (
    cell_source,
    config,
    failure_causes,
    planner,
    profile_builder,
    push_pull,
    stacks,
)
from nbdist.session import checkpoints as session_checkpoints
from nbdist.session.cell import Cell, CellResult
from nbdist.session.cell_runner import Cells
from nbdist.session.cluster_options import FIXED, NAMES, Where
from nbdist.session.config import Choice
from nbdist.session.events import Mark, Marks
from nbdist.session.locking import in_turn, in_turn_on_these_ranks, tell_of_waiting
from nbdist.session.metrics import Metrics
from nbdist.session.model_query import Peek
from nbdist.session.placement import check_usable, differing_gpus
from nbdist.session.profiler import Profiler, Profiling, Wish
from nbdist.session.progress import Activity
from nbdist.session.rank_activity import Whereabouts
from nbdist.session.worker_group import Gang

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from nbdist.cluster.interfaces import Engine
    from nbdist.cluster.rank_channels import Message
    from nbdist.hardware.discovery import Node
    from nbdist.hardware.telemetry import Now
    from nbdist.operations.calibrate import Calibrated
    from nbdist.operations.export import ExportReport
    from nbdist.operations.import_checkpoint import ForeignReport
    from nbdist.output.renderer import Show
    from nbdist.profiler.report import Profile
    from nbdist.session.checkpoints import Checkpoints, LoadReport, Save
    from nbdist.session.failure_causes import Death
    from nbdist.session.placement import Placement

State = Literal["new", "ready", "running", "dead", "stopped"]
NEWEST_S = 1.0
"""For the folder of checkpoints to be read once ranks have died: its file system may hang."""
TURN_S = 1.0
"""A thread that waits for ranks which Stop has ended starts new ones itself, within this time."""


class Session:
    """Ranks on this machine, or on nodes of a cluster, that run cells and keep their variables.

    A context manager; the first `run()` starts it at the latest.

    Args:
        nproc: number of ranks. Default: every visible GPU; without a GPU, 2 CPU ranks.
        backend: ddp (the default), fsdp (= fsdp2), fsdp1, zero1, zero2 or zero3.
        precision: no, fp16, bf16, fp8. Default: bf16 where the hardware has it, else no.
        offload: none, cpu or nvme:PATH; of the optimizer state.
        devices: GPU indices, as "0,2" or a sequence.
        auto: choose the backend, offload and activation checkpointing at the first
            `accelerator.prepare()`, from the real model and machine; what is given here of
            them is kept.
        engine: where launchers come from. Default: this machine.
        options: what else `strategies.Options` has: offload_params, replicate_across,
            activation_checkpointing, compile, accumulate, clip, fsdp_config,
            deepspeed_config. And where the ranks are: on ("local", "ray", "ray://HOST:PORT",
            "slurm"), nodes, gpus_per_node, interface; of Slurm partition, time, account. And
            where checkpoints go: checkpoints, a folder that all ranks see or a URL that fsspec
            knows ("s3://bucket/run"). Default: "checkpoints" where the notebook runs.

    Raises:
        OptionError: a value that is not allowed, or that the backend does not have.
        StartError: no cluster there, or it has not enough.
        CheckpointError: a URL that fsspec does not know, or for which a package is missing.
    """

    def __init__(
        self,
        nproc: int | None = None,
        backend: str | None = None,
        precision: str | None = None,
        offload: str | None = None,
        devices: str | Sequence[int] | None = None,
        *,
        auto: bool = False,
        engine: Engine | None = None,
        **options: Any,
    ) -> None:
        """Check the options; start nothing yet."""
        self.turn = threading.RLock()
        """Held by the thread that uses the ranks; `interrupt` and `status` need none."""
        self.restarts = 0
        """How often the ranks were restarted; written in turn."""
        self.activity = Activity()
        """What is done beside cells, and how far it is."""
        self.marks = Marks()
        self.state = "new"
        self.started: float | None = None
        """Unix seconds of the first start."""
        self.kept_for_panel: object = None
        """What a panel knows of this session; its own."""
        self._at_stop: list[Callable[[], object]] = []
        self._on_phase: Callable[[str], object] | None = None
        self._saves = session_checkpoints.Saves(options.pop("checkpoints", None))
        self._saving: dict[str, Mark] = {}
        """Marks of the saves that are not over yet."""
        self._pid = os.getpid()
        self.received: dict[str, Any] = {}
        """Values of send(), by name."""
        self._death: RankDied | None = None
        self._ended_by_stop = False
        """Whether Stop has ended the ranks that are dead."""
        self._where = Where({name: options.pop(name) for name in NAMES if name in options})
        self._gang = Gang(
            self._where.engine() or engine or LocalEngine(),
            on_message=self._receive,
            on_idle=self._on_idle,
            on_death=self._die,
            on_notice=self._notice,
        )
        self.whereabouts = Whereabouts(self._gang)
        self._cells = Cells(self._gang, self.whereabouts)
        self.peek = Peek(self._gang)
        self._profiler = Profiler(
            self._gang, lambda one: profile_builder.judged(self, self._gang, one)
        )
        named = {"backend": backend, "precision": precision, "offload": offload}
        given = {name: value for name, value in named.items() if value is not None}
        asked_for = {"nproc": nproc, "devices": devices, "auto": auto, **self._where.spread}
        try:
            self._configure(asked_for | given | options)
        except BaseException:
            self._where.close()
            raise

    # -- options

    def _configure(self, options: Mapping[str, Any]) -> None:
        self._asked = dict(options)
        self._choice = Choice.of(options, self._where)
        self.metrics = Metrics(self.world_size)
        self.logs = {rank: RankLog() for rank in range(self.world_size)}

    @property
    def state(self) -> State:
        """How the ranks are."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state: State = state
        self.since = time.time()
        """Unix seconds: since when the state is this one."""

    @property
    def running(self) -> Cell | None:
        """The cell that runs now."""
        return self._cells.running

    @property
    def last(self) -> Cell | None:
        """The cell that ended last."""
        return self._cells.last

    @property
    def standstill(self) -> str:
        """Who waits for whom in what runs, and who does not answer; "" where all goes on."""
        work = self.running or self._gang.joint
        return "" if work is None else work.notice

    @property
    def death(self) -> RankDied | None:
        """How the ranks ended that are dead."""
        return self._death

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._choice.placement.nproc

    @property
    def on(self) -> str:
        """Where the ranks are: "local", "ray", "ray://HOST:PORT", "slurm"."""
        return self._where.on

    @property
    def place(self) -> str:
        """Ranks and devices in a few words."""
        return self._choice.place

    @property
    def placement(self) -> Placement:
        """Which devices the ranks are on."""
        return self._choice.placement

    @property
    def backend(self) -> str:
        """Canonical name of the strategy: "fsdp2", never "fsdp"."""
        return self._choice.options.backend

    @property
    def options(self) -> strategies.Options:
        """What the engine was given; under auto, before the first prepare(), a placeholder."""
        return self._choice.options

    @property
    def hardware(self) -> strategies.Hardware:
        """What the ranks run on."""
        return self._choice.hardware

    @property
    def undecided(self) -> bool:
        """Whether auto has yet to choose: it does so at the first `accelerator.prepare()`."""
        return self._choice.undecided

    def differing(self, **changes: Any) -> dict[str, tuple[object, object]]:
        """Which options would really change: name -> (now, then).

        Raises:
            OptionError: a value that is not allowed.
        """
        if not changes:
            return {}
        return self._choice.differing(Choice.of(self._with(changes), self._where))

    def _with(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """What was asked for, changed; it stays where it is."""
        self._where.check(changes)
        stays = {name: value for name, value in changes.items() if name not in FIXED}
        return config.changed(self._asked, stays)

    # -- life

    def start(self) -> Self:
        """Start the ranks; returns once every rank has answered and passed a barrier.

        Raises:
            StartError: launcher or ranks did not come up; nothing is left running.
        """
        return self if self.state in {"ready", "running"} else self._start()

    @in_turn
    def _start(self) -> Self:
        if self.state in {"ready", "running"}:  # another thread was quicker
            return self
        started, choice = time.monotonic(), self._choice
        notes = self._look_at_gpus(choice)
        self._saves.settle()
        starting = f"starting {self.describe()}"
        with self.activity.doing("starting", starting), StatusLine() as line:
            line.show(f"nbdist: {starting}")
            try:
                self._choice = self._start_ranks(choice, lambda text: line.show(f"nbdist: {text}"))
            except KeyboardInterrupt:
                line.show("nbdist: the start was stopped")
                msg = "stopped while the ranks were starting; the next cell starts them anew."
                raise CellInterrupted(msg) from None
            ready = f"nbdist: {self.describe()}, ready in {time.monotonic() - started:.1f} s"
            notes += [one for node in self.nodes for one in node.machine.warnings]
            line.show(". ".join(filter(None, (ready, differing_gpus(self.nodes), *notes))))
        self._is_up()
        self.started = self.started or time.time()
        _set_current(self)
        return self

    def _look_at_gpus(self, choice: Choice) -> list[str]:
        """What to know of this machine's GPUs; raises StartError where ranks cannot use one."""
        if choice.placement.away:
            return []
        own = of_this_kernel() if choice.placement.devices else ()
        return check_usable(choice.placement, discovery.found(), own=own)

    def _start_ranks(self, choice: Choice, progress: Callable[[str], None]) -> Choice:
        """Start ranks; returns the choice with what the GPUs of a cluster turned out to be."""
        placement = choice.placement
        self._where.settle(placement)
        self._gang.take(placement.kind, placement.nproc, progress)
        self._where.nodes = self._gang.nodes
        try:
            choice = choice.seen(self._where)
        except OptionError as error:
            self._gang.close()
            raise StartError(str(error)) from None
        self._gang.start(
            world_size=placement.nproc,
            devices=choice.visible,
            options=choice.options.to_json(),
            auto=choice.auto if choice.undecided else None,
            hardware=choice.hardware.to_json(),
            checkpoints=self._saves.told,
            progress=progress,
        )
        self._look_at_checkpoints(anew=self.started is None)
        return choice

    def _look_at_checkpoints(self, *, anew: bool) -> None:
        """Say below the cell, in a while, if they could not be saved where they are to go."""
        root, complain = self.checkpoints.root, session_checkpoints.complain_later()
        if isinstance(root, Path):
            self._gang.fleet.see_later(root, complain)
        elif anew:
            session_checkpoints.prove_later(root, complain)

    def stop(self) -> None:
        """End ranks and launcher; nothing of the session is left on the machine.

        Waits up to a minute for a checkpoint that is being written, and for a command of the
        panel, which Stop cuts short.
        """
        self._end_others()
        self._stop()

    @in_turn
    def _stop(self) -> None:
        self._saves.finish()
        self._profiler.give_up("the session was stopped.")
        self._cells.die(RankDied("The session was stopped; %%distribute starts a new one."))
        self._gang.close()
        self._no_more_saves("the session was stopped")
        self._where.close()
        self.state = "stopped"
        if current() is self:
            _set_current(None)
        callbacks, self._at_stop = self._at_stop, []
        for callback in callbacks:
            callback()

    def at_stop(self, callback: Callable[[], object]) -> None:
        """Call it once, when the session has been stopped."""
        self._at_stop.append(callback)

    def restart(self, *, wait: bool = False, **changes: Any) -> Self:
        """Start new ranks, with changed options if given; the old ranks' variables are lost.

        Waits for a command of the panel, which Stop cuts short. When nodes of a cluster are
        gone, the ranks start on those that are left, and are fewer; with `wait` when as many
        nodes as before are there again.

        Raises:
            OptionError: a value that is not allowed; the old ranks are still there.
            StartError: the new ranks did not come up.
        """
        if self._death is not None and not wait:
            changes = self._where.left(self.placement) | changes
        Choice.of(self._with(changes), self._where)  # what is not allowed ends nothing
        self._end_others()
        return self._restart(**changes)

    @in_turn
    def _restart(self, **changes: Any) -> Self:
        self.restarts += 1
        self._configure(self._with(changes))
        self._saves.finish()
        self.abandon()
        self._gang.halt()
        self._no_more_saves("the ranks were restarted")
        self.state, self._cells.last = "new", None
        self._saving.clear()
        self.marks.begin_anew(Mark(0, "restart", f"new ranks: {self.describe()}"))
        return self.start()

    def abandon(self) -> None:
        """Let whoever waits for the running cell wait no more: its ranks are restarted next.

        From any thread, so that a restart is possible while a cell blocks.
        """
        self._profiler.give_up("the ranks were restarted.")
        self._cells.die(RankDied("The ranks were restarted; their variables are gone."))

    def give_up(self) -> None:
        """Let whoever waits for anything of the ranks wait no more: they are ended next.

        From any thread, so that ranks which hang in a command of the panel can be ended.
        """
        self.abandon()
        self._gang.give_up()

    def _end_others(self) -> None:
        """The ranks are ended next: what another thread does with them ends first, or by Stop."""
        tell_of_waiting(self.activity, "; Stop cuts it short")
        try:
            with self.turn:
                return
        except KeyboardInterrupt:
            self.give_up()

    def __enter__(self) -> Self:
        """Start the ranks."""
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the ranks."""
        self.stop()

    def _die(self, death: Death) -> RankDied:
        """Say who ended how, what it said last, and from where training can go on."""
        self._death = death.told(
            log=self.logs[death.rank].tail(failure_causes.LAST_LINES)
            if death.rank is not None
            else "",
            checkpoint=self.checkpoints.newest(within_s=NEWEST_S),
            cells=self._cells.files(),
        )
        self._ended_by_stop = death.by_stop
        self.state = "dead"
        self._saves.give_up(self._death.headline)
        self._profiler.give_up(self._death.headline)
        self._cells.die(self._death)
        return self._death

    def replace_stopped_ranks(self) -> str:
        """Start new ranks where Stop has ended the old ones; in turn.

        Returns:
            What happened, in words; "" where Stop has ended none.
        """
        death = self._death
        if death is None or not self._ended_by_stop:
            return ""
        self.restart()
        return f"{death.headline.partition(';')[0]}; all ranks were ended, and new ones started."

    def _notice(self, line: str) -> None:
        self._cells.tell(line)

    def _no_more_saves(self, why: str) -> None:
        """Once the ranks are gone: nothing is left of a save that they could not finish."""
        self._saves.give_up(f"{why} while it was written.")
        self._saves.tidy()

    # -- cells

    @in_turn_on_these_ranks
    def run(
        self,
        code: str,
        ranks: str | Sequence[int] | None = None,
        background: bool = False,  # noqa: FBT001, FBT002 - the contract
        *,
        output: str | Sequence[int] = "all",
        count: int | None = None,
        profile: bool | Mapping[str, Any] = False,
    ) -> CellResult:
        """Run `code` on the ranks as a notebook cell.

        Blocks until every rank has ended it, unless `background`. Output is shown as it
        comes, labelled by rank, equal output of several ranks once.

        Args:
            code: as in a cell: magics, `!shell` and top-level await work.
            ranks: these ranks only, as "0,2-3" or a sequence. Default: all.
            background: return at once; `wait()` joins.
            output: whose output is shown: "all", "none" or ranks.
            count: number of the cell in tracebacks. Default: counts the session's cells.
            profile: True, or arguments of `profile()`, to profile this cell.

        Raises:
            SyntaxError: of the code, or nothing to run; nothing was sent.
            OptionError: `profile` is none of the above.
            CellError: the code raised on a rank.
            CellInterrupted: Stop was pressed; the ranks keep their variables.
            RankDied: a rank ended; its message says how.
            SessionBusy: a background cell is still running.
        """
        cell_source.check(code)
        wish = Wish.given(profile)
        chosen = rank_names.chosen(ranks, self.world_size)
        shown = self._shown(output)
        self._ensure_free()
        self.start()
        if wish is not None:
            self._profiler.arm(wish)
        pinned = PinnedScreen()  # this cell of the notebook, also when others run
        screen = pinned if background else LiveScreen()
        logs = {rank: self.logs[rank] for rank in chosen}
        renderer = Renderer(screen, ranks=chosen, show=shown, logs=logs)
        cell = self._send_cell(code, chosen, renderer, count)
        if background:
            self._cells.background = cell
            cell.detach(pinned)
        else:
            self._join(cell, pinned)
            cell.raise_errors()
        return CellResult(cell)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the cell that still runs or ran in the background; False: the time is up.

        Raises:
            CellError: the cell raised on a rank; told once.
            CellInterrupted: Stop was pressed; the cell goes on.
        """
        cell = self._cells.running or self._cells.background
        try:
            return cell is None or cell.joined or CellResult(cell).wait(timeout_s)
        except KeyboardInterrupt:
            msg = "stopped waiting; the cell goes on in the background, %nbdist interrupt stops it."
            raise CellInterrupted(msg) from None

    def interrupt(self) -> bool:
        """Raise KeyboardInterrupt in the running cell on all ranks; variables are kept.

        A save, a load, a switch, an export is stopped too, and all is as it was before.

        A second call aborts the process groups, which frees ranks that wait for others in C, and
        returns the prompt where a cell or command blocks it. A third call ends the ranks and
        starts new ones. A Stop in the notebook or in the panel counts as a call.

        Returns:
            Whether there was anything to stop.
        """
        joint = self._gang.joint
        if self._death is not None:
            stopped = False
        elif joint is not None:
            joint.stop()
            stopped = True
        else:
            stopped = self._cells.stop()
        # where no thread waits for the ranks, nobody else would start new ones
        if self._ended_by_stop and self.turn.acquire(timeout=TURN_S):
            try:
                if said := self.replace_stopped_ranks():
                    with StatusLine() as line:
                        line.show(f"nbdist: {said}")
            finally:
                self.turn.release()
        return stopped

    def _shown(self, output: str | Sequence[int]) -> Show:
        """Whose output is displayed."""
        if output == "all":
            return "all"
        if output == "none":
            return "none"
        return frozenset(rank_names.chosen(output, self.world_size, option="--output"))

    def _send_cell(
        self, code: str, ranks: Sequence[int], renderer: Renderer, count: int | None
    ) -> Cell:
        profiling = self._profiler.begin(ranks, None)
        cell = Cell(ranks, renderer, on_send=self._take_sent, on_done=self._cell_done)
        cell.code, cell.count = code, self._cells.number(count)
        if profiling is not None:
            profiling.cell, profiling.sources = cell, self._cells.sources(cell)
        self.state = "running"
        self._cells.send(cell, world_size=self.world_size, checkpoints=self._saves.told)
        return cell

    def _join(self, cell: Cell, afterwards: PinnedScreen) -> None:
        """Show the cell's output until it is over, and see that the ranks are in step."""
        self._cells.join(cell, afterwards, owed=self._profiler.show_owed)
        problem = self._settle()
        if cell.stopped:  # perhaps by another thread
            words = f"but {problem}" if problem else "every variable is kept"
            raise CellInterrupted(f"stopped on all ranks; {words}.") from None

    def _settle(self) -> str:
        return self._cells.settle(world_size=self.world_size)

    def _ensure_alive(self) -> None:
        if os.getpid() != self._pid:
            msg = "The session belongs to the process that made it; this is a fork of that one."
            raise SessionError(msg)
        if self.state == "stopped":
            msg = "The session was stopped; start() gives it new ranks."
            raise SessionError(msg)
        if self._death is not None:
            raise self._death

    def _ensure_free(self) -> None:
        self._ensure_alive()
        if self.running is not None:
            msg = (
                "A cell is still running on the ranks: wait for it with %nbdist wait, stop it"
                " with %nbdist interrupt, or take new ranks with %nbdist restart."
            )
            raise SessionBusy(msg)
        while (joint := self._gang.joint) is not None:
            if not joint.finished.is_set():
                raise SessionBusy(joint.busy_words())
            joint.conclude()
        self._settle()  # after a cell in the background

    def _cell_done(self, cell: Cell) -> None:
        if self._cells.done(cell) and self.state == "running":
            self.state = "ready"

    # -- what arrives on the reader thread

    def _receive(self, rank: int, message: Message) -> None:
        content = message["content"]
        if message["header"]["msg_type"] == messages.REPORT:
            self.metrics.add(rank, content["rows"])
        elif message["header"]["msg_type"] == messages.CHOSEN:
            chosen = strategies.Options.from_json(content["options"])
            self._choice = self._choice.decided(chosen)
        elif message["header"]["msg_type"] == messages.SAVED:
            self._take_saved(content)
        elif message["header"]["msg_type"] == messages.PROFILED:
            self._profiler.receive(rank, content)
        elif message["header"]["msg_type"] == messages.PHASE:
            (self._on_phase or self._profiler.hear)(content["text"])

    def _take_saved(self, content: messages.Saved) -> None:
        self._saves.receive(content)
        if content["state"] == "running":  # the state is that of this moment
            self._saving[content["id"]] = Mark(self.metrics.last_step, "save", content["name"])
            return
        mark = self._saving.pop(content["id"], None)
        if content["state"] == "done" and mark is not None:
            self.marks.add(mark)

    def _on_idle(self) -> bool:
        """Watch what runs; show output of background cells and what past ones write."""
        self._cells.tick()
        if (joint := self._gang.joint) is not None and self._death is None:
            joint.ladder.tick()
        self._profiler.tick()
        return self._cells.show_late()

    def _take_sent(self, rank: int, name: str, path: str) -> None:
        """Bind a value of send() in the notebook, while the cell still runs."""
        value = push_pull.received(rank, path, self._gang)[name]
        self.received[name] = value
        cell_source.bind(name, value)

    # -- values

    @in_turn_on_these_ranks
    def push(self, **values: object) -> int:
        """Bind values on all ranks; returns the bytes moved through shared memory.

        Tensors keep dtype and shape and arrive on the CPU.

        Raises:
            PayloadError: a value that cannot be moved; says where and what to do.
        """
        self._ensure_free()
        self.start()
        return push_pull.push(values, range(self.world_size), self._gang)

    @in_turn_on_these_ranks
    def pull(self, *names: str, rank: int = 0, as_numpy: bool = False) -> Any:
        """Fetch variables of one rank: one value for one name, else a list.

        A model comes as its state dict; of a prepared one all ranks give their share, and
        weights are fp32 where the engine keeps them so. Tied tensors are one.

        torch tensors come as CPU tensors (torch is imported here, at this moment), or with
        `as_numpy` as NumPy arrays.

        Raises:
            PayloadError: no such variable, or one that cannot be moved.
            CheckpointError: a prepared model whose ranks cannot give it.
        """
        (chosen,) = rank_names.chosen([rank], self.world_size, option="rank")
        self._ensure_free()
        self.start()
        everyone = range(self.world_size)
        values = push_pull.pull(
            names,
            chosen,
            self._gang,
            as_numpy=as_numpy,
            gather=lambda name, folders: operations_export.gather(
                name, folders, everyone, self._gang, self._listen
            ),
        )
        return values[names[0]] if len(names) == 1 else [values[name] for name in names]

    # -- another engine

    @in_turn_on_these_ranks
    def switch(self, backend: str | None = None, **changes: Any) -> SwitchReport:
        """Give the living models another engine; nothing of the training is lost.

        Weights, optimizer state, scheduler, random generators, loaders in the middle of an
        epoch and all variables go on; a variable that was bound to a prepared object is bound
        to its successor.

        Another number of ranks, other devices and an offload to NVMe take new processes:
        everything goes there through shared memory. Variables that cannot be pickled (open
        files, generators) stay behind; the report lists them.

        Args:
            backend: ddp, fsdp (= fsdp2), fsdp1, zero1, zero2 or zero3. Default: the same.
            changes: nproc, devices, precision, offload, activation_checkpointing and what
                else a `Session` takes; `reset_optimizer=True` leaves the state of optimizers
                behind.

        Raises:
            OptionError: a value that is not allowed; nothing was touched.
            SwitchError: which phase failed, on which ranks, and why; all is as it was.
            SessionBusy: a cell is still running.
        """
        reset = bool(changes.pop("reset_optimizer", False))
        wished = {"backend": backend, **changes} if backend is not None else changes
        asked_for = self._with(wished)
        then = self._choice.decides(Choice.of(asked_for, self._where))
        differing = self._choice.differing(then)
        if self.state in {"new", "stopped"} or not differing:
            if self.state == "new":
                self._configure(asked_for)
            return SwitchReport.nothing(self._choice.describe())
        self._ensure_free()
        doing = f"{self.backend} -> {then.options.backend}"
        with self.activity.doing("switching", doing):
            report = self._switch(then, asked_for, reset_optimizer=reset)
        self.marks.add(
            Mark(
                self.metrics.last_step,
                "switch",
                operations_switch.arrow(report.before, report.after),
            )
        )
        return report

    def _switch(
        self, then: Choice, asked_for: dict[str, Any], *, reset_optimizer: bool
    ) -> SwitchReport:
        if resize.needed(self._choice, then):
            report = self._hand_over(then, reset_optimizer=reset_optimizer)
            self._asked = asked_for
            return report
        with StatusLine() as line:
            request = operations_switch.Request(
                before=self._choice, then=then, reset_optimizer=reset_optimizer, line=line
            )

            def switched() -> None:
                self._asked, self._choice = asked_for, then
                self._is_up()

            try:
                report = request.send(self._gang, self._listen)
            except CellInterrupted:
                if (joint := self._gang.joint) is not None:
                    joint.late = switched  # the prompt comes back, and the switch goes on
                raise
        switched()
        return report

    def _hand_over(self, then: Choice, *, reset_optimizer: bool) -> SwitchReport:
        """Let new ranks take over; on failure others with the old options do."""
        self._saves.finish()
        self._cells.die(RankDied("New ranks took over; what the old ones still wrote is lost."))
        with StatusLine() as line:
            change = resize.Handover(
                gang=self._gang,
                before=self._choice,
                then=then,
                reset_optimizer=reset_optimizer,
                line=line,
                listen=self._listen,
                start=self._start_ranks,
            )
            try:
                report = change.run()
            except SwitchError as error:
                if change.lost:
                    self.state, self._death = "dead", RankDied(str(error))
                    self._ended_by_stop = False
                else:
                    self._is_up()
                raise
        self._choice = then.seen(self._where)
        self._is_up()
        self.metrics.world_size = self.world_size
        self.logs |= {rank: RankLog() for rank in range(self.world_size) if rank not in self.logs}
        return report

    def _is_up(self) -> None:
        self.state, self._death, self._ended_by_stop = "ready", None, False

    def _listen(self, on_phase: Callable[[str], object] | None) -> None:
        """Let the ranks' words about a long request be heard."""
        self._on_phase = on_phase

    # -- checkpoints

    @property
    def checkpoints(self) -> Checkpoints:
        """Whole checkpoints in the session's folder or at its URL, the newest last.

        Also those of earlier sessions. By place or by name: `checkpoints["base"].state_dict()`.
        """
        return self._saves.checkpoints

    def save_to(self, folder: str | os.PathLike[str] | None) -> None:
        """Have checkpoints go somewhere else; for `save()` in cells from the next cell on.

        Args:
            folder: of all checkpoints, or a URL. None: "checkpoints" beside the notebook.

        Raises:
            CheckpointError: a URL that fsspec does not know, or for which a package is missing.
        """
        self._saves.go_to(folder)
        if self.state in {"ready", "running"}:
            self._look_at_checkpoints(anew=True)

    @in_turn_on_these_ranks
    def save(
        self,
        name: str,
        overwrite: bool = False,  # noqa: FBT001, FBT002 - the contract
        keep: int | None = None,
        wait: bool = False,  # noqa: FBT001, FBT002
        *,
        folder: str | os.PathLike[str] | None = None,
    ) -> Save:
        """Save the training state of this moment, crash-safe; loads under any backend and ranks.

        Returns once the ranks have copied their state to host memory, after an earlier save
        that still runs; the next cell runs while they write. A cell can do the same with
        `save(name)`.

        Args:
            name: 1 to 64 letters, digits, dots, dashes and underscores.
            overwrite: replace a checkpoint of this name; it stays until the new one is whole.
            keep: remove the oldest checkpoints beyond so many, once this one is whole.
            wait: return once the checkpoint is on the disk.
            folder: of all checkpoints, or a URL that fsspec knows. Default: that of the session.

        Raises:
            CheckpointError: no model, no room, a name that is taken, micro-batches that wait for
                a step; with `wait` which rank could not write, and why. Nothing was written.
            SessionBusy: a cell is still running.
        """
        self._ensure_free()
        self.start()
        root = self._folder(folder)
        if isinstance(root, Path):
            self._gang.fleet.see(root)
        request = messages.SaveRequest(root=full(root), name=name, overwrite=overwrite, keep=keep)
        with self.activity.doing("saving", f"copying the state for checkpoint {name}"):
            save = self._saves.begin(request, range(self.world_size), self._gang)
            if wait:
                save.wait_shown()
        return save

    @in_turn_on_these_ranks
    def load(
        self,
        name: str,
        *,
        weights_only: bool = False,
        folder: str | os.PathLike[str] | None = None,
        trust: bool = False,
    ) -> LoadReport | ForeignReport:
        """Load a checkpoint into the models that are prepared now, under any backend and ranks.

        Run the cell that prepares them first. Everything goes on as after the save: weights,
        optimizer, schedule, random generators, loaders in the middle of their epoch.

        Args:
            name: of a checkpoint, or the path of its folder; a path to what something else wrote
                goes to `load_foreign`.
            weights_only: leave all but weights and buffers as it is.
            folder: of all checkpoints, or a URL. Default: that of the session.
            trust: as for `load_foreign`.

        Raises:
            CheckpointError: what does not fit, is damaged or failed; all is as it was.
            SessionBusy: a cell is still running.
        """
        root, last = self._folder(folder), name
        if os.sep in name:
            path = self._folder(name)
            root, last = path.parent, path.name
            if isinstance(path, Path) and session_checkpoints.is_foreign(path):
                return self.load_foreign(path, trust=trust)
        self._ensure_free()
        self.start()
        ranks = range(self.world_size)
        with self.activity.doing("loading", f"loading {last}"):
            report = session_checkpoints.load(
                last, root, ranks, self._gang, self._listen, weights_only=weights_only
            )
        self.marks.add(Mark(self.metrics.last_step, "load", last))
        return report

    def _folder(self, given: str | os.PathLike[str] | None) -> Path | Url:
        """Folder of checkpoints, absolute: the ranks may be elsewhere."""
        return self.checkpoints.root if given is None else session_checkpoints.folder(given)

    # -- out of here

    @in_turn_on_these_ranks
    def export(
        self,
        folder: str | os.PathLike[str],
        dtype: object = None,
        *,
        model: str | None = None,
        max_shard_size: str | int = operations_export.MAX_SHARD_SIZE,
        overwrite: bool = False,
    ) -> ExportReport:
        """Write the prepared model as `save_pretrained` would, whatever the engine.

        Each rank writes its own share of each tensor; none holds the model. The folder
        appears whole, or not at all.

        Args:
            folder: to be made; may exist if it is empty.
            dtype: bf16, fp16 or fp32, of floating-point tensors. Default: as trained, the fp32
                masters where the engine has them.
            model: the variable that holds it. Default: the only prepared one.
            max_shard_size: of a file, as "5GB".
            overwrite: replace the model in a folder that is not empty; other files there stay.

        Raises:
            OptionError: a dtype that is not allowed.
            CheckpointError: no model, no room, not empty: which rank, and why; nothing is left.
            SessionBusy: a cell is still running.
        """
        content = operations_export.request(
            folder, dtype, model=model, max_shard_size=max_shard_size, overwrite=overwrite
        )
        self._ensure_free()
        self.start()
        self._gang.fleet.see(Path(content["folder"]).parent)
        with self.activity.doing("exporting", f"exporting to {folder}"):
            return operations_export.export(
                content, range(self.world_size), self._gang, self._listen
            )

    @in_turn_on_these_ranks
    def load_foreign(
        self, path: str | os.PathLike[str], *, trust: bool = False, model: str | None = None
    ) -> ForeignReport:
        """Load what something else wrote into the prepared model, under any backend and ranks.

        safetensors of Hugging Face (weights), `save_state` of Accelerate under DDP and FSDP,
        folders of DeepSpeed ZeRO 1, 2 and 3 (weights and the state of the optimizer). Nothing
        in the files is run.

        Args:
            path: of a folder or a file.
            trust: run what is in files that hold more than tensors and plain values: whatever
                code their writer put there.
            model: the variable that holds the model. Default: the only prepared one.

        Raises:
            CheckpointError: nothing known is there, it needs trust, or is of another model;
                all is as it was.
            SessionBusy: a cell is still running.
        """
        self._ensure_free()
        self.start()
        ranks = range(self.world_size)
        with self.activity.doing("loading", f"loading {path}"):
            return import_checkpoint.load(
                path, ranks, self._gang, self._listen, trust=trust, model=model
            )

    # -- the profiler

    def profile(
        self,
        steps: int | None = None,
        trace: str | os.PathLike[str] | None = None,
        *,
        memory: bool = True,
    ) -> Profiling:
        """Profile the cell that runs now, or else the next one; returns at once.

        The verdict appears below that cell and is added to `profiles`. From any thread.

        Args:
            steps: of the optimizer, after warm-up. Default: until the figures are stable, 30 s
                at most.
            trace: folder for a trace of each rank.
            memory: tell the peak of memory apart.

        Raises:
            OptionError: a value that is not allowed, or a folder that cannot be written.
            ProfileError: a profile is under way.
            SessionError: the session was stopped, or its ranks are gone.
        """
        wish = Wish.of(steps, trace, memory)
        self._ensure_alive()
        cell = self.running
        profiling = self._profiler.arm(wish)
        if cell is not None and cell.running:
            profiling.sources = self._cells.sources(cell)
            self._profiler.begin(cell.running, cell)
        return profiling

    @property
    def profiling(self) -> Profiling | None:
        """The profile that is armed or under way."""
        return self._profiler.now

    @property
    def profiles(self) -> list[Profile]:
        """Profiles of this session, the newest last."""
        return self._profiler.done

    def why_no_profile(self) -> str:
        """Why nothing can be profiled now; "" where it can."""
        if self.state == "stopped":
            return "the session was stopped."
        if self._death is not None:
            return self._death.headline
        return self._profiler.why_busy()

    # -- the planner

    def measured(self) -> dict[int, Measured | None]:
        """What each rank's training held in its third optimizer step; None before its end.

        Ranks measure by themselves, once for each `prepare()`. Also while a cell runs.
        """
        self._ensure_alive()
        self.start()
        ranks = range(self.world_size)
        replies = self._gang.ask(ranks, messages.MEASURED, {}, channel="control")
        figures = {rank: replies[rank]["figures"] for rank in ranks}
        return {rank: Measured.from_json(one) if one else None for rank, one in figures.items()}

    @in_turn_on_these_ranks
    def model_spec(
        self,
        name: str | None = None,
        *,
        batch_size: int | None = None,
        seq_len: int | None = None,
        kind: Literal["cuda", "cpu"] = "cuda",
        quick: bool = False,
    ) -> messages.ModelReply:
        """Describe a model of rank 0 to the planner; looks at it in a child process.

        Args:
            name: a variable that holds an nn.Module, bare or the one prepared last. Default:
                the one prepared last.
            batch_size: samples of a micro-batch. Default: those of the last forward.
            seq_len: tokens of a sample. Default: those of the last forward, or what the model
                takes.
            kind: of the devices to plan for.
            quick: by its closed form or not at all; no child process.

        Raises:
            PlanError: no such model, or one that cannot be looked at.
        """
        self._ensure_free()
        self.start()
        request = messages.ModelRequest(
            name=name, batch_size=batch_size, seq_len=seq_len, kind=kind, quick=quick
        )
        reply: messages.ModelReply = self._gang.ask([0], messages.MODEL, request, raises=PlanError)[
            0
        ]
        return reply

    @in_turn_on_these_ranks
    def calibrate(self, disk: str | os.PathLike[str] | Literal[True] | None = None) -> Calibrated:
        """Measure links, devices and a disk for the planner; some seconds, no model is touched.

        From then on `nbdist.plan` and `%nbdist plan` take these figures for this machine and
        this number of ranks, and say "measured here".

        Args:
            disk: a folder whose disk is measured too, for offload to NVMe; True: the temp folder.
                The disk that the session offloads to is measured in any case.

        Raises:
            SessionError: the ranks cannot be measured; nothing was kept.
            SessionBusy: a cell is still running.
        """
        self._ensure_free()
        self.start()
        with self.activity.doing("calibrating", "measuring links and devices"):
            return operations_calibrate.calibrate(
                self._gang,
                self._listen,
                options=self.options,
                world_size=self.world_size,
                hardware=self.hardware,
                there=planner.machine(self),
                disk=disk,
            )

    # -- state

    @property
    def nodes(self) -> list[Node]:
        """The machines of a cluster that the ranks are on, with what they have; none locally."""
        return self._gang.nodes

    def nodes_now(self, within_s: float = 1.0) -> dict[str, Now]:
        """Ask each node what it holds and does now: one answer of each, by name.

        Also while a cell runs. A node that does not answer in this time is left out.
        """
        return self._gang.now(within_s)

    def status(self) -> dict[str, Any]:
        """State of session and ranks, as plain values."""
        gone = self._gang.gone()
        members = [
            {
                "rank": rank,
                "pid": member.pid,
                "device": member.device,
                "node": self._gang.node_of(rank),
                "alive": rank not in gone,
                "unresponsive": self._gang.pulse.words(f"rank {rank}"),
            }
            for rank, member in enumerate(self._gang.members)
        ]
        launchers = self._gang.launchers
        return {
            "state": self.state,
            "standstill": self.standstill,
            "world_size": self.world_size,
            "options": self.options.to_json(),
            "launcher": launchers[0] if launchers else None,
            "launchers": launchers,
            "ranks": members,
        }

    def describe(self) -> str:
        """Ranks and strategy in a few words: "2 CPU ranks (no GPU found), ddp"."""
        return self._choice.describe()

    def log(self, rank: int | None = None, *, lines: int = 100) -> str:
        """Last lines that a rank wrote; without a rank, the launcher's own log; no secrets."""
        if rank is None:
            return self._gang.log_tail()
        (chosen,) = rank_names.chosen([rank], self.world_size, option="rank")
        return redacted(self.logs[chosen].tail(lines))

    def stacks(self) -> dict[int, str]:
        """What every thread of each rank is doing now; also while a cell runs.

        Takes four seconds at most. A rank that is stopped or does not answer has a line that
        says so.
        """
        self._ensure_alive()
        return stacks.of_ranks(self._gang, self._cells.files())

    def panel(self, face: str = "auto") -> None:
        """Show predicted memory beside live devices, curves, and buttons, under this cell.

        Args:
            face: widget, html, text; auto takes the best that is possible here.

        Raises:
            OptionError: no such face, or one that is not possible here.
        """
        from nbdist import panel

        panel.show(self, face)

    def saves_running(self) -> list[Save]:
        """Saves that go on in the background."""
        return self._saves.running()

    def __repr__(self) -> str:
        """One line: state, ranks, strategy."""
        return f"Session({self.state}: {self.describe()})"

    def _ipython_display_(self) -> None:
        """A session that is a cell's last expression is its panel."""
        self.panel()

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        """What the panel shows, as HTML without script and as text."""
        from nbdist import panel

        return panel.bundle(self)


_current: list[Session | None] = [None]


def current() -> Session | None:
    """The session that was started last and not stopped, or None."""
    return _current[0]


def _set_current(session: Session | None) -> None:
    _current[0] = session
