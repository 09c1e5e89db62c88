from __future__ import annotations

from pathlib import Path

import pytest

import nbdist
from nbdist.output import tracebacks
from nbdist.output.tracebacks import (
    format_tracebacks,
    group_errors,
    summarize_errors,
)
from nbdist.protocol.messages import RankError

RULE = "\x1b[31m" + "-" * 75 + "\x1b[39m"
PEER_CLOSED = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed"
    " by peer [127.0.0.1]:13000. This is typically caused by a remote worker crashing. Check the"
    " logs of the remote worker before reporting an error. GLHF!"
)


def error(
    rank: int,
    ename: str = "ValueError",
    evalue: str = "bad batch",
    *,
    at: float = 10.0,
    frames: tuple[str, ...] = (
        "\x1b[36mCell\x1b[39m \x1b[32mIn[2], line 3\x1b[39m\n----> 3 f(x)\n",
    ),
) -> RankError:
    """An error as ipykernel 7.4 sends it."""
    head = f"\x1b[31m{ename}\x1b[39m              Traceback (most recent call last)"
    last = f"\x1b[31m{ename}\x1b[39m: {evalue}"
    return RankError(rank, ename, evalue, [RULE, head, *frames, last], at)


def text(errors: list[RankError], ranks: range = range(0)) -> str:
    lines = format_tracebacks(group_errors(errors), ranks=ranks)
    return tracebacks.strip_ansi("\n".join(lines))


def test_equal_errors_are_one_group() -> None:
    groups = group_errors([error(rank, at=10 + rank) for rank in (3, 1, 0, 2)])
    assert [group.ranks for group in groups] == [(0, 1, 2, 3)]
    assert summarize_errors(groups) == "ValueError: bad batch (ranks 0-3)"
    assert text([error(rank) for rank in range(4)]).count("Traceback") == 1


def test_one_error_of_several_ranks_tells_who_finished() -> None:
    shown = text([error(1)], range(3))
    assert shown.startswith("rank 1 (ranks 0,2 finished):\n---")
    assert shown.endswith("ValueError: bad batch")


def test_a_reminder_of_a_shown_traceback_names_the_line() -> None:
    groups = group_errors([error(1)])
    expected = ["ValueError: bad batch (rank 1) in Cell In[2], line 3: shown above"]
    assert tracebacks.format_reminder(groups) == expected


def test_addresses_pids_temp_names_and_colours_do_not_tell_errors_apart() -> None:
    one = error(0, evalue="<A at 0x7f01> in pid 12, /tmp/nbdist-0-ab/x")
    two = error(1, evalue="<A at 0x7f02> in pid 3456, /tmp/nbdist-1-cd/x")
    bare = RankError(
        2, two.ename, two.evalue, [tracebacks.strip_ansi(i) for i in two.traceback], 11.0
    )
    assert [group.ranks for group in group_errors([one, two, bare])] == [(0, 1, 2)]


def test_different_errors_are_apart_earliest_first() -> None:
    shown = text([error(0, "KeyError", "'k'", at=11), error(1, at=10)])
    assert shown.index("rank 1:") < shown.index("bad batch") < shown.index("rank 0:")
    assert "KeyError: 'k'" in shown
    assert summarize_errors(
        group_errors([error(0, "KeyError", "'k'", at=11), error(1, at=10)])
    ) == ("ValueError: bad batch (rank 1); KeyError (rank 0)")


def test_another_message_from_the_same_place_is_one_line() -> None:
    shown = text([error(rank, evalue=f"bad batch {rank}") for rank in range(3)])
    assert shown.count("Traceback") == 1
    assert "rank 2, at the same place as rank 0: ValueError: bad batch 2" in shown


def test_a_lost_connection_is_folded_below_its_cause_even_if_earlier() -> None:
    lost = error(0, "RuntimeError", PEER_CLOSED, at=5)
    shown = text([lost, error(1, at=10)], range(3))
    assert shown.startswith("rank 1 (rank 2 finished):")
    assert shown.count("Traceback") == 1
    assert "\nrank 0 then lost its connection to rank 1: RuntimeError: [/__w" in shown
    assert summarize_errors(group_errors([lost, error(1)])) == "ValueError: bad batch (rank 1)"


def test_without_a_cause_the_earliest_secondary_error_is_shown_in_full() -> None:
    late = error(1, "RuntimeError", PEER_CLOSED, at=12)
    timeout = "[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv"
    first = error(0, "RuntimeError", f"{timeout} operation to complete", at=11)
    shown = text([late, first])
    assert shown.startswith("rank 0:\n---")
    assert shown.count("Traceback") == 1


def test_a_wrapped_lost_connection_is_secondary() -> None:
    inner = f"\x1b[31mRuntimeError\x1b[39m: {PEER_CLOSED}"
    link = "\nThe above exception was the direct cause of the following exception:\n"
    wrapped = error(0, "TrainingError", "step failed", at=5, frames=(inner, link))
    assert group_errors([wrapped, error(1)])[0].ranks == (1,)


@pytest.mark.parametrize(
    ("ename", "evalue"),
    [
        ("RuntimeError", PEER_CLOSED),
        ("RuntimeError", "Application timeout caused pair closure"),
        (
            "RuntimeError",
            (
                "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error"
                " [127.0.0.1]:9649: Connection reset by peer. This is typically caused by"
            ),
        ),
        (
            "RuntimeError",
            (
                "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78]"
                " Timed out waiting 4000ms for recv operation to complete"
            ),
        ),
        (
            "RuntimeError",
            "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms\n Original exception:",
        ),
        (
            "DistNetworkError",
            (
                "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server"
                " shutdown or crash?"
            ),
        ),
        ("DistNetworkError", "Broken pipe"),
        (
            "DistBackendError",
            (
                "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, remote"
                " process exited or there was a network error, NCCL version 2.26.2"
            ),
        ),
        ("DistBackendError", "NCCL communicator was aborted on rank 12."),
    ],
)
def test_texts_of_torch_that_only_say_a_peer_is_gone(ename: str, evalue: str) -> None:
    assert group_errors([error(0, ename, evalue)])[0].kind == "secondary"


@pytest.mark.parametrize(
    ("ename", "evalue"),
    [
        ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
        ("OutOfMemoryError", "CUDA out of memory."),
        ("RuntimeError", "Detected mismatch between collectives on ranks."),
        ("BrokenPipeError", "[Errno 32] Broken pipe"),
    ],
)
def test_errors_of_the_users_own_are_causes(ename: str, evalue: str) -> None:
    assert group_errors([error(0, ename, evalue)])[0].kind == "cause"


def test_pythons_connection_errors_inside_torch_are_secondary() -> None:
    frame = "File ~/x/site-packages/torch/distributed/distributed_c10d.py:9, in f()\n"
    lost = error(0, "ConnectionResetError", "[Errno 104]", frames=(frame,))
    assert group_errors([lost])[0].kind == "secondary"


def test_an_interrupted_rank_is_not_a_cause() -> None:
    stopped = error(0, "KeyboardInterrupt", "", at=1)
    shown = text([stopped, error(1)])
    assert shown.startswith("rank 1:")
    assert shown.endswith("\nrank 0 was interrupted")
    assert summarize_errors(group_errors([stopped])) == "KeyboardInterrupt (rank 0)"


def test_frames_of_nbdist_and_ipykernel_never_show() -> None:
    own = Path(nbdist.__file__).parent / "rank" / "accelerator.py"
    frames = (
        "Cell In[2], line 3\n",
        f"\x1b[36mFile \x1b[39m\x1b[32m{own}:12\x1b[39m, in \x1b[36mprepare\x1b[39m()\n",
        "File ~/env/lib/python3.11/site-packages/ipykernel/ipkernel.py:4, in f()\n",
        "File ~/home/nbdist/mine.py:4, in f()\n",
    )
    shown = text([error(0, frames=frames)])
    assert "accelerator.py" not in shown
    assert "ipykernel" not in shown
    assert "mine.py" in shown
    assert "In[2]" in shown


def test_a_syntax_error_and_an_empty_traceback_are_shown() -> None:
    syntax = RankError(0, "SyntaxError", "invalid syntax", ["  Cell In[3], line 1\n    1+\n"], 1)
    assert "Cell In[3], line 1" in text([syntax])
    assert text([RankError(0, "SystemExit", "1", [], 1.0)]) == "rank 0:"
