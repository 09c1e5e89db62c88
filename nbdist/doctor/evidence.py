"""What `%nbdist doctor --run` goes by: the profile, the engine's options, the last errors."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist.output import ansi

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nbdist.profiler.measurements import Model, Part, RankFigures
    from nbdist.session.session import Session
    from nbdist.strategies import Hardware, Options

Plain = dict[str, Any]

NO_MEMORY = r"out of memory|OutOfMemoryError|can't allocate memory|Cannot allocate memory"
LESS_MEMORY = (
    "%nbdist plan says what would fit; a smaller micro-batch with --accumulate, or"
    " --activation-checkpointing, is the least change"
)
PINNING = r"pin_memory|page-?lock|cudaHost|host_alloc|mlock"
_FRAME = re.compile(r"^\s*File |^-+> ")
"""Of a traceback as IPython or Python write it."""
_LAST_LINES = 40
_LONGEST = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run. Without a profile `figures` is empty, without an error `errors` is."""

    figures: Sequence[RankFigures]
    options: Options
    hardware: Hardware
    errors: str = ""
    """What the last cell, or the end of the ranks, has said."""
    frames: str = ""
    """The functions and lines of its tracebacks."""
    host_bytes: int = 0
    """Memory of this machine, or what the container may take; 0 where it is not known."""

    @property
    def model(self) -> Model | None:
        """What the engine made of the model."""
        return next((one.model for one in self.figures if one.model is not None), None)

    def share(self, part: Part) -> float:
        """Of a step, on the rank that has most of it."""
        return max(
            (self._of_step(one, one.parts.get(part, 0.0)) for one in self.figures), default=0
        )

    def exposed(self, names: Iterable[str]) -> float:
        """Share of a step that waits for collectives, all ranks being there."""
        wanted = frozenset(names)
        return max(
            (
                self._of_step(
                    one,
                    sum(t.exposed_s - t.waiting_s for t in one.traffic if t.name in wanted),
                )
                for one in self.figures
            ),
            default=0.0,
        )

    def messages(self, names: Iterable[str]) -> tuple[float, float]:
        """Collectives of a step on one rank, and the mean bytes of one."""
        wanted = frozenset(names)
        traffic = [one for rank in self.figures[:1] for one in rank.traffic if one.name in wanted]
        count = sum(one.count for one in traffic)
        return count, sum(one.bytes for one in traffic) / count if count else 0.0

    def error(self, pattern: str, frames: str = "") -> str:
        """The first line of the errors with that pattern; "" unless `frames` is in a traceback."""
        found = re.search(f"^.*(?:{pattern}).*$", self.errors, re.IGNORECASE | re.MULTILINE)
        places = f"{self.frames}\n{self.errors}"
        if found is None or re.search(frames, places, re.IGNORECASE) is None:
            return ""
        return found[0].strip()[:_LONGEST]

    def zero(self, key: str, default: Any = None) -> Any:
        """What the user's deepspeed_config says in zero_optimization."""
        section = (self.options.deepspeed_config or {}).get("zero_optimization") or {}
        return section.get(key, default)

    def fsdp(self, key: str, default: Any = None) -> Any:
        """What the user's fsdp_config says."""
        return (self.options.fsdp_config or {}).get(key, default)

    def fsdp_line(self, **changed: Any) -> str:
        """A line to paste: the config that is there, with these keys; "" if it has them already."""
        return self._line("--fsdp-config", self.options.fsdp_config or {}, changed)

    def deepspeed_line(self, changed: Mapping[str, Any]) -> str:
        """A line to paste: the config that is there, with these keys; "" if it has them already."""
        return self._line("--deepspeed-config", self.options.deepspeed_config or {}, changed)

    def zero_line(self, **changed: Any) -> str:
        """A line to paste that changes zero_optimization."""
        return self.deepspeed_line({"zero_optimization": changed})

    def _line(self, option: str, present: Mapping[str, Any], changed: Mapping[str, Any]) -> str:
        config = _merged(present, changed)
        if config == present:
            return ""
        if isinstance(zero := config.get("zero_optimization"), dict):
            zero.pop("stage", None)  # the backend says it
        text = json.dumps(config, default=str)
        return f"%nbdist switch {self.options.backend} {option} {shlex.quote(text)}"

    @staticmethod
    def _of_step(rank: RankFigures, seconds: float) -> float:
        return seconds / rank.step_s if rank.step_s > 0 else 0.0


def last_errors(session: Session) -> tuple[str, str]:
    """What the last cell, or the end of the ranks, has said; and the frames of the tracebacks."""
    cell = session.running or session.last
    raised = list(cell.errors.values()) if cell is not None else []
    said = [f"{one.ename}: {one.evalue}" for one in raised]
    lines = [line for one in raised for part in one.traceback for line in part.splitlines()]
    if session.death is not None:
        said.append(f"{session.death}")
        tails = [log.tail(_LAST_LINES) for log in session.logs.values()]
        said += tails
        lines += [line for tail in tails for line in tail.splitlines()]
    # lines around those that ran name much that did not run
    frames = [line for line in map(ansi.plain, lines) if _FRAME.search(line)]
    return ansi.plain("\n".join(said)), "\n".join(frames)


def _merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> Plain:
    """Base with top's values, mappings merged key by key; neither is changed."""
    merged: Plain = {k: _merged(v, {}) if isinstance(v, dict) else v for k, v in base.items()}
    for key, value in top.items():
        inner: Any = merged.get(key)
        both = isinstance(inner, dict) and isinstance(value, dict)
        merged[key] = _merged(inner, value) if both else value
    return merged
