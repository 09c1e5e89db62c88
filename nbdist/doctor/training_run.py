"""Checks of the session, and `%nbdist doctor --run`: its last errors and its last profile.

An error has the engine's own option as a remedy. The bottleneck and the recommendations are those
of the profile. No request is sent to the ranks, which may be busy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nbdist.doctor.finding import Finding, note, ok, problem
from nbdist.output import ansi
from nbdist.profiler.advice import remarks_without_advice
from nbdist.profiler.option_recommendations import (
    BUCKET,
    LIVE,
    MAX_UNIT,
    MIN_UNIT,
    PREFETCH,
    config_number,
    merged_config,
    switch_line,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.profiler.measurements import ProfiledModel
    from nbdist.session.session import Session
    from nbdist.strategies import Hardware, Options

TOPIC = "run"
_OUT_OF_MEMORY = r"out of memory|OutOfMemoryError|can't allocate memory|Cannot allocate memory"
_PINNED = r"pin_memory|page-?lock|cudaHost|host_alloc|mlock"
_GATHERS = {
    "fsdp": r"all_?gather|unshard",
    "deepspeed": r"all_?gather|fetch_sub_module|partitioned_param",
}
"""Engine -> functions in the traceback of an all-gather of parameters."""
_LAYERS = 16
"""A wrapped unit is usually a transformer block, whose smallest layer is about a twelfth of it."""
_FRAME = re.compile(r"^\s*File |^-+> ")
"""Stack frame line of a traceback in the format of IPython or Python."""
_LAST_LINES = 40
_MAX_LINE_CHARS = 160


def check_session(session: Session | None) -> Iterator[Finding]:
    """Report the state of the session."""
    if session is None:
        yield ok("session", "none; a %%distribute cell starts one")
        return
    if session.death is not None:
        yield problem("session", f"{session.death}", "%nbdist restart, then %nbdist load NAME")
        return
    ended = [process["rank"] for process in session.status()["ranks"] if not process["alive"]]
    if ended:
        yield problem("session", f"ranks {ended} have ended", "%nbdist restart")
        return
    yield ok("session", f"{session.describe()}, {session.state}")


def check_training(session: Session | None) -> Iterator[Finding]:
    """Report the last errors, and the bottleneck and the advice of the last profile."""
    if session is None:
        yield note(TOPIC, "no session was started", "run a %%distribute cell to start one")
        return
    profile = session.profiles[-1] if session.profiles else None
    profiled = profile.setting.options if profile else session.options
    # These options do not affect the engine's sharding and communication.
    is_current = replace(profiled, accumulate=1, precision=None) == replace(
        session.options, accumulate=1, precision=None
    )
    yield from check_errors(
        RunErrors.of(session, profile.model if profile and is_current else None)
    )
    again = "%nbdist profile, then %nbdist doctor --run"
    if profile is None:
        yield note(TOPIC, "this run was not profiled: only its last errors were checked", again)
    elif not is_current:
        was, is_now = profiled.describe(), session.options.describe()
        now = f"{was}, and the engine is now {is_now}"
        subject = now if was != is_now else f"{was} with other config"
        message = f"the last profile is of {subject}: only the last errors were checked"
        yield note(TOPIC, message, again)
    else:
        calm = not profile.bottlenecks and not profile.advice
        yield Finding("ok" if calm else "note", TOPIC, profile.verdict)
        for advice in profile.advice:
            yield note(advice.title, f"{advice.why.rstrip('.')}: {advice.gain_text}", advice.line)
        for remark in remarks_without_advice(profile.remarks, profile.advice):
            yield note(f"{remark.cell}, line {remark.line}", remark.reason, remark.change)


# ------------------------------------------------------------------------------ errors


@dataclass(frozen=True, slots=True, kw_only=True)
class RunErrors:
    """The last errors of a run, with what is needed to suggest a remedy."""

    options: Options
    hardware: Hardware
    model: ProfiledModel | None = None
    """The model, if it was profiled under these options."""
    messages: str = ""
    """Messages of the last cell's errors and of the crash of the ranks."""
    frames: str = ""
    """Functions and lines of the tracebacks."""

    @classmethod
    def of(cls, session: Session, model: ProfiledModel | None) -> RunErrors:
        """Read the errors of the last cell, or of the crash of the ranks."""
        cell = session.running or session.last
        errors = list(cell.errors.values()) if cell is not None else []
        messages = [f"{error.ename}: {error.evalue}" for error in errors]
        lines = [line for error in errors for part in error.traceback for line in part.splitlines()]
        if session.death is not None:
            log_tails = [log.tail(_LAST_LINES) for log in session.logs.values()]
            messages += [f"{session.death}", *log_tails]
            lines += [line for log_tail in log_tails for line in log_tail.splitlines()]
        # The source lines around a frame also name functions that did not run.
        frames = [line for line in map(ansi.strip_ansi, lines) if _FRAME.search(line)]
        return cls(
            options=session.options,
            hardware=session.hardware,
            model=model,
            messages=ansi.strip_ansi("\n".join(messages)),
            frames="\n".join(frames),
        )

    def find(self, pattern: str, frames: str = "") -> str:
        """Return the first line of the messages that matches `pattern`, or "".

        Args:
            pattern: regular expression of the message, case insensitive.
            frames: regular expression that must also match a traceback or the messages.
        """
        match = re.search(f"^.*(?:{pattern}).*$", self.messages, re.IGNORECASE | re.MULTILINE)
        searched = f"{self.frames}\n{self.messages}"
        if match is None or re.search(frames, searched, re.IGNORECASE) is None:
            return ""
        return match[0].strip()[:_MAX_LINE_CHARS]

    def switch_line(self, changed: Mapping[str, Any]) -> str:
        """Return the command that merges keys into the engine's config, or "" if it has them."""
        is_fsdp = self.options.strategy.engine == "fsdp"
        name = "fsdp_config" if is_fsdp else "deepspeed_config"
        present = getattr(self.options, name) or {}
        config = merged_config(present, changed)
        return "" if config == present else switch_line({name: config})


def check_errors(run: RunErrors) -> Iterator[Finding]:
    """Report known errors, each with the option that fixes it."""
    yield from _loading(run)
    out_of_memory = run.find(_OUT_OF_MEMORY)
    pinned = run.find(_PINNED) or run.find(_OUT_OF_MEMORY, _PINNED)
    gathers = _GATHERS.get(run.options.strategy.engine)
    advice = (
        "%nbdist plan shows what would fit; try a smaller micro-batch with --accumulate, or"
        " --activation-checkpointing"
    )
    if pinned and run.options.offload_device != "none":
        message = f"cannot pin more host memory: {pinned}"
        yield problem("pinned memory", message, _unpinned(run) or advice)
    elif gathers and run.find(_OUT_OF_MEMORY, gathers):
        message = f"out of memory during the all-gather of parameters: {out_of_memory}"
        changed = _smaller_gathers(run)
        yield problem("all_gather", message, run.switch_line(changed) or advice)
    elif out_of_memory:
        yield problem("memory", out_of_memory, advice)


def _unpinned(run: RunErrors) -> str:
    """Return the line that offloads without pinned memory."""
    unpinned = {"pin_memory": False}
    if run.options.strategy.engine == "fsdp":
        # torch/distributed/fsdp/_fully_shard/_fsdp_api.py CPUOffloadPolicy(pin_memory=True); the
        # plugin creates it from a bool (accelerate/utils/dataclasses.py), so a config cannot
        # change it.
        zero = {"zero_optimization": {"offload_optimizer": unpinned}}
        return switch_line({"backend": "zero3", "offload": "cpu", "deepspeed_config": zero})
    # zero/offload_config.py: "Disable only on hosts with tight memlock limits".
    changed: dict[str, Any] = {"offload_optimizer": unpinned}
    if run.options.offload_params:
        changed["offload_param"] = unpinned
    return run.switch_line({"zero_optimization": changed})


def _smaller_gathers(run: RunErrors) -> dict[str, Any]:
    """Return keys of the engine's config that gather fewer parameters at a time."""
    level = run.options.strategy.level
    if run.options.strategy.engine == "deepspeed":
        zero = (run.options.deepspeed_config or {}).get("zero_optimization") or {}
        # zero/partitioned_param_coordinator.py prefetches below a number of live parameters;
        # zero/stage_1_and_2.py gathers updated weights in pieces.
        sizes = {"allgather_bucket_size": BUCKET // 10, "reduce_bucket_size": BUCKET // 10}
        if level == 3:  # noqa: PLR2004 - the stage that shards parameters
            sizes = {
                "stage3_max_live_parameters": LIVE // 10,
                "stage3_max_reuse_distance": LIVE // 10,
                "stage3_prefetch_bucket_size": PREFETCH // 5,
            }
        halves = {key: config_number(zero.get(key), 2 * sizes[key]) // 2 for key in sizes}
        return {"zero_optimization": {key: min(sizes[key], halves[key]) for key in sizes}}
    # Units smaller than the current ones, which did not fit. Without a profile one per layer.
    current = int((run.options.fsdp_config or {}).get("min_num_params") or 0)
    limits = [MAX_UNIT, run.model.largest_unit // _LAYERS if run.model else 0]
    limits += [current // 2] if current else []
    smallest = max(MIN_UNIT, min(limits))
    changed: dict[str, Any] = {
        "auto_wrap_policy": "SIZE_BASED_WRAP",
        "min_num_params": smallest,
    }
    if level == 1:
        # torch/distributed/fsdp/_runtime_utils.py _unshard: without the limit the CPU runs ahead
        # and gathers more units than fit; a prefetch holds one more.
        changed |= {"limit_all_gathers": True, "backward_prefetch": "NO_PREFETCH"}
        changed |= {"forward_prefetch": False}
    if not run.options.reshard_after_forward:
        # torch/distributed/fsdp/_fully_shard/_fully_shard.py: False keeps all units gathered until
        # backward. FSDP1 uses sharding_strategy instead, accelerate/accelerator.py.
        if level == 1:
            changed["sharding_strategy"] = "FULL_SHARD"
        else:
            changed["reshard_after_forward"] = True
    return changed


def _loading(run: RunErrors) -> Iterator[Finding]:
    """Report a checkpoint that does not fit the model or the engine."""
    if error := run.find(
        r"Missing key\(s\)|Unexpected key\(s\)|size mismatch for|Error\(s\) in loading state_dict"
    ):
        yield problem(
            "loading",
            f"the checkpoint does not match the model: {error}",
            "load it before accelerator.prepare(), or after it with %nbdist load PATH, which"
            " removes the prefixes of wrappers (module., _fsdp_wrapped_module., _orig_mod.)",
        )
    if run.options.strategy.engine == "fsdp":
        yield from _fsdp_loading(run)
    elif run.options.strategy.engine == "deepspeed":
        yield from _zero_loading(run)


def _fsdp_loading(run: RunErrors) -> Iterator[Finding]:
    # accelerate/utils/fsdp_utils.py load_fsdp_model: FULL reads pytorch_model_fsdp.bin and, under
    # FSDP1, refuses without sync_module_states; SHARDED reads a folder with .metadata.
    config, on_gpu = run.options.fsdp_config or {}, run.hardware.kind == "cuda"
    expected = str(config.get("state_dict_type", "SHARDED_STATE_DICT")).upper()
    if error := run.find("sync_module_states"):
        # accelerate/utils/dataclasses.py rejects the flag without a GPU.
        line = run.switch_line({"sync_module_states": True})
        do = line if on_gpu else "%nbdist load PATH, which does not need the flag"
        yield problem("loading", f"cannot load the {expected} checkpoint: {error}", do)
    elif error := run.find(r"LOCAL_STATE_DICT|pytorch_model_fsdp|\.distcp|\.metadata"):
        is_full = expected.startswith("FULL")
        changed: dict[str, Any] = {
            "state_dict_type": "SHARDED_STATE_DICT" if is_full else "FULL_STATE_DICT"
        }
        if not is_full and run.options.strategy.level == 1 and on_gpu:
            changed["sync_module_states"] = True
        yield problem(
            "loading",
            f"the engine expects {expected}, but the checkpoint has another format (%nbdist load"
            f" PATH reads both): {error}",
            run.switch_line(changed),
        )


def _zero_loading(run: RunErrors) -> Iterator[Finding]:
    # runtime/engine.py _load_zero_checkpoint raises it; checkpoint.load_universal of
    # runtime/constants.py reads what deepspeed/checkpoint/ds_to_universal.py has written.
    if error := run.find(r"world size of \d+ but the|DP world size"):
        yield problem(
            "loading",
            "the checkpoint was saved with another number of ranks. %nbdist load PATH reads it;"
            f" DeepSpeed reads it after a conversion with its ds_to_universal.py: {error}",
            run.switch_line({"checkpoint": {"load_universal": True}}),
        )
    # zero/stage_1_and_2.py _load_global_state compares it with zero/config.py parameter_alignment.
    elif error := run.find("parameter-alignment layout"):
        zero = (run.options.deepspeed_config or {}).get("zero_optimization") or {}
        aligned = zero.get("parameter_alignment") is not True
        yield problem(
            "loading",
            f"the checkpoint was saved with another parameter alignment: {error}",
            run.switch_line({"zero_optimization": {"parameter_alignment": aligned}}),
        )
