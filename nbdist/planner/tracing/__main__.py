"""`python -m nbdist.planner.tracing`: trace a transformers config in a separate process.

Reads one JSON request from stdin: config, batch_size, seq_len, and optionally computes and kinds.
Writes progress lines to stderr and one JSON object to stdout: the fields of a `TracedModel`, or
{"error": message}. After a crash, the last line of stderr is the reason.
"""

from __future__ import annotations

import contextlib
import json
import sys


def main() -> int:
    """Answer the request on stdin."""
    request = json.load(sys.stdin)
    write_progress("loading torch and transformers")
    answer = sys.stdout
    # Output of a model's code must not mix with the answer on stdout.
    with contextlib.redirect_stdout(sys.stderr):
        from nbdist.planner.tracing.subprocess_worker import trace_requested_config

        fields = trace_requested_config(request, write_progress)
    json.dump(fields, answer)
    return 0


def write_progress(text: str) -> None:
    """Write a progress line to stderr."""
    print(f"trace: {text}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
