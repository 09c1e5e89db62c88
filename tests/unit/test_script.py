"""`%nbdist script`: which cells a script has, and what they become as Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nbdist import OptionError
from nbdist.session import cell_history
from nbdist.session.cell_history import CellHistory, CellRun, Command, RankCode
from nbdist.session.script import choose_cells, own_modules
from nbdist.session.script_source import Script, build_script

if TYPE_CHECKING:
    from pathlib import Path

TRAINING = """
import torch.nn.functional as F
from torch import nn

model = accelerator.prepare(nn.Linear(2, 1))
report(loss=F.mse_loss(model(torch.ones(1, 2)), torch.ones(1, 1)))
"""


def cell(code: str, number: int = 1, *, ranks: tuple[int, ...] = (0, 1), **fields: str) -> CellRun:
    error = fields.get("error", "")
    part = RankCode(code=code, ranks=ranks, world_size=2, error=error)
    return CellRun(cell_id=fields.get("cell_id", f"id {number}"), number=number, parts=[part])


def script(*runs: CellRun) -> Script:
    return build_script([(run, []) for run in runs], docstring="A script.")


def history(*runs: CellRun) -> CellHistory:
    found = CellHistory()
    found.runs.extend(runs)
    return found


def chosen(*runs: CellRun) -> list[str]:
    return [run.code[0].code for run, _ in choose_cells(history(*runs))[0]]


def test_a_script_reads_as_if_written_by_hand() -> None:
    assert script(cell("# %%distribute --backend fsdp\n" + TRAINING, 3)).source == (
        '"""A script."""\n\n'
        "import torch\n"
        "import torch.nn.functional as F\n"
        "from accelerate import Accelerator\n"
        "from torch import nn\n\n"
        "from runtime import report\n\n"
        "accelerator = Accelerator()\n\n"
        "# Cell 3\n"
        "model = accelerator.prepare(nn.Linear(2, 1))\n"
        "report(loss=F.mse_loss(model(torch.ones(1, 2)), torch.ones(1, 1)))\n"
    )


def test_magics_are_commented_out_and_listed() -> None:
    code = "!pip install peft\nif True:\n    %env A=1\n%time train()\nmodel?\nx = 1"
    result = script(cell(code, 4))
    assert result.left_out == [
        f"{m} of cell 4" for m in ("!pip install peft", "%env A=1", "model?")
    ]
    assert "# !pip install peft\nif True:\n    pass  # %env A=1\n" in result.source
    assert "\ntrain()\n# model?\nx = 1\n" in result.source
    assert "# Not in this script:\n# - !pip install peft of cell 4\n" in result.source


def test_a_result_of_a_command_is_to_be_set() -> None:
    result = script(cell("files = !ls \\\n  -l\nprint(files)", 4))
    assert result.to_provide == ["files = ...  (the result of !ls -l in cell 4)"]
    assert "# Cell 4\n# files = !ls -l\nprint(files)\n" in result.source


def test_the_body_of_a_timed_cell_is_kept_and_a_shell_script_is_not() -> None:
    assert "# Cell 1\ntrain()\n" in script(cell("%%time\n%%capture\ntrain()")).source
    assert "echo" not in script(cell("%%bash\necho hello"), cell("x = 1", 2)).source


def test_an_indented_cell_is_code() -> None:
    assert "# Cell 1\nx = 1\nprint(x)\n" in script(cell("    x = 1\n    print(x)")).source


def test_a_cell_of_some_ranks_becomes_a_condition() -> None:
    source = script(cell('text = """a\nb"""\nprint(text)', ranks=(0,))).source
    assert "# Runs on rank 0 only.\nif accelerator.is_main_process:\n" in source
    assert '    text = """a\nb"""\n    print(text)\n' in source
    assert "accelerator = Accelerator()\n" in source


def test_an_import_stays_where_its_place_matters() -> None:
    late = script(cell("import os\nos.environ['A'] = '1'"), cell("import torch.nn", 2)).source
    assert "os.environ['A'] = '1'\n\n# Cell 2\nimport torch.nn\n" in late
    rebound = script(cell("from time import time\nbegin = time()\ntime = 3")).source
    assert "# Cell 1\nfrom time import time\n" in rebound


def test_a_name_that_the_user_imports_is_not_the_predefined_one() -> None:
    own = script(cell("from mylib import rank, save\nsave(rank)")).source
    assert "from mylib import rank, save\n" in own
    assert "from runtime" not in own
    later = script(cell("report(loss=1)"), cell("from mylib import report\nreport(2)", 2)).source
    assert "from runtime import report\n" in later
    assert "# Cell 2\nfrom mylib import report\nreport(2)\n" in later
    builtin = script(cell("print(max([1, 2]))"), cell("from torch import max", 2)).source
    assert "# Cell 2\nfrom torch import max\n" in builtin


def test_commands_do_not_call_functions_of_the_user() -> None:
    run = cell("def save(path): print(path)")
    run.parts.append(Command(kind="save", name="größe"))
    source = script(run).source
    assert "import runtime as nbdist_runtime\n" in source
    assert 'nbdist_runtime.save("größe")  # %nbdist save\n' in source


def test_modules_beside_the_notebook_are_to_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mylib.py").touch()
    (tmp_path / "torch").mkdir()  # of the user, without Python code
    assert own_modules(script(cell("import mylib, torch"))) == ["mylib.py"]


def test_get_ipython_is_imported() -> None:
    source = script(cell("in_notebook = get_ipython() is not None")).source
    assert "from IPython import get_ipython\n" in source


def test_a_displayed_value_is_printed() -> None:
    assert "print(world_size)" in script(cell("world_size")).source
    assert "print" not in script(cell("train()"), cell("world_size;", 2)).source


def test_pushed_values_are_written_or_named() -> None:
    run = cell("print(base, tokens)", 5)
    run.parts.insert(0, Command(kind="push", name="base", text='"/data"', is_literal=True))
    run.parts.insert(0, Command(kind="push", name="tokens", text="ndarray"))
    source = script(run).source
    assert 'base = "/data"  # pushed from the notebook\nprint(base, tokens)' in source
    assert "# - tokens = ...  (ndarray, used from cell 5)\n" in source


def test_an_accelerator_of_the_user_is_the_only_one() -> None:
    own = "from accelerate import Accelerator\naccelerator = Accelerator()\naccelerator.print(1)"
    assert script(cell(own)).source.count("accelerator = Accelerator()") == 1
    options = {"gradient_accumulation_steps=4": ()}
    result = build_script([(cell(own), [])], docstring="A script.", arguments=options)
    assert result.to_provide == ["Accelerator(gradient_accumulation_steps=4), as in the session"]


def test_await_outside_of_a_function_runs_in_asyncio() -> None:
    assert script(cell("import mylib\nx = await mylib.work()", 7)).source.endswith(
        "import asyncio\n\nimport mylib\n\n"
        "import runtime  # noqa: F401 - applies accelerate.yaml\n\n"
        "# Cell 7\n"
        "async def cell_7():\n"
        "    global x\n"
        "    x = await mylib.work()\n"
        "asyncio.run(cell_7())\n"
    )
    star = script(cell("from math import *\nx = await work(pi)")).source
    assert "from math import *\nasync def cell_1():\n" in star


def test_only_newlines_end_a_line() -> None:
    assert '# Cell 1\nx = "a\u2028b"  # c\x0cd\n' in script(cell('x = "a\u2028b"  # c\x0cd')).source


def test_the_last_run_of_a_cell_counts_at_the_place_of_the_first() -> None:
    runs = [cell("lr = 1", 1, cell_id="a"), cell("train()", 2, cell_id="b")]
    assert chosen(*runs, cell("lr = 2", 3, cell_id="a")) == ["lr = 2", "train()"]
    failed = cell("lr = wrong", 4, cell_id="a", error="NameError")
    assert chosen(*runs, failed) == ["lr = 1", "train()"]
    (_, notes), _ = choose_cells(history(*runs, failed))[0]
    assert notes == ["Its last run failed with NameError; this code ran before."]


def test_failed_and_deleted_cells_are_left_out_and_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cell_history, "deleted_cells", {"gone"})
    runs = [cell("x = 1", 1), cell("y = 2", 2, cell_id="gone"), cell("z", 3, error="NameError")]
    assert choose_cells(history(*runs))[1] == [
        "cell 2, which was deleted from the notebook",
        "cell 3, which failed with NameError",
    ]


def test_an_interrupted_cell_is_kept_with_a_comment() -> None:
    run = cell("while True: step()")
    run.code[0].was_interrupted = True
    assert choose_cells(history(run))[0] == [(run, [])]
    comment = "# Was interrupted in the notebook; here it runs to its end."
    assert f"{comment}\nwhile True" in script(run).source


def test_cells_are_chosen_by_number_or_tag() -> None:
    ran = history(*(cell(f"x = {number}", number) for number in (2, 4, 7)))
    ran.runs[1].tags = ("train",)
    assert [run.number for run, _ in choose_cells(ran, "7,2-5")[0]] == [7, 2, 4]
    assert [run.number for run, _ in choose_cells(ran, "4-999999999999")[0]] == [4, 7]
    assert [run.number for run, _ in choose_cells(ran, [4])[0]] == [4]
    assert [run.number for run, _ in choose_cells(ran, tag="train")[0]] == [4]


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ("9", r"^The code of cell 9 is not available: it did not run on these ranks"),
        ("a", r"^--cells takes numbers of cells such as 3,5-7, got 'a'"),
        ("9-3", r"^--cells takes numbers of cells such as 3,5-7, got '9-3'"),
    ],
)
def test_wrong_numbers_of_cells_are_refused(cells: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        choose_cells(history(cell("x = 1")), cells)


def test_without_cells_there_is_nothing_to_write() -> None:
    with pytest.raises(OptionError, match=r"^No %%distribute cell ran since"):
        choose_cells(CellHistory())


def test_text_that_is_not_kept_is_named() -> None:
    ran = history(cell("x = 1"))
    ran.num_dropped = 3
    with pytest.raises(OptionError, match=r"^The code of the first 3 cells .* --cells"):
        choose_cells(ran)
