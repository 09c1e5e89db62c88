"""widgets/src/protocol.ts says what nbdist/panel/protocol.py says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from nbdist.panel import protocol

MIRROR = (Path(__file__).parents[2] / "widgets" / "src" / "protocol.ts").read_text()
NAMES = {
    "Header": protocol.HeaderView,
    "Part": protocol.MemoryPart,
    "Device": protocol.DeviceView,
    "StrategyRow": protocol.StrategyRow,
    "Strategies": protocol.StrategiesView,
    "Span": protocol.StepPartTime,
    "ProfiledRank": protocol.ProfiledRank,
    "Advice": protocol.AdviceView,
    "Profile": protocol.ProfileView,
    "Rank": protocol.RankView,
    "Checkpoint": protocol.CheckpointView,
    "Progress": protocol.ProgressView,
    "Queued": protocol.QueuedCommand,
    "Mark": protocol.EventMarkView,
    "Notice": protocol.NoticeView,
    "Picture": protocol.PanelState,
    "Sample": protocol.DeviceSample,
}
"""Interface of the front end -> its like in the kernel."""


@pytest.mark.parametrize("name", NAMES)
def test_an_interface_has_the_fields_that_the_kernel_sends(name: str) -> None:
    body = re.search(rf"^export interface {name} {{$(.*?)^}}$", MIRROR, re.MULTILINE | re.DOTALL)
    assert body
    fields = re.findall(r"^  (\w+): ", body[1], re.MULTILINE)
    assert set(fields) == set(get_type_hints(NAMES[name]))


@pytest.mark.parametrize(
    ("name", "kernels"), [("CommandName", protocol.CommandName), ("State", protocol.SessionState)]
)
def test_words_that_are_allowed_are_the_same(name: str, kernels: Any) -> None:
    union = re.search(rf"^export type {name} =(.*?);$", MIRROR, re.MULTILINE | re.DOTALL)
    assert union
    assert re.findall(r'"(\w+)"', union[1]) == list(get_args(kernels))
