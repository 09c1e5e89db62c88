"""Runs all checks, sorts the findings and formats them as text, HTML or JSON."""

from __future__ import annotations

import json
import logging
import re
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist._version import __version__
from nbdist.cluster.run_dir import kernel_descendants
from nbdist.display import Table, element, join
from nbdist.doctor import machine, software, training_run
from nbdist.doctor.finding import LEVELS, Finding, note
from nbdist.session.session import current_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

log = logging.getLogger(__name__)

WIDTH, TOPIC_WIDTH = 110, 15
"""Characters of a line, and of the topic column."""
_CODE_START = re.compile(r"%nbdist switch |# |\w+ = ")
"""Matches the beginning of a remedy to paste, which must stay in one line."""
COLORS = {"problem": "#c0392b", "note": "#b7791f", "ok": "#2f855a"}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Findings of `%nbdist doctor`, worst first. Displays itself in a notebook."""

    findings: tuple[Finding, ...]

    @property
    def level(self) -> str:
        """Level of the worst finding: problem, note or ok."""
        return next((finding.level for finding in self.findings), "ok")

    def to_json(self) -> str:
        """Return all findings as JSON, with the fields of `Finding` and without secrets."""
        findings = [asdict(finding) for finding in self.findings]
        tree = {"nbdist": __version__, "level": self.level, "findings": findings}
        return json.dumps(tree, indent=2)

    def __str__(self) -> str:
        return "\n".join([self._heading(), *(_text(finding) for finding in self.findings)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = []
        for finding in self.findings:
            level = element("b", finding.level, style=f"color:{COLORS[finding.level]}")
            remedy = [element("br"), element("i", finding.do)] if finding.do else []
            rows.append([level, finding.topic, join([finding.says, *remedy])])
        table = Table(rows=rows, text_columns={0, 1, 2})
        return str(element("div", element("b", self._heading()), table.html))

    def _heading(self) -> str:
        counts = Counter(finding.level for finding in self.findings)
        parts = [
            f"{counts[level]} {level}{'s' * (level != 'ok' and counts[level] != 1)}"
            for level in LEVELS
        ]
        return f"nbdist {__version__} \N{MIDDLE DOT} {', '.join(parts)}"


def diagnose_machine() -> Diagnosis:
    """Run all checks of the machine, the kernel and the session."""
    active, pids = current_session(), kernel_descendants()
    ranks = None if active is None else active.world_size
    root = None if active is None else active.checkpoints.root
    checkpoints = root if root is None or isinstance(root, Path) else str(root)
    checks: Sequence[tuple[str, Callable[[], Iterable[Finding]]]] = (
        ("session", lambda: training_run.check_session(active)),
        ("versions", software.check_versions),
        ("GPUs", lambda: machine.check_gpus(own=pids)),
        ("limits", lambda: machine.check_resources(ranks=ranks, checkpoints=checkpoints)),
        ("building", software.check_compilers),
        ("leftovers", machine.check_stale_resources),
        ("environment", machine.check_environment),
        ("clusters", software.check_clusters),
        ("ports", lambda: machine.check_ports(pids)),
        ("notebook", software.check_notebook),
    )
    findings = [finding for topic, check in checks for finding in run_check(topic, check)]
    findings.sort(key=lambda finding: LEVELS.index(finding.level))
    return Diagnosis(tuple(findings))


def diagnose_run() -> Diagnosis:
    """Check the current or last training run."""
    findings = run_check("run", lambda: training_run.check_training(current_session()))
    findings.sort(key=lambda finding: LEVELS.index(finding.level))
    return Diagnosis(tuple(findings))


def run_check(topic: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Run one check. An exception becomes a finding; earlier findings are kept."""
    findings: list[Finding] = []
    try:
        findings.extend(check())  # keep the findings that were yielded before an exception
    except Exception as error:  # one failing check must not prevent the others
        log.exception("the check of %s failed", topic)
        message = f"the check failed: {type(error).__name__}: {error}"
        findings.append(
            note(
                topic,
                message,
                "please report this, with the name and version of your operating system",
            )
        )
    return findings


def _text(finding: Finding) -> str:
    first = f"{finding.level:<8} {finding.topic:<{TOPIC_WIDTH}} "
    indent = " " * len(first)
    lines = [_wrap_text(first + finding.says, indent)]
    if _CODE_START.match(finding.do):
        lines.append(f"{indent}-> {finding.do}")
    elif finding.do:
        lines.append(_wrap_text(f"{indent}-> {finding.do}", indent))
    return "\n".join(lines)


def _wrap_text(line: str, indent: str) -> str:
    return textwrap.fill(
        line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
