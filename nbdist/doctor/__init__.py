"""`%nbdist doctor`: checks of the machine, each with a remedy.

Runs in the notebook kernel, with or without a session. Imports no torch, starts no ranks and
changes nothing. Each module checks one topic and yields findings; `diagnosis` collects them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.doctor.diagnosis import Diagnosis


def doctor(*, run: bool = False, front_end: bool = False) -> Diagnosis:
    """Check the machine, the kernel and the session, and report problems.

    Takes less than a second, changes nothing and works without a session. The result displays
    itself; `.findings` lists the findings and `.to_json()` returns them as JSON.

    Args:
        run: check the training run instead: its last errors and its last profile.
        front_end: check instead what this front end can do, and show the report. Takes
            about ten seconds and asks for input.
    """
    if front_end:
        from nbdist.doctor.front_end import FrontEndCheck

        return FrontEndCheck().run()
    from nbdist.doctor.diagnosis import diagnose_machine, diagnose_run

    return diagnose_run() if run else diagnose_machine()
