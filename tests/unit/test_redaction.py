from __future__ import annotations

import pytest

from nbdist.redaction import is_secret, redact_secrets

pytestmark = pytest.mark.fault("S18")
ENVIRON = {
    "HF_TOKEN": "hf_abcdefgh",
    "WANDB_API_KEY": "0123456789",
    "DB_PASSWORD": "hunter22",
    "LONGER_SECRET": "hf_abcdefgh-and-more",
    "TOKENIZERS_PARALLELISM": "false----",
    "SHORT_KEY": "1",
    "HOME": "/home/me-and-you",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)


def test_values_are_replaced_by_their_names() -> None:
    text = "Bearer hf_abcdefgh, 0123456789\nhunter22 at /home/me-and-you, false----, 1"
    expected = "Bearer <HF_TOKEN>, <WANDB_API_KEY>\n<DB_PASSWORD> at /home/me-and-you, false----, 1"
    assert redact_secrets(text) == expected


def test_a_value_within_another_does_not_leave_its_rest() -> None:
    assert redact_secrets("hf_abcdefgh-and-more") == "<LONGER_SECRET>"


def test_an_assignment_that_a_rank_printed_is_known_by_its_name() -> None:
    assert redact_secrets("OTHER_TOKEN=xyz PATH=/bin") == "OTHER_TOKEN=<redacted> PATH=/bin"
    others = "max_new_tokens=5 key=3 num_KEYS=4"
    assert redact_secrets(others) == others


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "api_key", "X_AUTH"]
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "MONKEY", "KEYBOARD", "PASSES"])
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name)
