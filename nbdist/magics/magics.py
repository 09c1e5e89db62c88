"""`%%distribute` and `%nbdist`: parse a line, call the session, show what it says."""

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

import nbdist
from nbdist import strategies
from nbdist.cluster.local import LocalEngine
from nbdist.errors import CellSyntaxError, NbdistError, OptionError, SessionError
from nbdist.hardware import discovery
from nbdist.magics import arguments, completion, plan
from nbdist.session import cell_source, status
from nbdist.session import checkpoints as session_checkpoints
from nbdist.session.session import Session, current

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from IPython.core.interactiveshell import InteractiveShell


def norm(text: str) -> float | str:
    """Read --clip: a number, or "none"."""
    return "none" if text == "none" else float(text)


def unquoted(text: str) -> str:
    """Take off the quotes that IPython leaves around an option's value (9.18)."""
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text


@magics_class
class NbDist(Magics):
    """Settings of nbdist (`%config NbDist`): the defaults for a new session."""

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
        None, allow_none=True, help='Folder or URL of checkpoints. Default: "checkpoints" here.'
    ).tag(config=True)
    output = Unicode("all", help="Default of --output.").tag(config=True)

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell, **traits: Any) -> None:
        """Start to warm up a launcher."""
        super().__init__(shell, **traits)
        self.observe(self._move_checkpoints, "checkpoints")
        self.observe(self._say_when_it_counts, [one for one in DEFAULTS if one != "checkpoints"])
        self.engine = LocalEngine()
        self.ended: Session | None = None
        """That `%nbdist stop` has ended last; the panel still shows it."""
        self.warm_up()

    def warm_up(self) -> None:
        """Start a launcher in the background for the devices found here."""
        self.engine.warm_up("cuda" if discovery.found().gpus else "cpu")

    @validate("checkpoints")
    def _a_place_for_checkpoints(self, proposal: Bunch) -> str | None:
        given: str | None = proposal.value
        try:
            if given is not None:
                session_checkpoints.checked(given)
        except NbdistError as error:
            raise TraitError(f"The 'checkpoints' trait: {error}") from None
        return given

    def _move_checkpoints(self, change: Bunch) -> None:
        """Let a living session save to where its user says."""
        session = current()
        if session is not None:
            session.save_to(change.new)
            print(f"nbdist: checkpoints of this session go to {session.checkpoints.root} from now")

    def _say_when_it_counts(self, change: Bunch) -> None:
        """Leave a living session as it is."""
        if current() is not None:
            print(
                f"nbdist: {change.name} = {change.new!r} is for the next session; an option of"
                " %%distribute changes this one"
            )

    @no_var_expand
    @magic_arguments("%distribute")
    @argument(
        "-b",
        "--backend",
        metavar="NAME",
        help="ddp, fsdp (= fsdp2), fsdp1, zero1, zero2, zero3; another one switches living models",
    )
    @argument(
        "--auto",
        action="store_true",
        help="choose at accelerator.prepare(), from the real model and machine, and say why",
    )
    @argument(
        "-n",
        "--nproc",
        type=int,
        metavar="N",
        help="number of ranks; default: every visible GPU, without a GPU 2 CPU ranks",
    )
    @argument("--gpus", metavar="LIST", help="these devices, as 0,2")
    @argument(
        "--on",
        metavar="WHERE",
        help="local, ray, ray://HOST:PORT or slurm; default: local, this machine",
    )
    @argument("--nodes", type=int, metavar="N", help="of a cluster, with the same number of ranks")
    @argument(
        "--gpus-per-node",
        type=int,
        metavar="N",
        help="GPUs and ranks of each node; 0 for CPU ranks; default: all",
    )
    @argument("--partition", metavar="NAME", help="of Slurm")
    @argument("--time", metavar="TIME", help="for Slurm's job, as 1:00:00")
    @argument("--account", metavar="NAME", help="for Slurm's job")
    @argument("--interface", metavar="NAME", help="of the network between nodes, as ib0")
    @argument(
        "--precision",
        metavar="NAME",
        help="no, fp16, bf16, fp8; default: bf16 where the hardware has it, else no",
    )
    @argument("--offload", metavar="WHERE", help="of the optimizer state: none, cpu, nvme:PATH")
    @argument(
        "--offload-params", action=argparse.BooleanOptionalAction, help="offload the parameters too"
    )
    @argument(
        "--replicate-across",
        metavar="WHAT",
        help="fsdp on several machines: nodes keeps shards inside each (HSDP); default: none",
    )
    @argument(
        "--activation-checkpointing",
        action=argparse.BooleanOptionalAction,
        help="recompute activations in the backward pass",
    )
    @argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile at prepare()")
    @argument("--accumulate", type=int, metavar="N", help="micro batches in one optimizer step")
    @argument("--clip", type=norm, metavar="NORM", help="largest gradient norm, or none")
    @argument(
        "--deepspeed-config",
        type=unquoted,
        metavar="FILE",
        help="your own DeepSpeed config: a file, JSON or YAML, or '{...}' in the line",
    )
    @argument(
        "--fsdp-config",
        type=unquoted,
        metavar="FILE",
        help="your own FSDP settings with Accelerate's names: a file or '{...}' as above",
    )
    @argument("--ranks", metavar="LIST", help="run on these ranks only, as 0,2-3")
    @argument(
        "--push",
        metavar="NAMES",
        help="variables of the notebook to all ranks before the cell, as a,b",
    )
    @argument(
        "--pull", metavar="NAMES", help="variables of rank 0 to the notebook after the cell, as c,d"
    )
    @argument("--background", action="store_true", help="return at once; %%nbdist wait joins")
    @argument(
        "--output", metavar="WHOSE", help="whose output is shown: all, none or ranks; default: all"
    )
    @argument("--fresh", action="store_true", help="restart the ranks first")
    @argument(
        "--profile",
        action="store_true",
        help="say where the steps of this cell go, and what would make them faster",
    )
    @argument("--steps", type=int, metavar="N", help="with --profile: length of its window")
    @argument("--trace", metavar="DIR", help="with --profile: write a trace of each rank")
    @argument("-h", "--help", action="store_true", help="show this text")
    @cell_magic
    def distribute(self, line: str, cell: str) -> None:
        """Run the cell on every rank; start the ranks if there are none.

        The ranks stay alive between cells and keep their variables. From the start they
        have `accelerator`, `rank`, `local_rank`, `world_size`, `device`, `report`, `send`,
        `save` and `torch`. The last expression is displayed, per rank, once where equal.

        Example:
            %%distribute --backend fsdp --pull final
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            final = train(model, optimizer, loader)
        """
        asked = asked_of(line)
        if asked.help:
            print(self.distribute.__doc__)
            return
        refuse_contradictions(asked)
        # IPython 9.18 counts execution_count up before the cell runs, older ones after
        count = len(self.shell.user_ns["_ih"]) - 1
        code = numbered(line, cell)
        try:
            cell_source.check(code)
        except SyntaxError as error:
            raise CellSyntaxError(place_in_cell(error, count)) from None
        session = self.session_for(asked)
        if asked.push:
            session.push(**self.notebook_values(asked.push))
        session.run(
            code,
            asked.ranks,
            asked.background,
            output=asked.output or self.output,
            count=count,
            profile={"steps": asked.steps, "trace": asked.trace} if asked.profile else False,
        )
        if asked.pull:
            self.bind_pulled(session, asked.pull)

    @no_var_expand
    @line_magic
    def nbdist(self, line: str) -> None:
        """Look at the session and steer it: `%nbdist COMMAND`.

        status          state of the session and of each rank
        pull NAMES      variables of rank 0 into the notebook, as a,b; a model as its state dict
        push NAMES      variables of the notebook to all ranks
        wait            join the cell that runs in the background
        interrupt       stop what runs on all ranks; variables are kept; a third Stop ends the ranks
        restart         new ranks with the same options; variables are lost; after the death of a
                        node on those that are left, with --wait once there is another
        stop            end ranks and launcher
        log [RANK]      last lines of a rank; without RANK, of the launcher
        log --stacks    what every thread of each rank is doing now
        doctor          what is wrong with this machine; --run: with this training; --json
        export DIR      the model as from_pretrained reads it; -h for its options
        switch NAME     another engine for the living models; -h for its options
        save NAME       a checkpoint of the training, written while it goes on; -h for its options
        load NAME       a checkpoint into the prepared models, under any engine and ranks
        checkpoints     those there are, the newest last
        plan [MODEL]    predicted memory and speed under every strategy; -h for its options
        plan --check    predicted beside measured, for the model on the ranks
        panel           memory, curves, ranks and buttons, live; --face auto, widget, html, text
        profile         where the steps of the loop that runs go, and what would make them faster
        """
        command, _, rest = line.strip().partition(" ")
        if not command:
            print(inspect.getdoc(type(self).nbdist))
        elif command in COMMANDS:
            COMMANDS[command](self, rest.strip())
        else:
            msg = f"%nbdist has no command {command!r}; it has {', '.join(COMMANDS)}."
            raise UsageError(msg)

    # -- the session

    def session_for(self, asked: argparse.Namespace) -> Session:
        """The current session with the options of the line, restarted if they differ."""
        changes = session_options(asked)
        session = current()
        if session is not None and asked.on is not None and asked.on != session.on:
            moved = self.new_session(asked, changes)  # what cannot be had there ends nothing here
            print(
                f"nbdist: on {session.on} -> {asked.on}: new ranks; the variables of the old ones"
                " are lost"
            )
            session.stop()
            return moved.start()
        if session is None:
            return self.new_session(asked, changes).start()
        differing = session.differing(**changes)
        if asked.fresh:
            session.restart(**changes)
        elif NEW_RANKS & differing.keys():
            words = ", ".join(f"{name} {now} -> {then}" for name, (now, then) in differing.items())
            print(f"nbdist: {words}: new ranks; the variables of the old ones are lost")
            session.restart(**changes)
        elif differing:
            print(session.switch(**changes))
        return session

    def new_session(self, asked: argparse.Namespace, options: Mapping[str, Any]) -> Session:
        """A session with the options of the line, checked and not started."""
        return Session(**{**self.defaults(asked), **options}, engine=self.engine)

    def defaults(self, asked: argparse.Namespace) -> dict[str, Any]:
        """Settings for a new session; --auto chooses backend and offload itself."""
        of_auto = {"backend", "offload"} if asked.auto else set()
        settings = [name for name in DEFAULTS if name not in of_auto]
        return {name: getattr(self, name) for name in settings}

    def session_now(self) -> Session:
        """The current session, or an error that says how to get one."""
        session = current()
        if session is None:
            msg = "There is no session; a %%distribute cell starts one."
            raise SessionError(msg)
        return session

    def notebook_values(self, names: str) -> dict[str, object]:
        """Variables of the notebook, by name."""
        wanted = name_list(names)
        missing = [name for name in wanted if name not in self.shell.user_ns]
        if missing:
            msg = (
                f"The notebook has no variable {', '.join(missing)}; define it before it is pushed."
            )
            raise OptionError(msg)
        return {name: self.shell.user_ns[name] for name in wanted}

    def bind_pulled(self, session: Session, names: str) -> None:
        """Fetch variables of rank 0 and bind them in the notebook."""
        wanted = name_list(names)
        values = session.pull(*wanted)
        self.shell.push(dict(zip(wanted, values if len(wanted) > 1 else [values], strict=True)))

    # -- commands

    def status_command(self, _: str) -> None:
        """Print state of the session and of each rank."""
        for one in status.lines(self.session_now()):
            print(one)

    def pull_command(self, names: str) -> None:
        """Bind variables of rank 0 in the notebook."""
        self.bind_pulled(self.session_now(), names)

    def push_command(self, names: str) -> None:
        """Bind variables of the notebook on all ranks."""
        self.session_now().push(**self.notebook_values(names))

    def wait_command(self, _: str) -> None:
        """Join the cell that runs in the background."""
        self.session_now().wait()

    def interrupt_command(self, _: str) -> None:
        """Stop the running cell on all ranks."""
        self.session_now().interrupt()

    def restart_command(self, line: str) -> None:
        """Take new ranks with the same options, on the nodes that are left or once all are back."""
        if line not in {"", "--wait"}:
            message = (
                f"%nbdist restart takes no options but --wait and was given {line!r}; %nbdist"
                " switch and %%distribute do."
            )
            raise UsageError(message)
        session = self.session_now()
        before = session.placement.nodes
        session.restart(wait=bool(line))
        if session.placement.nodes < before:
            print(
                f"nbdist: {session.placement.nodes} of {before} nodes are left and have all ranks"
                " now; %nbdist load NAME continues from a checkpoint"
            )

    def stop_command(self, _: str) -> None:
        """End ranks and launcher; a new launcher warms up."""
        self.ended = self.session_now()
        self.ended.stop()
        self.warm_up()
        print("nbdist: ranks and launcher ended")

    def log_command(self, rank: str) -> None:
        """Print the last lines of a rank, or of the launcher, or all stacks."""
        if rank == "--stacks":
            for number, text in self.session_now().stacks().items():
                print(f"-- rank {number} --\n{text}\n")
            return
        if rank and not (rank.isascii() and rank.isdigit()):
            msg = f"%nbdist log takes a rank such as 0, or --stacks, not {rank!r}."
            raise UsageError(msg)
        print(self.session_now().log(int(rank) if rank else None))

    def switch_command(self, line: str) -> None:
        """Give the living models another engine."""
        parser = switch_parser()
        asked = parser.parse_args(arguments.words(line, "switch"))
        changes = session_options(asked)
        if asked.help or not changes:
            print(parser.format_help())
            return
        print(self.session_now().switch(**changes, reset_optimizer=asked.reset_optimizer))

    def export_command(self, line: str) -> None:
        """Write the prepared model as a folder that `from_pretrained` reads."""
        parser = arguments.export()
        asked = parser.parse_args(arguments.words(line, "export"))
        if asked.help or not asked.folder:
            print(parser.format_help())
            return
        print(
            self.session_now().export(
                asked.folder,
                asked.dtype,
                model=asked.model,
                max_shard_size=asked.max_shard_size,
                overwrite=asked.overwrite,
            )
        )

    def save_command(self, line: str) -> None:
        """Write a checkpoint of the training in the background."""
        parser = arguments.save()
        asked = parser.parse_args(arguments.words(line, "save"))
        if asked.help or not asked.name:
            print(parser.format_help())
            return
        save = self.session_now().save(
            asked.name, asked.overwrite, asked.keep, asked.wait, folder=asked.dir
        )
        print(save)
        if not save.done:
            session_checkpoints.show_later(save)

    def load_command(self, line: str) -> None:
        """Load a checkpoint into the prepared models."""
        parser = arguments.load()
        asked = parser.parse_args(arguments.words(line, "load"))
        if asked.help or not asked.name:
            print(parser.format_help())
            return
        print(
            self.session_now().load(
                asked.name, weights_only=asked.weights_only, folder=asked.dir, trust=asked.trust
            )
        )

    def checkpoints_command(self, line: str) -> None:
        """List checkpoints, also without a session."""
        parser = arguments.checkpoints()
        asked = parser.parse_args(arguments.words(line, "checkpoints"))
        session = current()
        if asked.help:
            print(parser.format_help())
        elif asked.dir is not None:
            print(session_checkpoints.Checkpoints(session_checkpoints.checked(asked.dir)))
        elif session is None:
            print(
                session_checkpoints.Checkpoints(
                    session_checkpoints.folder(self.checkpoints or session_checkpoints.FOLDER)
                )
            )
        else:
            print(session.checkpoints)

    def plan_command(self, line: str) -> None:
        """Show what every strategy needs for a model, or how well that was predicted."""
        answer = plan.run(line, self.shell.user_ns, current())
        if isinstance(answer, str):
            print(answer)
        else:
            display(answer)

    def profile_command(self, line: str) -> None:
        """Profile the loop that runs, or the next cell; or show the last profile again."""
        parser = arguments.profile()
        asked = parser.parse_args(arguments.words(line, "profile"))
        if asked.help:
            print(parser.format_help())
            return
        refuse_what_is_ignored(asked)
        session = current()
        if session is None:
            msg = "There is no session to profile; %%distribute --profile starts one."
            raise SessionError(msg)
        if asked.calibrate:
            display(session.calibrate(disk=asked.disk))
        elif not asked.show:
            print(f"nbdist: {session.profile(asked.steps, asked.trace, memory=asked.memory)}")
        elif session.profiles:
            display(session.profiles[-1])
        else:
            now = session.profiling
            print(f"nbdist: there is no profile yet{'' if now is None else f'; {now.text}'}.")

    def panel_command(self, line: str) -> None:
        """Show the session: live where that is possible."""
        parser = arguments.panel()
        asked = parser.parse_args(arguments.words(line, "panel"))
        if asked.help:
            print(parser.format_help())
        else:
            session = current() or self.ended or self.session_now()
            session.panel(asked.face)

    def doctor_command(self, line: str) -> None:
        """Show what is wrong with this machine, or with this run, and what to do."""
        parser = arguments.doctor()
        asked = parser.parse_args(arguments.words(line, "doctor"))
        if asked.help:
            print(parser.format_help())
            return
        found = nbdist.doctor(run=asked.run)
        if asked.json:
            print(found.to_json())
        else:
            display(found)


PLACE_OPTIONS = (
    "on",
    "nodes",
    "gpus_per_node",
    "partition",
    "time",
    "account",
    "interface",
)
"""Where a session is; `%nbdist switch` takes the numbers of them."""

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

SWITCHED = frozenset(
    {*ENGINE_OPTIONS, "gpus", "nodes", "gpus_per_node", "deepspeed_config", "fsdp_config"}
    - {"backend"}
)
"""Destinations of options that `%nbdist switch` takes too."""


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
    """The options of `%nbdist switch`: those of `%%distribute` that name an engine."""
    made = arguments.command(
        "switch", "Give the living models another engine; nothing of the training is lost."
    )
    made.add_argument(
        "backend", nargs="?", metavar="NAME", help="ddp, fsdp (= fsdp2), fsdp1, zero1, ..."
    )
    for action in NbDist.distribute.parser._actions:  # noqa: SLF001 - argparse has no other way
        if action.dest in SWITCHED:
            made._add_action(action)  # noqa: SLF001
    made.add_argument(
        "--reset-optimizer", action="store_true", help="leave the state of optimizers behind"
    )
    made.set_defaults(auto=None)
    return made


MATCHER = completion.matcher(
    options=arguments.flags(NbDist.distribute.parser),
    valued=arguments.flags(NbDist.distribute.parser, valued=True),
    commands=list(COMMANDS),
    of_commands={
        "plan": arguments.flags(plan.parser()),
        "switch": arguments.flags(switch_parser()),
        "export": arguments.flags(arguments.export()),
        "save": arguments.flags(arguments.save()),
        "load": arguments.flags(arguments.load()),
        "checkpoints": arguments.flags(arguments.checkpoints()),
        "profile": arguments.flags(arguments.profile()),
        "panel": arguments.flags(arguments.panel()),
        "doctor": arguments.flags(arguments.doctor()),
        "log": ["--stacks"],
        "restart": ["--wait"],
    },
)

NEW_RANKS = frozenset({"auto"})
"""Options that living ranks cannot take."""

DEFAULTS = ("backend", "nproc", "precision", "offload", "on", "checkpoints")
"""Settings of `%config NbDist` that a new session takes."""


def place_in_cell(error: SyntaxError, count: int) -> str:
    """Say where in the notebook's cell a syntax error is."""
    text = "".join(traceback.format_exception_only(error))
    return text.replace(f'File "{cell_source.CELL}"', f"Cell In[{count}]").strip("\n")


def session_options(asked: argparse.Namespace) -> dict[str, Any]:
    """What the line says of the session; what it leaves out stays as it runs."""
    options = {name: getattr(asked, name, None) for name in (*ENGINE_OPTIONS, *PLACE_OPTIONS)}
    options["devices"] = asked.gpus
    options["auto"] = asked.auto or None
    for name in ("deepspeed_config", "fsdp_config"):
        text = getattr(asked, name)
        named = text and text != "none"
        options[name] = strategies.load_config(text) if named else text
    given = {name: value for name, value in options.items() if value is not None}
    for name in ("clip", "deepspeed_config", "fsdp_config"):
        if given.get(name) == "none":
            given[name] = None
    return given


def asked_of(line: str) -> argparse.Namespace:
    """Read the line of a `%%distribute` cell.

    Raises:
        UsageError: an option that there is not, or a quote that is left open.
    """
    try:
        asked: argparse.Namespace = parse_argstring(NbDist.distribute, line)
    except ValueError as error:
        msg = f"%%distribute {line}: {error}."
        raise UsageError(msg) from None
    return asked


def refuse_what_is_ignored(asked: argparse.Namespace) -> None:
    """Raise OptionError for options of `%nbdist profile` that another one makes useless."""
    other = "--calibrate" if asked.calibrate else "--show" if asked.show else ""
    plain = asked.steps is None and asked.trace is None and asked.memory
    if other and not plain:
        msg = f"{other} records no steps: leave out --steps, --trace and --no-memory."
        raise OptionError(msg)
    if asked.calibrate and asked.show:
        msg = "--show repeats a profile and --calibrate measures anew; leave one of the two out."
        raise OptionError(msg)
    if asked.disk is not None and not asked.calibrate:
        msg = f"--disk {asked.disk} is measured with --calibrate; add it, or leave --disk out."
        raise OptionError(msg)


def refuse_contradictions(asked: argparse.Namespace) -> None:
    """Raise OptionError for options that cannot hold together."""
    if asked.auto and asked.backend:
        msg = (
            f"--auto chooses the backend and --backend {asked.backend} names one;"
            " leave one of the two out."
        )
        raise OptionError(msg)
    if not asked.profile and (asked.steps is not None or asked.trace is not None):
        msg = "--steps and --trace are of a profile; add --profile, or leave them out."
        raise OptionError(msg)
    if asked.background and asked.pull:
        msg = (
            "--background with --pull: there is nothing to pull until the cell has ended;"
            " use %nbdist wait, then %nbdist pull."
        )
        raise OptionError(msg)


def name_list(names: str) -> list[str]:
    """Split "a,b" or "a b" into identifiers.

    Raises:
        OptionError: no name, or one that is not an identifier.
    """
    wanted = names.replace(",", " ").split()
    wrong = [name for name in wanted if not name.isidentifier()]
    if wrong or not wanted:
        msg = f"{names!r} is not a list of variables; give names as a,b."
        raise OptionError(msg)
    return wanted


def numbered(line: str, cell: str) -> str:
    """Put a comment in the place of the magic's line, so that line numbers are the cell's."""
    return cell if cell.lstrip().startswith("%%") else f"# %%distribute {line}\n{cell}"


def load(ipython: InteractiveShell) -> None:
    """Register the magics and the completer, and say what was found."""
    ipython.register_magics(configured(ipython))
    ipython.Completer.custom_matchers.append(MATCHER)
    found = discovery.found()
    print(
        f"nbdist {nbdist.__version__} \N{MIDDLE DOT} {found.describe()} \N{MIDDLE DOT}"
        " %%distribute --auto to begin, %nbdist for help"
    )
    for warning in found.warnings:
        print(f"nbdist: {warning}")


def configured(ipython: InteractiveShell) -> NbDist:
    """Make the magics, dropping a configured value that is not allowed.

    IPython keeps a refused `%config NbDist.x = ...` in its config (9.18); without this the
    next load would fail.
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
                f"nbdist: NbDist.{name} = {section.pop(name)!r} is ignored: {error}",
                file=sys.stderr,
            )


def unload(ipython: InteractiveShell) -> None:
    """Remove the magics and the completer; keep ranks that run."""
    manager = ipython.magics_manager
    magics = manager.registry.pop(NbDist.__name__)
    manager.magics["cell"].pop("distribute")
    manager.magics["line"].pop("nbdist")
    ipython.configurables.remove(magics)
    ipython.Completer.custom_matchers.remove(MATCHER)
    magics.engine.close()
    if current() is not None:
        print("nbdist: the ranks are kept; nbdist.session().stop() ends them")
