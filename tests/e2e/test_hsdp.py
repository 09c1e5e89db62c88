"""HSDP on four CPU ranks that are told to be two nodes: shards inside a node, replicas across."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from nbdist import CellError, OptionError, Session
from nbdist.cluster.local_launcher import Launcher
from nbdist.hardware import discovery
from nbdist.hardware.discovery import SessionNode
from nbdist.panel import plan_view
from nbdist.session import device_placement as session_placement
from nbdist.session import planner
from tests.e2e.cells import TRAINER
from tests.e2e.training import MODEL, START, max_difference, value_of
from tests.interrupts import stopped_with

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist.strategies import Hardware

pytestmark = pytest.mark.timeout(300)

LOOK = textwrap.dedent(
    """
    from nbdist.state import tensor_digest, layouts

    def looked():
        layout = layouts.layout_for(model, [optimizer.optimizer])
        first = next(iter(model.parameters()))
        owned = layout.weights(owned=True)
        given = layout.weights(owned=False)
        moments = {
            f"{name}.{kind}": shard
            for name, kinds in layout.optimizer_state(owned=False).items()
            for kind, shard in kinds.items()
        }
        return {
            "axes": first.device_mesh.mesh_dim_names,
            "ranks": first.device_mesh.mesh.tolist(),
            "local": sum(p.to_local().numel() for p in model.parameters()),
            "owned": sum(v.stop - v.start for one in owned.values() for v in one.pieces),
            "given": sum(v.stop - v.start for one in given.values() for v in one.pieces),
            "mine": [tensor_digest.local_digests(given), tensor_digest.local_digests(moments)],
            "all": sum(p.numel() for p in model.parameters()),
        }
    """
)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Session]:
    """Four ranks on this machine; each of two is told that it shares a node with the next."""
    found = session_placement.hardware_for_placement

    def hardware(*found_for: Any) -> Hardware:
        return replace(found(*found_for), nodes=2)

    def nodes(_: Launcher, world_size: int) -> list[SessionNode]:
        here, half = discovery.discover_machine(), world_size // 2
        places = (range(half), range(half, world_size))
        return [SessionNode(f"node {i}", tuple(mine), here) for i, mine in enumerate(places)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_placement, "hardware_for_placement", hardware)
        patch.setattr(Launcher, "nodes_for", nodes)
        with Session(nproc=4) as session:
            session.run(MODEL + LOOK)
            yield session


def under(session: Session, backend: str, **options: str) -> list[float]:
    """Losses of a training that begins anew."""
    session.switch(backend, **options)
    session.run(START.format(""))
    return list(value_of(session, "train(6)"))


@pytest.mark.nightly
def test_it_trains_as_fsdp_does_and_replicas_are_equal(two_nodes: Session) -> None:
    expected = under(two_nodes, "fsdp")
    assert max_difference(under(two_nodes, "fsdp", replicate_across="nodes"), expected) <= 1e-6
    assert two_nodes.options.describe() == "fsdp2, replicate across nodes"
    found = two_nodes.run("looked()").values
    for rank, seen in found.items():
        assert seen["axes"] == ("dp_replicate", "dp_shard_cp")
        assert seen["ranks"] == [[0, 1], [2, 3]]
        assert seen["local"] == seen["given"]
        assert seen["mine"] == found[(rank + 2) % 4]["mine"]
        assert all(seen["mine"])
    everything = found[0]["all"]
    assert sum(seen["local"] for seen in found.values()) == 2 * everything
    assert sum(seen["owned"] for seen in found.values()) == everything
    lines = {line.part: line for line in planner.compare_with_measured(two_nodes).lines}
    for part in ("parameters", "optimizer"):
        assert lines[part].relative_error == pytest.approx(0, abs=0.02), part


@pytest.mark.nightly
def test_a_session_on_nodes_is_planned_with_replicas(two_nodes: Session) -> None:
    two_nodes.switch("fsdp", replicate_across="nodes")
    two_nodes.run(START.format(""))
    plan = planner.plan_model(two_nodes)
    assert plan.question.cluster.describe() == "4 CPU ranks on 2 nodes"
    row = plan.row("fsdp2", replicate_across="nodes")
    assert row.memory["optimizer"] > 1.8 * plan.row("fsdp2").memory["optimizer"]
    shown = plan_view.view_from_plan(plan, two_nodes.options).strategies["rows"]
    (current,) = [one for one in shown if one["current"]]
    assert current["words"] == "fsdp2, replicate across nodes"
    other = next(one for one in shown if one["backend"] == "zero3")
    assert other["arguments"] == {"backend": "zero3", "replicate_across": "none"}


@pytest.mark.nightly
def test_it_goes_to_other_engines_and_back(two_nodes: Session) -> None:
    two_nodes.switch("ddp")
    two_nodes.run(START.format(""))
    expected = value_of(two_nodes, "train(8)")
    two_nodes.run(START.format(""))
    found: list[float] = []
    for backend, across in (
        ("fsdp", "nodes"),
        ("ddp", None),
        ("fsdp", "nodes"),
        ("zero3", None),
    ):
        report = two_nodes.switch(backend, **({"replicate_across": across} if across else {}))
        assert report.verified > 0
        found += value_of(two_nodes, "train(2)")
    assert max_difference(found, expected) <= 1e-6


@pytest.mark.nightly
def test_a_checkpoint_is_the_same_under_it(two_nodes: Session, tmp_path: Path) -> None:
    two_nodes.switch("fsdp", replicate_across="nodes")
    two_nodes.run(START.format(""))
    two_nodes.save("replicated", wait=True, folder=tmp_path)
    expected = value_of(two_nodes, "train(3)")
    two_nodes.switch(replicate_across="none")
    two_nodes.load("replicated", folder=tmp_path)
    two_nodes.save("cut", wait=True, folder=tmp_path)
    assert max_difference(value_of(two_nodes, "train(3)"), expected) <= 1e-6
    two_nodes.switch(replicate_across="nodes")
    two_nodes.load("cut", folder=tmp_path)
    assert max_difference(value_of(two_nodes, "train(3)"), expected) <= 1e-6
    replicated, cut = (written(tmp_path / name) for name in ("replicated", "cut"))
    assert replicated == cut != {}


def test_a_backend_without_replicas_says_so(two_nodes: Session) -> None:
    with pytest.raises(OptionError, match=r"zero3 cannot replicate across nodes\. Use fsdp2"):
        two_nodes.switch("zero3", replicate_across="nodes")


def written(folder: Path) -> dict[str, Any]:
    """Shape, type and digest of each tensor of a checkpoint."""
    return dict(json.loads((folder / "manifest.json").read_text())["keys"])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {"clip": 0.5},
        {"precision": "bf16", "accumulate": 2},
        {"activation_checkpointing": True},
        {"fsdp_config": {"reshard_after_forward": False}},
    ],
    ids=["clip", "accumulate", "checkpointing", "gathered"],
)
def test_options_go_with_it(two_nodes: Session, options: dict[str, Any]) -> None:
    usual = {
        "clip": None,
        "precision": "no",
        "accumulate": 1,
        "activation_checkpointing": False,
        "fsdp_config": None,
    }
    asked = usual | options
    two_nodes.switch("fsdp", replicate_across="none", **asked)
    two_nodes.run(START.format(""))
    expected = value_of(two_nodes, "train(6)")
    two_nodes.switch("fsdp", replicate_across="nodes", **asked)
    two_nodes.run(START.format(""))
    # in another order of addition, which bf16 shows
    assert max_difference(value_of(two_nodes, "train(6)"), expected) <= (
        1e-3 if "precision" in options else 1e-6
    )
    two_nodes.switch("fsdp", **usual)


@pytest.mark.nightly
def test_a_trainer_trains_under_it(two_nodes: Session) -> None:
    code = "def build():\n    torch.manual_seed(0)\n    return gpt2()\n" + TRAINER.format(
        steps=4, arguments=""
    )
    found = {}
    for across in ("none", "nodes"):
        two_nodes.switch("fsdp", replicate_across=across)
        _, found[across] = two_nodes.run(code).values[0]
        names = "trainer.model_wrapped.lm_head.weight.device_mesh.mesh_dim_names"
    assert value_of(two_nodes, names) == ("dp_replicate", "dp_shard_cp")
    # a Trainer logs four digits
    assert max_difference(found["nodes"], found["none"]) <= 2e-4


@pytest.mark.nightly
def test_it_trains_on_after_ranks_were_freed(two_nodes: Session) -> None:
    two_nodes.switch("fsdp", replicate_across="nodes")
    two_nodes.run(MODEL + LOOK + START.format(""))
    stuck = "import time\nif rank == 0: train(1)\nelse:\n    while True: time.sleep(0.05)"
    stopped_with(two_nodes, stuck, says="rank 0 has waited")
    _trains_on(two_nodes)
    two_nodes.run("group = next(model.parameters()).device_mesh.get_group(1).group_name")
    broken = (
        "import datetime, time\nimport torch.distributed as dist\n"
        "dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1))\n"
        "if rank == 0: dist.all_reduce(torch.ones(1), async_op=True).wait()\n"
        "else: time.sleep(3)"
    )
    with pytest.raises(CellError):
        two_nodes.run(broken)
    _trains_on(two_nodes)
    anew = "next(model.parameters()).device_mesh.get_group(1).group_name != group"
    assert all(two_nodes.run(anew).values.values())


def _trains_on(two_nodes: Session) -> None:
    """All ranks make further steps, and the replicas stay equal."""
    losses = two_nodes.run("batches = iter(loader); train(3)").values
    assert losses[0] == losses[1] == losses[2] == losses[3]
    found = two_nodes.run("looked()").values
    assert found[0]["ranks"] == [[0, 1], [2, 3]]
    assert all(seen["mine"] == found[(rank + 2) % 4]["mine"] for rank, seen in found.items())
