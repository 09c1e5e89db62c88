"""How a profile reads: text for a terminal, HTML for a notebook, plain fields for programs."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest

from nbdist.display import STEP_COLORS, html_bar
from nbdist.profiler.lint import LintFinding
from nbdist.profiler.measurements import STEP_PARTS, LineProfile, PeakMemory, RankProfile
from nbdist.profiler.profile import shown_ranks
from tests.unit.profile_figures import both, profile, rank, setting

MIB = 1 << 20
EVIL = "<script>alert(1)</script>"


pytestmark = pytest.mark.usefixtures("own_cache")


def full() -> list[RankProfile]:
    """Two ranks with everything that a profile can show."""
    line = LineProfile(cell="In[3]", line=12, source=f"x = {EVIL}", seconds=0.04, bytes=3 * MIB)
    memory = PeakMemory(
        parts={"parameters": 4 * MIB, "optimizer": 8 * MIB, "activations": 2 * MIB},
        lines=[line],
        device_bytes=700 * MIB,
        snapshot="/runs/snapshot.pickle",
    )
    return [
        replace(one, lines=[line], memory=memory, trace=f"/runs/rank{one.rank}.json", notes=[EVIL])
        for one in both(python=0.045, data=0.1)
    ]


def test_the_verdict_is_the_first_line_and_advice_follows() -> None:
    found = profile(*full())
    lines = str(found).splitlines()
    assert lines[0] == found.verdict
    assert lines[1].startswith("  1. ")
    assert lines[2].strip() == found.advice[0].line
    assert repr(found) == str(found)


def test_the_tables_say_shares_and_times_of_each_rank() -> None:
    shown = str(profile(*full()))
    assert re.search(r"part of a step +rank 0 +rank 1", shown)
    assert re.search(r"data +40 % +100 ms +40 % +100 ms", shown)
    assert re.search(r"all_reduce +1 +4.0 MiB +500 MiB/s", shown)
    assert re.search(r"In\[3\], line 12 +40 ms", shown)
    assert re.search(r"all tensors +14 MiB +\d", shown)
    assert re.search(r"resident memory +700 MiB", shown)
    assert "/runs/rank0.json, /runs/rank1.json" in shown
    assert "8 steps of 253 ms (p50 253 ms, p90 253 ms); 4,047 tokens/s; 2 x CPU rank, ddp" in shown


def test_the_html_has_no_script_and_escapes_what_is_the_user_s() -> None:
    shown = profile(*full())._repr_html_()
    assert not re.search(r"<(script|style|svg|img|iframe|button)\b| on\w+=", shown)
    assert "&lt;script&gt;" in shown


def test_each_rank_has_a_bar_that_says_its_parts_in_words() -> None:
    shown = profile(*full())._repr_html_()
    labels = re.findall(r"role='img' aria-label='([^']*)'", shown)
    assert [label.split(":")[0] for label in labels] == ["rank 0", "rank 1"]
    assert "data 40 %" in labels[0]
    assert ">data</div>" in shown


def test_the_pieces_of_a_bar_have_room_next_to_each_other() -> None:
    pieces = [(part, 1.0, "") for part in list(STEP_COLORS)[:6]]  # 16.67 % each are too many
    widths = re.findall(r"width:([\d.]+)%;background:#", html_bar(pieces, STEP_COLORS, 6, label=""))
    assert 99.9 <= sum(map(float, widths)) <= 100


def test_of_many_ranks_some_are_shown_the_straggler_among_them() -> None:
    ranks = [rank(number, communication=0.038) for number in range(30)]
    ranks[20] = rank(20, backward=0.09)
    found = profile(*ranks)
    assert found.straggler == 20
    assert [one.rank for one in shown_ranks(found)] == [0, 1, 2, 3, 4, 5, 6, 20]
    assert "and 22 more ranks: profile.ranks" in str(found)
    assert "rank 20 (slowest)" in found._repr_html_()


def test_what_the_text_of_the_cell_tells_is_shown_once() -> None:
    remark = LintFinding(
        kind="train_mode",
        cell="In[3]",
        line=1,
        source="for batch in loader:",
        reason="The model is in evaluation mode.",
        change="model.train()",
        sure="certain",
    )
    workers = replace(remark, kind="num_workers", change="num_workers=4")
    shown = str(profile(*both(data=0.2), remarks=[remark, workers]))
    assert (
        "In[3], line 1 (certain): The model is in evaluation mode. Instead: model.train()" in shown
    )
    assert shown.count("num_workers=4, persistent_workers=True") == 1
    assert "(certain): The model is in evaluation mode. Instead: num_workers=4" not in shown


def test_a_gpu_says_its_mfu_and_the_peak_that_it_is_of() -> None:
    model = {"seq_len": 2048, "samples": 2, "precision": "bf16"}
    ranks = both(kind="cuda", forward=3.0, backward=6.0, model=model)
    where = setting("2xH100-80GB,nvlink", precision="bf16")
    found = profile(
        *[replace(one, model=replace(one.model, precision="bf16")) for one in ranks if one.model],
        where=where,
    )
    assert found.mfu is not None
    assert found.model_flops == pytest.approx(6 * 6.7e9 * 2 * 2048, rel=0.15)
    assert f"MFU {100 * found.mfu:.0f} % of 989T FLOP/s (bf16)" in str(found)
    assert profile(*both()).mfu is None


def test_a_profile_is_plain_json() -> None:
    found = profile(*full())
    plain = json.loads(json.dumps(found.to_json()))
    assert plain["verdict"] == found.verdict
    assert plain["advice"][0]["line"] == found.advice[0].line
    again = [RankProfile.from_json(one) for one in plain["ranks"]]
    assert [one.parts for one in again] == [one.parts for one in found.ranks]


@pytest.mark.parametrize("seed", range(60))
def test_odd_figures_are_shown_and_never_raise(seed: int) -> None:
    luck = random.Random(seed)  # noqa: S311 - no secret

    def odd(number: int) -> RankProfile:
        one = rank(number, steps=luck.randint(1, 4))
        for part in STEP_PARTS:
            one.parts[part] = luck.choice((0.0, 0.0, 1e-9, 0.1, 50.0))
        one.ends = luck.choice((one.ends, one.ends[:1], [1.0, 1.0], [0.0, 5.0]))
        one.begins = luck.choice((one.begins, {}, {"0": []}, {"1": [[0.0, 0.0]]}))
        one.traffic = luck.choice((one.traffic, []))
        one.loaders = luck.choice((one.loaders, []))
        model = one.model
        if model is not None:
            odder = ({"samples": 0}, {"seq_len": 0}, {"accumulate": 0}, {"params": 0, "units": 1})
            one.model = luck.choice((None, model, replace(model, **luck.choice(odder))))
        one.hidden_s = luck.choice((0.0, 3.0))
        return one

    before = profile(*(odd(number) for number in range(3)))
    found = profile(*(odd(number) for number in range(luck.randint(1, 4))), before=before)
    assert str(found).startswith(found.verdict)
    assert found._repr_html_()
    json.dumps(found.to_json())
