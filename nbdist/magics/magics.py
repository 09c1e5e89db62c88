"""The `%%distribute` and `%nbdist` magics: parse a line, call the session, show the result."""

from __future__ import annotations

import argparse
import inspect
import sys
import traceback
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import (
    MagicArgumentParser,
    argument,
    magic_arguments,
    parse_argstring,
)
from IPython.display import display
from traitlets import Bunch, Enum, Int, TraitError, Unicode, validate

from nbdist import strategies
from nbdist._version import __version__
from nbdist.cluster.local import LocalLauncherProvider
from nbdist.doctor import doctor
from nbdist.errors import CellSyntaxError, NbdistError, OptionError, SessionError
from nbdist.hardware import discovery
from nbdist.magics import arguments, completion, plan
from nbdist.session import cell_source, status
from nbdist.session import checkpoints as session_checkpoints
from nbdist.session.session import Session, current_session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from IPython.core.interactiveshell import InteractiveShell


def parse_clip_norm(text: str) -> float | str:
    """Parse the value of --clip: a number, or "none"."""
    return "none" if text == "none" else float(text)


def strip_quotes(text: str) -> str:
    """Remove the quotes that IPython (9.18) leaves around an option's value."""
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text


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
    checkpoints = Unicode(
        None, allow_none=True, help='Folder or URL of checkpoints. Default: "checkpoints".'
    ).tag(config=True)
    output = Unicode("all", help="Default of --output.").tag(config=True)

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell, **traits: Any) -> None:
        super().__init__(shell, **traits)
        self.observe(self._move_checkpoints, "checkpoints")
        self.observe(
            self._warn_on_restart_options,
            [name for name in CONFIGURABLE_OPTIONS if name != "checkpoints"],
        )
        self.launcher_provider = LocalLauncherProvider()
        self.ended: Session | None = None
        """The session that `%nbdist stop` ended last; the panel still shows it."""
        self.warm_up()

    def warm_up(self) -> None:
        """Start a launcher in the background for the devices found here."""
        self.launcher_provider.warm_up("cuda" if discovery.discover_machine().gpus else "cpu")

    @validate("checkpoints")
    def _validate_checkpoint_dir(self, proposal: Bunch) -> str | None:
        given: str | None = proposal.value
        try:
            if given is not None:
                session_checkpoints.check_root(given)
        except NbdistError as error:
            raise TraitError(f"The 'checkpoints' trait: {error}") from None
        return given

    def _move_checkpoints(self, change: Bunch) -> None:
        session = current_session()
        if session is not None:
            session.save_to(change.new)
            print(f"nbdist: checkpoints are now saved to {session.checkpoints.root}")

    def _warn_on_restart_options(self, change: Bunch) -> None:
        if current_session() is not None:
            print(
                f"nbdist: {change.name} = {change.new!r} applies to the next session; use an"
                " option of %%distribute to change this one"
            )

    @no_var_expand
    @magic_arguments("%distribute")
    @argument(
        "-b",
        "--backend",
        metavar="NAME",
        help="ddp, fsdp (= fsdp2), fsdp1, zero1, zero2, zero3; prepared models are switched to it",
    )
    @argument(
        "--auto",
        action="store_true",
        help="choose the backend at accelerator.prepare() from model and machine, and explain it",
    )
    @argument(
        "-n",
        "--nproc",
        type=int,
        metavar="N",
        help="number of ranks; default: one per visible GPU, or 2 CPU ranks without a GPU",
    )
    @argument("--gpus", metavar="LIST", help="GPU indices, such as 0,2")
    @argument(
        "--on",
        metavar="WHERE",
        help="where ranks run: local, ray, ray://HOST:PORT or slurm; default: local",
    )
    @argument(
        "--nodes", type=int, metavar="N", help="number of cluster nodes, with equally many ranks"
    )
    @argument(
        "--gpus-per-node",
        type=int,
        metavar="N",
        help="GPUs and ranks per node; 0 for CPU ranks; default: all",
    )
    @argument("--partition", metavar="NAME", help="Slurm partition")
    @argument("--time", metavar="TIME", help="time limit of the Slurm job, such as 1:00:00")
    @argument("--account", metavar="NAME", help="account of the Slurm job")
    @argument("--interface", metavar="NAME", help="network interface between nodes, such as ib0")
    @argument(
        "--precision",
        metavar="NAME",
        help="no, fp16, bf16, fp8; default: bf16 if the hardware supports it, else no",
    )
    @argument(
        "--offload", metavar="WHERE", help="where to offload optimizer state: none, cpu, nvme:PATH"
    )
    @argument(
        "--offload-params",
        action=argparse.BooleanOptionalAction,
        help="also offload the parameters",
    )
    @argument(
        "--replicate-across",
        metavar="WHAT",
        help="with fsdp: nodes shards within nodes and replicates across (HSDP); default: none",
    )
    @argument(
        "--activation-checkpointing",
        action=argparse.BooleanOptionalAction,
        help="recompute activations in the backward pass",
    )
    @argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile at prepare()")
    @argument("--accumulate", type=int, metavar="N", help="micro-batches per optimizer step")
    @argument("--clip", type=parse_clip_norm, metavar="NORM", help="maximum gradient norm, or none")
    @argument(
        "--deepspeed-config",
        type=strip_quotes,
        metavar="FILE",
        help="your own DeepSpeed config: a JSON or YAML file, or '{...}' inline",
    )
    @argument(
        "--fsdp-config",
        type=strip_quotes,
        metavar="FILE",
        help="your own FSDP settings with Accelerate's names: a file or '{...}' inline",
    )
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
    @argument("--fresh", action="store_true", help="restart the ranks first")
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
        check_contradictory_options(options)
        # IPython 9.18 increments execution_count before the cell runs, older versions after it
        count = len(self.shell.user_ns["_ih"]) - 1
        code = keep_line_numbers(line, cell)
        try:
            cell_source.check_code(code)
        except SyntaxError as error:
            raise CellSyntaxError(format_syntax_error(error, count)) from None
        session = self.get_or_start_session(options)
        if options.push:
            session.push(**self.notebook_values(options.push))
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

    @no_var_expand
    @line_magic
    def nbdist(self, line: str) -> None:
        """Inspect and control the session: `%nbdist COMMAND`.

        status          state of the session and of each rank
        pull NAMES      copy variables of rank 0 to the notebook; a model as its state dict
        push NAMES      copy notebook variables to all ranks
        wait            wait for the cell that runs in the background
        interrupt       interrupt all ranks; variables are kept; a third interrupt ends the ranks
        restart         start new ranks with the same options; variables are lost; after a node
                        failure on the remaining nodes, or with --wait on a full set again
        stop            end the ranks and the launcher
        log [RANK]      last output lines of a rank; without RANK, of the launcher
        log --stacks    current stack of every thread of each rank
        doctor          problems of this machine; --run: of this training; --json
        export DIR      write the model as a from_pretrained folder; -h for its options
        switch NAME     switch the prepared models to another backend; -h for its options
        save NAME       write a checkpoint in the background; -h for its options
        load NAME       load a checkpoint into the prepared models, under any backend and world size
        checkpoints     list the checkpoints, newest last
        plan [MODEL]    predicted memory and speed under every strategy; -h for its options
        plan --check    compare prediction and measurement for the model on the ranks
        panel           memory, curves, ranks and buttons, live; --face auto, widget, html, text
        profile         where the time of a step goes, and what would make it faster
        """
        command, _, rest = line.strip().partition(" ")
        if not command:
            print(inspect.getdoc(type(self).nbdist))
        elif command in COMMANDS:
            COMMANDS[command](self, rest.strip())
        else:
            msg = f"Unknown command %nbdist {command!r}. Use one of {', '.join(COMMANDS)}."
            raise UsageError(msg)

    # -- the session

    def get_or_start_session(self, options: argparse.Namespace) -> Session:
        """Return the current session with the line's options; start or restart it as needed."""
        changes = session_options(options)
        session = current_session()
        if session is not None and options.on is not None and options.on != session.on:
            # Created first: if it fails, the current session keeps running.
            moved = self.new_session(options, changes)
            print(
                f"nbdist: on {session.on} -> {options.on}: starting new ranks; variables of the old"
                " ranks are lost"
            )
            session.stop()
            return moved.start()
        if session is None:
            return self.new_session(options, changes).start()
        differing = session.differing(**changes)
        if options.fresh:
            session.restart(**changes)
        elif RESTART_OPTIONS & differing.keys():
            words = ", ".join(f"{name} {now} -> {then}" for name, (now, then) in differing.items())
            print(f"nbdist: {words}: starting new ranks; variables of the old ranks are lost")
            session.restart(**changes)
        elif differing:
            print(session.switch(**changes))
        return session

    def new_session(self, arguments: argparse.Namespace, options: Mapping[str, Any]) -> Session:
        """Return a new session with the options of the line; its ranks are not started."""
        return Session(
            **{**self.session_defaults(arguments), **options}, engine=self.launcher_provider
        )

    def session_defaults(self, options: argparse.Namespace) -> dict[str, Any]:
        """Return the configured options of a new session; --auto sets backend and offload."""
        of_auto = {"backend", "offload"} if options.auto else set()
        settings = [name for name in CONFIGURABLE_OPTIONS if name not in of_auto]
        return {name: getattr(self, name) for name in settings}

    def require_session(self) -> Session:
        """Return the current session.

        Raises:
            SessionError: there is none.
        """
        session = current_session()
        if session is None:
            msg = "There is no session. Run a %%distribute cell to start one."
            raise SessionError(msg)
        return session

    def notebook_values(self, names: str) -> dict[str, object]:
        """Return variables of the notebook by name.

        Raises:
            OptionError: a variable is not defined.
        """
        wanted = parse_names(names)
        missing = [name for name in wanted if name not in self.shell.user_ns]
        if missing:
            msg = f"The notebook has no variable {', '.join(missing)}. Define it before pushing it."
            raise OptionError(msg)
        return {name: self.shell.user_ns[name] for name in wanted}

    def bind_pulled(self, session: Session, names: str) -> None:
        """Copy variables of rank 0 to the notebook."""
        wanted = parse_names(names)
        values = session.pull(*wanted)
        self.shell.push(dict(zip(wanted, values if len(wanted) > 1 else [values], strict=True)))

    # -- commands

    def status_command(self, _: str) -> None:
        """Print the state of the session and of each rank."""
        for line in status.status_lines(self.require_session()):
            print(line)

    def pull_command(self, names: str) -> None:
        """Copy variables of rank 0 to the notebook."""
        self.bind_pulled(self.require_session(), names)

    def push_command(self, names: str) -> None:
        """Copy variables of the notebook to all ranks."""
        self.require_session().push(**self.notebook_values(names))

    def wait_command(self, _: str) -> None:
        """Wait for the cell that runs in the background."""
        self.require_session().wait()

    def interrupt_command(self, _: str) -> None:
        """Interrupt the running cell on all ranks."""
        self.require_session().interrupt()

    def restart_command(self, line: str) -> None:
        """Start new ranks with the same options.

        After a node failure they start on the remaining nodes, or with --wait on a full set.
        """
        if line not in {"", "--wait"}:
            message = (
                f"%nbdist restart takes only the option --wait, got {line!r}. Use %nbdist switch"
                " or %%distribute to change options."
            )
            raise UsageError(message)
        session = self.require_session()
        before = session.placement.num_nodes
        session.restart(wait=bool(line))
        if session.placement.num_nodes < before:
            print(
                f"nbdist: {session.placement.num_nodes} of {before} nodes remain and now run all"
                " ranks; %nbdist load NAME continues from a checkpoint"
            )

    def stop_command(self, _: str) -> None:
        """End the ranks and the launcher; start to warm up a new launcher."""
        self.ended = self.require_session()
        self.ended.stop()
        self.warm_up()
        print("nbdist: ranks and launcher ended")

    def log_command(self, rank: str) -> None:
        """Print the last lines of a rank or of the launcher, or all stacks."""
        if rank == "--stacks":
            for number, text in self.require_session().stacks().items():
                print(f"-- rank {number} --\n{text}\n")
            return
        if rank and not (rank.isascii() and rank.isdigit()):
            msg = f"%nbdist log takes a rank such as 0, or --stacks, got {rank!r}."
            raise UsageError(msg)
        print(self.require_session().log(int(rank) if rank else None))

    def switch_command(self, line: str) -> None:
        """Switch the prepared models to another backend."""
        parser = switch_parser()
        options = parser.parse_args(arguments.split_line(line, "switch"))
        changes = session_options(options)
        if options.help or not changes:
            print(parser.format_help())
            return
        print(self.require_session().switch(**changes, reset_optimizer=options.reset_optimizer))

    def export_command(self, line: str) -> None:
        """Write the prepared model as a `from_pretrained` folder."""
        parser = arguments.export_parser()
        options = parser.parse_args(arguments.split_line(line, "export"))
        if options.help or not options.folder:
            print(parser.format_help())
            return
        print(
            self.require_session().export(
                options.folder,
                options.dtype,
                model=options.model,
                max_shard_size=options.max_shard_size,
                overwrite=options.overwrite,
            )
        )

    def save_command(self, line: str) -> None:
        """Write a checkpoint in the background."""
        parser = arguments.save_parser()
        options = parser.parse_args(arguments.split_line(line, "save"))
        if options.help or not options.name:
            print(parser.format_help())
            return
        save = self.require_session().save(
            options.name, options.overwrite, options.keep, options.wait, folder=options.dir
        )
        print(save)
        if not save.done:
            session_checkpoints.show_when_done(save)

    def load_command(self, line: str) -> None:
        """Load a checkpoint into the prepared models."""
        parser = arguments.load_parser()
        options = parser.parse_args(arguments.split_line(line, "load"))
        if options.help or not options.name:
            print(parser.format_help())
            return
        print(
            self.require_session().load(
                options.name,
                weights_only=options.weights_only,
                folder=options.dir,
                trust=options.trust,
            )
        )

    def checkpoints_command(self, line: str) -> None:
        """List the checkpoints; works without a session."""
        parser = arguments.checkpoints_parser()
        options = parser.parse_args(arguments.split_line(line, "checkpoints"))
        session = current_session()
        if options.help:
            print(parser.format_help())
        elif options.dir is not None:
            print(session_checkpoints.Checkpoints(session_checkpoints.check_root(options.dir)))
        elif session is None:
            print(
                session_checkpoints.Checkpoints(
                    session_checkpoints.parse_root(
                        self.checkpoints or session_checkpoints.DEFAULT_FOLDER
                    )
                )
            )
        else:
            print(session.checkpoints)

    def plan_command(self, line: str) -> None:
        """Show what every strategy needs for a model, or compare a plan with measurements."""
        answer = plan.run_plan_command(line, self.shell.user_ns, current_session())
        if isinstance(answer, str):
            print(answer)
        else:
            display(answer)

    def profile_command(self, line: str) -> None:
        """Profile the running loop or the next cell, or show the last profile again."""
        parser = arguments.profile_parser()
        options = parser.parse_args(arguments.split_line(line, "profile"))
        if options.help:
            print(parser.format_help())
            return
        check_ignored_options(options)
        session = current_session()
        if session is None:
            msg = "There is no session to profile. Use %%distribute --profile to start one."
            raise SessionError(msg)
        if options.calibrate:
            display(session.calibrate(disk=options.disk))
        elif not options.show:
            print(f"nbdist: {session.profile(options.steps, options.trace, memory=options.memory)}")
        elif session.profiles:
            display(session.profiles[-1])
        else:
            now = session.profiling
            print(f"nbdist: no profile yet{'' if now is None else f'; {now.text}'}")

    def panel_command(self, line: str) -> None:
        """Show the panel of the session."""
        parser = arguments.panel_parser()
        options = parser.parse_args(arguments.split_line(line, "panel"))
        if options.help:
            print(parser.format_help())
        else:
            session = current_session() or self.ended or self.require_session()
            session.panel(options.face)

    def doctor_command(self, line: str) -> None:
        """Show problems of this machine or of this training, and what to do about them."""
        parser = arguments.doctor_parser()
        options = parser.parse_args(arguments.split_line(line, "doctor"))
        if options.help:
            print(parser.format_help())
            return
        diagnosis = doctor(run=options.run)
        if options.json:
            print(diagnosis.to_json())
        else:
            display(diagnosis)


CLUSTER_OPTIONS = (
    "on",
    "nodes",
    "gpus_per_node",
    "partition",
    "time",
    "account",
    "interface",
)
"""Options for the cluster of a session; `%nbdist switch` accepts the numeric ones."""

ENGINE_OPTIONS = (
    "backend",
    "nproc",
    "precision",
    "offload",
    "offload_params",
    "replicate_across",
    "activation_checkpointing",
    "compile",
    "accumulate",
    "clip",
)

SWITCH_OPTIONS = frozenset(
    {*ENGINE_OPTIONS, "gpus", "nodes", "gpus_per_node", "deepspeed_config", "fsdp_config"}
    - {"backend"}
)
"""`dest` names of the options that `%nbdist switch` accepts too."""


COMMANDS: dict[str, Callable[[NbDist, str], None]] = {
    "status": NbDist.status_command,
    "pull": NbDist.pull_command,
    "push": NbDist.push_command,
    "wait": NbDist.wait_command,
    "interrupt": NbDist.interrupt_command,
    "restart": NbDist.restart_command,
    "stop": NbDist.stop_command,
    "log": NbDist.log_command,
    "plan": NbDist.plan_command,
    "profile": NbDist.profile_command,
    "switch": NbDist.switch_command,
    "export": NbDist.export_command,
    "save": NbDist.save_command,
    "load": NbDist.load_command,
    "checkpoints": NbDist.checkpoints_command,
    "panel": NbDist.panel_command,
    "doctor": NbDist.doctor_command,
}


def switch_parser() -> MagicArgumentParser:
    """Return the parser of `%nbdist switch`, with the backend options of `%%distribute`."""
    parser = arguments.command_parser(
        "switch", "Switch the prepared models to another backend; the training state is kept."
    )
    parser.add_argument(
        "backend", nargs="?", metavar="NAME", help="ddp, fsdp (= fsdp2), fsdp1, zero1, ..."
    )
    for action in NbDist.distribute.parser._actions:  # noqa: SLF001 - argparse has no public API
        if action.dest in SWITCH_OPTIONS:
            parser._add_action(action)  # noqa: SLF001
    parser.add_argument(
        "--reset-optimizer", action="store_true", help="discard the optimizer state"
    )
    parser.set_defaults(auto=None)
    return parser


MATCHER = completion.make_matcher(
    options=arguments.option_flags(NbDist.distribute.parser),
    valued=arguments.option_flags(NbDist.distribute.parser, valued=True),
    commands=list(COMMANDS),
    of_commands={
        "plan": arguments.option_flags(plan.plan_parser()),
        "switch": arguments.option_flags(switch_parser()),
        "export": arguments.option_flags(arguments.export_parser()),
        "save": arguments.option_flags(arguments.save_parser()),
        "load": arguments.option_flags(arguments.load_parser()),
        "checkpoints": arguments.option_flags(arguments.checkpoints_parser()),
        "profile": arguments.option_flags(arguments.profile_parser()),
        "panel": arguments.option_flags(arguments.panel_parser()),
        "doctor": arguments.option_flags(arguments.doctor_parser()),
        "log": ["--stacks"],
        "restart": ["--wait"],
    },
)

RESTART_OPTIONS = frozenset({"auto"})
"""Options that need new ranks."""

CONFIGURABLE_OPTIONS = ("backend", "nproc", "precision", "offload", "on", "checkpoints")
"""Traits of `%config NbDist` that a new session uses."""


def format_syntax_error(error: SyntaxError, count: int) -> str:
    """Format a syntax error with the notebook's name of the cell."""
    text = "".join(traceback.format_exception_only(error))
    return text.replace(f'File "{cell_source.CELL_FILE_NAME}"', f"Cell In[{count}]").strip("\n")


def session_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the session options that the line sets; others stay unchanged."""
    options = {name: getattr(arguments, name, None) for name in (*ENGINE_OPTIONS, *CLUSTER_OPTIONS)}
    options["devices"] = arguments.gpus
    options["auto"] = arguments.auto or None
    for name in ("deepspeed_config", "fsdp_config"):
        text = getattr(arguments, name)
        named = text and text != "none"
        options[name] = strategies.load_config(text) if named else text
    given = {name: value for name, value in options.items() if value is not None}
    for name in ("clip", "deepspeed_config", "fsdp_config"):
        if given.get(name) == "none":
            given[name] = None
    return given


def parse_distribute_line(line: str) -> argparse.Namespace:
    """Parse the line of a `%%distribute` cell.

    Raises:
        UsageError: an unknown option, or a quote that is not closed.
    """
    try:
        options: argparse.Namespace = parse_argstring(NbDist.distribute, line)
    except ValueError as error:
        msg = f"%%distribute {line}: {error}."
        raise UsageError(msg) from None
    return options


def check_ignored_options(options: argparse.Namespace) -> None:
    """Check `%nbdist profile` for options that another option makes useless.

    Raises:
        OptionError: there is one.
    """
    other = "--calibrate" if options.calibrate else "--show" if options.show else ""
    plain = options.steps is None and options.trace is None and options.memory
    if other and not plain:
        msg = f"{other} records no steps. Leave out --steps, --trace and --no-memory."
        raise OptionError(msg)
    if options.calibrate and options.show:
        msg = "--show and --calibrate exclude each other. Leave one of them out."
        raise OptionError(msg)
    if options.disk is not None and not options.calibrate:
        msg = f"--disk {options.disk} needs --calibrate. Add it, or leave --disk out."
        raise OptionError(msg)


def check_contradictory_options(options: argparse.Namespace) -> None:
    """Check `%%distribute` for options that exclude each other.

    Raises:
        OptionError: there are some.
    """
    if options.auto and options.backend:
        msg = (
            f"--auto chooses the backend itself, but --backend {options.backend} was given."
            " Leave one of them out."
        )
        raise OptionError(msg)
    if not options.profile and (options.steps is not None or options.trace is not None):
        msg = "--steps and --trace need --profile. Add it, or leave them out."
        raise OptionError(msg)
    if options.background and options.pull:
        msg = (
            "--background and --pull exclude each other: values exist only after the cell has"
            " ended. Use %nbdist wait, then %nbdist pull."
        )
        raise OptionError(msg)


def parse_names(names: str) -> list[str]:
    """Parse "a,b" or "a b" into identifiers.

    Raises:
        OptionError: no name, or one that is not an identifier.
    """
    wanted = names.replace(",", " ").split()
    wrong = [name for name in wanted if not name.isidentifier()]
    if wrong or not wanted:
        msg = f"Expected variable names such as a,b, got {names!r}."
        raise OptionError(msg)
    return wanted


def keep_line_numbers(line: str, cell: str) -> str:
    """Replace the magic's line by a comment, so that line numbers match the notebook's cell."""
    return cell if cell.lstrip().startswith("%%") else f"# %%distribute {line}\n{cell}"


def register_magics(ipython: InteractiveShell) -> None:
    """Register the magics and the completer, and print the devices that were found."""
    ipython.register_magics(create_magics(ipython))
    ipython.Completer.custom_matchers.append(MATCHER)
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
    ipython.configurables.remove(magics)
    ipython.Completer.custom_matchers.remove(MATCHER)
    magics.launcher_provider.close()
    if current_session() is not None:
        print("nbdist: the ranks keep running; nbdist.session().stop() ends them")
