"""The pictures of the documentation are as new as what they show; `make pictures` takes them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.browser import pictures

DOCS = [pictures.ROOT / "README.md", *(pictures.ROOT / "docs").glob("*.md")]
MAX_BYTES = 1_000_000


@pytest.mark.nightly
@pytest.mark.parametrize("picture", pictures.SOURCES)
def test_picture_is_not_older_than_what_it_shows(picture: str) -> None:
    recorded = json.loads(pictures.RECORD.read_text())
    assert recorded.get(picture) == pictures.digest(picture), f"run `make pictures` for {picture}"


def test_each_picture_is_small_used_and_made_by_a_command() -> None:
    shown = {name for path in DOCS for name in re.findall(r"images/([\w.-]+)", path.read_text())}
    there = {path.name for path in pictures.IMAGES.iterdir() if path != pictures.RECORD}
    assert shown == there == set(pictures.SOURCES)
    assert all((pictures.IMAGES / name).stat().st_size < MAX_BYTES for name in there)


def test_links_between_documents_lead_somewhere() -> None:
    missing = [
        f"{path.name}: {link}"
        for path in DOCS
        for link in re.findall(
            r"\]\(([^)#\s]+)", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        )
        if not link.startswith(("http:", "https:", "mailto:"))
        and not Path(path.parent, link).exists()
    ]
    assert missing == []
