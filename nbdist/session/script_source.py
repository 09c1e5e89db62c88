"""Builds the source of train.py from the cells of a session.

Magics are commented out, imports move to the top where nothing can depend on their place, and the
names that `%%distribute` predefines are made from an Accelerator.
"""

from __future__ import annotations

import ast
import builtins
import io
import json
import re
import symtable
import sys
import textwrap
import tokenize
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from IPython.core import inputtransformer2
from IPython.core.inputtransformer2 import TransformerManager

from nbdist import rank_sets
from nbdist.session.cell_history import RankCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nbdist.session.cell_history import CellRun

RUNTIME = "runtime"
"""Module beside train.py with report(), save() and what else a notebook provides."""
_ALIAS = "nbdist_runtime"
_FROM_RUNTIME = ("display", "export", "load", "report", "save", "send")
_FROM_ACCELERATOR = {
    "rank": "process_index",
    "local_rank": "local_process_index",
    "world_size": "num_processes",
    "device": "device",
}
"""Predefined names, and the attribute of Accelerator and PartialState with their value."""
_BODY_MAGICS = frozenset({"capture", "prun", "time"})
"""Cell magics whose body is run as it is."""
_AFFECTS_IMPORTS = re.compile(
    r"environ|putenv|load_dotenv|sys\.path|sys\.modules|chdir"
    r"|set_start_method|set_default_|filterwarnings|simplefilter"
)
"""After a cell with one of these, an import may depend on its place."""
_INDENT = "    "
_LINE_CHARS = 100
"""The usual width of a line."""


@dataclass(slots=True)
class Script:
    """Source of a script, and what a reader should know about it."""

    source: str = ""
    left_out: list[str] = field(default_factory=list)
    to_provide: list[str] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)
    """Top-level packages that it imports."""


@dataclass(slots=True)
class _Block:
    """Code of one cell, with comments above it."""

    notes: list[str]
    source: str
    number: int


def build_script(
    runs: Sequence[tuple[CellRun, list[str]]],
    *,
    docstring: str,
    arguments: Mapping[str, Sequence[str]] = MappingProxyType({}),
    setup: str = "",
    left_out: Sequence[str] = (),
    runtime_has_accelerator: bool = False,
) -> Script:
    """Return the script of these cells.

    Args:
        runs: the cells in their order, each with notes for a comment.
        docstring: of the module.
        arguments: of `Accelerator(...)`, each with the imports that it needs.
        setup: call of the runtime module that applies options of the session.
        left_out: what else is not in the script.
        runtime_has_accelerator: import `accelerator` from the runtime module.
    """
    script = Script(left_out=list(left_out))
    blocks = [_block(run, notes, script) for run, notes in runs]
    blocks = [block for block in blocks if block.source or block.notes]
    used = _used_names(blocks)
    imports = _hoist_imports(blocks, keep=used & {*_FROM_RUNTIME, *_FROM_ACCELERATOR})
    blocks = [block for block in blocks if block.source or block.notes]
    if arguments and any("Accelerator(" in block.source for block in blocks):
        text = re.sub(r"\n *", "", ", ".join(arguments))
        script.to_provide.append(f"Accelerator({text}), as in the session")
    from_runtime = used.intersection(_FROM_RUNTIME) | ({"setup"} if setup else set())
    if runtime_has_accelerator and used.intersection(["accelerator", *_FROM_ACCELERATOR]):
        from_runtime.add("accelerator")
    accelerator = _predefined_lines(used, arguments, imports, is_made="accelerator" in from_runtime)
    if from_runtime:
        imports.add(f"from {RUNTIME} import {', '.join(sorted(from_runtime))}")
    if _ALIAS in used:
        imports.add(f"import {RUNTIME} as {_ALIAS}")
    elif not from_runtime:
        imports.add(f"import {RUNTIME}  # noqa: F401 - applies accelerate.yaml")
    parts = [f'"""{docstring}"""', *_comment_list("Not in this script:", script.left_out)]
    parts += _comment_list("Set these values:", script.to_provide)
    parts += ["\n".join(_sorted_imports(imports)), "\n".join(filter(None, [setup, *accelerator]))]
    parts += [
        "\n".join([f"# Cell {block.number}", *(f"# {note}" for note in block.notes), block.source])
        for block in blocks
    ]
    script.source = "\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"
    nodes = ast.walk(ast.parse(script.source))
    imported = [name for node in nodes for _, name in _bindings(node)]
    script.modules = {name.split()[1].split(".")[0] for name in imported}
    compile(script.source, "train.py", "exec")
    return script


def _comment_list(title: str, items: Sequence[str]) -> list[str]:
    return ["\n".join([f"# {title}", *(f"# - {item}" for item in items)])] if items else []


def _block(run: CellRun, notes: Sequence[str], script: Script) -> _Block:
    lines: list[str] = []
    comments = list(notes)
    for part in run.parts:
        if isinstance(part, RankCode):
            source = _on_ranks(part, _to_python(part.code, run.number, script))
            if len(part.ranks) < part.world_size:
                comments.append(f"Runs on {rank_sets.describe_ranks(part.ranks)} only.")
            if part.was_interrupted:
                comments.append("Was interrupted in the notebook; here it runs to its end.")
        elif part.kind == "switch":
            comments.append(f"The notebook switched here, {part.name}; the script does not.")
            continue
        elif part.kind == "call":
            script.left_out.append(
                f"the call of {part.name}() in cell {run.number}, which has @nbdist.distribute:"
                " copy the function into train.py"
            )
            continue
        elif part.kind == "push" and not part.is_literal:
            script.to_provide.append(
                f"{part.name} = ...  ({part.text}, used from cell {run.number})"
            )
            continue
        elif part.kind == "push":
            source = f"{part.name} = {part.text}  # pushed from the notebook"
        elif part.kind == "load":
            source = f"# The notebook loaded a checkpoint here: load({json.dumps(part.name)})"
        else:
            # Not `save` or `runtime`: a cell may have a name of its own like that.
            call = f"{_ALIAS}.{part.kind}({json.dumps(part.name, ensure_ascii=False)}{part.text})"
            source = f"{call}  # %nbdist {part.kind}"
        lines.append(source)
    return _Block(comments, "\n".join(lines).strip("\n"), run.number)


def _on_ranks(part: RankCode, source: str) -> str:
    """Return code below a condition if it ran on some ranks only."""
    if len(part.ranks) == part.world_size or not source.strip():
        return source
    # Not the predefined `rank`: a cell may use that name for something else.
    if part.ranks == (0,):
        test = "accelerator.is_main_process"
    elif len(part.ranks) == 1:
        test = f"accelerator.process_index == {part.ranks[0]}"
    else:
        test = f"accelerator.process_index in {part.ranks}"
    has_code = bool(ast.parse(source).body)
    return "\n".join([f"if {test}:", *_indented(source), *([] if has_code else [f"{_INDENT}pass"])])


def _split_lines(source: str) -> list[str]:
    """Split as Python does; str.splitlines() also splits at characters such as U+2028."""
    return source.removesuffix("\n").split("\n")


def _indented(source: str) -> list[str]:
    """Return the lines, indented except for those that begin inside of a string."""
    starts: list[int] = []
    inside: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = tokenize.tok_name[token.type]
        if name == "STRING":
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
        elif name in {"FSTRING_START", "TSTRING_START"}:  # from Python 3.12 on
            starts.append(token.start[0])
        elif name in {"FSTRING_END", "TSTRING_END"}:
            inside.update(range(starts.pop() + 1, token.end[0] + 1))
    return [
        line if number in inside or not line.strip() else _INDENT + line
        for number, line in enumerate(_split_lines(source), start=1)
    ]


# -- magics


def _to_python(code: str, number: int, script: Script) -> str:
    """Return a cell's code as Python, with magics as comments."""
    code = re.sub(r"\A# %%distribute[^\n]*\n", "", code)
    while code.lstrip().startswith("%%"):
        first, _, code = code.lstrip().partition("\n")
        name = first[2:].split()[0]
        if name != "time":
            script.left_out.append(f"{first.strip()} of cell {number}")
        if name not in _BODY_MAGICS:
            return ""
    lines = io.StringIO(code).readlines()
    clean_ups: list[Any] = TransformerManager().cleanup_transforms
    for clean_up in clean_ups:  # indentation, >>> and In [1]:
        lines = clean_up(lines)
    lines = io.StringIO("".join(lines)).readlines()  # IPython uses str.splitlines()
    code = _comment_magics(lines, number, script)
    try:
        compile(code, "cell", "exec", dont_inherit=True)
    except SyntaxError:  # await outside of a function
        return _in_async_function(code, number)
    return _show_last_value(code, ast.parse(code)).strip("\n")


def _in_async_function(code: str, number: int) -> str:
    imports = [
        node
        for node in ast.parse(code).body
        if isinstance(node, ast.Import | ast.ImportFrom) and _stands_alone(node, code)
    ]
    body = _remove_statements(imports, code)
    names = [
        s.get_name()
        for s in symtable.symtable(body, "cell", "exec").get_symbols()
        if s.is_assigned()
    ]
    declared = [f"{_INDENT}global {', '.join(sorted(names))}"] if names else []
    head = dict.fromkeys(
        ["import asyncio", *map(ast.unparse, imports), f"async def cell_{number}():"]
    )
    return "\n".join([*head, *declared, *_indented(body), f"asyncio.run(cell_{number}())"])


def _comment_magics(lines: list[str], number: int, script: Script) -> str:
    """Make comments of magics and !commands; `%time statement` becomes the statement."""
    while magic := _find_magic(lines):
        first = magic.start_line
        end = inputtransformer2.find_end_of_continued_line(lines, first) + 1
        text = " ".join(line.rstrip("\\\n").strip() for line in lines[first:end])
        indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
        statement = re.sub(r"^(\w+ *= *)?%time (?!-)", r"\1", text)
        if statement == text:
            statement = f"pass  # {text}" if indent else f"# {text}"
            name, _, command = text.partition("=")
            if isinstance(magic, inputtransformer2.MagicAssign | inputtransformer2.SystemAssign):
                result = f"{name.strip()} = ...  (the result of {command.strip()} in cell {number})"
                script.to_provide.append(result)
            else:
                script.left_out.append(f"{text} of cell {number}")
        lines[first:end] = [f"{indent}{statement}\n"]
    return "".join(lines)


def _find_magic(lines: list[str]) -> inputtransformer2.TokenTransformBase | None:
    """Return where IPython finds a magic, a !command or a ?."""
    tokens = inputtransformer2.make_tokens_by_line(lines)
    kinds: list[Any] = TransformerManager().token_transformers
    found = [magic for kind in kinds if (magic := kind.find(tokens))]
    return min(found, key=lambda magic: magic.sortby(), default=None)


def _show_last_value(code: str, tree: ast.Module) -> str:
    """Print the value that the notebook shows below the cell; a call is left as it is."""
    last = tree.body[-1] if tree.body else None
    quiet = (ast.Call, ast.Constant, ast.Await, ast.Yield)
    if not isinstance(last, ast.Expr) or isinstance(last.value, quiet):
        return code
    value = ast.get_source_segment(code, last.value) or ""
    lines = _split_lines(code)
    shown = "\n".join(lines[last.lineno - 1 : last.end_lineno])
    if code.rstrip().endswith(";") or shown.strip() != value:
        return code
    return "\n".join([*lines[: last.lineno - 1], f"print({value})"])


# -- the place of imports


def _hoist_imports(blocks: Sequence[_Block], keep: set[str]) -> set[str]:
    """Move imports out of the blocks where their place has no effect; return their lines.

    Args:
        blocks: the cells.
        keep: names of which the imports stay, because the code before uses the predefined ones.
    """
    tables = [symtable.symtable(block.source, "cell", "exec") for block in blocks]
    assigned = {
        symbol.get_name()
        for table in tables
        for symbol in table.get_symbols()
        if symbol.is_assigned()
    }
    targets: dict[str, set[str]] = {}
    for block in blocks:
        for node in ast.walk(ast.parse(block.source)):
            for name, line in _bindings(node):
                targets.setdefault(name, set()).add(line)
    fixed = (
        assigned
        | keep
        | {*dir(builtins)}
        | {name for name, lines in targets.items() if len(lines) > 1}
    )
    hoisted: set[str] = set()
    for block in blocks:
        moved = [
            node
            for node in ast.parse(block.source).body
            if (bindings := _bindings(node))
            and fixed.isdisjoint(name for name, _ in bindings)
            and _stands_alone(node, block.source)
        ]
        if _AFFECTS_IMPORTS.search(block.source):
            break
        hoisted |= {line for node in moved for _, line in _bindings(node)}
        block.source = _remove_statements(moved, block.source)
    return hoisted


def _remove_statements(statements: Sequence[ast.stmt], source: str) -> str:
    lines = _split_lines(source)
    for statement in reversed(statements):
        del lines[statement.lineno - 1 : statement.end_lineno]
    return "\n".join(lines).strip("\n")


def _bindings(node: ast.AST) -> list[tuple[str, str]]:
    """Return the names that an import binds, each with an import line for it alone."""
    if isinstance(node, ast.Import):
        return [
            (alias.asname or alias.name.split(".")[0], ast.unparse(ast.Import([alias])))
            for alias in node.names
        ]
    if isinstance(node, ast.ImportFrom) and not any(alias.name == "*" for alias in node.names):
        return [
            (
                alias.asname or alias.name,
                ast.unparse(ast.ImportFrom(node.module, [alias], node.level)),
            )
            for alias in node.names
        ]
    return []


def _stands_alone(node: ast.stmt, source: str) -> bool:
    """Return whether an import has its lines for itself, without a comment."""
    text = "\n".join(_split_lines(source)[node.lineno - 1 : node.end_lineno])
    return text.strip() == (ast.get_source_segment(source, node) or "") and "#" not in text


def _sorted_imports(lines: Iterable[str]) -> list[str]:
    """Return import lines in the order of isort, those from one module merged."""
    groups: list[dict[str, set[str]]] = [{}, {}, {}, {}]
    for line in lines:
        node = ast.parse(line).body[0]
        if isinstance(node, ast.ImportFrom):
            key = f"from {'.' * node.level}{node.module or ''} import "
            module, names = node.module or "", {ast.unparse(alias) for alias in node.names}
        else:
            module, key, names = line.split()[1], line, set()
        top = module.split(".")[0]
        place = 1 if top in sys.stdlib_module_names else 2
        place = 0 if top == "__future__" else 3 if top == RUNTIME else place
        groups[place].setdefault(key, set()).update(names)
    joined: list[str] = []
    for group in filter(None, groups):
        order = sorted(group, key=lambda line: (line.startswith("from"), line))
        joined += [""] if joined else []
        for key in order:
            merged = sorted(group[key])
            line = key + ", ".join(merged)
            if len(line) > _LINE_CHARS and merged:
                line = "\n".join([f"{key}(", *(f"{_INDENT}{name}," for name in merged), ")"])
            joined.append(line)
    return joined


# -- names


def _used_names(blocks: Sequence[_Block]) -> set[str]:
    """Return the names that the code reads before it binds them itself."""
    bound: set[str] = set()
    used: set[str] = set()
    for statement in [node for block in blocks for node in ast.parse(block.source).body]:
        table = symtable.symtable(ast.unparse(statement), "cell", "exec")
        used |= _global_reads(table) - bound
        bound |= {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    return used


def _global_reads(table: symtable.SymbolTable) -> set[str]:
    read = {s.get_name() for s in table.get_symbols() if s.is_referenced() and s.is_global()}
    return read.union(*map(_global_reads, table.get_children()))


def _predefined_lines(
    used: set[str], arguments: Mapping[str, Sequence[str]], imports: set[str], *, is_made: bool
) -> list[str]:
    """Return the lines that make the predefined names; add the imports that they need."""
    if "torch" in used:
        imports.add("import torch")
    if "get_ipython" in used:  # without IPython it returns None
        imports.add("from IPython import get_ipython")
    lines: list[str] = []
    names = [name for name in _FROM_ACCELERATOR if name in used]
    if "accelerator" in used and not is_made:
        imports.add("from accelerate import Accelerator")
        imports.update(*arguments.values())
        text = ", ".join(arguments)
        if "\n" in text:
            text = "\n" + textwrap.indent(",\n".join([*arguments, ""]), _INDENT)
        lines = [f"accelerator = Accelerator({text})"]
    elif names and not is_made:
        imports.add("from accelerate import PartialState")
    source = "accelerator" if is_made or "accelerator" in used else "PartialState()"
    return lines + [f"{name} = {source}.{_FROM_ACCELERATOR[name]}" for name in names]
