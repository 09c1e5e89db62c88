"""A screen that remembers, and a clock that is set by hand."""

from __future__ import annotations

import re
from typing import Any


class FakeScreen:
    """Keeps outputs as a notebook would: [kind, ...] in order, displays updated in place."""

    has_output_area = False

    def __init__(self, *, can_update: bool = True) -> None:
        self.can_update = can_update
        self.outputs: list[list[Any]] = []
        self.relayed: list[tuple[Any, ...]] = []
        self.updates = 0
        self.clear_next = False

    def write(self, name: str, text: str) -> None:
        self._before()
        if self.outputs and self.outputs[-1][0] == name:
            self.outputs[-1][1] += text
        else:
            self.outputs.append([name, text])

    def display(
        self,
        bundle: dict[str, Any],
        metadata: dict[str, Any],
        *,
        display_id: str | None = None,
        update: bool = False,
    ) -> None:
        if update:
            self.updates += 1
            for output in self.outputs:
                if output[0] == "display" and output[2] == display_id:
                    output[1] = bundle
            return
        self._before()
        self.outputs.append(["display", bundle, display_id, metadata])

    def clear(self, *, wait: bool) -> None:
        if wait:
            self.clear_next = True
        else:
            self.outputs.clear()

    def relay_comm(self, *message: Any) -> None:
        self.relayed.append(message)

    def flush(self) -> None:
        """Nothing is held back."""

    def _before(self) -> None:
        if self.clear_next:
            self.outputs.clear()
        self.clear_next = False

    @property
    def text(self) -> str:
        return "".join(
            f"{out[1].get('text/plain', '')}\n" if out[0] == "display" else out[1]
            for out in self.outputs
        )

    def streamed(self, name: str) -> str:
        return "".join(out[1] for out in self.outputs if out[0] == name)

    @property
    def displays(self) -> list[dict[str, Any]]:
        return [out[1] for out in self.outputs if out[0] == "display"]


class Clock:
    """Monotonic seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def accounted(screen: FakeScreen, ranks: range) -> dict[int, int]:
    total = dict.fromkeys(ranks, 0)
    for line in screen.text.splitlines():
        found = re.match(r"\[([\d,-]+)\] (?:([\d,]+) lines? .*not shown)?", line)
        assert found, line
        for part in found[1].split(","):
            first, _, last = part.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                total[rank] += int(found[2].replace(",", "")) if found[2] else 1
    return total
