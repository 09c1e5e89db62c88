"""The evidence for `%nbdist doctor --run`: the profile, the options and the last errors."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist.output import ansi

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nbdist.profiler.measurements import ProfiledModel, RankProfile, StepPart
    from nbdist.session.session import Session
    from nbdist.strategies import Hardware, Options

JsonDict = dict[str, Any]

OUT_OF_MEMORY_PATTERN = (
    r"out of memory|OutOfMemoryError|can't allocate memory|Cannot allocate memory"
)
OUT_OF_MEMORY_ADVICE = (
    "%nbdist plan shows what would fit; try a smaller micro-batch with --accumulate, or"
    " --activation-checkpointing"
)
PINNED_MEMORY_PATTERN = r"pin_memory|page-?lock|cudaHost|host_alloc|mlock"
_FRAME = re.compile(r"^\s*File |^-+> ")
"""Stack frame line of a traceback in the format of IPython or Python."""
_LAST_LINES = 40
_MAX_LINE_CHARS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvidence:
    """Evidence of one run. Without a profile, ``rank_profiles`` is empty."""

    rank_profiles: Sequence[RankProfile]
    options: Options
    hardware: Hardware
    errors: str = ""
    """Messages of the last cell's errors and of the crash of the ranks."""
    traceback_frames: str = ""
    """Functions and lines of the tracebacks."""
    host_bytes: int = 0
    """Memory of the machine or limit of the container in bytes; 0 if unknown."""

    @property
    def model(self) -> ProfiledModel | None:
        """Model facts from the profile."""
        return next((rank.model for rank in self.rank_profiles if rank.model is not None), None)

    def step_share(self, part: StepPart) -> float:
        """Return the largest share of a step over the ranks that this part takes."""
        return max(
            (self._of_step(rank, rank.parts.get(part, 0.0)) for rank in self.rank_profiles),
            default=0,
        )

    def exposed_collective_share(self, names: Iterable[str]) -> float:
        """Return the largest share of a step in exposed collectives, without waits for ranks."""
        wanted = frozenset(names)
        return max(
            (
                self._of_step(
                    rank,
                    sum(
                        collective.exposed_s - collective.waiting_s
                        for collective in rank.traffic
                        if collective.name in wanted
                    ),
                )
                for rank in self.rank_profiles
            ),
            default=0.0,
        )

    def collective_messages(self, names: Iterable[str]) -> tuple[float, float]:
        """Return the number of collectives per step on one rank and their mean size in bytes."""
        wanted = frozenset(names)
        traffic = [
            collective
            for rank in self.rank_profiles[:1]
            for collective in rank.traffic
            if collective.name in wanted
        ]
        count = sum(collective.count for collective in traffic)
        return count, sum(collective.bytes for collective in traffic) / count if count else 0.0

    def find_error(self, pattern: str, frames: str = "") -> str:
        """Return the first line of the errors that matches `pattern`, or "".

        Args:
            pattern: regular expression of the message, case insensitive.
            frames: regular expression that must also match a traceback or the errors.
        """
        match = re.search(f"^.*(?:{pattern}).*$", self.errors, re.IGNORECASE | re.MULTILINE)
        searched = f"{self.traceback_frames}\n{self.errors}"
        if match is None or re.search(frames, searched, re.IGNORECASE) is None:
            return ""
        return match[0].strip()[:_MAX_LINE_CHARS]

    def zero_option(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of `zero_optimization` in the user's deepspeed_config."""
        section = (self.options.deepspeed_config or {}).get("zero_optimization") or {}
        return section.get(key, default)

    def fsdp_option(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of the user's fsdp_config."""
        return (self.options.fsdp_config or {}).get(key, default)

    def fsdp_config_line(self, **changed: Any) -> str:
        """Return the switch command with these keys merged into fsdp_config.

        Returns "" if nothing changes.
        """
        return self._line("--fsdp-config", self.options.fsdp_config or {}, changed)

    def deepspeed_config_line(self, changed: Mapping[str, Any]) -> str:
        """Return the switch command with `changed` merged into deepspeed_config.

        Returns "" if nothing changes.
        """
        return self._line("--deepspeed-config", self.options.deepspeed_config or {}, changed)

    def zero_config_line(self, **changed: Any) -> str:
        """Return the switch command with these keys merged into `zero_optimization`."""
        return self.deepspeed_config_line({"zero_optimization": changed})

    def _line(self, option: str, present: Mapping[str, Any], changed: Mapping[str, Any]) -> str:
        config = _merged(present, changed)
        if config == present:
            return ""
        if isinstance(zero := config.get("zero_optimization"), dict):
            zero.pop("stage", None)  # the backend determines the stage
        text = json.dumps(config, default=str)
        return f"%nbdist switch {self.options.backend} {option} {shlex.quote(text)}"

    @staticmethod
    def _of_step(rank: RankProfile, seconds: float) -> float:
        return seconds / rank.step_s if rank.step_s > 0 else 0.0


def last_errors(session: Session) -> tuple[str, str]:
    """Return the errors of the last cell or of the crash of the ranks, and the traceback frames."""
    cell = session.running or session.last
    errors = list(cell.errors.values()) if cell is not None else []
    messages = [f"{error.ename}: {error.evalue}" for error in errors]
    lines = [line for error in errors for part in error.traceback for line in part.splitlines()]
    if session.death is not None:
        messages.append(f"{session.death}")
        log_tails = [log.tail(_LAST_LINES) for log in session.logs.values()]
        messages += log_tails
        lines += [line for log_tail in log_tails for line in log_tail.splitlines()]
    # The source lines around a frame also name functions that did not run: keep the frame lines.
    frames = [line for line in map(ansi.strip_ansi, lines) if _FRAME.search(line)]
    return ansi.strip_ansi("\n".join(messages)), "\n".join(frames)


def _merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> JsonDict:
    """Return a copy of `base` updated with `top`, merging nested mappings."""
    merged: JsonDict = {k: _merged(v, {}) if isinstance(v, dict) else v for k, v in base.items()}
    for key, value in top.items():
        inner: Any = merged.get(key)
        both = isinstance(inner, dict) and isinstance(value, dict)
        merged[key] = _merged(inner, value) if both else value
    return merged
