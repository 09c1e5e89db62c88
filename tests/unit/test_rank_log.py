from __future__ import annotations

from nbdist.output.replay import RankLogTail


def test_text_and_tail() -> None:
    log = RankLogTail()
    log.append("a\nb\n")
    log.append("c")
    assert log.text() == "a\nb\nc"
    assert log.tail(2) == "b\nc"
    assert log.tail(0) == ""
    assert RankLogTail().tail() == ""


def test_it_is_bounded_and_keeps_the_end() -> None:
    log = RankLogTail(limit=1000)
    for i in range(10_000):
        log.append(f"line {i}\n")
    log.append("x" * 5000 + "\nlast\n")
    assert len(log.text()) <= 1000
    assert log.tail(1) == "last"


def test_streams_do_not_cut_each_others_lines() -> None:
    log = RankLogTail()
    log.append("half ")
    log.append("warning\n", name="stderr")
    log.append("line\n")
    assert log.text() == "warning\nhalf line\n"
