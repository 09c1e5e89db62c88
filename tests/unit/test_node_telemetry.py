"""What an agent measures on its node, and what the kernel makes of it."""

from __future__ import annotations

import json
import os
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.hardware import discovery, telemetry
from nbdist.hardware.discovery import Gpu, Machine, SessionNode
from nbdist.hardware.telemetry import GpuReading, NodeUsage, NodeUsageMonitor
from tests.conftest import eventually
from tests.doubles.nvml import GIB, FakeNvml, one_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator

A100 = Gpu("GPU-a", "NVIDIA A100-SXM4-80GB", 80 * GIB, (8, 0))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """One GPU, on which this process holds 12 GiB and another 8."""
    fake = one_gpu((os.getpid(), 12 * GIB), (1, 8 * GIB))
    monkeypatch.setattr(discovery, "import_pynvml", lambda: fake)
    return fake


@pytest.fixture
def asked() -> Iterator[tuple[NodeUsageMonitor, SimpleQueue[tuple[int, dict[str, Any]]]]]:
    answers: SimpleQueue[tuple[int, dict[str, Any]]] = SimpleQueue()
    made = NodeUsageMonitor(lambda *answer: answers.put(answer))
    yield made, answers
    made.close()
    eventually(lambda: "watch" not in {one.name for one in threading.enumerate()}, within_s=5)


def test_one_answer_has_all_ranks_and_the_hosts_memory(
    nvml: FakeNvml, asked: tuple[NodeUsageMonitor, SimpleQueue[tuple[int, dict[str, Any]]]]
) -> None:
    made, answers = asked
    made.request_usage(7, {4: ("GPU-a", os.getpid()), 5: ("", os.getpid()), 6: ("", None)})
    number, reply = answers.get(timeout=5)
    now = NodeUsage.from_json(json.loads(json.dumps(reply)))
    assert number == 7
    assert (now.readings[4].used_bytes, now.readings[4].others_bytes) == (12 * GIB, 8 * GIB)
    assert len(now.readings[4].holders) == 1
    assert (now.readings[5].used_bytes or 0) > 1 << 20
    assert now.readings[6] == GpuReading()  # it is not born yet
    assert 0 < now.host_free_bytes <= discovery.host_memory_bytes()
    assert nvml.calls == ["init"]


def test_nvml_is_shut_down_when_it_is_no_longer_used(
    nvml: FakeNvml,
    asked: tuple[NodeUsageMonitor, SimpleQueue[tuple[int, dict[str, Any]]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(telemetry, "IDLE_S", 0.05)
    made, answers = asked
    for number, calls in ((1, ["init", "shutdown"]), (2, ["init", "shutdown"] * 2)):
        made.request_usage(number, {0: ("GPU-a", os.getpid())})
        assert answers.get(timeout=5)[0] == number
        eventually(lambda calls=calls: nvml.calls == calls, within_s=5)


def test_nothing_is_lost_on_the_way() -> None:
    idle = GpuReading(used_bytes=0, utilization=0.0, others_bytes=5, holders=("python (pid 7)",))
    sent = NodeUsage(
        3 * GIB, {0: idle, 1: GpuReading(), 12: GpuReading(note="NVML does not answer")}
    )
    assert NodeUsage.from_json(json.loads(json.dumps(sent.to_json()))) == sent


def test_nodes_travel_without_their_names() -> None:
    def node(number: int, cores: int) -> SessionNode:
        gpu = Gpu(f"GPU-{number}", A100.name, A100.memory_bytes, A100.capability)
        return SessionNode(f"node {number}", (number,), Machine((gpu,), None, cores))

    sent = [*(node(number, 96) for number in range(3)), node(3, 64), node(4, 96)]
    nodes_received = json.loads(json.dumps(discovery.nodes_to_json(sent)))
    read = discovery.nodes_from_json(nodes_received)
    assert [(one.name, one.ranks) for one in read] == [(one.name, one.ranks) for one in sent]
    assert [one.machine.num_cpus for one in read] == [one.machine.num_cpus for one in sent]


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (
            SessionNode("a", (0, 1), Machine((A100, A100), "NVLink", 96)),
            "2 x NVIDIA A100 80GB, NVLink",
        ),
        (SessionNode("a", (0, 1, 2), Machine(num_cpus=96)), "3 CPU ranks"),
        (SessionNode("a", (5,), Machine(num_cpus=96)), "1 CPU rank"),
    ],
)
def test_nodes_are_described_in_a_few_words(node: SessionNode, words: str) -> None:
    assert node.describe() == f"{words}, 96 cores"
