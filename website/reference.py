"""Pages of the reference that are made from the code: magics, configuration, messages."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist import errors, strategies
from nbdist.magics import magics

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
_LONG = 30
"""Length of an expression whose last name does not describe its value."""
_OPTION_ROWS = "| option | meaning |\n|---|---|\n"
_MAGICS_HEAD = """\
# Magics

`%load_ext nbdist` registers both. Tab completes options and commands.

## %%distribute

"""
_COMMANDS_HEAD = """
## %nbdist

`%nbdist COMMAND` inspects and controls the session. `%nbdist` alone lists the commands.
"""
_MESSAGES_HEAD = """\
# Messages

The messages of nbdist, generated from its code; `{...}` stands for a value. Search for a few words
of the message that you see. [Troubleshooting](../troubleshooting.md) is sorted by symptom,
[errors](errors.md) lists the classes.
"""


# -- magics


def magics_page() -> str:
    """Return the page of `%%distribute` and `%nbdist`, made from their parsers."""
    commands = _command_sentences()
    parts = [
        _MAGICS_HEAD,
        _prose(magics.NbDist.distribute),
        "\n\nA line takes every option of a session, listed in [options](../options.md), and:\n\n",
        _option_table(magics.NbDist.distribute.parser, skip=strategies.ARGUMENTS),
        _COMMANDS_HEAD,
    ]
    for name, command in magics.COMMANDS.items():
        parts.append(f"\n### %nbdist {name}\n\n{_capitalized(commands[name])}.\n")
        if command.parser is not None:
            parts.append(_parser_section(name, command.parser))
    return "".join(parts)


def _prose(function: object) -> str:
    """Return a docstring, its example as a block of code; without the usage that IPython adds."""
    text = inspect.getdoc(function) or ""
    text = text[text.index("Run the cell") :]
    prose, _, example = text.partition("Example:\n")
    example = inspect.cleandoc(example.partition("\n\n")[0])
    return f"{prose.strip()}\n\n```python\n{example}\n```" if example else prose.strip()


def _command_sentences() -> dict[str, str]:
    """Return the sentences about each command, from the help of `%nbdist`."""
    found: dict[str, list[str]] = defaultdict(list)
    name = ""
    for line in (inspect.getdoc(magics.NbDist.nbdist) or "").splitlines()[2:]:
        usage, sentence = line[:16].strip(), line[16:].strip()
        name = usage.split()[0] if usage else name
        again = usage and found[name]
        found[name].append(f"`{usage}`: {sentence}" if again else sentence)
    return {
        name: re.sub(r" (?=`\w+ (?:--)?\w)", "; ", " ".join(sentences))
        for name, sentences in found.items()
    }


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _parser_section(name: str, parser: argparse.ArgumentParser) -> str:
    """Return usage and options of a command."""
    skip = [n for n, item in strategies.ARGUMENTS.items() if item.can_switch and n != "backend"]
    usage = " ".join(parser.format_usage().removeprefix("::").split())  # "::" as of IPython 9
    more = "\nAlso the options marked *switch* in [options](../options.md).\n"
    if name != "switch":
        skip, more = [], ""
        text = f"\n```text\n{usage}\n```\n"
    else:
        text = "\n```text\n%nbdist switch [options] [NAME]\n```\n"
    return f"{text}\n{_option_table(parser, skip=skip)}{more}"


def _option_table(parser: argparse.ArgumentParser, *, skip: object = ()) -> str:
    rows = [
        f"| {_flags(action)} | {_cell((action.help or '').replace('%%', '%'))} |\n"
        for action in parser._actions  # noqa: SLF001 - argparse lists them nowhere else
        if action.dest not in skip  # type: ignore[operator]
    ]
    return _OPTION_ROWS + "".join(rows)


def _flags(action: argparse.Action) -> str:
    value = f" {action.metavar}" if action.metavar and action.nargs != 0 else ""
    names = action.option_strings or [str(action.metavar or action.dest)]
    return ", ".join(f"`{name}{value if action.option_strings else ''}`" for name in names)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


# -- configuration


def configuration_page() -> str:
    """Return the page of `%config NbDist`, made from its traits."""
    rows = [
        f"| `{name}` | {type(trait).__name__} | `{trait.default_value!r}` | {_cell(trait.help)} |\n"
        for name, trait in sorted(magics.NbDist.class_own_traits(config=True).items())
    ]
    return (
        "# Configuration\n\n"
        '`%config NbDist` lists the current values, `%config NbDist.backend = "fsdp"` changes one'
        " in this notebook. `checkpoints`, `deadline` and `track` apply to the running session too,"
        " the others to the next one. To change them for all notebooks, write"
        ' `c.NbDist.backend = "fsdp"` into `~/.ipython/profile_default/ipython_config.py`; there'
        ' `c.InteractiveShellApp.extensions = ["nbdist"]` loads the extension.\n\n'
        "| name | type | default | meaning |\n|---|---|---|---|\n" + "".join(rows)
    )


# -- messages


def messages_page() -> str:
    """Return the page of all messages: those of errors by class, then what is printed."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "nbdist").rglob("*.py")):
        for kind, text in _messages(ast.parse(path.read_text())):
            found[kind].add(text)
    parts = [_MESSAGES_HEAD]
    for kind in sorted(found):
        rows = "".join(f"* {_literal(text)}\n" for text in sorted(found[kind]))
        parts.append(f"\n## {kind}\n\n{rows}")
    return "".join(parts)


def _literal(text: str) -> str:
    return "`` " + " ".join(text.split()) + " ``"


def _messages(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield kind and text of each message of a module."""
    assigned = {
        (target.id, node.lineno): node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            kind = ast.unparse(node.exc.func).rpartition(".")[2]
            value = node.exc.args[0]
            if isinstance(value, ast.Name):  # msg = "..." on the lines before
                before = [at for name, at in assigned if name == value.id and at < node.lineno]
                value = assigned.get((value.id, max(before, default=0)), value)
            text = _template(value)
            if hasattr(errors, kind) and len(text.split()) > 2:  # noqa: PLR2004
                yield kind, text
        elif isinstance(node, ast.Constant | ast.JoinedStr):
            text = _template(node)
            if text.startswith("nbdist: ") and len(text.split()) > 2:  # noqa: PLR2004
                yield "Printed below a cell", text


def _template(node: ast.expr) -> str:
    """Return a string of the source, with fields by name."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.BinOp):
        return _template(node.left) + _template(node.right)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else _field(part) for part in node.values
        )
    return ""


def _field(part: ast.expr) -> str:
    value = part.value if isinstance(part, ast.FormattedValue) else part
    names = re.findall(r"[a-z_]\w*", ast.unparse(value)) if len(ast.unparse(value)) < _LONG else []
    return "{" + (names[-1].strip("_").lower() if names else "...") + "}"


# -- decisions


def decisions_page() -> str:
    """Return the list of all decisions."""
    rows = []
    for path in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        title = path.read_text().partition("\n")[0].removeprefix("# ")
        number, _, name = title.partition(". ")
        rows.append(f"{int(number)}. [{name}]({path.name})\n")
    return (
        "# Decisions\n\nWhy nbdist is built as it is: half a page for each decision that others may"
        " question.\n\n" + "".join(rows)
    )
