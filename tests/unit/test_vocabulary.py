"""Names and sentences use the words of PyTorch and Jupyter; see docs/decisions/0014-names.md."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "nbdist").rglob("*.py"))
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
]

MODULE_NAMES = frozenset(
    """
    advice agreement answers arrival asked beside blackbox board bootstrap boxes bulk carry
    cast causes checked described figures fit fleet foreign fork free gang gate given gut
    handover here holdings inside interfaces joint judging kept known ladder learning leftovers
    link living local marks meet meeting merge mould moving named names now one opened parcel
    peeking picture place planted positions pulse readings recorded rehearsal relay release
    remark room saving settling several show signals slots solo source standing standstill
    stopping stops story strict taken there together told tracer transaction turns units
    unstopped validation verdict walk watch where whereabouts window wires words
    """.split()  # noqa: SIM905 - as below
)
"""Names that do not tell what a module holds."""

WORDS = frozenset(
    """
    anew asked beginning blamed brought gang gut joint ladder leftovers mould parcel rung said
    standstill told unstopped whereabouts wish
    """.split()  # noqa: SIM905 - as below
)
"""Words that no identifier contains."""

VAGUE_NAMES = frozenset(
    """
    _again _alike _and _apart _assumed _at_once _become _born _bring_in _bring_out _bunches
    _carried _cut _die _do _during _earlier _elsewhere _entering _fitting _folded _for_good
    _granted _heads _hold _is_here _is_mine _leaving _listed _listening _looked _low _maybe
    _mine _misfits _mixed _needed _normal _once _others _paced _page _press _put _retire _room
    _scarce _seal _see _sees _settle _settled _short _sound _space _spread _stays _take
    _take_over _there _too_few _trains _unable _unfit _unpacked _whole _why _wire _with _within
    _without _woken _words _work bent figured give_back living rooms taken whose wished
    """.split()  # noqa: SIM905 - one a line would be eighty lines
)
"""Names of functions and variables that do not say what is done to what."""

PHRASES = (
    r"(?<![Tt]here )\b(?:is|are) no (?!longer|more|faster|such)",
    r"\bof (?:before|now)\b",
    r"\banew\b",
    r"\b(?:is|are|was|were) told\b",
    r"\bwhoever\b",
    r"\botherwise than\b",
    r"\blets? go\b",
    r"\bnobody\b",
    r"\bfor ever\b",
    r"\bsome seconds\b",
    r"\bin vain\b",
    r"\bfor lack of\b",
    r"\bany more\b",
)
"""Phrases that documentation in English does not use."""

OPENINGS = r"(?:Of|Whether|What|How far|Say|Let|Who|That)\b"
"""First words of a docstring that is not a sentence."""

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("nbdist/profiler/advice.py", "advice"): "holds `Advice`, the elements of `Profile.advice`",
    ("nbdist/session/lifecycle.py", "standstill"): "`Session.standstill` is public",
}
"""(file, word or phrase) -> why it stays."""


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def identifiers(module: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that a module defines: classes, functions, parameters, variables, attributes."""
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def texts(path: Path) -> Iterator[str]:
    """Comments, docstrings and messages of a module; the text of a document."""
    content = path.read_text()
    if path.suffix == ".md":
        yield content
    elif path.suffix == ".ipynb":
        yield from ("".join(cell["source"]) for cell in json.loads(content)["cells"])
    else:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
        for token in tokenize.generate_tokens(io.StringIO(content).readline):
            if token.type == tokenize.COMMENT:
                yield token.string


def excepted(path: Path, found: str) -> bool:
    return (str(path.relative_to(ROOT)), found) in EXCEPTIONS


def test_modules_are_named_after_what_they_hold() -> None:
    helpers = sorted((ROOT / "tests").rglob("*.py"))
    names = [path for path in [*MODULES, *helpers] if path.stem in MODULE_NAMES]
    assert [path for path in names if not excepted(path, path.stem)] == []


def test_identifiers_are_words_of_the_field() -> None:
    found = []
    for path in MODULES:
        for line, name in identifiers(tree(path)):
            parts = set(re.findall(r"[A-Z]?[a-z]+", name.replace("_", " ")))
            words = {part.lower() for part in parts} & WORDS
            words |= {name} & ({"one", "_one"} | VAGUE_NAMES)
            found += [(path, line, name) for word in words if not excepted(path, word)]
    assert found == []


def test_texts_are_plain_english() -> None:
    pattern = re.compile("|".join(PHRASES))
    found = []
    for path in [*MODULES, *DOCUMENTS]:
        for text in texts(path):
            plain = " ".join(text.split())
            found += [
                (path, plain[max(0, match.start() - 40) : match.end() + 40])
                for match in pattern.finditer(plain)
                if not excepted(path, match[0])
            ]
    assert found == []


def test_docstrings_begin_as_sentences() -> None:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [
        (path, getattr(node, "lineno", 1), text.splitlines()[0])
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
        if re.match(OPENINGS, text)
    ]
    assert found == []


def test_there_are_few_exceptions() -> None:
    assert len(EXCEPTIONS) <= 15
    assert all(EXCEPTIONS.values()), "each has a reason"
