"""The `%%distribute` and `%nbdist` magics: parse a line, call the session, show the result."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import traceback
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar, cast

from IPython.core.error import UsageError
from IPython.core.magic import (
    Magics,
    cell_magic,
    line_magic,
    magics_class,
    needs_local_scope,
    no_var_expand,
)
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.core.magics.execution import ExecutionMagics
from IPython.display import display
from IPython.utils.process import arg_split  # type: ignore[attr-defined]
from traitlets import Bool, Bunch, Enum, Int, TraitError, Unicode, validate

from nbdist import rank_python, strategies
from nbdist._version import __version__
from nbdist.cluster.local_launcher import LocalLauncherProvider
from nbdist.doctor import doctor
from nbdist.errors import (
    CellInterrupted,
    CellSyntaxError,
    NbdistError,
    OptionError,
    ProfileError,
    SessionError,
)
from nbdist.hardware import discovery
from nbdist.magics import arguments, results
from nbdist.magics.arguments import SessionArguments
from nbdist.rank_sets import format_ranks
from nbdist.session import cell_history
from nbdist.session import checkpoints as session_checkpoints
from nbdist.session.cell import CELL_FILE_NAME, check_code
from nbdist.session.progress import suppress_status_lines
from nbdist.session.save_on_termination import parse_deadline
from nbdist.session.session import Session, apply_options, current_session
from nbdist.session.tracking import Tracker

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from IPython.core.interactiveshell import InteractiveShell
    from IPython.core.magic_arguments import MagicArgumentParser

    from nbdist.planner.result import Plan

_Method = TypeVar("_Method", bound="Callable[..., None]")


@dataclass(frozen=True, slots=True)
class MagicCommand:
    """A command of `%nbdist`."""

    run: Callable[[NbDist, Any], None]
    """Method of the magics; called with the parsed line, or without a parser with the text."""
    parser: MagicArgumentParser | None
    required: str
    """Argument without which the help is printed."""
    flags: tuple[str, ...]
    """Options that tab completion offers."""


COMMANDS: dict[str, MagicCommand] = {}


def command(
    name: str, *, required: str = "", flags: tuple[str, ...] = ()
) -> Callable[[_Method], _Method]:
    """Register a method of `NbDist` as the command `%nbdist NAME`.

    Args:
        name: the command.
        required: argument without which the help is printed.
        flags: options that tab completion offers, if there is no parser.
    """

    def register(method: _Method) -> _Method:
        parser = arguments.PARSERS.get(name)
        own = flags if parser is None else tuple(arguments.option_flags(parser))
        COMMANDS[name] = MagicCommand(method, parser, required, own)
        return method

    return register


@magics_class
class NbDist(Magics):
    """Configurable defaults for a new session (`%config NbDist`), and the magics."""

    backend = Enum(strategies.BACKENDS, "ddp", help="Default of --backend.").tag(config=True)
    nproc = Int(None, allow_none=True, min=1, help="Default of --nproc.").tag(config=True)
    precision = Enum(
        strategies.PRECISIONS, None, allow_none=True, help="Default of --precision."
    ).tag(config=True)
    offload = Unicode("none", help="Default of --offload.").tag(config=True)
    on = Unicode("local", help="Default of --on: local, ray, ray://HOST:PORT, slurm.").tag(
        config=True
    )
    python = Unicode(
        None, allow_none=True, help="Default of --python. None: the notebook's interpreter."
    ).tag(config=True)
    sharded_load = Bool(
        default_value=True, help="Load from_pretrained models as shards with fsdp, fsdp1, zero3."
    ).tag(config=True)
    checkpoints = Unicode(
        None, allow_none=True, help='Folder or URL of checkpoints. Default: "checkpoints".'
    ).tag(config=True)
    track = Unicode(
        None,
        allow_none=True,
        help="Tracker of report(): tensorboard:DIR, trackio:PROJECT, wandb:PROJECT or"
        " mlflow:EXPERIMENT.",
    ).tag(config=True)
    output = Unicode("all", help="Default of --output.").tag(config=True)
    deadline = Unicode(
        None,
        allow_none=True,
        help="When the session will be terminated from outside: 8h50m, 17:30, 2026-11-24T17:30.",
    ).tag(config=True)

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell, **traits: Any) -> None:
        super().__init__(shell, **traits)
        self.observe(self._apply_default, self.default_names())
        self.launcher_provider = LocalLauncherProvider()
        self.ipython_debug = shell.magics_manager.magics["line"]["debug"]
        """IPython's `%debug`, which is registered again when the extension is unloaded."""
        self.ended: Session | None = None
        """The session that `%nbdist stop` ended last; the panel still shows it."""
        self.warm_up()

    def warm_up(self) -> None:
        """Start a launcher in the background for the devices found here."""
        try:
            python = rank_python.find(self.python)
        except OptionError:  # its environment was deleted: the next cell raises this
            return
        rank_python.select(python)
        has_gpus = bool(discovery.discover_machine().gpus)
        self.launcher_provider.warm_up("cuda" if has_gpus else "cpu", python)

    @validate("python", "checkpoints", "deadline", "track")
    def _validate_value(self, proposal: Bunch) -> str | None:
        checks: dict[str, Callable[[str], object]] = {
            "python": rank_python.find,
            "checkpoints": session_checkpoints.check_root,
            # A duration counts from the kernel's start, and the value is kept as it was given.
            "deadline": parse_deadline,
            "track": Tracker.parse,
        }
        name, value = proposal.trait.name, cast("str | None", proposal.value)
        try:
            if value is not None:
                checks[name](value)
        except NbdistError as error:
            raise TraitError(f"The {name!r} trait: {error}") from None
        return value

    def _apply_default(self, change: Bunch) -> None:
        """Apply a changed default to the current session, if a running session can change it."""
        session = current_session()
        if change.name == "python":
            self.warm_up()
        elif change.name == "deadline" and change.new is not None:
            at = datetime.fromtimestamp(parse_deadline(change.new)).astimezone()
            print(f"nbdist: before {at:%Y-%m-%d %H:%M:%S} the ranks stop and save a checkpoint")
        if session is None:
            return
        if change.name == "deadline":
            session.set_deadline(change.new)
        elif change.name == "track":
            session.track_to(change.new)
        elif change.name == "checkpoints":
            session.save_to(change.new)
            print(f"nbdist: checkpoints are now saved to {session.checkpoints.root}")
        else:
            print(
                f"nbdist: {change.name} = {change.new!r} applies to the next session; use an"
                " option of %%distribute to change this one"
            )

    @magic_arguments("%distribute")
    @SessionArguments(strategies.ARGUMENTS)
    @argument("--ranks", metavar="LIST", help="run on these ranks only, such as 0,2-3")
    @argument(
        "--push",
        metavar="NAMES",
        help="copy notebook variables to all ranks before the cell, such as a,b",
    )
    @argument(
        "--pull",
        metavar="NAMES",
        help="copy variables of rank 0 to the notebook after the cell, such as c,d",
    )
    @argument(
        "--background", action="store_true", help="return at once; %%nbdist wait waits for it"
    )
    @argument(
        "--output",
        metavar="WHOSE",
        help="ranks whose output is shown: all, none or a list; default: all",
    )
    @argument("--fresh", action="store_true", help="restart the ranks first; variables are lost")
    @argument(
        "--profile",
        action="store_true",
        help="report where the time of a training step goes, and what would make it faster",
    )
    @argument("--steps", type=int, metavar="N", help="with --profile: steps to record")
    @argument("--trace", metavar="DIR", help="with --profile: write a trace of each rank")
    @argument("-h", "--help", action="store_true", help="show this text")
    @cell_magic
    def distribute(self, line: str, cell: str) -> None:
        """Run the cell on every rank; start the ranks if needed.

        The ranks stay alive between cells and keep their variables. Predefined names:
        `accelerator`, `rank`, `local_rank`, `world_size`, `device`, `report`, `send`,
        `save` and `torch`. The last expression is displayed per rank; equal values once.

        Example:
            %%distribute --backend fsdp --pull final
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            final = train(model, optimizer, loader)
        """
        options = parse_distribute_line(line)
        if options.help:
            print(self.distribute.__doc__)
            return
        arguments.check_contradictory_options(options)
        # IPython 9.18 increments execution_count before the cell runs, older versions after it
        count = len(self.shell.user_ns["_ih"]) - 1
        # A comment in place of the magic's line: line numbers match the notebook's cell.
        code = cell if cell.lstrip().startswith("%%") else f"# %%distribute {line}\n{cell}"
        try:
            check_code(code)
        except SyntaxError as error:
            text = "".join(traceback.format_exception_only(error)).strip("\n")
            message = text.replace(f'File "{CELL_FILE_NAME}"', f"Cell In[{count}]")
            raise CellSyntaxError(message) from None
        # read before ranks are started, switched or restarted: a name may be misspelled
        pushed = self.notebook_values(options.push) if options.push else {}
        session = self.get_or_start_session(options)
        if pushed:
            session.push(**pushed)
        session.run(
            code,
            options.ranks,
            options.background,
            output=options.output or self.output,
            count=count,
            profile={"steps": options.steps, "trace": options.trace} if options.profile else False,
        )
        if options.pull:
            self.bind_pulled(session, options.pull)

    @needs_local_scope
    @no_var_expand
    @line_magic
    def debug(self, line: str, local_ns: Any = None) -> None:
        """Debug the last error: of a %%distribute cell on its rank, otherwise as IPython does.

        `%debug --rank 3` chooses another rank than the one whose error came first.
        """
        last, rank = getattr(sys, "last_value", None), re.fullmatch(r"\s*--rank\b[ =]*(.*)", line)
        if rank and not rank[1].strip().isdecimal():
            raise OptionError(f"Expected a rank, such as %debug --rank 3, got {rank[1]!r}.")
        if rank or (isinstance(last, NbdistError | CellInterrupted) and not line.strip()):
            self.require_session().debug(int(rank[1]) if rank else None)
        else:
            # IPython 9.18 loads its magics on first use, by name: here it would find this method.
            ExecutionMagics(self.shell).debug(line, local_ns=local_ns)

    @line_magic
    def nbdist(self, line: str) -> None:
        """Inspect and control the session: `%nbdist COMMAND`.

        status          state of the session and of each rank
        pull NAMES      copy variables of rank 0 to the notebook; a model as its state dict
        push NAMES      copy notebook variables to all ranks
        wait            wait for the cell that runs in the background
        replay          show the output of the last cell again, for example if its page was closed
        inspect EXPR    value of an expression on each rank, also between steps of a running cell
        interrupt       interrupt all ranks; variables are kept; a third interrupt ends the ranks
        restart         start new ranks with the same options; variables are lost. After a node
                        failure, uses the remaining nodes; --wait waits for as many as before
        stop            end the ranks and the launcher
        log [RANK]      last output lines of a rank; without RANK, of the launcher
        log --stacks    current stack of every thread of each rank
        doctor          problems of this machine; --run: of this training; --front-end; --json
        export DIR      write the model as a from_pretrained folder; -h for its options
        script DIR      write the cells as train.py, with accelerate.yaml and a Slurm job
        switch NAME     switch the prepared models to another backend; -h for its options
        save NAME       write a checkpoint in the background; -h for its options
        load NAME       load a checkpoint into the prepared models, under any backend and world size
        resume          load the checkpoint of a run that a signal or a deadline ended
        checkpoints     list the checkpoints, newest last
        plan [MODEL]    predicted memory and speed under every strategy; -h for its options
        plan --check    compare prediction and measurement for the model on the ranks
        panel           memory, curves, ranks and buttons, live; --face auto, widget, html, text
        profile         where the time of a step goes, and what would make it faster
        """
        name, _, rest = arguments.without_comment(line).strip().partition(" ")
        if name in {"", "help", "-h", "--help"}:
            print(inspect.getdoc(type(self).nbdist))
            return
        if name not in COMMANDS:
            close_names = get_close_matches(name, COMMANDS, n=1)
            hint = f"Did you mean {close_names[0]}? " if close_names else ""
            raise UsageError(
                f"Unknown command %nbdist {name!r}. {hint}Use one of {', '.join(COMMANDS)}."
            )
        chosen = COMMANDS[name]
        parser = chosen.parser
        if parser is None:
            chosen.run(self, rest.strip())
            return
        words = arguments.split_line(rest.strip(), name)
        options = arguments.parse_words(parser, words, f"%nbdist {name}")
        if options.help or (chosen.required and not getattr(options, chosen.required)):
            print(arguments.help_text(parser))
        else:
            chosen.run(self, options)

    # -- the session

    def get_or_start_session(self, options: argparse.Namespace) -> Session:
        """Return the current session with the line's options; start or restart it as needed."""
        changes = arguments.session_options(options)
        session = current_session()
        if session is None:
            return self.new_session(changes).start()
        places = {"on": (session.on, options.on)}
        if options.python is not None:
            places["python"] = (session.python, rank_python.find(options.python).executable)
        moved = [
            f"{name} {now} -> {new}"
            for name, (now, new) in places.items()
            if new not in {None, now}
        ]
        if moved:
            # Starts the new ranks first: if that fails, the current ones keep running.
            try:
                switched = self.new_session(changes).start()
            except BaseException:  # also an interrupt: planner and doctor ask the selected Python
                rank_python.select(rank_python.find(session.python))
                raise
            session.stop()
            print(f"nbdist: {', '.join(moved)}: variables of the old ranks are lost")
            return switched
        if options.fresh:
            session.restart(**changes)
        elif changed := apply_options(session, changes):
            print(changed)
        return session

    def new_session(self, options: Mapping[str, Any]) -> Session:
        """Return a new session with the options of the line; its ranks are not started."""
        chosen_by_auto = {"backend", "offload"} if options.get("auto") else set()
        names = [name for name in self.default_names() if name not in chosen_by_auto]
        defaults = {name: getattr(self, name) for name in names}
        return Session(**{**defaults, **options}, engine=self.launcher_provider)

    @classmethod
    def default_names(cls) -> list[str]:
        """Return the traits of `%config NbDist` that are options of a session."""
        return [name for name in cls.class_own_traits(config=True) if name != "output"]

    def require_session(self) -> Session:
        """Return the current session.

        Raises:
            SessionError: there is none.
        """
        session = current_session()
        if session is None:
            raise SessionError("There is no session. Run a %%distribute cell to start one.")
        return session

    def notebook_values(self, names: str) -> dict[str, object]:
        """Return variables of the notebook by name.

        Raises:
            OptionError: a variable is not defined.
        """
        requested = arguments.parse_names(names)
        missing = [name for name in requested if name not in self.shell.user_ns]
        if missing:
            msg = f"The notebook has no variable {', '.join(missing)}. Define it before pushing it."
            raise OptionError(msg)
        return {name: self.shell.user_ns[name] for name in requested}

    def bind_pulled(self, session: Session, names: str) -> None:
        """Copy variables of rank 0 to the notebook."""
        requested = arguments.parse_names(names)
        values = session.pull(*requested)
        self.shell.push(
            dict(zip(requested, values if len(requested) > 1 else [values], strict=True))
        )

    # -- commands

    @command("status")
    def _status(self, options: argparse.Namespace) -> None:
        if options.json:
            print(results.status_document(self.require_session()))
            return
        for line in results.status_lines(self.require_session()):
            print(line)

    @command("pull")
    def _pull(self, names: str) -> None:
        self.bind_pulled(self.require_session(), names)

    @command("push")
    def _push(self, names: str) -> None:
        self.require_session().push(**self.notebook_values(names))

    @command("wait")
    def _wait(self, _: argparse.Namespace) -> None:
        self.require_session().wait()

    @command("replay")
    def _replay(self, _: argparse.Namespace) -> None:
        (current_session() or self.ended or self.require_session()).replay()

    @command("inspect")
    def _inspect(self, expression: str) -> None:
        ranks_by_text: dict[str, list[int]] = {}
        for rank, text in self.require_session().inspect(expression).items():
            ranks_by_text.setdefault(text, []).append(rank)
        for text, ranks in ranks_by_text.items():
            print(f"[{format_ranks(ranks)}] {text}")

    @command("interrupt")
    def _interrupt(self, _: argparse.Namespace) -> None:
        self.require_session().interrupt()

    @command("restart", flags=("--wait",))
    def _restart(self, line: str) -> None:
        """Start new ranks with the same options.

        After a node failure they start on the remaining nodes, or with --wait on a full set.
        """
        if line not in {"", "--wait"}:
            raise UsageError(
                f"%nbdist restart takes only the option --wait, got {line!r}. Use %nbdist switch"
                " or %%distribute to change options."
            )
        session = self.require_session()
        before = session.placement.num_nodes
        session.restart(wait=bool(line))
        if session.placement.num_nodes < before:
            print(
                f"nbdist: {session.placement.num_nodes} of {before} nodes remain and now run all"
                " ranks; %nbdist load NAME continues from a checkpoint"
            )

    @command("stop")
    def _stop(self, _: argparse.Namespace) -> None:
        self.ended = self.require_session()
        self.ended.stop()
        self.warm_up()
        print("nbdist: ranks and launcher ended")

    @command("log", flags=("--stacks",))
    def _log(self, rank: str) -> None:
        if rank == "--stacks":
            for number, text in self.require_session().stacks().items():
                print(f"-- rank {number} --\n{text}\n")
            return
        if rank and not (rank.isascii() and rank.isdigit()):
            raise UsageError(f"%nbdist log takes a rank such as 0, or --stacks, got {rank!r}.")
        print(self.require_session().log(int(rank) if rank else None))

    @command("switch")
    def _switch(self, options: argparse.Namespace) -> None:
        changes = arguments.session_options(options)
        if not changes:
            print(arguments.help_text(arguments.PARSERS["switch"]))
            return
        print(self.require_session().switch(**changes, reset_optimizer=options.reset_optimizer))

    @command("export", required="folder")
    def _export(self, options: argparse.Namespace) -> None:
        print(
            self.require_session().export(
                options.folder,
                options.dtype,
                model=options.model,
                max_shard_size=options.max_shard_size,
                overwrite=options.overwrite,
            )
        )

    @command("script", required="folder")
    def _script(self, options: argparse.Namespace) -> None:
        session = current_session() or self.ended or self.require_session()
        print(
            session.script(
                options.folder,
                cells=options.cells,
                tag=options.tag,
                overwrite=options.overwrite,
                with_nbdist=options.with_nbdist,
            )
        )

    @command("save", required="name")
    def _save(self, options: argparse.Namespace) -> None:
        save = self.require_session().save(
            options.name,
            options.overwrite,
            options.keep,
            options.wait,
            folder=options.dir,
            full=options.full,
        )
        print(save)
        if not save.done:
            session_checkpoints.show_when_done(save)

    @command("load", required="name")
    def _load(self, options: argparse.Namespace) -> None:
        print(
            self.require_session().load(
                options.name,
                weights_only=options.weights_only,
                reset_optimizer=options.reset_optimizer,
                folder=options.dir,
                trust=options.trust,
            )
        )

    @command("resume")
    def _resume(self, _: argparse.Namespace) -> None:
        print(self.require_session().resume())

    @command("checkpoints")
    def _checkpoints(self, options: argparse.Namespace) -> None:
        session = current_session()
        if options.dir is not None:
            found = session_checkpoints.Checkpoints(session_checkpoints.check_root(options.dir))
        elif session is not None:
            found = session.checkpoints
        else:
            root = self.checkpoints or session_checkpoints.DEFAULT_FOLDER
            found = session_checkpoints.Checkpoints(session_checkpoints.parse_root(root))
        print(results.checkpoints_document(found) if options.json else found)

    @command("plan")
    def _plan(self, options: argparse.Namespace) -> None:
        with suppress_status_lines() if options.json else contextlib.nullcontext():
            planned = results.run_plan_command(options, self.shell.user_ns, current_session())
        if options.json:
            print(results.plan_document(cast("Plan", planned)))
        else:
            display(planned)

    @command("profile")
    def _profile(self, options: argparse.Namespace) -> None:
        arguments.check_ignored_options(options)
        session = current_session()
        if session is None:
            msg = "There is no session to profile. Use %%distribute --profile to start one."
            raise SessionError(msg)
        if options.calibrate:
            display(session.calibrate(disk=options.disk))
        elif options.json:
            if not session.profiles:
                raise ProfileError("There is no profile yet. Use %nbdist profile to record one.")
            print(results.profile_document(session.profiles[-1].to_json()))
        elif not options.show:
            print(f"nbdist: {session.profile(options.steps, options.trace, memory=options.memory)}")
        elif session.profiles:
            display(session.profiles[-1])
        else:
            now = session.profiling
            print(f"nbdist: no profile yet{'' if now is None else f'; {now.text}'}")

    @command("panel")
    def _panel(self, options: argparse.Namespace) -> None:
        session = current_session() or self.ended or self.require_session()
        session.panel(options.face)

    @command("doctor")
    def _doctor(self, options: argparse.Namespace) -> None:
        diagnosis = doctor(run=options.run, front_end=options.front_end)
        if options.json:
            print(diagnosis.to_json())
        elif not options.front_end:
            display(diagnosis)


def complete_on_ranks(code: str, cursor: int) -> tuple[list[str], int]:
    """Return what completes the code of a cell in the current session."""
    session = current_session()
    return ([], cursor) if session is None else session.complete(code, cursor)


def words_of_command(name: str) -> Sequence[str]:
    """Return what completes a command: backends or checkpoints, and its options."""
    names: Sequence[str] = strategies.BACKENDS if name == "switch" else ()
    if name == "load" and (session := current_session()) is not None:
        names = [entry.name for entry in session.checkpoints.cached]
    return [*names, *COMMANDS[name].flags] if name in COMMANDS else []


MATCHER = arguments.make_matcher(
    options=arguments.option_flags(NbDist.distribute.parser),
    valued=arguments.option_flags(NbDist.distribute.parser, valued=True),
    commands=list(COMMANDS),
    of_command=words_of_command,
    on_ranks=complete_on_ranks,
)


def parse_distribute_line(line: str) -> argparse.Namespace:
    """Parse the line of a `%%distribute` cell.

    Raises:
        UsageError: an unknown option, or a quote that is not closed.
    """
    try:
        words = arg_split(arguments.without_comment(line))
    except ValueError as error:
        raise UsageError(f"%%distribute {line}: {error}.") from None
    return arguments.parse_words(NbDist.distribute.parser, words, "%%distribute")


def transform_distribute_comment(lines: list[str]) -> list[str]:
    """Turn a first line `#| distribute OPTIONS` into `%%distribute OPTIONS`.

    An IPython input transformer. A type checker, a linter and jupytext read such a cell as Python.
    """
    first = [arguments.DISTRIBUTE_COMMENT.sub("%%distribute", line) for line in lines[:1]]
    return first + lines[1:]


def register_magics(ipython: InteractiveShell) -> None:
    """Register the magics and the completer, and print the devices that were found."""
    ipython.register_magics(create_magics(ipython))
    if MATCHER is not None:
        ipython.Completer.custom_matchers.append(MATCHER)
    ipython.input_transformers_cleanup.append(transform_distribute_comment)
    ipython.events.register("pre_run_cell", cell_history.note_notebook_cell)
    machine = discovery.discover_machine()
    print(
        f"nbdist {__version__} \N{MIDDLE DOT} {machine.describe()} \N{MIDDLE DOT}"
        " %%distribute --auto to begin, %nbdist for help"
    )
    for warning in machine.warnings:
        print(f"nbdist: {warning}")


def create_magics(ipython: InteractiveShell) -> NbDist:
    """Create the magics; skip configured values that are not allowed.

    IPython (9.18) keeps a rejected `%config NbDist.x = ...` in its config, which would make the
    next load fail.
    """
    while True:
        try:
            return NbDist(ipython)
        except TraitError as error:
            section = ipython.config.NbDist
            name = next((n for n in section if f"'{n}' trait" in str(error)), None)
            if name is None:
                raise
            print(
                f"nbdist: ignoring NbDist.{name} = {section.pop(name)!r}: {error}",
                file=sys.stderr,
            )


def unregister_magics(ipython: InteractiveShell) -> None:
    """Remove the magics and the completer; running ranks are kept."""
    manager = ipython.magics_manager
    magics = manager.registry.pop(NbDist.__name__)
    manager.magics["cell"].pop("distribute")
    manager.magics["line"].pop("nbdist")
    manager.magics["line"]["debug"] = magics.ipython_debug
    ipython.configurables.remove(magics)
    if MATCHER is not None:
        ipython.Completer.custom_matchers.remove(MATCHER)
    ipython.input_transformers_cleanup.remove(transform_distribute_comment)
    ipython.events.unregister("pre_run_cell", cell_history.note_notebook_cell)
    magics.launcher_provider.close()
    if current_session() is not None:
        print("nbdist: the ranks keep running; nbdist.session().stop() ends them")
