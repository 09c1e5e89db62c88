"""The check of the front end where there is none; tests/browser has one with a page."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from nbdist.doctor.front_end import FrontEndCheck


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stands in for input()."""
    asked = Mock(return_value="")
    monkeypatch.setattr("builtins.input", asked)
    return asked


def test_a_script_gets_a_report_without_a_page() -> None:
    findings = {found.topic: found for found in FrontEndCheck().run().findings}
    assert findings["widgets"].says == "not checked: this is not a notebook"
    assert findings["widgets"].do.endswith("see 'panel' in %nbdist doctor")
    assert findings["input"].level == "ok"
    assert "ipykernel" in findings["front end"].says


def test_an_interrupt_is_part_of_the_report(user: Mock) -> None:
    user.side_effect = KeyboardInterrupt
    assert "KeyboardInterrupt reached the kernel" in str(FrontEndCheck().run())


def test_missing_input_is_part_of_the_report(user: Mock) -> None:
    user.side_effect = EOFError("no stdin")
    assert "input() is not available: no stdin" in str(FrontEndCheck().run())
