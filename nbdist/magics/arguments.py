"""Argument parsers and tab completion of `%%distribute` and of the commands of `%nbdist`."""

from __future__ import annotations

import argparse
import re
import shlex
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from IPython.core import completer
from IPython.core.error import UsageError
from IPython.core.magic_arguments import ArgDecorator, MagicArgumentParser

from nbdist import strategies
from nbdist.errors import OptionError
from nbdist.operations import model_files
from nbdist.output.sink import PANEL_FORMATS
from nbdist.session.config import expand_config_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from IPython.core.completer import CompletionContext, MatcherAPIv2, SimpleMatcherResult

_COMMENT = re.compile(r"""((?:'[^']*'|"[^"]*"|[^'"])*?)(?:^|\s)#(?:\s.*)?""")


class SessionArgumentsDecorator(ArgDecorator):
    """Decorates a magic whose line takes every option of a session."""

    def add_to_parser(self, parser: MagicArgumentParser, group: object) -> None:  # noqa: ARG002
        """Add the options; called by `magic_arguments`."""
        for name, argument in strategies.ARGUMENTS.items():
            add_session_argument(parser, name, argument)


def add_session_argument(
    parser: MagicArgumentParser, name: str, argument: strategies.Argument
) -> None:
    """Add one option of a session; it is None if the line does not have it."""
    flags = argument.flags(name)
    if argument.metavar:
        parser.add_argument(
            *flags, type=argument.type, metavar=argument.metavar, help=argument.help, dest=name
        )
    else:
        # An option that a switch can turn on can also be turned off again.
        action = argparse.BooleanOptionalAction if argument.can_switch else "store_true"
        parser.add_argument(*flags, action=action, default=None, help=argument.help, dest=name)


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


def command_parser(name: str, description: str) -> MagicArgumentParser:
    """Return a parser for one command, with only its help option."""
    # IPython puts the "%" before the name in the usage.
    parser = MagicArgumentParser(f"nbdist {name}", description=description, add_help=False)
    parser.add_argument("-h", "--help", action="store_true", help="show this text")
    return parser


def switch_parser() -> MagicArgumentParser:
    """Return the parser of `%nbdist switch`, with the options that can change in a session."""
    parser = command_parser(
        "switch", "Switch the prepared models to another backend; the training state is kept."
    )
    parser.add_argument(
        "backend", nargs="?", metavar="NAME", help="ddp, fsdp (= fsdp2), fsdp1, zero1, ..."
    )
    for name, argument in strategies.ARGUMENTS.items():
        if argument.can_switch and name != "backend":
            add_session_argument(parser, name, argument)
    parser.add_argument(
        "--reset-optimizer", action="store_true", help="discard the optimizer state"
    )
    return parser


def export_parser() -> MagicArgumentParser:
    """Return the parser of `%nbdist export`."""
    parser = command_parser(
        "export", "Write the prepared model as a from_pretrained folder, under any backend."
    )
    parser.add_argument("folder", nargs="?", metavar="DIR", help="a new or empty folder")
    parser.add_argument("--dtype", metavar="NAME", help="bf16, fp16 or fp32; default: as trained")
    parser.add_argument(
        "--max-shard-size",
        default=model_files.MAX_SHARD_SIZE,
        metavar="SIZE",
        help="largest size of one file, such as 500MB; default: 5GB",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the model in DIR; other files in it stay"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="variable of the model, if several are prepared"
    )
    return parser


def script_parser() -> MagicArgumentParser:
    """Return the parser of `%nbdist script`."""
    parser = command_parser(
        "script", "Write the cells that ran as a script, with its launcher config and a Slurm job."
    )
    parser.add_argument("folder", nargs="?", metavar="DIR", help="a new or empty folder")
    parser.add_argument(
        "--cells", metavar="LIST", help="numbers of the cells, such as 3,5-7; default: all that ran"
    )
    parser.add_argument("--tag", metavar="NAME", help="only cells with this tag")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace files in DIR; other files in it stay"
    )
    parser.add_argument(
        "--with-nbdist",
        action="store_true",
        help="use nbdist's engines and checkpoints in the script; default: if a cell imports it",
    )
    return parser


def save_parser() -> MagicArgumentParser:
    """Return the parser of `%nbdist save`."""
    parser = command_parser("save", "Write a checkpoint in the background; the next cell can run.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="letters, digits, . - _")
    parser.add_argument("--overwrite", action="store_true", help="replace the checkpoint NAME")
    parser.add_argument(
        "--keep", type=int, metavar="N", help="keep only the newest N, once this one is complete"
    )
    parser.add_argument("--wait", action="store_true", help="return when the checkpoint is on disk")
    parser.add_argument(
        "--full", action="store_true", help="store the frozen parameters of a base model too"
    )
    _add_folder(parser)
    return parser


def load_parser() -> MagicArgumentParser:
    """Return the parser of `%nbdist load`."""
    parser = command_parser("load", "Load a checkpoint into the prepared models.")
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="name of a checkpoint, or path of a folder"
    )
    parser.add_argument(
        "--weights-only",
        action="store_true",
        help="do not load optimizer, scheduler and data loaders",
    )
    parser.add_argument(
        "--reset-optimizer", action="store_true", help="start with new optimizer state"
    )
    parser.add_argument(
        "--trust", action="store_true", help="allow code in files that nbdist did not write to run"
    )
    _add_folder(parser)
    return parser


def status_parser() -> MagicArgumentParser:
    """Return the parser of `%nbdist status`."""
    parser = command_parser("status", "Show the state of the session and of each rank.")
    add_json(parser)
    return parser


def checkpoints_parser() -> MagicArgumentParser:
    """Return the parser of `%nbdist checkpoints`."""
    parser = command_parser("checkpoints", "List the complete checkpoints.")
    _add_folder(parser)
    add_json(parser)
    return parser


def profile_parser() -> MagicArgumentParser:
    """Return the parser of `%nbdist profile`."""
    parser = command_parser(
        "profile",
        "Profile the running background cell, or else the next cell: where the time of a step"
        " goes, what would make it faster, and what the last advice gained.",
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help="optimizer steps to record; default: until stable"
    )
    parser.add_argument("--trace", metavar="DIR", help="write a Perfetto trace of each rank")
    parser.add_argument(
        "--memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="break down the peak memory",
    )
    parser.add_argument("--show", action="store_true", help="show the last profile again")
    add_json(parser, "print the last profile as JSON")
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="instead, measure this machine's bandwidths for %%nbdist plan; takes seconds",
    )
    parser.add_argument("--disk", metavar="PATH", help="with --calibrate: also measure this disk")
    return parser


def panel_parser() -> MagicArgumentParser:
    """Return the parser of `%nbdist panel`."""
    parser = command_parser(
        "panel", "Show predicted and live memory, strategies, curves, ranks and checkpoints."
    )
    parser.add_argument(
        "--face",
        choices=PANEL_FORMATS,
        default="auto",
        help="widget: live; html: a snapshot without scripts; text; default: the best available",
    )
    return parser


def doctor_parser() -> MagicArgumentParser:
    """Return the parser of `%nbdist doctor`."""
    parser = command_parser("doctor", "Check this machine for problems and suggest fixes.")
    parser.add_argument(
        "--run", action="store_true", help="check the training: profile, options, last errors"
    )
    parser.add_argument(
        "--front-end", action="store_true", help="check this front end: widgets, interrupts, input"
    )
    add_json(parser)
    return parser


def add_json(parser: MagicArgumentParser, text: str = "print JSON") -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help=text)


def _add_folder(parser: MagicArgumentParser) -> None:
    parser.add_argument(
        "--dir", metavar="ROOT", help="folder or URL of all checkpoints; default: checkpoints"
    )


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


def make_matcher(
    *,
    options: Sequence[str],
    valued: Sequence[str],
    commands: Sequence[str],
    of_commands: Mapping[str, Sequence[str]],
) -> MatcherAPIv2 | None:
    """Return an IPython matcher for the lines of the two magics; it ignores all other lines.

    None before IPython 8.6, which has no matchers.

    Args:
        options: options of `%%distribute`.
        valued: those of them that take a value.
        commands: commands of `%nbdist`.
        of_commands: options of each command that has any.
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
        if magic == "%%distribute" and context.cursor_line == first:
            before = words[-2] if words[1:] else ""
            choices = (
                OPTION_VALUES.get(before, () if before in valued else options) if words else ()
            )
        elif magic == "%nbdist" and words and not words[1:]:
            choices = commands
        elif magic == "%nbdist" and words[1:] and words[0] in of_commands:
            choices = OPTION_VALUES.get(words[-2], of_commands[words[0]])
        return {
            "completions": [
                completer.SimpleCompletion(text=word)
                for word in choices
                if word.startswith(fragment)
            ],
            "matched_fragment": fragment,
            "suppress": bool(choices),
            "ordered": True,
        }

    matching: MatcherAPIv2 = complete
    return matching
