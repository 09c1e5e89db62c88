"""Cells on real ranks through the Python API."""

from __future__ import annotations

import importlib
import os
import signal

import pytest

from nbdist import CellError, CellInterrupted, OptionError, Session, SessionError
from tests.conftest import eventually


def test_values_by_rank(session: Session) -> None:
    result = session.run("(rank, world_size, local_rank)")
    assert result.ok
    assert result.values == {0: (0, 2, 0), 1: (1, 2, 1)}


def test_names_from_the_start(session: Session) -> None:
    code = (
        "(accelerator.num_processes, str(device), callable(report), callable(send), torch.__name__)"
    )
    assert session.run(code).values[1] == (2, "cpu", True, True, "torch")


def test_variables_live_between_cells(session: Session) -> None:
    session.run("kept = rank * 10")
    assert session.run("kept").values == {0: 0, 1: 10}


def test_a_script_parses_its_defaults_and_what_the_cell_sets(session: Session) -> None:
    session.run(
        "import argparse, sys\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--lr', type=float, default=0.5)"
    )
    assert session.run("parser.parse_args().lr").values == {0: 0.5, 1: 0.5}
    session.run("sys.argv[1:] = ['--lr', '0.1']")
    assert session.run("parser.parse_args().lr").values == {0: 0.1, 1: 0.1}
    session.run("del sys.argv[1:]")


def test_ranks_are_one_group(session: Session) -> None:
    code = (
        "import torch.distributed as dist\nt = torch.ones(1) * (rank + 1)\n"
        "dist.all_reduce(t)\nt.item()"
    )
    assert session.run(code).values == {0: 3.0, 1: 3.0}


def test_subset_of_ranks(session: Session) -> None:
    session.run("where = 'all'")
    session.run("where = 'one'", ranks="1")
    assert session.run("where").values == {0: "all", 1: "one"}


def test_magics_shell_and_await(session: Session) -> None:
    session.run("%env NBDIST_TEST=seen")
    assert session.run("import os\nos.environ['NBDIST_TEST']").values[0] == "seen"
    assert session.run("out = !echo from the shell\nout[0]").values[1] == "from the shell"
    assert session.run("import asyncio\nawait asyncio.sleep(0)\nrank").values == {0: 0, 1: 1}


def test_a_plain_loop_that_trains_each_rank_by_itself_is_noted_once(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.run(
        "def train(model, steps=3):\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    for _ in range(steps):\n"
        "        model(torch.ones(1, 2)).sum().backward()\n"
        "        optimizer.step()\n"
    )
    together = "train(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1)))"
    session.run(together)
    session.run("train(torch.nn.Linear(2, 1))", ranks="0")
    assert "nbdist: each rank trains" not in capsys.readouterr().err
    session.run("train(torch.nn.Linear(2, 1))")
    assert "[0-1] nbdist: each rank trains a model of its own" in capsys.readouterr().err
    session.run("train(torch.nn.Linear(2, 1))")
    assert "nbdist: each rank trains" not in capsys.readouterr().err


def test_equal_output_is_shown_once(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    session.run("print('same')\nprint('mine', rank)")
    assert capsys.readouterr().out.splitlines() == ["[0-1] same", "[0] mine 0", "[1] mine 1"]


def test_output_of_one_rank(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    session.run("print('rank', rank)", output="0")
    assert capsys.readouterr().out == "rank 0\n"
    session.run("print('rank', rank)", output="none")
    assert capsys.readouterr().out == ""


def test_a_warning_of_all_ranks_is_shown_once(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.run("import warnings\nwarnings.warn('old')")
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("[0-1] ")
    assert first.endswith(":2: UserWarning: old")


@pytest.mark.fault("D6")
def test_syntax_error_is_raised_here(session: Session) -> None:
    with pytest.raises(SyntaxError):
        session.run("x = = 1")


@pytest.mark.parametrize("code", ["", "  \n", "# only words\n"])
@pytest.mark.fault("D6")
def test_empty_cell(session: Session, code: str) -> None:
    with pytest.raises(OptionError, match="empty"):
        session.run(code)


@pytest.mark.fault("D7")
def test_rank_outside_the_session(session: Session) -> None:
    with pytest.raises(OptionError, match="world_size 2"):
        session.run("1", ranks="0,5")


def test_report_streams_rows(session: Session) -> None:
    session.run("for step in range(5):\n    report(loss=torch.tensor(float(rank + step)), lr=0.1)")
    assert session.metrics["loss"] == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert session.metrics.by_rank("loss")[1] == [1.0, 2.0, 3.0, 4.0, 5.0]
    session.run("report(step=9, loss=float('nan'))")
    assert session.metrics["loss"][-1] != session.metrics["loss"][-1]


def test_push_and_pull(session: Session) -> None:
    import torch

    weights = {"w": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "names": ["a", ("b", 1)]}
    session.push(state=weights, scale=2.5)
    session.run("state['w'] += rank\nback = {'w': state['w'] * scale, 'n': state['names']}")
    back = session.pull("back", rank=1)
    assert back["w"].dtype == torch.bfloat16
    assert torch.equal(back["w"], (weights["w"] + 1) * 2.5)
    assert back["n"] == ["a", ("b", 1)]
    assert session.pull("rank", "scale", rank=0) == [0, 2.5]
    assert torch.equal(weights["w"], torch.arange(6, dtype=torch.bfloat16).reshape(2, 3))


def test_stop_in_the_import_of_torch_cuts_nothing_in_two(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, whole = importlib.import_module, []

    def stopped(name: str, package: str | None = None) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        whole.append(original(name, package))
        return whole[-1]

    session.run("ones = torch.ones(3)")
    monkeypatch.setattr("nbdist.protocol.serialization.reader.importlib.import_module", stopped)
    with pytest.raises(CellInterrupted, match="The pull was interrupted; no variable was changed"):
        session.pull("ones")
    assert [one.__name__ for one in whole] == ["torch"]
    monkeypatch.undo()
    assert session.pull("ones").tolist() == [1.0, 1.0, 1.0]


def test_send_arrives_while_the_cell_runs(session: Session) -> None:
    session.sent_values.clear()
    result = session.run(
        "if rank == 0: send('early', {'x': 1})\nimport time\nwhile True: time.sleep(0.01)",
        background=True,
    )
    eventually(lambda: "early" in session.sent_values, within_s=10)
    assert session.sent_values["early"] == {"x": 1}
    assert not result.done
    session.interrupt()
    with pytest.raises(CellError):
        result.wait(30)


@pytest.mark.parametrize("value", [lambda: 0, object(), open])
@pytest.mark.fault("D9")
def test_what_cannot_be_pushed(session: Session, value: object) -> None:
    from nbdist import PayloadError

    with pytest.raises(PayloadError, match="value"):
        session.push(value=value)
    assert session.run("rank").ok


@pytest.mark.fault("D9")
def test_what_cannot_be_pulled(session: Session) -> None:
    from nbdist import PayloadError

    with pytest.raises(PayloadError, match="nowhere"):
        session.pull("nowhere")
    session.run("f = lambda: 0")
    with pytest.raises(PayloadError, match="function"):
        session.pull("f")


@pytest.mark.fault("D5")
def test_output_after_the_end_is_labelled(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.run("import threading\nthreading.Timer(0.3, lambda: print('late', rank)).start()")
    seen = ""

    def both() -> bool:
        nonlocal seen
        seen += capsys.readouterr().out
        return "[0] late 0" in seen and "[1] late 1" in seen

    eventually(both, within_s=10)


def test_a_stopped_session_says_so() -> None:
    with Session(nproc=1) as session:
        session.run("1")
    with pytest.raises(SessionError, match="start"):
        session.run("1")


def test_send_without_room_in_shared_memory(session: Session) -> None:
    session.run("if rank == 0: send.__closure__[0].cell_contents.pop(0); send('spared', [1, 2])")
    assert session.sent_values["spared"] == [1, 2]


def test_threads_are_the_users_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with Session(nproc=1) as session:
        assert session.run("torch.get_num_threads()").values == {0: 3}
