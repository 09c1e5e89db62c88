"""What ranks tell one another: plain values come out, and nothing is called."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from nbdist.state import collectives
from nbdist.state.shards import ShapeAndDtype
from nbdist.strategies import Options


def packed(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@pytest.mark.parametrize(
    "value",
    [
        *(None, 3, 2.5, "x", b"x", (1, [2, {"a": {3}}]), frozenset({1}), 1j, 2**70),
        *(
            Path("/x"),
            torch.bfloat16,
            torch.Size([2, 3]),
            ShapeAndDtype((2,), torch.float32),
            Options(backend="zero3"),
        ),
    ],
    ids=repr,
)
def test_plain_values_arrive(value: Any) -> None:
    assert collectives.unpickle_values(packed(pickle.dumps(value))) == value


class Bomb:
    """Makes a folder wherever it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("marker",)


@pytest.mark.fault("S6")
@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Bomb()),
        pickle.dumps({"a": [Bomb()]}),
        b"cnbdist.launcher.process_tree\nos.system\n.",
        b"cnbdist.launcher.process_tree\nend_descendants\n)R.",
        b"cnbdist.state.wires\npickle.loads\n.",
        b"ctorch\nload\n.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        pickle.dumps(torch.ones(1)),
        pickle.dumps(os.getcwd),
    ],
    ids=range(9),
)
def test_anything_else_is_refused_and_not_run(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pickle.UnpicklingError, match="which is not a plain value"):
        collectives.unpickle_values(packed(content))
    assert list(tmp_path.iterdir()) == []
