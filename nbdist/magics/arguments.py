"""Options of the commands of `%nbdist`, one parser each; pure but for IPython's argparse."""

from __future__ import annotations

import argparse
import shlex

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser

from nbdist.operations import export as operations_export
from nbdist.output.sink import FACES


def command(name: str, description: str) -> MagicArgumentParser:
    """A parser of one command, which has only its help yet."""
    made = MagicArgumentParser(f"%nbdist {name}", description=description, add_help=False)
    made.add_argument("-h", "--help", action="store_true", help="show this text")
    return made


def export() -> MagicArgumentParser:
    """The options of `%nbdist export`."""
    made = command(
        "export", "Write the prepared model as from_pretrained reads it, whatever the engine."
    )
    made.add_argument("folder", nargs="?", metavar="DIR", help="to be made, or empty")
    made.add_argument("--dtype", metavar="NAME", help="bf16, fp16 or fp32; default: as trained")
    made.add_argument(
        "--max-shard-size",
        default=operations_export.MAX_SHARD_SIZE,
        metavar="SIZE",
        help="of a file, as 500MB; default: 5GB",
    )
    made.add_argument(
        "--overwrite", action="store_true", help="replace the model in DIR; other files there stay"
    )
    made.add_argument("--model", metavar="NAME", help="the variable, where several are prepared")
    return made


def save() -> MagicArgumentParser:
    """The options of `%nbdist save`."""
    made = command("save", "Write a checkpoint of the training; the next cell runs meanwhile.")
    made.add_argument("name", nargs="?", metavar="NAME", help="letters, digits, . - _")
    made.add_argument("--overwrite", action="store_true", help="replace the checkpoint NAME")
    made.add_argument(
        "--keep", type=int, metavar="N", help="remove the oldest beyond N, once this one is whole"
    )
    made.add_argument("--wait", action="store_true", help="return once it is on the disk")
    _add_folder(made)
    return made


def load() -> MagicArgumentParser:
    """The options of `%nbdist load`."""
    made = command("load", "Load a checkpoint into the models that are prepared now.")
    made.add_argument(
        "name", nargs="?", metavar="NAME", help="of a checkpoint, or the path of a folder"
    )
    made.add_argument(
        "--weights-only", action="store_true", help="leave optimizer, schedule and loaders alone"
    )
    made.add_argument(
        "--trust", action="store_true", help="run code in files that something else wrote"
    )
    _add_folder(made)
    return made


def checkpoints() -> MagicArgumentParser:
    """The options of `%nbdist checkpoints`."""
    made = command("checkpoints", "List whole checkpoints.")
    _add_folder(made)
    return made


def profile() -> MagicArgumentParser:
    """The options of `%nbdist profile`."""
    made = command(
        "profile",
        "Say where the steps of the loop go that runs in the background, or of the"
        " next cell; what would make them faster; and what the last advice has gained.",
    )
    made.add_argument(
        "--steps", type=int, metavar="N", help="of the window; default: until it is stable"
    )
    made.add_argument("--trace", metavar="DIR", help="write a trace of each rank, for Perfetto")
    made.add_argument(
        "--memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="tell the peak of memory apart",
    )
    made.add_argument("--show", action="store_true", help="show the last profile again")
    made.add_argument(
        "--calibrate",
        action="store_true",
        help="instead measure this machine's bandwidths for %%nbdist plan; a few seconds",
    )
    made.add_argument("--disk", metavar="PATH", help="with --calibrate: of the disk for NVMe too")
    return made


def panel() -> MagicArgumentParser:
    """The options of `%nbdist panel`."""
    made = command(
        "panel", "Predicted memory beside live devices, strategies, curves, ranks, checkpoints."
    )
    made.add_argument(
        "--face",
        choices=FACES,
        default="auto",
        help="widget: live; html: as it is now, without script; text; default: the best possible",
    )
    return made


def doctor() -> MagicArgumentParser:
    """The options of `%nbdist doctor`."""
    made = command("doctor", "Look at this machine: what is wrong or disturbs, and what to do.")
    made.add_argument(
        "--run", action="store_true", help="the training: its profile, options and last errors"
    )
    made.add_argument("--json", action="store_true", help="the same as JSON")
    return made


def _add_folder(parser: MagicArgumentParser) -> None:
    """The option of all three that are about checkpoints."""
    parser.add_argument(
        "--dir", metavar="ROOT", help="folder or URL of all checkpoints; default: checkpoints"
    )


def words(line: str, command: str) -> list[str]:
    """Split a line as a shell does.

    Raises:
        UsageError: a quote is left open.
    """
    try:
        return shlex.split(line)
    except ValueError as error:
        msg = f"%nbdist {command} {line}: {error}."
        raise UsageError(msg) from None


def flags(parser: argparse.ArgumentParser, *, valued: bool = False) -> list[str]:
    """Options of a parser by their long names; with `valued` those that take a value, short too."""
    actions = parser._actions  # noqa: SLF001 - argparse has no other way
    if valued:
        return [flag for one in actions if one.nargs is None for flag in one.option_strings]
    return [flag for one in actions for flag in one.option_strings if flag.startswith("--")]
