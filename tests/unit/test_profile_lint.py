"""Remarks on the text of a cell: all that was planted, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nbdist.profiler.lint import lint_cell, read_training_cell
from nbdist.profiler.measurements import DataLoaderStats, LineProfile, RankProfile
from tests.unit import profile_figures
from tests.unit.training_loops import BAD, GOOD, LOOP, MAKE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.profiler.lint import LintFinding

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def named(sources: tuple[str, ...] | list[str]) -> list[tuple[str, str]]:
    return [(f"In[{number}]", source) for number, source in enumerate(sources, start=1)]


def kinds(found: list[LintFinding]) -> list[str]:
    return sorted(one.kind for one in found)


def rank(
    number: int = 0,
    *,
    kind: Literal["cuda", "cpu"] = "cuda",
    loaders: Sequence[DataLoaderStats] = (),
    lines: Sequence[LineProfile] = (),
    training: bool = True,
    precision: str = "no",
    **parts: float,
) -> RankProfile:
    """Figures of a rank with steps of a second."""
    figures = profile_figures.rank(
        number, kind=kind, model={"training": training, "precision": precision}
    )
    parts["forward"] = 1 - sum(parts.values())
    return replace(
        figures, ends=[0.0, 1.0, 2.0], parts=parts, loaders=list(loaders), lines=list(lines)
    )


def loader(
    *, num_workers: int = 0, pin_memory: bool = False, sharded: bool = True
) -> DataLoaderStats:
    return DataLoaderStats(
        num_workers=num_workers,
        pin_memory=pin_memory,
        batch_size=4,
        sharded=sharded,
        batches=1,
        fetch_s=0.2,
    )


def judged(
    cells: list[str] | tuple[str, ...], *figures: RankProfile, bf16: bool = True
) -> list[LintFinding]:
    return lint_cell(read_training_cell(named(cells)), figures, bf16=bf16)


# -- both corpora


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("name", GOOD)
def test_a_good_loop_gets_no_remark(name: str, kind: str, *, sharded: bool) -> None:
    figures = [rank(one, kind=kind, loaders=[loader(sharded=sharded)], idle=0.2) for one in (0, 1)]
    assert judged(GOOD[name], *figures) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebooks_of_this_repository_get_no_remark(path: Path) -> None:
    cells = [one for one in json.loads(path.read_text())["cells"] if one["cell_type"] == "code"]
    sources = ["".join(one["source"]) for one in cells]
    for number in range(len(sources)):
        assert judged(sources[: number + 1], rank(idle=0.2), rank(1, idle=0.2)) == []


@pytest.mark.parametrize("name", BAD)
def test_what_was_planted_is_found_and_nothing_else(name: str) -> None:
    cells, planted = BAD[name]
    (kind,) = {kind for kind, _ in planted}
    figures = [
        rank(
            one,
            loaders=[loader(sharded=kind != "sharding")],
            training=kind != "train_mode",
            precision="fp16" if kind == "fp16" else "no",
            idle=0.2,
        )
        for one in range(2)
    ]
    found = judged(cells, *figures)
    lines = {number: source.split("\n") for number, source in enumerate(cells, start=1)}
    for one in found:
        number = int(one.cell.removeprefix("In[").removesuffix("]"))
        assert one.source == lines[number][one.line - 1].strip()
        assert one.reason
        assert one.change
    assert sorted((one.kind, one.source) for one in found) == sorted(planted)


# -- what a profile says to it

LOADER = GOOD["with a loader"]
ITEM = BAD["item in each step"][0]
HALF = BAD["fp16 in the line of the magic"][0]
WHOLE = BAD["a loader that is not prepared"][0]
MODE = BAD["evaluated, and not made to train again"][0]


def test_a_loader_without_workers_is_reported_if_the_step_waits_for_data() -> None:
    (one,) = judged(LOADER, rank(loaders=[loader()], data=0.4), rank(1, loaders=[loader()]))
    assert (one.kind, one.sure, one.seconds) == ("num_workers", "certain", 0.4)
    assert "Waiting for batches takes 40% of the step (400 ms)" in one.reason
    assert "num_workers=4" in one.change


@pytest.mark.parametrize(
    "own",
    [
        "own = accelerator.prepare(DataLoader(rest))\n" + LOOP.replace("loader", "own"),
        "own = DataLoader(rest)\nown = accelerator.prepare(own)\n" + LOOP.replace("loader", "own"),
        "a, own = accelerator.prepare(b, DataLoader(rest))\n" + LOOP.replace("loader", "own"),
        "own = accelerator.prepare(DataLoader(rest))\nround = iter(own)\nwhile True:\n"
        "    batch = next(round)\n" + "\n".join(LOOP.splitlines()[1:]),
        LOOP.replace("loader", "accelerator.prepare(DataLoader(rest))"),
    ],
)
def test_another_loader_of_the_notebook_is_not_meant(own: str) -> None:
    (one,) = judged([MAKE + LOOP, own], rank(loaders=[loader()], data=0.4))
    assert one.cell == "In[2]"
    assert "rest" in one.source


@pytest.mark.parametrize("made", ["range(9)", "torch.randn(100, 4)"])
def test_a_loop_without_a_loader_gets_no_finding_about_it(made: str) -> None:
    assert judged([MAKE + LOOP, LOOP.replace("loader", made)], rank(data=0.4)) == []


def test_a_loader_that_a_function_gives_back_is_the_one_that_there_is() -> None:
    build = "def build():\n    data = DataLoader(rows)\n    return accelerator.prepare(net, data)\n"
    cells = [build, "net, mine = build()\n" + LOOP.replace("loader", "mine")]
    (one,) = judged(cells, rank(loaders=[loader()], data=0.4))
    assert one.source == "data = DataLoader(rows)"


def test_a_loader_with_workers_at_run_time_is_not_reported() -> None:
    assert judged(LOADER, rank(loaders=[loader(num_workers=2)], data=0.4)) == []


def test_memory_is_pinned_where_copies_take_time_on_a_gpu() -> None:
    (one,) = judged(LOADER, rank(loaders=[loader()], copies=0.1))
    assert (one.kind, one.seconds) == ("pin_memory", 0.1)
    assert judged(LOADER, rank(kind="cpu", loaders=[loader()], copies=0.1)) == []
    assert judged(LOADER, rank(loaders=[loader(pin_memory=True)], copies=0.1)) == []


def test_a_loader_that_is_hardly_waited_for_is_not_spoken_of() -> None:
    for part in ("data", "copies"):
        for kind in ("cuda", "cpu"):
            assert judged(LOADER, rank(kind=kind, loaders=[loader()], **{part: 0.09})) == []


def test_a_wait_for_the_device_costs_what_the_device_idles() -> None:
    (remark,) = judged(ITEM, rank(kind="cpu"))
    lines = [LineProfile(cell=remark.cell, line=remark.line, source=remark.source, seconds=0.7)]
    (one,) = judged(ITEM, rank(lines=lines, idle=0.2))
    assert one.seconds == 0.2
    assert "The device is idle for 20% of the step (200 ms)" in one.reason
    assert judged(ITEM, rank(lines=lines, idle=0.001)) == []


def test_a_wait_for_the_device_costs_nothing_on_cpu_ranks() -> None:
    (one,) = judged(ITEM, rank(kind="cpu", idle=0.2))
    assert one.seconds == 0
    assert "on a GPU it blocks" in one.reason
    assert "Here the line costs nothing on CPU ranks" in one.reason


def test_fp16_is_reported_if_bf16_is_available() -> None:
    (one,) = judged(HALF, rank(precision="fp16"))
    assert (one.kind, one.sure) == ("fp16", "certain")
    assert judged(HALF, rank(precision="bf16")) == []
    assert judged(HALF, rank(precision="fp16"), bf16=False) == []


def test_one_rank_needs_no_shards() -> None:
    whole, shards = loader(sharded=False), loader()
    assert judged(WHOLE, rank(loaders=[whole])) == []
    assert kinds(judged(WHOLE, rank(loaders=[whole]), rank(1))) == ["sharding"]
    assert judged(WHOLE, rank(loaders=[shards]), rank(1, loaders=[shards])) == []


def test_the_mode_of_the_model_decides_whether_train_is_missing() -> None:
    assert judged(MODE, rank(training=True)) == []
    (one,) = judged(MODE, rank(training=False))
    assert (one.kind, one.sure) == ("train_mode", "certain")


# -- any input


@pytest.mark.parametrize(
    "source",
    ["", "\n", "for", "x = (", "%%bash\nfor x in y; do step; done", "\x00", "\ud800", "(" * 5000],
)
def test_invalid_python_gets_no_finding(source: str) -> None:
    assert judged([source], rank(idle=0.2)) == []


def test_ipythons_own_lines_keep_the_numbers_of_the_others() -> None:
    source = "%%distribute -n 2\n!ls\nfiles = !ls\n%timeit x\nif x:\n    %pwd\nx?\n"
    (one,) = judged([f"{source}{MAKE}{ITEM[0].removeprefix(MAKE)}"], rank(kind="cpu"))
    assert one.line == source.count("\n") + MAKE.count("\n") + 6
    assert one.source == "losses.append(loss.item())"


TEXTS = st.text() | st.lists(st.sampled_from([*"\n\n  ():=.", *GOOD["with a loader"][0].split()]))


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXTS, max_size=3))
@example(["x = " + "-" * 3000 + "1"])
@example(["x" + ".a" * 3000])
def test_any_text_is_read_without_an_error(texts: list[str | list[str]]) -> None:
    sources = [one if isinstance(one, str) else " ".join(one) for one in texts]
    judged(sources, rank(idle=0.2))
