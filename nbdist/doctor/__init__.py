"""`%nbdist doctor`: checks of this machine, each with what to do about a problem.

Runs in the kernel, with or without a session; imports no torch, starts no rank, changes
nothing. Each module looks at one thing and gives findings; `diagnosis` puts them together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.doctor.report import Diagnosis


def doctor(*, run: bool = False) -> Diagnosis:
    """Look at this machine, this kernel and what runs, and say what is wrong.

    Takes less than a second, changes nothing, and works without a session too. The answer
    displays itself; `.findings` are its parts, `.to_json()` gives them to programs.

    Args:
        run: look at the training instead: its last profile, its options, its last errors.
    """
    from nbdist.doctor.report import diagnose, diagnose_run

    return diagnose_run() if run else diagnose()
