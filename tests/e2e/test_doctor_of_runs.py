"""`%nbdist doctor --run` on real ranks: it knows their errors, and its lines can be pasted."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import nbdist
from nbdist import CellError, Session
from nbdist.planner import cluster_spec
from nbdist.profiler.measurements import CollectiveStats, RankProfile
from nbdist.profiler.profile import Profile
from nbdist.profiler.profile_data import ProfiledConfig
from tests.unit.profile_figures import MODEL

if TYPE_CHECKING:
    from tests.live_kernel import LiveKernel

pytestmark = pytest.mark.timeout(600)

START = textwrap.dedent(
    """
    bare = torch.nn.Sequential(*(torch.nn.Linear(120, 120) for _ in range(6)))
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(bare, optimizer)

    def train(steps=2):
        for _ in range(steps):
            loss = model(torch.ones(4, 120)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return float(loss)
    """
)


def advised(session: Session, *, units: int, gathers: int, each: int) -> str:
    """The line to paste for a profile of the session, with gathers that take 300 ms of a step."""
    model = replace(
        MODEL, backend=session.backend, params=87_120, units=units, largest_unit=87_120 // units
    )
    traffic = CollectiveStats(
        name="all_gather", count=gathers, bytes=gathers * each, seconds=0.3, exposed_s=0.3
    )
    figures = RankProfile(
        rank=0,
        kind="cpu",
        device="cpu",
        ends=[0.0, 1.0],
        parts={"communication": 0.3, "forward": 0.7},
        traffic=[traffic],
        model=model,
    )
    cluster = cluster_spec.cpu_cluster(2, host_memory_bytes=16 << 30, num_cpus=2)
    (one,) = Profile.of([figures], ProfiledConfig(options=session.options, cluster=cluster)).advice
    return one.line


def test_a_load_that_failed_is_recognised_by_its_error() -> None:
    with Session(nproc=2) as session:
        with pytest.raises(CellError):
            session.run("torch.nn.Linear(2, 2).load_state_dict({'weight': torch.ones(2, 2)})")
        first, second = nbdist.doctor(run=True).findings
        assert (first.level, first.topic) == ("problem", "loading")
        assert "Error(s) in loading state_dict" in first.says
        assert "was not profiled" in second.says
        session.run("1")
        assert [one.topic for one in nbdist.doctor(run=True).findings] == ["run"]


@pytest.mark.nightly
def test_the_lines_for_zero3_and_fsdp_can_be_pasted_while_a_model_lives(
    notebook: LiveKernel,
) -> None:
    config = '{"auto_wrap_policy": "NO_WRAP"}'
    start = f"%%distribute -n 2 --backend fsdp2 --precision no --fsdp-config '{config}'\n{START}"
    assert notebook.run(f"{start}train()").status == "ok"
    text = "import nbdist\nsession = nbdist.session()\nprint(session.options.fsdp_config)"
    assert "NO_WRAP" in notebook.run(text).text
    like = Session(nproc=2, backend="fsdp2", fsdp_config={"auto_wrap_policy": "NO_WRAP"})
    line = advised(like, units=1, gathers=1, each=348_480)
    assert notebook.run(line).status == "ok"
    counted = "f'units {sum(type(one).__name__.startswith(\"FSDP\") for one in model.modules())}'"
    units = f"%%distribute\ntrain()\n{counted}"
    assert "units 7" in notebook.run(units).text  # six layers and the model around them
    like = Session(nproc=2, backend="zero3")
    line = advised(like, units=1, gathers=40, each=1000)
    assert notebook.run(line.replace("switch", "switch zero3", 1)).status == "ok"
    assert notebook.run("%%distribute\ntrain()").status == "ok"
    kept = notebook.run("print(session.options.deepspeed_config)").text
    assert "'stage3_param_persistence_threshold': 1000000" in kept
    assert notebook.run("%nbdist doctor --run").status == "ok"
    assert "was not profiled" in notebook.run("%nbdist doctor --run --json").text
    notebook.run("%nbdist stop")
