"""Output that nobody can read, prompts that nobody can answer, cells that go wrong: real ranks."""

from __future__ import annotations

import ctypes
import gc
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

from nbdist import CellError, Session, SessionBusy
from tests.conftest import eventually
from tests.nightly import nightly

if TYPE_CHECKING:
    from collections.abc import Iterator

MB = 1e6
DISPLAYS, LINES = 20_000, 200_000


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Two CPU ranks, which catch what is written past Python as they do outside of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST", raising=False)  # ipykernel 7.4 does not where it is set
        running = Session(nproc=2).start()
    with running:
        yield running


def peak_bytes() -> int:
    """Most memory that this process, the notebook's kernel, has ever held."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def forget_peak() -> None:
    """Let the peak begin anew at what is held now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def rest(capsys: pytest.CaptureFixture[str]) -> str:
    """What was shown since the last look."""
    shown = capsys.readouterr()
    return shown.out + shown.err


# -- D1, D2: a lot


@pytest.mark.nightly
@pytest.mark.fault("D1")
@pytest.mark.timeout(120)
def test_twenty_thousand_displays_end_with_their_cell(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    before = psutil.Process().memory_info().rss
    code = f"for i in range({DISPLAYS}): display({{'text/plain': f'd{{i}}'}}, raw=True)"
    result = session.run(f"from IPython.display import display\n{code}")
    shown = rest(capsys)
    assert "displays" in shown
    assert "not shown" in shown
    assert len(shown) < MB
    assert max(map(len, result.outputs.values())) <= 1_000
    assert psutil.Process().memory_info().rss - before < 200 * MB
    session.run("print('next')")
    assert rest(capsys) == "[0-1] next\n"  # nothing of the flood comes after its cell


@pytest.mark.nightly
@pytest.mark.fault("D1")
@pytest.mark.timeout(120)
def test_two_hundred_thousand_lines_are_counted(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    before = psutil.Process().memory_info().rss
    session.run(f"for i in range({LINES}): print('line', i, rank)")
    shown = rest(capsys)
    assert "lines" in shown
    assert "not shown" in shown
    assert all(f"[{rank}] line {LINES - 1} {rank}" in shown for rank in (0, 1))
    assert len(shown) < 2 * MB
    assert psutil.Process().memory_info().rss - before < 100 * MB


GIANT = "'x' * 200_000_000"


@pytest.mark.fault("D2")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "code",
    [f"print({GIANT})", nightly(GIANT), f"display({GIANT})", nightly(f"raise ValueError({GIANT})")],
    ids=["printed", "value", "displayed", "raised"],
)
def test_two_hundred_megabytes_are_cut(
    session: Session, capsys: pytest.CaptureFixture[str], code: str
) -> None:
    forget_peak()
    before = peak_bytes()
    text = ""
    try:
        session.run(code)
    except CellError as error:
        text = "\n".join(error._render_traceback_())
    shown = rest(capsys) + text
    assert "191 MiB" in shown
    assert len(shown) < MB
    assert peak_bytes() - before < 150 * MB


# -- D3: text that is none


@pytest.mark.fault("D3")
def test_bytes_that_are_not_text_do_no_harm(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    code = textwrap.dedent(
        r"""
        import os, sys
        if rank == 0:
            print('\ud800 surrogate'); print('nul\0nul')
            print('\x1b[31mred \x1b[2J\x1b[H wiped\x1b[0m')
            sys.stderr.write('\udfff too\n'); sys.stdout.flush()
            os.write(1, b'raw \xff\xfe out\n'); os.write(2, b'raw \xff err\n')
            for i in range(200):
                sys.stdout.write(f'\rbar {i}'); sys.stdout.flush()
            print()
        print('plain of rank', rank)
        """
    )
    session.run(code)
    seen = ""

    def all_there() -> bool:  # what was written past Python may come after the cell
        nonlocal seen
        seen += rest(capsys)
        return "raw \ufffd\ufffd out" in seen and "raw \ufffd err" in seen

    eventually(all_there, within_s=10)
    assert "[1] plain of rank 1\n" in seen
    assert "[0] \\ud800 surrogate\n" in seen
    assert "[0] nul\u2400nul\n" in seen
    assert "[0] bar 199\n" in seen
    assert "bar 100" not in seen
    assert "\x1b[2J" not in seen
    assert "\0" not in seen
    assert "rank 0" in session.log(0)


# -- D4: nobody is there to answer


@pytest.mark.fault("D4")
@pytest.mark.parametrize(
    "code",
    [
        "input('name? ')",
        "breakpoint()",
        "import pdb\npdb.set_trace()\nrank",
        "import getpass\ngetpass.getpass()",
        "%pdb on\n1 / 0",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    import pdb\n    pdb.post_mortem()",
    ],
    ids=["input", "breakpoint", "pdb", "getpass", "pdb on", "post mortem"],
)
def test_a_prompt_is_an_error_at_once(session: Session, code: str) -> None:
    begin = time.monotonic()
    with pytest.raises(CellError, match="cannot ask for input"):
        session.run(code)
    assert time.monotonic() - begin < 5
    session.run("%pdb off")
    assert session.run("rank").values == {0: 0, 1: 1}


@pytest.mark.fault("D4")
def test_code_that_reads_standard_input_gets_its_end(session: Session) -> None:
    code = "import subprocess, sys\n(sys.stdin.readline(), subprocess.run('cat').returncode)"
    assert session.run(code).values == {0: ("", 0), 1: ("", 0)}


# -- D8, D10, D11, D12


@pytest.mark.fault("D8")
def test_the_same_error_on_all_ranks_is_shown_once_and_others_apart(session: Session) -> None:
    with pytest.raises(CellError) as raised:
        session.run("raise ValueError('same on all')")
    text = "\n".join(raised.value._render_traceback_())
    assert text.count("same on all") == 2  # the line of the cell, and the message
    assert "ranks 0-1" in text
    with pytest.raises(CellError) as raised:
        session.run("raise (ValueError if rank else KeyError)(rank)")
    text = "\n".join(raised.value._render_traceback_())
    assert "rank 0" in text
    assert "rank 1" in text


@pytest.mark.fault("D12")
def test_ranks_that_finished_are_listed_beside_those_that_failed(session: Session) -> None:
    with pytest.raises(CellError) as raised:
        session.run("if rank % 2: raise ValueError('odd')\nrank")
    assert set(raised.value.errors) == {1}
    assert "rank 0 finished" in "\n".join(raised.value._render_traceback_())
    assert session.last is not None
    assert session.last.rank_states[0].value == 0


@pytest.mark.fault("D10")
def test_status_and_log_answer_while_a_cell_runs(session: Session) -> None:
    result = session.run("print('on')\nimport time\nwhile True: time.sleep(0.01)", background=True)
    begin = time.monotonic()
    assert session.status()["state"] == "running"
    assert all(rank["alive"] for rank in session.status()["ranks"])
    with pytest.raises(SessionBusy):
        session.run("1")
    with pytest.raises(SessionBusy):
        session.push(x=1)
    eventually(lambda: "on" in session.log(0), within_s=5)
    assert session.measured() == {0: None, 1: None}  # asked on the control channel
    assert time.monotonic() - begin < 5
    session.interrupt()
    with pytest.raises(CellError, match="KeyboardInterrupt"):
        result.wait(30)


@pytest.mark.nightly
@pytest.mark.fault("D11")
def test_a_notebook_without_a_front_end_runs_to_its_end(tmp_path: Path) -> None:
    cells = [
        "%load_ext nbdist",
        "%%distribute -n 2\nprint('hello')\nreport(loss=1.0)\nrank",
        "%nbdist panel",
        "%nbdist status",
        "%nbdist stop",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(
        notebook, timeout=90, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    text = "".join(output.get("text", "") for output in notebook.cells[1].outputs)
    assert "[0-1] hello" in text
    assert notebook.cells[2].outputs


# -- F3: memory of a failed cell


OUT_OF_MEMORY = textwrap.dedent(
    """
    import weakref

    def step(depth):
        held = torch.ones(25_000_000)  # 100 MB in each of three frames
        seen.append(weakref.ref(held))
        if depth:
            return step(depth - 1) + held
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    seen = []
    if rank == 1:
        step(2)
    """
)


@pytest.mark.fault("F3")
def test_tensors_of_a_cell_that_ran_out_of_memory_are_gone_before_the_next(
    session: Session,
) -> None:
    held = psutil.Process(session.status()["ranks"][1]["pid"])
    session.run("torch.ones(10).sum()")
    before = held.memory_info().rss
    with pytest.raises(CellError, match="out of memory"):
        session.run(OUT_OF_MEMORY)
    assert held.memory_info().rss - before < 50 * MB
    assert session.run("[one() is None for one in seen]").values[1] == [True] * 3
    assert session.run("torch.ones(75_000_000).sum().item()").values[1] == 75_000_000
