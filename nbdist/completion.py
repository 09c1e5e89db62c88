"""Tab completion of `%%distribute` and `%nbdist`: their own words and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.completer import SimpleCompletion, context_matcher

from nbdist import strategies

if TYPE_CHECKING:
    from IPython.core.completer import CompletionContext, SimpleMatcherResult

VALUES: dict[str, tuple[str, ...]] = {
    "--backend": strategies.BACKENDS,
    "-b": strategies.BACKENDS,
    "--precision": strategies.PRECISIONS,
    "--offload": ("none", "cpu", "nvme:"),
    "--output": ("all", "0", "none"),
}
"""Options whose values can be listed."""


@context_matcher()
def matcher(context: CompletionContext) -> SimpleMatcherResult:
    """Complete on the line of one of the magics; silent everywhere else."""
    line = context.full_text.split("\n")[context.cursor_line][: context.cursor_position]
    words = line.lstrip().split(" ")
    choices: tuple[str, ...] = ()
    if words[0] == "%%distribute" and context.cursor_line == first_line(context.full_text):
        choices = VALUES.get(words[-2], ()) or options() if len(words) > 1 else ()
    elif words[0] == "%nbdist" and len(words) == 2:  # noqa: PLR2004 - the magic and one word
        choices = commands()
    return _result(choices, words[-1])


def first_line(text: str) -> int:
    """Index of the first line that is not blank."""
    return next((i for i, line in enumerate(text.split("\n")) if line.strip()), 0)


def options() -> tuple[str, ...]:
    """Options of `%%distribute`, as its own parser has them."""
    from nbdist.magics import NbDist

    parser: Any = NbDist.distribute.parser
    flags = [flag for action in parser._actions for flag in action.option_strings]  # noqa: SLF001
    return tuple(flag for flag in flags if flag.startswith("--"))


def commands() -> tuple[str, ...]:
    """Commands of `%nbdist`."""
    from nbdist.magics import COMMANDS, NOT_YET

    return (*COMMANDS, *NOT_YET)


def _result(choices: tuple[str, ...], fragment: str) -> SimpleMatcherResult:
    found = [SimpleCompletion(text=word) for word in choices if word.startswith(fragment)]
    return {
        "completions": found,
        "matched_fragment": fragment,
        "suppress": bool(choices),
        "ordered": True,
    }
