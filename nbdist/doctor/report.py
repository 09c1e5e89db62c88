"""All findings together: looked for, put in order, shown as text, HTML or JSON."""

from __future__ import annotations

import json
import logging
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import nbdist
from nbdist.cluster.orphan_cleanup import of_this_kernel
from nbdist.doctor import (
    clusters,
    compilers,
    environment,
    gpus,
    notebook,
    ports,
    resources,
    session,
    stale_resources,
    training_checks,
    versions,
)
from nbdist.doctor.finding import LEVELS, Finding, note
from nbdist.session.session import current

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

log = logging.getLogger(__name__)

WIDTH, TOPIC_WIDTH = 110, 15
"""Of a line, and of the column of topics."""
PASTED = "%nbdist switch "
"""Beginning of a remedy that is a line to paste."""
COLORS = {"problem": "#c0392b", "note": "#b7791f", "ok": "#2f855a"}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What `%nbdist doctor` found, problems first; displays itself in a notebook."""

    findings: tuple[Finding, ...]

    @property
    def level(self) -> str:
        """Of the worst finding: problem, note or ok."""
        return next((one.level for one in self.findings), "ok")

    def to_json(self) -> str:
        """All findings; the schema is that of `Finding`, secrets are not in it."""
        found = [asdict(one) for one in self.findings]
        tree = {"nbdist": nbdist.__version__, "level": self.level, "findings": found}
        return json.dumps(tree, indent=2)

    def __str__(self) -> str:
        """The page as text."""
        return "\n".join([self._heading(), *(_text(one) for one in self.findings)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The page as a table."""
        rows = "".join(_row(one) for one in self.findings)
        style = "border-collapse: collapse; text-align: left"
        return f'<div><b>{escape(self._heading())}</b><table style="{style}">{rows}</table></div>'

    def _heading(self) -> str:
        counts = Counter(one.level for one in self.findings)
        words = [f"{counts[level]} {_plural(level, counts[level])}" for level in LEVELS]
        return f"nbdist {nbdist.__version__} \N{MIDDLE DOT} {', '.join(words)}"


def diagnose() -> Diagnosis:
    """Look at everything."""
    running, pids = current(), of_this_kernel()
    ranks = None if running is None else running.world_size
    root = None if running is None else running.checkpoints.root
    checkpoints = root if isinstance(root, Path) else None
    looks: Sequence[tuple[str, Callable[[], Iterable[Finding]]]] = (
        ("session", lambda: session.look(running)),
        ("versions", versions.look),
        ("GPUs", lambda: gpus.look(own=pids)),
        ("limits", lambda: resources.look(ranks=ranks, checkpoints=checkpoints)),
        ("building", compilers.look),
        ("leftovers", stale_resources.look),
        ("environment", environment.look),
        ("clusters", clusters.look),
        ("ports", lambda: ports.look(pids)),
        ("notebook", notebook.look),
    )
    found = [one for topic, look in looks for one in _looked(topic, look)]
    found.sort(key=lambda one: LEVELS.index(one.level))
    return Diagnosis(tuple(found))


def diagnose_run() -> Diagnosis:
    """Look at the training that runs, or has ended."""
    running = current()
    profiles = [] if running is None else running.profiles
    look = _looked("run", lambda: training_checks.findings(next(reversed(profiles), None), running))
    return Diagnosis(tuple(look))


def _looked(topic: str, look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Findings of one kind; a look that fails is a finding too, and the page stays whole."""
    found: list[Finding] = []
    try:
        found.extend(look())  # what was found before a failure is kept
    except Exception as error:  # whatever a strange machine does to one look
        log.exception("the doctor could not look at %s", topic)
        says = f"could not be looked at: {type(error).__name__}: {error}"
        found.append(note(topic, says, "please report this with your system's name and version"))
    return found


def _text(one: Finding) -> str:
    first = f"{one.level:<8} {one.topic:<{TOPIC_WIDTH}} "
    indent = " " * len(first)
    lines = [_filled(first + one.says, indent)]
    if one.do.startswith(PASTED):
        lines.append(f"{indent}-> {one.do}")  # a break would be pasted too
    elif one.do:
        lines.append(_filled(f"{indent}-> {one.do}", indent))
    return "\n".join(lines)


def _filled(line: str, indent: str) -> str:
    return textwrap.fill(
        line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _row(one: Finding) -> str:
    level = f'<td style="color: {COLORS[one.level]}"><b>{one.level}</b></td>'
    do = f"<br><i>{escape(one.do)}</i>" if one.do else ""
    cells = f"{level}<td>{escape(one.topic)}</td>"
    return f'<tr>{cells}<td style="text-align: left">{escape(one.says)}{do}</td></tr>'


def _plural(level: str, count: int) -> str:
    return level if level == "ok" or count == 1 else f"{level}s"
