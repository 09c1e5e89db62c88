"""Tab completion for the lines of `%%distribute` and `%nbdist`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from IPython.core.completer import SimpleCompletion, context_matcher

from nbdist import strategies

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from IPython.core.completer import CompletionContext, MatcherAPIv2, SimpleMatcherResult

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
) -> MatcherAPIv2:
    """Return an IPython matcher for the lines of the two magics; it ignores all other lines.

    Args:
        options: options of `%%distribute`.
        valued: those of them that take a value.
        commands: commands of `%nbdist`.
        of_commands: options of each command that has any.
    """

    @context_matcher()
    def complete(context: CompletionContext) -> SimpleMatcherResult:
        line = context.full_text.split("\n")[context.cursor_line][: context.cursor_position]
        magic, *words = DISTRIBUTE_COMMENT.sub("%%distribute", line.lstrip()).split(" ")
        choices: Sequence[str] = ()
        if magic == "%%distribute" and context.cursor_line == first_line_index(context.full_text):
            before = words[-2] if words[1:] else ""
            choices = (
                OPTION_VALUES.get(before, () if before in valued else options) if words else ()
            )
        elif magic == "%nbdist" and words and not words[1:]:
            choices = commands
        elif magic == "%nbdist" and words[1:] and words[0] in of_commands:
            choices = OPTION_VALUES.get(words[-2], of_commands[words[0]])
        return _result(choices, words[-1] if words else "")

    matching: MatcherAPIv2 = complete
    return matching


def first_line_index(text: str) -> int:
    """Return the index of the first line that is not blank."""
    return next((i for i, line in enumerate(text.split("\n")) if line.strip()), 0)


def _result(choices: Sequence[str], fragment: str) -> SimpleMatcherResult:
    completions = [SimpleCompletion(text=word) for word in choices if word.startswith(fragment)]
    return {
        "completions": completions,
        "matched_fragment": fragment,
        "suppress": bool(choices),
        "ordered": True,
    }
