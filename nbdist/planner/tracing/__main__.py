"""`python -m nbdist.planner.tracing`: trace a transformers config in a process of its own.

Reads one JSON request from stdin: config, batch_size, seq_len, and optionally computes and
kinds. Writes progress lines to stderr and one JSON object to stdout: the fields of a
`plan.traced.Traced`, or {"error": a sentence}. A crash is what stands last on stderr.
"""

from __future__ import annotations

import contextlib
import json
import sys


def main() -> int:
    """Answer the request on stdin."""
    request = json.load(sys.stdin)
    say("loading torch and transformers")
    answer = sys.stdout
    # What a model's code prints belongs to the log.
    with contextlib.redirect_stdout(sys.stderr):
        from nbdist.planner.tracing.subprocess_worker import answered

        fields = answered(request, say)
    json.dump(fields, answer)
    return 0


def say(text: str) -> None:
    """Write a progress line."""
    print(f"trace: {text}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
