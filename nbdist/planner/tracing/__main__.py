"""`python -m nbdist.planner.tracing`: trace a transformers config in a separate process.

Reads one JSON request from stdin: config, batch_size, seq_len, and optionally computes and kinds.
Writes progress lines to stderr and one JSON object to stdout: the fields of a `TracedModel`, or
{"error": message}. After a crash, the last line of stderr is the reason.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

from nbdist.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def main() -> int:
    """Answer the request on stdin."""
    request = json.load(sys.stdin)
    write_progress("loading torch and transformers")
    answer = sys.stdout
    # Output of a model's code must not mix with the answer on stdout.
    with contextlib.redirect_stdout(sys.stderr):
        fields = trace_requested_config(request, write_progress)
    json.dump(fields, answer)
    return 0


def write_progress(text: str) -> None:
    """Write a progress line to stderr."""
    print(f"trace: {text}", file=sys.stderr, flush=True)  # noqa: T201


def trace_requested_config(
    request: Mapping[str, Any], progress: Callable[[str], None]
) -> dict[str, Any]:
    """Trace a transformers config; return the fields of a `TracedModel`, or {"error": message}."""
    import torch

    from nbdist.planner.model_spec import COMPUTE_MODES
    from nbdist.planner.tracing import build_model, trace_variants

    torch.set_num_threads(1)
    try:
        build_model.disable_tracing_branches()
        model, notes = build_model.build_from_config(request["config"])
        build_model.use_grouped_experts(model)
        sample = build_model.make_sample_batch(model, request["batch_size"], request["seq_len"])
    except PlanError as error:
        return {"error": str(error)}
    options = trace_variants.TraceRequest(
        batch_size=request["batch_size"],
        seq_len=request["seq_len"] if sample.has_tokens else None,
        compute_modes=request.get("computes", COMPUTE_MODES),
        device_kinds=request.get("kinds", trace_variants.DEVICE_KINDS),
    )
    fields = trace_variants.trace_module_fields(model, sample.batch, options, progress)
    if "error" in fields:
        return fields
    return fields | {"notes": [*notes, *sample.notes]}


if __name__ == "__main__":
    sys.exit(main())
