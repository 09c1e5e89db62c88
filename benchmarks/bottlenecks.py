"""Planted bottlenecks: what nbdist's profile finds, and `alloc diagnose` in the same code.

alloc reads a script and knows its rules; without a GPU it measures nothing. It is installed into
an environment of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from results import Row

import nbdist

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests import bottleneck_loops

if TYPE_CHECKING:
    from collections.abc import Iterator


ALLOC = "alloc==0.0.16"
RULES = {
    "input": {"DL001", "DL005"},
    "straggler": {"STRAG001"},
    "communication": {"XS003", "DIST003"},
    "offload": {"UPG003"},
    "": set[str](),
}
"""Rules of alloc that name what is wrong, by nbdist's kind of the cause."""


QUIET_SHARE = 0.9
"""Share of a core that each rank must get, for a slower rank to be told from a rank that waits for
a core. On two cores at a load of 4 ranks got 0.5 of one, and a rank with a third more work took
8 % longer than the other."""


class Score(NamedTuple):
    """What a tool made of one script."""

    found: bool
    alarms: list[str]
    """What else it blames."""
    cpu_share: float = 1.0
    """Share of a core that each rank got before and after, whichever is smaller."""


def measure(build: Path) -> Iterator[Row]:
    """Both tools on all planted loops and on the one without a bottleneck."""
    with contextlib.redirect_stdout(io.StringIO()):
        ours, profiles = profiled()
    theirs = diagnosed(build)
    for name in ours:
        print(f"    {name}: nbdist {words(ours[name])}; alloc {words(theirs[name])}", flush=True)
    wanted = [one.name for one in bottleneck_loops.ALL]
    visible = [
        one.name
        for one in bottleneck_loops.ALL
        if one.blamed != "straggler" or ours[one.name].cpu_share >= QUIET_SHARE
    ]
    share = min(score.cpu_share for score in ours.values())
    yield Row(
        name="planted bottlenecks found",
        value=sum(ours[name].found for name in wanted),
        unit=f"of {len(wanted)}",
        limit=len(visible),
        sense=">=",
        detail=(
            f"in {profiles} profiles of {len(ours)} loops, ranks got {share:.2f} of a core;"
            f" {ALLOC}: {sum(theirs[name].found for name in wanted)} of {len(wanted)}"
        ),
    )
    yield Row(
        name="false alarms on them and on a loop without any",
        value=sum(len(score.alarms) for score in ours.values()),
        unit="",
        limit=0,
        detail=f"{ALLOC}: {sum(len(score.alarms) for score in theirs.values())}",
    )


def words(score: Score) -> str:
    alarms = f" and blames {', '.join(score.alarms)}" if score.alarms else ""
    return ("finds it" if score.found else "finds nothing") + alarms


def profiled() -> tuple[dict[str, Score], int]:
    """Profile on two CPU ranks; the scores, and how many profiles it took on a busy machine."""
    scores, made = {}, 0
    for group in (
        (bottleneck_loops.CONTROL, *bottleneck_loops.DDP),
        (bottleneck_loops.ONE_UNIT,),
        (bottleneck_loops.OFFLOADED,),
    ):
        with nbdist.Session(nproc=2, precision="no", **group[0].options) as session:
            session.run(bottleneck_loops.SETUP)
            for one in group:
                share = bottleneck_loops.cpu_share(session)
                profile = bottleneck_loops.profiled(session, one)
                share = min(share, bottleneck_loops.cpu_share(session))
                kinds = [blame.kind for blame in profile.bottlenecks]
                # A rank that gets less of a core than the others is slower indeed.
                true = {one.blamed} | ({"straggler"} if share < QUIET_SHARE else set())
                scores[one.name] = Score(
                    found=one.expected in str(profile) and (not one.blamed or one.blamed in kinds),
                    alarms=[kind for kind in kinds if kind not in true],
                    cpu_share=share,
                )
            made += len(session.profiles)
    return scores, made


def diagnosed(build: Path) -> dict[str, Score]:
    """alloc's findings in the same loops as scripts; what it only mentions ("info") is no alarm."""
    program = installed(build / "alloc-env")
    scores = {}
    for one in (bottleneck_loops.CONTROL, *bottleneck_loops.ALL):
        script = build / "alloc-env" / "train.py"
        script.write_text(one.script(bottleneck_loops.STEPS))
        shown = subprocess.run(
            [program, "diagnose", script.name, "--json", "--no-artifact", "--no-config"],
            cwd=script.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        ).stdout
        rules = [
            finding["rule_id"]
            for finding in json.loads(shown)["findings"]
            if finding["severity"] != "info"
        ]
        wanted = RULES[one.blamed]
        scores[one.name] = Score(
            found=bool(wanted & set(rules)) or one is bottleneck_loops.CONTROL,
            alarms=[rule for rule in rules if rule not in wanted],
        )
    return scores


def installed(folder: Path) -> str:
    """The program, in an environment that is made once."""
    program = folder / "bin" / "alloc"
    if not program.exists():
        print(f"==> making {folder} with {ALLOC}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pip = [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, ALLOC], check=True)
    return str(program)
