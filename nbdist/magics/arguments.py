"""Argument parsers and tab completion of `%%distribute` and of the commands of `%nbdist`."""

from __future__ import annotations

import argparse
import re
import shlex
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from IPython.core import completer
from IPython.core.error import UsageError
from IPython.core.magic_arguments import ArgDecorator, MagicArgumentParser, argument

from nbdist import strategies
from nbdist.errors import OptionError
from nbdist.operations import model_files
from nbdist.output.sink import PANEL_FORMATS
from nbdist.session.config import expand_config_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from IPython.core.completer import CompletionContext, MatcherAPIv2, SimpleMatcherResult

_COMMENT = re.compile(r"""((?:'[^']*'|"[^"]*"|[^'"])*?)(?:^|\s)#(?:\s.*)?""")


class SessionArguments(ArgDecorator):
    """Adds options of a session to the parser of a magic or a command."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = names

    def add_to_parser(self, parser: MagicArgumentParser, group: object) -> None:  # noqa: ARG002
        """Add the options; called by `magic_arguments` and `command_parser`."""
        for name in self._names:
            add_session_argument(parser, name, strategies.ARGUMENTS[name])


def add_session_argument(
    parser: MagicArgumentParser, name: str, option: strategies.Argument
) -> None:
    """Add one option of a session; it is None if the line does not have it."""
    flags = option.flags(name)
    if option.metavar:
        parser.add_argument(
            *flags, type=option.type, metavar=option.metavar, help=option.help, dest=name
        )
    else:
        # An option that a switch can turn on can also be turned off again.
        action = argparse.BooleanOptionalAction if option.can_switch else "store_true"
        parser.add_argument(*flags, action=action, default=None, help=option.help, dest=name)


def session_options(line: argparse.Namespace) -> dict[str, Any]:
    """Return the session options that the line sets; others stay unchanged.

    Raises:
        OptionError: a config file that cannot be read, or that contradicts another option.
    """
    return expand_config_file(
        {
            name: argument.read(value)
            for name, argument in strategies.ARGUMENTS.items()
            if (value := getattr(line, name, None)) is not None
        }
    )


def command_parser(name: str, description: str, *arguments: ArgDecorator) -> MagicArgumentParser:
    """Return a parser for one command, with its arguments and a help option."""
    # IPython puts the "%" before the name in the usage.
    parser = MagicArgumentParser(f"nbdist {name}", description=description, add_help=False)
    parser.add_argument("-h", "--help", action="store_true", help="show this text")
    for each in arguments:
        each.add_to_parser(parser, None)
    return parser


def help_text(parser: MagicArgumentParser) -> str:
    """Return the help of a command, without the "::" that IPython puts first."""
    return parser.format_help().removeprefix("::\n\n")


def _flag(name: str, text: str, **more: Any) -> ArgDecorator:
    """Return an option without a value."""
    return argument(name, action="store_true", help=text, **more)


def _option(name: str, metavar: str, text: str, **more: Any) -> ArgDecorator:
    """Return an option with a value."""
    return argument(name, metavar=metavar, help=text, **more)


def _word(name: str, metavar: str, text: str) -> ArgDecorator:
    """Return an argument without a name."""
    return argument(name, nargs="?", metavar=metavar, help=text)


_JSON = _flag("--json", "print JSON")
_FOLDER = _option("--dir", "ROOT", "folder or URL of all checkpoints; default: checkpoints")
_PARSERS = (
    command_parser("status", "Show the state of the session and of each rank.", _JSON),
    command_parser("wait", "Wait until the background cell has ended, and show its output."),
    command_parser("replay", "Show the output of the last cell again."),
    command_parser("interrupt", "Interrupt the running cell on all ranks."),
    command_parser("stop", "End the ranks and the launcher."),
    command_parser(
        "switch",
        "Switch the prepared models to another backend; the training state is kept.",
        _word("backend", "NAME", "ddp, fsdp (= fsdp2), fsdp1, zero1, ..."),
        SessionArguments(
            name
            for name, option in strategies.ARGUMENTS.items()
            if option.can_switch and name != "backend"
        ),
        _flag("--reset-optimizer", "discard the optimizer state"),
    ),
    command_parser(
        "export",
        "Write the prepared model as a from_pretrained folder, under any backend.",
        _word("folder", "DIR", "a new or empty folder"),
        _option("--dtype", "NAME", "bf16, fp16 or fp32; default: as trained"),
        _option(
            "--max-shard-size",
            "SIZE",
            "largest size of one file, such as 500MB; default: 5GB",
            default=model_files.MAX_SHARD_SIZE,
        ),
        _flag("--overwrite", "replace the model in DIR; other files in it stay"),
        _option("--model", "NAME", "variable of the model, if several are prepared"),
    ),
    command_parser(
        "script",
        "Write the cells that ran as a script, with its launcher config and a Slurm job.",
        _word("folder", "DIR", "a new or empty folder"),
        _option("--cells", "LIST", "numbers of the cells, such as 3,5-7; default: all that ran"),
        _option("--tag", "NAME", "only cells with this tag"),
        _flag("--overwrite", "replace files in DIR; other files in it stay"),
        _flag(
            "--with-nbdist",
            "use nbdist's engines and checkpoints in the script; default: if a cell imports it",
        ),
    ),
    command_parser(
        "save",
        "Write a checkpoint in the background; the next cell can run.",
        _word("name", "NAME", "letters, digits, . - _"),
        _flag("--overwrite", "replace the checkpoint NAME"),
        _option("--keep", "N", "keep only the newest N, once this one is complete", type=int),
        _flag("--wait", "return when the checkpoint is on disk"),
        _flag("--full", "store the frozen parameters of a base model too"),
        _FOLDER,
    ),
    command_parser(
        "load",
        "Load a checkpoint into the prepared models.",
        _word("name", "NAME", "name of a checkpoint, or path of a folder"),
        _flag("--weights-only", "do not load optimizer, scheduler and data loaders"),
        _flag("--reset-optimizer", "start with new optimizer state"),
        _flag("--trust", "allow code in files that nbdist did not write to run"),
        _FOLDER,
    ),
    command_parser("resume", "Load the checkpoint of a run that a signal or a deadline ended."),
    command_parser("checkpoints", "List the complete checkpoints.", _FOLDER, _JSON),
    command_parser(
        "plan",
        "Predict memory and speed of a model under every strategy.",
        _word(
            "model",
            "MODEL",
            "a size such as 7b, a folder or config.json, or a variable of the notebook or the"
            " ranks; default: the prepared model",
        ),
        _flag("--check", "compare prediction and measurement of the prepared model"),
        _option(
            "--devices",
            "WORDS",
            "such as 8xH100-80GB,nvlink or 2x(8xH100,nvlink),400Gb/s; any: which machine is"
            " enough; default: this machine's",
        ),
        _option("--max-nodes", "N", "with --devices any: at most N nodes; default 4", type=int),
        _option("--only", "LIST", "with --devices any: only these GPUs, such as T4,L4,A10"),
        argument(
            "-n",
            "--nproc",
            type=int,
            metavar="N",
            dest="world_size",
            help="number of ranks; default: one per device",
        ),
        _option("--batch-size", "LIST", "micro-batch size per rank, or several: 1,2,4"),
        _option("--seq-len", "N", "tokens per sample", type=int),
        argument("--precision", choices=strategies.PRECISIONS, help="default: bf16"),
        _option("--optimizer", "NAME", "adamw, adamw_8bit, adafactor, muon, ..."),
        _option("--lora", "RANK", "train PEFT adapters of this rank only", type=int),
        _option(
            "--target-modules",
            "LIST",
            "linear layers with an adapter, such as q_proj,v_proj or all-linear",
        ),
        _option("--quantize", "METHOD", "frozen weights: nf4, nf4-bf16, int8; needs --lora"),
        _option("--offload", "WHERE", "only plans with this offload: none, cpu, nvme"),
        _flag("--offload-params", "only plans with it", default=None),
        _flag("--activation-checkpointing", "only plans with it", default=None),
        _option("--replicate-across", "WHAT", "only plans with this: none, nodes"),
        _option("--accumulate", "N", "micro-batches per optimizer step", type=int),
        _JSON,
        argument(
            "--drop-outputs",
            action="store_false",
            default=None,
            dest="keep_outputs",
            help="the loop keeps only the loss of a step, not the model's outputs",
        ),
    ),
    command_parser(
        "profile",
        "Profile the running background cell, or else the next cell: where the time of a step"
        " goes, what would make it faster, and what the last advice gained.",
        _option("--steps", "N", "optimizer steps to record; default: until stable", type=int),
        _option("--trace", "DIR", "write a Perfetto trace of each rank"),
        argument(
            "--memory",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="break down the peak memory",
        ),
        _flag("--show", "show the last profile again"),
        _flag("--json", "print the last profile as JSON"),
        _flag(
            "--calibrate",
            "instead, measure this machine's bandwidths for %%nbdist plan; takes seconds",
        ),
        _option("--disk", "PATH", "with --calibrate: also measure this disk"),
    ),
    command_parser(
        "panel",
        "Show predicted and live memory, strategies, curves, ranks and checkpoints.",
        argument(
            "--face",
            choices=PANEL_FORMATS,
            default="auto",
            help="widget: live; html: a snapshot without scripts; text; default: the best"
            " available",
        ),
    ),
    command_parser(
        "doctor",
        "Check this machine for problems and suggest fixes.",
        _flag("--run", "check the training: profile, options, last errors"),
        _flag("--front-end", "check this front end: widgets, interrupts, input"),
        _JSON,
    ),
)
PARSERS = {parser.prog.removeprefix("nbdist "): parser for parser in _PARSERS}
"""Parsers of the commands of `%nbdist`, by name; the other commands get the text of their line."""


def without_comment(line: str) -> str:
    """Return the line of a magic up to a comment, which begins with "# " outside of quotes."""
    match = _COMMENT.fullmatch(line)
    return match[1] if match else line


def split_line(line: str, command: str) -> list[str]:
    """Split a line as a shell does.

    Raises:
        UsageError: a quote is not closed.
    """
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"%nbdist {command} {line}: {error}.") from None


def parse_words(parser: MagicArgumentParser, words: list[str], magic: str) -> argparse.Namespace:
    """Parse the words of a line.

    Raises:
        UsageError: the magic has no such option, which is probably misspelled.
    """
    options, unknown = parser.parse_known_args(words)
    if not unknown:
        return options
    if not unknown[0].startswith("-"):
        raise UsageError(f"{magic} does not take {' '.join(unknown)!r}.")
    flag = unknown[0].partition("=")[0]
    close_flags = get_close_matches(flag, option_flags(parser), n=1)
    listing = f"{magic}?" if magic.startswith("%%") else f"{magic} -h"
    advice = f"Did you mean {close_flags[0]}?" if close_flags else f"{listing} lists its options."
    raise UsageError(f"{magic} has no option {flag}. {advice}")


def option_flags(parser: argparse.ArgumentParser, *, valued: bool = False) -> list[str]:
    """Return the long option names of a parser.

    With `valued`, return all names, short ones included, of the options that take a value.
    """
    actions = parser._actions  # noqa: SLF001 - argparse has no public API
    if valued:
        return [
            flag for action in actions if action.nargs is None for flag in action.option_strings
        ]
    return [flag for action in actions for flag in action.option_strings if flag.startswith("--")]


def check_contradictory_options(options: argparse.Namespace) -> None:
    """Check `%%distribute` for options that exclude each other.

    Raises:
        OptionError: there are some.
    """
    if options.auto and options.backend:
        raise OptionError(
            f"--auto chooses the backend itself, but --backend {options.backend} was given."
            " Leave one of them out."
        )
    if not options.profile and (options.steps is not None or options.trace is not None):
        raise OptionError("--steps and --trace need --profile. Add it, or leave them out.")
    if options.background and options.pull:
        raise OptionError(
            "--background and --pull exclude each other: values exist only after the cell has"
            " ended. Use %nbdist wait, then %nbdist pull."
        )


def check_ignored_options(options: argparse.Namespace) -> None:
    """Check `%nbdist profile` for options that another option makes useless.

    Raises:
        OptionError: there is one.
    """
    chosen = [name for name in ("calibrate", "show", "json") if getattr(options, name)]
    other = f"--{chosen[0]}" if chosen else ""
    plain = options.steps is None and options.trace is None and options.memory
    if other and not plain:
        raise OptionError(f"{other} records no steps. Leave out --steps, --trace and --no-memory.")
    if options.calibrate and len(chosen) > 1:
        message = f"--{chosen[1]} and --calibrate exclude each other. Leave one of them out."
        raise OptionError(message)
    if options.disk is not None and not options.calibrate:
        raise OptionError(f"--disk {options.disk} needs --calibrate. Add it, or leave --disk out.")


def parse_names(names: str) -> list[str]:
    """Parse "a,b" or "a b" into identifiers.

    Raises:
        OptionError: no name, or one that is not an identifier.
    """
    parsed = names.replace(",", " ").split()
    wrong = [name for name in parsed if not name.isidentifier()]
    if wrong or not parsed:
        raise OptionError(f"Expected variable names such as a,b, got {names!r}.")
    return parsed


# -- tab completion


OPTION_VALUES: dict[str, tuple[str, ...]] = {
    "--output": ("all", "0", "none"),
    **{
        flag: argument.values
        for name, argument in strategies.ARGUMENTS.items()
        for flag in argument.flags(name)
        if argument.values
    },
}
"""Options with a fixed list of values."""
DISTRIBUTE_COMMENT = re.compile(r"^#\|[ \t]*distribute\b")
"""Beginning of a cell that is distributed like one that begins with `%%distribute`."""
_DISTRIBUTED = re.compile(rf"[ \t]*%%distribute\b|{DISTRIBUTE_COMMENT.pattern}")


def make_matcher(
    *,
    options: Sequence[str],
    valued: Sequence[str],
    commands: Sequence[str],
    of_command: Callable[[str], Sequence[str]],
    on_ranks: Callable[[str, int], tuple[list[str], int]],
) -> MatcherAPIv2 | None:
    """Return an IPython matcher for `%%distribute` cells and lines of `%nbdist`.

    None before IPython 8.6, which has no matchers.

    Args:
        options: options of `%%distribute`.
        valued: those of them that take a value.
        commands: commands of `%nbdist`.
        of_command: returns the words that can follow a command: its options, and names.
        on_ranks: completes the code of a `%%distribute` cell, as `Session.complete`.
    """
    if not hasattr(completer, "context_matcher"):
        return None

    @completer.context_matcher()
    def complete(context: CompletionContext) -> SimpleMatcherResult:
        lines = context.full_text.split("\n")
        first = next((i for i, text in enumerate(lines) if text.strip()), 0)
        line = lines[context.cursor_line][: context.cursor_position]
        magic, *words = DISTRIBUTE_COMMENT.sub("%%distribute", line.lstrip()).split(" ")
        fragment = words[-1] if words else ""
        choices: Sequence[str] = ()
        if context.cursor_line > first and _DISTRIBUTED.match(lines[first]):
            code = "\n".join(lines[first + 1 :])
            cursor = len("\n".join([*lines[first + 1 : context.cursor_line], line]))
            choices, start = on_ranks(code, cursor)
            fragment = code[start:cursor]
        elif magic == "%%distribute" and context.cursor_line == first:
            before = words[-2] if words[1:] else ""
            choices = (
                OPTION_VALUES.get(before, () if before in valued else options) if words else ()
            )
        elif magic == "%nbdist" and words and not words[1:]:
            choices = commands
        elif magic == "%nbdist" and words[1:]:
            choices = OPTION_VALUES.get(words[-2]) or of_command(words[0])
        completions = [
            completer.SimpleCompletion(text=word) for word in choices if word.startswith(fragment)
        ]
        return {
            "completions": completions,
            "matched_fragment": fragment,
            "suppress": bool(completions),  # otherwise IPython completes a path
            "ordered": True,
        }

    matching: MatcherAPIv2 = complete
    return matching
