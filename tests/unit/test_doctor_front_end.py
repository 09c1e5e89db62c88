"""The check of the front end where there is none; tests/browser has one with a page."""

from __future__ import annotations

from nbdist.doctor.front_end import FrontEndCheck


def interrupted(_: str) -> str:
    raise KeyboardInterrupt


def no_input(_: str) -> str:
    raise EOFError("no stdin")


def test_a_script_gets_a_report_without_a_page() -> None:
    findings = {found.topic: found for found in FrontEndCheck(lambda _: "").run().findings}
    assert findings["widgets"].says == "not checked: this is not a notebook"
    assert findings["input"].level == "ok"
    assert "ipykernel" in findings["front end"].says


def test_an_interrupt_is_part_of_the_report() -> None:
    report = FrontEndCheck(interrupted).run()
    assert "KeyboardInterrupt reached the kernel" in str(report)


def test_missing_input_is_part_of_the_report() -> None:
    assert "input() is not available: no stdin" in str(FrontEndCheck(no_input).run())
